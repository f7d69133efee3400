"""What the KV service tells others that it has: of each block the nearest tier in which it is."""

from collections.abc import Iterable, Sequence
from itertools import groupby

from engine.request import BlockRemoved, BlockStored, CacheCleared, KvEvent


class Announced:
    """Makes of the events of several `tiers`, nearest first, those of one cache."""

    def __init__(self, tiers: Sequence[str]) -> None:
        self.tiers = tiers
        self._held: dict[str, set[bytes]] = {tier: set() for tier in tiers}

    def nearest(self) -> dict[str, list[bytes]]:
        """All blocks, each in its nearest tier."""
        nearer: set[bytes] = set()
        found: dict[str, list[bytes]] = {}
        for tier, held in self._held.items():
            found[tier] = list(held - nearer)
            nearer |= held
        return found

    def held(self, tier: str) -> set[bytes]:
        """Those of one tier, to be looked at."""
        return self._held[tier]

    def changed(self, tier: str, events: Iterable[KvEvent]) -> list[KvEvent]:
        """What these events of a tier change for those who look at all tiers."""
        own = self._held[tier]
        told: list[KvEvent] = []
        for event in events:
            match event:
                case BlockStored(block_hashes):
                    new = [each for each in block_hashes if each not in own]
                    nearer = self.tiers[: self.tiers.index(tier)]
                    own.update(new)
                    if now := [each for each in new if not any(each in self._held[other] for other in nearer)]:
                        told.append(BlockStored(now, tier=tier))
                case BlockRemoved(block_hashes):
                    self._gone(tier, block_hashes, told)
                case CacheCleared():
                    self._gone(tier, list(own), told)
        return told

    def _gone(self, tier: str, hashes: Iterable[bytes], told: list[KvEvent]) -> None:
        """Of those that were nearest in this tier it is told where they are nearest now."""
        own = self._held[tier]
        were = [each for each in hashes if each in own and self._nearest(each) == tier]
        own.difference_update(hashes)
        for now, those in groupby(were, self._nearest):
            gone = list(those)
            told.append(BlockStored(gone, tier=now) if now else BlockRemoved(gone))

    def _nearest(self, block_hash: bytes) -> str:
        return next((tier for tier, held in self._held.items() if block_hash in held), "")
