"""The sending side of the KV service: what lies in a lower tier is brought into host memory before it is sent."""

from functools import partial

from engine.request import HOST, TIERS
from kv_transfer.states import SenderState
from services.tier.below import Below
from services.tier.blocks import Asked, KeptBlocks
from services.worker.sending import KvSender, Sending


class TierSender(KvSender):
    """Like a worker's, that has blocks promoted first. Without `below` there is nothing to promote."""

    below: Below | None = None

    def _begin(self, key: str, sending: Sending) -> None:
        """Engine thread."""
        if self.below is None or sending.to_send.tier == HOST:
            self._begin_with(key, sending, _asked(sending))
        else:
            self._loop.call_soon_threadsafe(lambda: self._start(sending, self._promote(key, sending, self.below)))

    def _begin_with(self, key: str, sending: Sending, asked: Asked) -> None:
        assert isinstance(self._engine.engine, KeptBlocks)
        self._engine.engine.asked[key] = asked
        sending.machine.tier = max(asked.promoted, key=TIERS.index, default=HOST)
        super()._begin(key, sending)
        self._engine.engine.asked.pop(key, None)  # of what was refused

    async def _promote(self, key: str, sending: Sending, below: Below | None) -> None:
        assert below is not None
        async with below.promoted(sending.to_send.request, sending.to_send.tier) as found:
            if sending.machine.state in (SenderState.PREFILLING, SenderState.SWITCHING):  # it is wanted still
                asked = _asked(sending)._replace(promoted=found)
                await self._engine.call(partial(self._begin_with, key, sending, asked))


def _asked(sending: Sending) -> Asked:
    order, layout = sending.to_send, sending.peer.plan.destination
    end = order.skip_blocks + len(order.blocks) // layout.ranks
    return Asked(order.skip_blocks * layout.block_size, end * layout.block_size)
