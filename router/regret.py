"""What it costs others that a worker stores blocks: in a full cache something goes for them, and may be missed.

Of what workers evict that nobody else has, the hashes are remembered for about as long as a cache twice as large would
have kept the blocks, and it is counted how many of them are asked for again. Their share in all blocks that workers
store is the regret of one more copy: so many tokens will be computed once more for each that is stored. It is near 0
where there is room, where what was used is not asked for again, and where a tier or another worker still has it; and
near 1 where conversations that go on drive each other out.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.request import BlockRemoved, BlockStored, KvEvent
from router.fleet import Fleet
from router.index import BlockIndex

_LEAST_BLOCKS = 1024  # that are remembered, and of which a share is made


@dataclass(slots=True)
class _Missed:
    """Of the workers of one layout."""

    stored: float = 0.0  # blocks, the latest count most
    asked: float = 0.0  # of those that went, that were asked for again
    young: set[bytes] = field(default_factory=set)  # that went
    old: set[bytes] = field(default_factory=set)


class Regret:
    """Writes the column `regret` of the fleet's table. `index` is told of events before this is."""

    def __init__(self, fleet: Fleet, index: BlockIndex) -> None:
        self._fleet = fleet
        self._index = index
        self._missed: defaultdict[int, _Missed] = defaultdict(_Missed)  # by layout
        self._turnover: defaultdict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])  # by row: stored, removed

    def told(self, row: int, events: Sequence[KvEvent]) -> None:
        """What a worker says of its cache."""
        worker = self._fleet.table[row]
        if not (worker["prefills"] or worker["decodes"]):
            return  # a tier: what goes there was not driven out by a placement
        missed, turnover, index = self._missed[int(worker["layout"])], self._turnover[row], self._index
        for event in events:
            match event:
                case BlockStored(hashes):
                    missed.stored += len(hashes)
                    turnover[0] += len(hashes)
                case BlockRemoved(hashes):
                    turnover[1] += len(hashes)
                    missed.young.update(each for each in hashes if each not in index)
        if len(missed.young) > max(_LEAST_BLOCKS, len(index) // 2):
            missed.young, missed.old = set(), missed.young
        if turnover[0] > max(_LEAST_BLOCKS, index.num_blocks(row)):
            turnover[:] = [value / 2 for value in turnover]

    def asked(self, layout: int, hashes: Sequence[bytes]) -> None:
        """A prompt came. What is missing of it is missed once, however often it is asked for until it is there."""
        missed = self._missed[layout]
        there = bisect_left(hashes, True, key=lambda each: each not in self._index)
        for gone in (missed.young, missed.old):
            found = gone.intersection(hashes[there:])
            missed.asked += len(found)
            gone -= found

    def forget(self, row: int) -> None:
        """The worker has left."""
        self._turnover.pop(row, None)

    def tick(self) -> None:
        """Now and then."""
        column, layouts = self._fleet.table["regret"], self._fleet.table["layout"]
        for missed in self._missed.values():
            if missed.stored > max(_LEAST_BLOCKS, len(self._index)):
                missed.stored /= 2
                missed.asked /= 2
        for row, (stored, removed) in self._turnover.items():
            missed = self._missed[int(layouts[row])]
            full = min(1.0, removed / stored) if stored else 0.0
            column[row] = full * min(1.0, missed.asked / missed.stored) if missed.stored else 0.0
