"""The planner's decisions where others find them: a stream in the cluster state, and a file of JSON lines if wanted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import structlog

from planner.decision import Decision, latest, to_line
from services.redis_client import REDIS_ERRORS, redis_client

log = structlog.get_logger()

_KEPT = 2000  # lines in the cluster state, about


class Journal:
    """Decisions of one model. Who asks for the latest ones sees each number once, as it was told last."""

    def __init__(self, url: str, cluster: str, model: str, file: Path | None = None) -> None:
        self._redis = redis_client(url)
        self._key = f"{cluster}:planner:{model}"
        self._file = file

    async def write(self, decision: Decision) -> None:
        """One line more. What cannot be written is told in the log, and no reason to stop."""
        line = to_line(decision)
        if self._file is not None:
            try:
                with self._file.open("ab") as file:
                    file.write(line)
            except OSError as error:
                log.warning("a decision is not in the file", file=str(self._file), error=str(error))
        try:
            await self._redis.xadd(self._key, {"decision": line}, maxlen=_KEPT)
        except REDIS_ERRORS as error:
            log.warning("a decision is not in the cluster state", error=str(error))

    async def latest(self, count: int) -> list[Decision]:
        """Up to so many, oldest first. Raises one of REDIS_ERRORS."""
        # Each is told again with what became of its actions, and with what came of it.
        entries: Any = await self._redis.xrevrange(self._key, count=3 * count)
        lines: list[bytes] = [fields[b"decision"] for _, fields in reversed(entries) if b"decision" in fields]
        return latest(lines)[-count:]

    async def close(self) -> None:
        """Disconnects."""
        await self._redis.aclose()
