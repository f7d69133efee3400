"""Clients of the Redis (or Valkey) that holds the cluster state: one server, or the master that Sentinels name."""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

import redis.asyncio
import redis.exceptions
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff

REDIS_ERRORS = (redis.exceptions.RedisError, OSError, TimeoutError, asyncio.TimeoutError)

_TIMEOUT_SECONDS = 0.5  # of any one operation
_SENTINEL_PORT = 26379
_SERVER_SCHEMES = ("redis", "rediss", "unix")
_SENTINEL_SCHEMES = ("redis+sentinel", "rediss+sentinel")
_SENTINEL_FORM = "redis+sentinel://:PASSWORD@HOST:PORT,HOST:PORT/NAME"


class SentinelUrl(NamedTuple):
    """What a URL says of Sentinels and of the servers that they watch."""

    sentinels: list[tuple[str, int]]
    name: str  # of the master
    tls: bool  # of Sentinels and servers
    server: dict[str, Any]  # how to log in at the servers
    sentinel: dict[str, Any]  # how to log in at the Sentinels


def check_url(url: str) -> None:
    """Raises ValueError, without anything secret, for a URL that names no server."""
    scheme = url.partition("://")[0]
    if scheme in _SENTINEL_SCHEMES:
        sentinel_url(url)
    elif scheme not in _SERVER_SCHEMES or "://" not in url:
        raise ValueError("it must begin with redis://, rediss://, unix://, redis+sentinel:// or rediss+sentinel://")
    else:
        try:
            redis.asyncio.ConnectionPool.from_url(url).make_connection()  # which does not connect yet
        except (ValueError, TypeError):  # says what is wrong, and of a password with a slash a part
            form = "unix:///PATH?db=NUMBER" if scheme == "unix" else f"{scheme}://:PASSWORD@HOST:PORT/NUMBER"
            raise ValueError(f"write {form}, special characters as %2F") from None


def sentinel_url(url: str) -> SentinelUrl:
    """The parts of `redis+sentinel://[[USER]:PASSWORD@]HOST[:PORT],.../NAME[?db=N&sentinel_password=PASSWORD]`.

    Raises ValueError, without anything secret.
    """
    parts = urlsplit(url)
    login, _, addresses = parts.netloc.rpartition("@")
    user, _, password = login.partition(":")
    name = parts.path.strip("/")
    if not name or "/" in name:
        raise ValueError(f"it must name the master that the Sentinels watch, as {_SENTINEL_FORM}")
    options = {key: values[-1] for key, values in parse_qs(parts.query).items()}
    if unknown := sorted(options.keys() - {"db", "sentinel_password"}):
        raise ValueError(f"{unknown[0]!r} is no option of it: there are db and sentinel_password")
    if not (db := options.get("db", "0")).isdecimal():
        raise ValueError("db must be a number")
    server = {"db": int(db), "username": unquote(user) or None, "password": unquote(password) or None}
    sentinel = {"password": options.get("sentinel_password")}
    found = [_address(text) for text in addresses.split(",")]
    return SentinelUrl(found, name, parts.scheme.startswith("rediss"), server, sentinel)


def redis_client(url: str, timeout: float = _TIMEOUT_SECONDS) -> redis.asyncio.Redis:
    """A client whose operations end within `timeout` seconds, by one of REDIS_ERRORS if they fail.

    With Sentinels each new connection goes to the master that they name then; one to a server that has become a
    replica is given up by the first write that it refuses, or when Sentinel cuts it off.
    """
    # Retries inside the client would stretch an operation to many seconds; the loops of its users try again anyway.
    options: dict[str, Any] = {"socket_connect_timeout": timeout, "retry": Retry(NoBackoff(), 0)}
    if url.partition("://")[0] not in _SENTINEL_SCHEMES:
        return redis.asyncio.Redis.from_url(url, socket_timeout=timeout, **options)
    parts = sentinel_url(url)
    options["ssl"] = parts.tls
    asking = options | parts.sentinel | {"socket_timeout": _TIMEOUT_SECONDS}
    sentinel = Sentinel(parts.sentinels, sentinel_kwargs=asking)
    client: redis.asyncio.Redis = sentinel.master_for(parts.name, socket_timeout=timeout, **options, **parts.server)
    return client


def _address(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        host, port = text, str(_SENTINEL_PORT)
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ValueError(f"each Sentinel is HOST or HOST:PORT, as {_SENTINEL_FORM}")
    return host.strip("[]"), int(port)
