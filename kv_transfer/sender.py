"""The prefill side of one KV transfer, as a state machine without sockets, threads or a clock of its own.

What it guarantees: an abort is acknowledged only when no write is under way and none follows; source blocks are kept
until the receiver has verified them, or does not want them, or its lease is over; any message may be late, doubled,
reordered or lost.
"""

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
from kv_transfer.states import SENDER, SenderEvent, SenderState


@dataclass(frozen=True, slots=True)
class Reply:
    """Send this message to the receiver."""

    message: ToReceiver


@dataclass(frozen=True, slots=True)
class Begin:
    """Compute the prompt, pushing each layer; of a fetch push what is cached."""


@dataclass(frozen=True, slots=True)
class StopPushing:
    """End the computation and the pushes, then call `stopped`."""


@dataclass(frozen=True, slots=True)
class Release:
    """The source blocks are free."""


@dataclass(frozen=True, slots=True)
class GiveUpConnector:
    """Bytes were lost: stop pushing over this connector, then call `switch`, or `failed` if there is no other."""

    reason: str


@dataclass(frozen=True, slots=True)
class PushAgain:
    """Push everything over the connector of the last `switch`."""


SenderAction = Reply | Begin | StopPushing | Release | GiveUpConnector | PushAgain


MAX_LEASE_SECONDS = 60.0  # longer ones are not granted


class SenderTransfer:
    """One transfer. Times are monotonic seconds."""

    def __init__(self, order: Order, now: float) -> None:
        self.order = order
        self.state = SenderState.PREFILLING
        self.turn = 0
        self.tier = ""  # see `Done`
        self._switch: Switch | None = None
        self._lease_ends = now
        self._extend(order.lease_seconds, now)
        self._done: Done | None = None
        self._first: FirstToken | None = None
        self._failed: Failed | None = None
        self._resend_at = 0.0

    @property
    def transfer_id(self) -> str:
        """Id of the transfer."""
        return self.order.transfer_id

    @property
    def closed(self) -> bool:
        """Whether nothing moves it any more."""
        return not SENDER[self.state]

    @property
    def moved(self) -> bool:
        """Whether another worker has what was cached here, and will use it there; the KV service only keeps it."""
        fetch = self.order.cached_only and not self.order.request.block_hashes
        return fetch and self.state is SenderState.COMMITTED

    def start(self, now: float) -> list[SenderAction]:
        """Accepts the order."""
        return [Reply(Accepted(self.transfer_id, self.order.lease_seconds)), Begin()]

    def on_message(self, message: ToSender, now: float) -> list[SenderAction]:
        """Handles a message of the receiver."""
        match message:
            case Order() if not self.closed:
                return [Reply(Accepted(self.transfer_id, self.order.lease_seconds))]  # a duplicate
            case Renew():
                self._extend(message.lease_seconds, now)
                if self.state in (SenderState.PREFILLING, SenderState.SWITCHING):
                    # Long prompts and queues are no reason to give up: the order is still wanted and still here.
                    return [Reply(Accepted(self.transfer_id, message.lease_seconds))]
            case Commit() if self._move(SenderEvent.COMMIT):
                return [Release()]
            case Switched() if message.turn == self.turn and self._move(SenderEvent.SWITCHED):
                return [PushAgain()]
            case Lost() if self.state in (SenderState.PREFILLING, SenderState.PUSHED) and message.turn == self.turn:
                return [GiveUpConnector(message.reason)]
            case Abort():
                if self.closed:
                    return [Reply(AbortAck(self.transfer_id))]
                return self._stop(None)
        return []

    def first_token(
        self,
        token_id: int,
        logprob: TokenLogprob | None,
        cached_tokens: int,
        queue_seconds: float = 0.0,
        prefill_seconds: float = 0.0,
    ) -> list[SenderAction]:
        """The prompt is computed and the first token sampled."""
        if self.state not in (SenderState.PREFILLING, SenderState.SWITCHING):
            return []
        self._first = FirstToken(self.transfer_id, token_id, logprob, cached_tokens, queue_seconds, prefill_seconds)
        return [Reply(self._first)]

    def progress(self, num_bytes: int, layers: int) -> list[SenderAction]:
        """Bytes were pushed."""
        if self.state is not SenderState.PREFILLING:
            return []
        return [Reply(Progress(self.transfer_id, num_bytes, layers))]

    def pushed(
        self, checksums: list[int], num_bytes: int, now: float, seconds_since_compute: float = 0.0
    ) -> list[SenderAction]:
        """The last byte is out."""
        if not self._move(SenderEvent.PUSHED):
            return []
        self._done = Done(self.transfer_id, checksums, num_bytes, self.turn, seconds_since_compute, self.tier)
        self._resend_at = now + self.order.lease_seconds / 3
        return [Reply(self._done)]

    def switch(self, connector: str, reason: str, now: float) -> list[SenderAction]:
        """Nothing is written any more over the connector so far: asks to go on over this one."""
        if not self._move(SenderEvent.SWITCH):
            return []
        self.turn += 1
        self._switch = Switch(self.transfer_id, self.turn, connector, reason)
        self._resend_at = now + self.order.lease_seconds / 3
        return [Reply(self._switch)]

    def failed(self, reason: str) -> list[SenderAction]:
        """The prompt could not be computed or pushed."""
        return self._stop(Failed(self.transfer_id, reason))

    def stopped(self) -> list[SenderAction]:
        """No write is under way and none will follow."""
        if not self._move(SenderEvent.STOPPED):
            return []
        return [Reply(self._failed or AbortAck(self.transfer_id)), Release()]

    def on_peer_lost(self) -> list[SenderAction]:
        """The stream to the receiver broke: nobody waits for these bytes."""
        return self._stop(None)

    def on_tick(self, now: float) -> list[SenderAction]:
        """Repeats an unanswered Done or Switch; gives up when the receiver's lease is over."""
        if SenderEvent.GIVEN_UP not in SENDER[self.state]:
            return []
        if now >= self._lease_ends:
            return self._stop(None)
        if self.state is SenderState.PUSHED and now >= self._resend_at:
            self._resend_at = now + self.order.lease_seconds / 3
            return [Reply(message) for message in (self._first, self._done) if message is not None]
        if self.state is SenderState.SWITCHING and now >= self._resend_at and self._switch is not None:
            self._resend_at = now + self.order.lease_seconds / 3
            return [Reply(self._switch)]
        return []

    def _extend(self, lease_seconds: float, now: float) -> None:
        if 0 < lease_seconds <= MAX_LEASE_SECONDS:
            self._lease_ends = now + lease_seconds

    def _stop(self, failed: Failed | None) -> list[SenderAction]:
        if not self._move(SenderEvent.GIVEN_UP):
            return []
        self._failed = failed
        return [StopPushing()]

    def _move(self, event: SenderEvent) -> bool:
        """False: the event means nothing in the present state."""
        state = SENDER[self.state].get(event)
        self.state = state or self.state
        return state is not None
