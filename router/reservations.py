"""Load that was given to workers and has not come back: booked when a request is placed, so that the next sees it."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Reservation:
    """What one attempt of a request means for its workers."""

    decode: str  # incarnation
    prefill: str | None
    prefill_tokens: int  # uncached prompt tokens, computed by `prefill` or else by `decode`
    decode_tokens: int  # prompt and output tokens whose KV the decode worker keeps
    expires: float  # monotonic seconds
    predicted_tokens: int  # cached prompt tokens expected


@dataclass(slots=True)
class Outstanding:
    """Sum of the reservations of one worker."""

    requests: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0


class Reservations:
    """All attempts under way. Releasing one twice, or one not known, changes nothing."""

    def __init__(self) -> None:
        self._by_attempt: dict[tuple[str, int], Reservation] = {}
        self._outstanding: dict[str, Outstanding] = {}

    def reserve(self, request_id: str, attempt: int, reservation: Reservation) -> None:
        """Books an attempt; a repeated one replaces the first."""
        self.release(request_id, attempt)
        self._by_attempt[request_id, attempt] = reservation
        self._book(reservation, 1)

    def release(self, request_id: str, attempt: int) -> Reservation | None:
        """Ends an attempt's booking."""
        reservation = self._by_attempt.pop((request_id, attempt), None)
        if reservation is not None:
            self._book(reservation, -1)
        return reservation

    def expire(self, now: float) -> int:
        """Ends bookings whose lease is over; returns how many."""
        over = [key for key, reservation in self._by_attempt.items() if reservation.expires <= now]
        for request_id, attempt in over:
            self.release(request_id, attempt)
        return len(over)

    def forget(self, worker: str) -> None:
        """Ends what is booked on a worker that is gone. Where it was to prefill, the decode worker now computes."""
        for key, reservation in list(self._by_attempt.items()):
            if reservation.decode == worker:
                self.release(*key)
            elif reservation.prefill == worker:
                self.reserve(*key, replace(reservation, prefill=None))
        self._outstanding.pop(worker, None)

    def of(self, worker: str) -> Outstanding:
        """What is booked on a worker."""
        return self._outstanding.get(worker) or Outstanding()

    def __len__(self) -> int:
        """Attempts under way."""
        return len(self._by_attempt)

    def _book(self, reservation: Reservation, sign: int) -> None:
        decode = self._outstanding.setdefault(reservation.decode, Outstanding())
        decode.requests += sign
        decode.decode_tokens += sign * reservation.decode_tokens
        computing = decode
        if reservation.prefill is not None:
            computing = self._outstanding.setdefault(reservation.prefill, Outstanding())
            computing.requests += sign
        computing.prefill_tokens += sign * reservation.prefill_tokens
