"""API keys as they are kept, hashed, in a file, and the tenants that they open the API for."""

from __future__ import annotations

import hashlib
import math
import re
import secrets
import tomllib
from pathlib import Path

import msgspec

from services.config import ConfigError

LOWEST_PRIORITY_NUMBER = -(2**31)
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_HASH = re.compile(r"sha256:[0-9a-f]{64}")


class Tenant(msgspec.Struct, frozen=True, kw_only=True):
    """Whose a request is, and what that allows. Limits of 0 are none."""

    id: str = ""  # tells tenants apart inside the cluster; says nothing of key or name
    cache: str = ""  # tenants with the same share cached prompts
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    weight: float = 1.0  # share of tokens while requests wait
    min_priority: int = 0  # lower numbers, which go first, are not for it


ANYBODY = Tenant(min_priority=LOWEST_PRIORITY_NUMBER)  # where no key is needed


class KeyEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A `[[key]]` of the file. Entries of one name are one tenant, so that a key can be replaced without a gap."""

    name: str
    hash: str  # sha256: and 64 hex digits
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    weight: float = 1.0
    min_priority: int = 0
    cache_group: str = ""  # names share cached prompts with others of their group; "": with nobody

    @property
    def digest(self) -> bytes:
        """Of the key."""
        return bytes.fromhex(self.hash.removeprefix("sha256:"))

    @property
    def tenant(self) -> Tenant:
        """Whom the key stands for."""
        tenant = _opaque("tenant", self.name)
        return Tenant(
            id=tenant,
            cache=_opaque("group", self.cache_group) if self.cache_group else tenant,
            requests_per_minute=self.requests_per_minute,
            tokens_per_minute=self.tokens_per_minute,
            weight=self.weight,
            min_priority=self.min_priority,
        )

    def check(self) -> None:
        """Raises ConfigError."""
        problem = ""
        if not _NAME.fullmatch(self.name):
            problem = "a name has 1 to 64 letters, digits, dots, dashes and underscores"
        elif not _HASH.fullmatch(self.hash):
            problem = "hash must be `sha256:` and 64 hex digits; `tandem keys new NAME` writes an entry"
        elif min(self.requests_per_minute, self.tokens_per_minute) < 0:
            problem = "limits per minute cannot be negative; 0 is no limit"
        elif not (math.isfinite(self.weight) and 0.001 <= self.weight <= 1000):
            problem = f"weight {self.weight} is not from 0.001 to 1000"
        elif not LOWEST_PRIORITY_NUMBER <= self.min_priority < 2**31:
            problem = f"min_priority {self.min_priority} is not a number of 32 bits"
        if problem:
            raise ConfigError(f"API key {self.name[:64]!r}: {problem}")

    def toml(self) -> str:
        """The entry as it stands in the file."""
        fields = msgspec.to_builtins(self)
        return "[[key]]\n" + "".join(f"{name} = {msgspec.json.encode(fields[name]).decode()}\n" for name in fields)


class _KeyFile(msgspec.Struct, forbid_unknown_fields=True):
    key: list[KeyEntry] = []


def digest_of(key: str) -> bytes:
    """What is kept of a key. Keys that we make have 256 random bits: no slow hash is needed to protect them."""
    return hashlib.sha256(key.encode()).digest()


def new_key() -> str:
    """A key that nobody can guess."""
    return "tdm-" + secrets.token_urlsafe(32)


def entry_for(name: str, key: str, **settings: float | str) -> KeyEntry:
    """The entry that stands for a key. Raises ConfigError."""
    entry = msgspec.convert({"name": name, "hash": "sha256:" + digest_of(key).hex(), **settings}, KeyEntry)
    entry.check()
    return entry


def read_key_file(path: Path) -> dict[bytes, Tenant]:
    """Tenants by the digests of their keys. Raises ConfigError."""
    try:
        entries = msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), _KeyFile).key
    except (OSError, ValueError) as error:  # msgspec's and tomllib's errors are ValueErrors
        raise ConfigError(f"the API keys in {path} cannot be read: {error}") from error
    for entry in entries:
        entry.check()
    return {entry.digest: entry.tenant for entry in entries}


def tenant_of_bare_key(key: str) -> Tenant:
    """The tenant of a key that stands alone, without entry."""
    tenant = hashlib.sha256(b"tandem-tenant\0" + digest_of(key)).hexdigest()[:32]
    return Tenant(id=tenant, cache=tenant)


def _opaque(kind: str, name: str) -> str:
    return hashlib.sha256(f"tandem-{kind}-name\0{name}".encode()).hexdigest()[:32]
