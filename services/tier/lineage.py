"""Where blocks are in their prompts, and whose these are, as far as workers' events have told."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from engine.request import BlockStored
from kv_transfer.tiers.policies.base import Arrival
from kv_transfer.tiers.store import Origin


class Lineage:
    """Of the last `limit` blocks that were told of. Written on the event loop; any thread may ask."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._arrivals: OrderedDict[bytes, Arrival] = OrderedDict()

    def told(self, event: BlockStored) -> None:
        """Blocks that a worker has computed."""
        if not event.root:
            return
        parent = event.parent
        for at, block_hash in enumerate(event.block_hashes, event.position):
            self._arrivals[block_hash] = Arrival(block_hash, at, parent, event.root)
            self._arrivals.move_to_end(block_hash)
            parent = block_hash
        while len(self._arrivals) > self._limit:
            self._arrivals.popitem(last=False)

    def arrival(self, block_hash: bytes) -> Arrival:
        """What policies are told of a block."""
        return self._arrivals.get(block_hash) or Arrival(block_hash)

    def runs(self, hashes: Sequence[bytes]) -> Iterator[tuple[Origin, list[bytes]]]:
        """These in the same order, each run following each other in one prompt, as a store wants them.

        What is not known to be apart counts as one run.
        """
        run: list[bytes] = []
        for block_hash in hashes:
            known = self._arrivals.get(block_hash)
            if run and known is not None and known.parent != run[-1]:
                yield self._origin(run[0]), run
                run = []
            run.append(block_hash)
        if run:
            yield self._origin(run[0]), run

    def _origin(self, block_hash: bytes) -> Origin:
        first = self.arrival(block_hash)
        return Origin(first.position, first.parent, first.owner)
