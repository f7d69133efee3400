"""Which connector a sender uses towards one receiver: the best of the receiver's offers that works, at any time.

A connector that fails rests for a pause, which doubles while it goes on failing; meanwhile the next one is used. What
was opened stays open, so a transfer can end on a connector that new transfers do not take any more.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from kv_transfer.connectors.base import ConnectorError, SenderConnector

FIRST_PAUSE_SECONDS = 2.0
_LONGEST_PAUSE_SECONDS = 120.0

OpenConnector = Callable[[str, bytes], SenderConnector]  # from kind and description; raises ConnectorError


@dataclass(slots=True)
class _Offer:
    kind: str
    description: bytes
    connector: SenderConnector | None = None
    failure: str = ""  # the last one; empty once it worked again
    rests_until: float = 0.0
    pause: float = FIRST_PAUSE_SECONDS


@dataclass(frozen=True, slots=True)
class Chosen:
    """A connector that works, as far as is known, and why it is this one."""

    kind: str
    connector: SenderConnector
    reason: str


class Selection:
    """The connectors to one receiver. `offers` are (kind, description), best first; `forced`: this kind or none.

    All methods but `current` may block for as long as a connector takes to open; any thread may call them. The
    constructor raises ConnectorError if none works. Times are monotonic seconds.
    """

    def __init__(
        self, offers: Sequence[tuple[str, bytes]], open_connector: OpenConnector, forced: str | None = None
    ) -> None:
        self._offers = [_Offer(kind, description) for kind, description in offers]
        self._open_connector = open_connector
        self._forced = forced
        self._lock = threading.Lock()
        self._given_up: list[SenderConnector] = []
        self._closed = False
        self.current = self._best({})  # what new transfers use

    def fall_back(self, failed: Chosen, reason: str, tried: Collection[str]) -> Chosen:
        """The best connector that is not one of `tried`, now that `failed` does not work.

        Raises ConnectorError, which names all reasons, if there is none: then `failed` stays in use, as connectors
        mend themselves for transfers that come later.
        """
        with self._lock:
            chosen = self._best({kind: "this transfer has used it" for kind in tried} | {failed.kind: reason})
            offer = next(offer for offer in self._offers if offer.kind == failed.kind)
            if offer.connector is failed.connector:  # else another transfer has said so before
                self._given_up.append(failed.connector)
                offer.connector = None
                self._rest(offer, reason)
            if self.current.connector is failed.connector:
                self.current = chosen
            return chosen

    def is_better_due(self) -> bool:
        """Whether a better connector than the current one has rested enough. Does not block."""
        now = time.monotonic()
        return any(offer.failure and offer.rests_until <= now for offer in self._better())

    def try_better(self) -> None:
        """Opens the better connectors that have rested enough; the first that opens becomes the current one."""
        with self._lock:
            self.current = self._best({})

    def take_given_up(self, in_use: Collection[SenderConnector]) -> list[SenderConnector]:
        """Connectors that failed and are used by no transfer any more, to be closed. Does not block for long."""
        if not self._given_up or not self._lock.acquire(blocking=False):
            return []
        try:
            idle = [connector for connector in self._given_up if connector not in in_use]
            self._given_up = [connector for connector in self._given_up if connector in in_use]
            return idle
        finally:
            self._lock.release()

    def close(self) -> None:
        """Closes all connectors."""
        with self._lock:
            self._closed = True
            opened = [offer.connector for offer in self._offers if offer.connector is not None]
            with contextlib.ExitStack() as closing:  # all, also after one that raises
                for connector in (*opened, *self._given_up):
                    closing.callback(connector.close)

    def _better(self) -> list[_Offer]:
        """Offers before the current one."""
        kinds = [offer.kind for offer in self._offers]
        return self._offers[: kinds.index(self.current.kind)]

    def _best(self, excluded: Mapping[str, str]) -> Chosen:
        """The first that works of those that neither rest nor are excluded, for a reason each."""
        refused: list[str] = []
        for offer in self._offers:
            if self._closed:
                raise ConnectorError("the link is closed")
            if self._forced is not None and offer.kind != self._forced:
                refused.append(f"{offer.kind}: not used, as {self._forced} is forced (connector = auto allows others)")
            elif offer.kind in excluded or offer.rests_until > time.monotonic():
                refused.append(f"{offer.kind}: {excluded.get(offer.kind, offer.failure)}")
            else:
                try:
                    if offer.connector is None:
                        offer.connector = self._open_connector(offer.kind, offer.description)
                except ConnectorError as error:
                    self._rest(offer, str(error))
                    refused.append(f"{offer.kind}: {error}")
                    continue
                reason = "forced" if self._forced else "after " + "; ".join(refused) if refused else "first choice"
                return Chosen(offer.kind, offer.connector, reason)
        raise ConnectorError(
            "no connector works between the two workers: " + ("; ".join(refused) or "none was offered")
        )

    def _rest(self, offer: _Offer, reason: str) -> None:
        now = time.monotonic()
        # One that worked for long after its last pause starts again with a short one.
        lately = now - offer.rests_until < offer.pause
        offer.pause = min(_LONGEST_PAUSE_SECONDS, 2 * offer.pause) if offer.failure and lately else FIRST_PAUSE_SECONDS
        offer.failure, offer.rests_until = reason, now + offer.pause
