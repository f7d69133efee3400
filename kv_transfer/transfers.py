"""The sending side's transfers by id, and a memory of those that must not start any more.

A transfer is known by (incarnation of the receiver, transfer id), whatever stream its messages come over: a receiver
that reconnects speaks to the same transfers. An order that was aborted, refused or carried out leaves a tombstone, so
that a late or doubled order is not carried out (again).
"""

from collections import OrderedDict

from kv_transfer.messages import Abort, AbortAck, Failed, Order, ToSender
from kv_transfer.sender import Reply, SenderAction, SenderTransfer

Key = tuple[str, str]  # incarnation of the receiver, transfer id


class SenderTransfers:
    """At most `max_transfers` at once; tombstones stay `tombstone_seconds`, the oldest go when there are too many.

    A lost tombstone alone does no harm: the destination references of a late order are stale, so writes are refused.
    """

    def __init__(
        self, *, max_transfers: int = 1024, tombstone_seconds: float = 60.0, max_tombstones: int = 10_000
    ) -> None:
        self._max_transfers = max_transfers
        self._tombstone_seconds = tombstone_seconds
        self._max_tombstones = max_tombstones
        self._transfers: dict[Key, SenderTransfer] = {}
        self._tombstones: OrderedDict[Key, float] = OrderedDict()  # to when they end, in that order

    def __len__(self) -> int:
        return len(self._transfers)

    @property
    def num_tombstones(self) -> int:
        """Ids that would be refused."""
        return len(self._tombstones)

    def on_message(
        self, peer: str, message: ToSender, now: float, refusal: str | None = None
    ) -> tuple[SenderTransfer | None, list[SenderAction]]:
        """Handles a message of the receiver `peer`; the transfer, if there is one, and what to do.

        `refusal` says why no transfer may begin now. The order of one that is under way is a duplicate: to refuse it
        would tell the receiver that nobody writes.
        """
        key = (peer, message.transfer_id)
        if (transfer := self._transfers.get(key)) is not None:
            actions = transfer.on_message(message, now)
            self.forget_closed(peer, transfer, now)
            return transfer, actions
        match message:
            case Order() if key not in self._tombstones:
                if len(self._transfers) >= self._max_transfers:
                    refusal = "the sender has too many transfers"
                if refusal is not None:
                    self._bury(key, now)
                    return None, [Reply(Failed(message.transfer_id, refusal))]
                transfer = self._transfers[key] = SenderTransfer(message, now)
                return transfer, transfer.start(now)
            case Order() | Abort():
                self._bury(key, now)
                return None, [Reply(AbortAck(message.transfer_id))]
            case _:
                return None, []

    def on_tick(self, now: float) -> list[tuple[str, SenderTransfer, list[SenderAction]]]:
        """Lets leases and tombstones end; what to do, by (peer, transfer)."""
        while self._tombstones and next(iter(self._tombstones.values())) <= now:
            self._tombstones.popitem(last=False)
        due = [(peer, transfer, transfer.on_tick(now)) for (peer, _), transfer in self._transfers.items()]
        for peer, transfer, _ in due:
            self.forget_closed(peer, transfer, now)
        return [entry for entry in due if entry[2]]

    def on_peer_lost(self, lost: str) -> list[tuple[SenderTransfer, list[SenderAction]]]:
        """The stream from the receiver `lost` broke; what to do with its transfers."""
        return [(transfer, transfer.on_peer_lost()) for (peer, _), transfer in self._transfers.items() if peer == lost]

    def forget_closed(self, peer: str, transfer: SenderTransfer, now: float) -> None:
        """To be called after an event that was given to the transfer itself, such as `stopped`."""
        key = (peer, transfer.transfer_id)
        if transfer.closed and self._transfers.get(key) is transfer:
            del self._transfers[key]
            self._bury(key, now)

    def _bury(self, key: Key, now: float) -> None:
        self._tombstones[key] = now + self._tombstone_seconds
        self._tombstones.move_to_end(key)
        if len(self._tombstones) > self._max_tombstones:
            self._tombstones.popitem(last=False)
