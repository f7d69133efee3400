"""Which API keys open the API at this moment: those of the settings, and those of a file that may change."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from pathlib import Path

import structlog

from services.api_keys import ANYBODY, Tenant, digest_of, read_key_file, tenant_of_bare_key
from services.config import ConfigError

log = structlog.get_logger()

_LOOK_SECONDS = 1.0


class ApiKeys:
    """Where neither keys nor a file are given everybody is let in; an empty file lets in nobody."""

    def __init__(self, keys: str, file: Path | None = None) -> None:
        """`keys`: separated by commas. Raises ConfigError for a malformed file."""
        bare = [key.strip() for key in keys.split(",") if key.strip()]
        self._bare = {digest_of(key): tenant_of_bare_key(key) for key in bare}
        self._file = file
        self._version = self._stat()
        self._tenants = self._bare | (read_key_file(file) if file else {})
        self._open = not bare and file is None

    def tenant(self, authorization: str) -> Tenant | None:
        """The tenant of an Authorization header; None if it opens nothing."""
        if self._open:
            return ANYBODY
        scheme, _, key = authorization.partition(" ")
        digest = digest_of(key.strip())
        # All are compared, so that the time tells nothing.
        matches = [tenant for known, tenant in self._tenants.items() if hmac.compare_digest(digest, known)]
        return matches[0] if matches and scheme.lower() == "bearer" else None

    def reload(self) -> None:
        """Reads the file again. If it is malformed, the keys stay as they are, and the log says so."""
        if self._file is None:
            return
        self._version = self._stat()
        try:
            self._tenants = self._bare | read_key_file(self._file)
        except ConfigError as error:
            log.error("the API keys stay as they were", error=str(error))
        else:
            log.info("API keys read", keys=len(self._tenants))

    async def follow(self) -> None:
        """Reloads whenever the file changes, for ever."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            if self._stat() != self._version:
                self.reload()

    def _stat(self) -> tuple[int, int, int] | None:
        """Differs after a change, also where another file took the name."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                found = self._file.stat()
                return found.st_ino, found.st_mtime_ns, found.st_size
        return None
