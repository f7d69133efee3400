"""The receiving side of one KV transfer, as a state machine without sockets, threads or a clock of its own.

Feed it messages, ticks and the fate of its peer; carry out the actions that it returns. What it guarantees: the
destination blocks go back to their owner only when the writer has said that it is done or has stopped, or is fenced;
every wait ends by a deadline; any message may be late, doubled, reordered or lost.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from engine.request import TokenLogprob
from kv_transfer.messages import (
    Abort,
    AbortAck,
    Accepted,
    Commit,
    Done,
    Failed,
    FirstToken,
    Lost,
    Order,
    Progress,
    Renew,
    Switch,
    Switched,
    ToReceiver,
    ToSender,
)
from kv_transfer.states import RECEIVER, ReceiverEvent, ReceiverState

TOO_LATE, DAMAGED, UNHEARD = "deadline exceeded", "checksum mismatch", "no first token"  # reasons of failures


@dataclass(frozen=True, slots=True)
class Send:
    """Send this message to the peer."""

    message: ToSender


@dataclass(frozen=True, slots=True)
class Verify:
    """All bytes are sent: compare what lands with this, then call `verified`."""

    done: Done


@dataclass(frozen=True, slots=True)
class Join:
    """Verified: the sequence joins the batch, its first token is this."""

    token_id: int
    logprob: TokenLogprob | None
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class JoinPrefix:
    """Verified: so many pages of the order have landed. The sequence joins the batch; what follows is computed here."""

    num_pages: int


@dataclass(frozen=True, slots=True)
class Recompute:
    """The transfer failed and nobody writes any more: the blocks are the sequence's to use or free."""

    reason: str


@dataclass(frozen=True, slots=True)
class Detach:
    """The transfer failed or is not wanted, but the writer may still write: keep the blocks aside.

    `recompute`: the sequence goes on without them; else it ends.
    """

    reason: str
    recompute: bool


@dataclass(frozen=True, slots=True)
class ReleaseBlocks:
    """The writer has stopped: blocks set aside by `Detach` are free."""


@dataclass(frozen=True, slots=True)
class Expect:
    """The connector so far is shut out: from now on bytes come over this one."""

    connector: str


Action = Send | Verify | Join | JoinPrefix | Recompute | Detach | ReleaseBlocks | Expect


class ReceiverTransfer:
    """One transfer. Times are monotonic seconds. `spare` are the connectors that it may go on over, each once."""

    def __init__(self, order: Order, *, deadline: float, spare: Iterable[str] = ()) -> None:
        self.order = order
        self.turn = 0
        self.connector = order.connector
        self._spare = set(spare) - {order.connector}
        self.state = ReceiverState.RESERVED
        self.first_token: FirstToken | None = None
        self.seconds_since_compute = 0.0  # from the prompt's last layer to the word that all was written
        self._deadline = deadline
        self._lease_ends = 0.0
        self._renew_at = 0.0
        self._resend_at = 0.0
        self._lost: Lost | None = None
        self._num_pages = 0  # that the writer says it has written

    @property
    def transfer_id(self) -> str:
        """Id of the transfer."""
        return self.order.transfer_id

    @property
    def closed(self) -> bool:
        """Whether nothing moves it any more."""
        return not RECEIVER[self.state]

    @property
    def waits(self) -> bool:
        """Whether bytes may still come over the present connector."""
        return ReceiverEvent.DONE in RECEIVER[self.state]

    def start(self, now: float) -> list[Action]:
        """Sends the order."""
        self._lease_ends = now + self.order.lease_seconds
        self._renew_at = now + self.order.lease_seconds / 3
        return [Send(self.order)]

    def on_message(self, message: ToReceiver, now: float) -> list[Action]:
        """Handles a message of the writer."""
        if self.closed:
            return []
        if self.state is ReceiverState.ABORTING:
            # Done also says that nothing is written any more; the abort stays in force.
            stopped = message.turn == self.turn if isinstance(message, Done) else isinstance(message, AbortAck | Failed)
            return [ReleaseBlocks()] if stopped and self._move(ReceiverEvent.STOPPED) else []
        if self.state is ReceiverState.VERIFYING and not isinstance(message, FirstToken):
            return []  # the writer is done; what counts now are the bytes
        match message:
            case Accepted():
                self._lease_ends = now + self.order.lease_seconds
                self._move(ReceiverEvent.ACCEPTED)
            case Progress():
                self._lease_ends = now + self.order.lease_seconds
                self._move(ReceiverEvent.BYTES)
            case FirstToken():
                self._lease_ends = now + self.order.lease_seconds
                self.first_token = self.first_token or message
                self._move(ReceiverEvent.BYTES)
            case Switch():
                return self._on_switch(message, now)
            case Done() if message.turn == self.turn and self._move(ReceiverEvent.DONE):
                self.seconds_since_compute = message.seconds_since_compute
                self._num_pages = len(message.checksums)
                return [Verify(message)]
            case Failed():
                self._move(ReceiverEvent.STOPPED)
                return [Recompute(message.reason)]
            case AbortAck():
                # Nobody asked: the writer has dropped the transfer on its own.
                self._move(ReceiverEvent.STOPPED)
                return [Recompute("the sender stopped")]
        return []

    def verified(self, ok: bool, now: float) -> list[Action]:
        """The checksums were compared. The writer is done either way, so the blocks are safe."""
        if self.state is not ReceiverState.VERIFYING:
            return []
        if not ok and self._spare:
            return self._tell_lost(DAMAGED, now)
        first, fetches = self.first_token, self.order.cached_only
        self._move(ReceiverEvent.VERIFIED if ok and (fetches or first is not None) else ReceiverEvent.REFUSED)
        if not ok:
            return [Send(Abort(self.transfer_id, DAMAGED)), Recompute(DAMAGED)]
        if fetches:
            return [Send(Commit(self.transfer_id)), JoinPrefix(self._num_pages)]
        if first is None:
            # Done overtook the first token, or it was lost: it is computed again, which gives the same one.
            return [Send(Commit(self.transfer_id)), Recompute(UNHEARD)]
        return [Send(Commit(self.transfer_id)), Join(first.token_id, first.logprob, first.cached_tokens)]

    def lost(self, reason: str, now: float) -> list[Action]:
        """Bytes did not arrive, or not whole. Without another connector this shows when they are verified."""
        return self._tell_lost(reason, now) if self.waits and self._spare else []

    def abort(self, reason: str, now: float) -> list[Action]:
        """The request is not wanted any more."""
        return self._give_up(reason, now, recompute=False)

    def on_peer_lost(self, now: float) -> list[Action]:
        """The stream to the writer broke. It may be dead, or alive and still writing; unless it is done."""
        if self.state is ReceiverState.VERIFYING:
            return []
        return self._give_up("the sender is lost", now, recompute=True)

    @property
    def to_be_fenced(self) -> bool:
        """Whether the transfer's present connector is to be shut out, and `on_fenced` called when it is."""
        return self.state in (ReceiverState.ABORTING, ReceiverState.FENCING)

    def on_fenced(self, now: float) -> list[Action]:
        """The writer cannot reach the blocks over the connector so far any more."""
        if self.state is ReceiverState.FENCING:
            self._move(ReceiverEvent.FENCED)
            self._lease_ends = now + self.order.lease_seconds
            return [Expect(self.connector), Send(Switched(self.transfer_id, self.turn))]
        return [ReleaseBlocks()] if self._move(ReceiverEvent.FENCED) else []

    def on_tick(self, now: float) -> list[Action]:
        """Renews the writer's lease, repeats an unanswered abort, gives up when the lease or the deadline is over."""
        if self.state is ReceiverState.ABORTING:
            if now < self._resend_at:
                return []
            self._resend_at = now + self.order.lease_seconds / 3
            return [Send(Abort(self.transfer_id, "repeated"))]
        if self.closed:
            return []
        if now >= self._deadline:
            return self._give_up(TOO_LATE, now, recompute=True)
        if self.state is not ReceiverState.VERIFYING and now >= self._lease_ends:
            return self._give_up("the sender makes no progress", now, recompute=True)
        if now < self._renew_at:
            return []
        self._renew_at = now + self.order.lease_seconds / 3
        renewal: list[Action] = [Send(Renew(self.transfer_id, self.order.lease_seconds))]
        return renewal + ([Send(self._lost)] if self._lost and self.state is ReceiverState.LOST else [])

    def _on_switch(self, message: Switch, now: float) -> list[Action]:
        self._lease_ends = now + self.order.lease_seconds
        if message.turn == self.turn and self.waits and self.turn:
            return [Send(Switched(self.transfer_id, self.turn))]  # the answer was lost
        if message.turn != self.turn + 1 or self.state is ReceiverState.FENCING:
            return []  # a late one
        if message.connector not in self._spare:
            reason = f"{message.reason}; {message.connector!r} is not, or no longer, offered to this transfer"
            return self._give_up(reason, now, recompute=True)
        self._spare.remove(message.connector)
        self.turn, self.connector = message.turn, message.connector
        self._move(ReceiverEvent.SWITCH)
        return []

    def _tell_lost(self, reason: str, now: float) -> list[Action]:
        self._move(ReceiverEvent.LOST)
        self._lease_ends = now + self.order.lease_seconds
        self._lost = Lost(self.transfer_id, self.turn, reason)
        return [Send(self._lost)]

    def _give_up(self, reason: str, now: float, *, recompute: bool) -> list[Action]:
        if not self._move(ReceiverEvent.GIVEN_UP):
            return []
        self._resend_at = now + self.order.lease_seconds / 3
        actions: list[Action] = [Detach(reason, recompute), Send(Abort(self.transfer_id, reason))]
        return [*actions, ReleaseBlocks()] if self.closed else actions  # in VERIFYING the writer is done

    def _move(self, event: ReceiverEvent) -> bool:
        """False: the event means nothing in the present state."""
        state = RECEIVER[self.state].get(event)
        self.state = state or self.state
        return state is not None


def answer_unknown(message: ToReceiver) -> list[Send]:
    """What to say to a writer whose transfer is not, or no longer, under way here: it need not go on or wait."""
    if isinstance(message, Failed | AbortAck):
        return []
    return [Send(Abort(message.transfer_id, "not under way"))]
