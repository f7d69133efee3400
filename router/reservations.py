"""Load that was given to workers and has not come back: booked when a request is placed, so that the next sees it."""

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from router.cost import Prediction
from router.fleet import Fleet


@dataclass(frozen=True, slots=True)
class Reservation:
    """What one attempt of a request means for its workers, which are rows of the fleet's table."""

    decode: int
    prefill: int | None
    prefill_tokens: int  # uncached prompt tokens, computed by `prefill` or else by `decode`
    decode_tokens: int  # prompt and output tokens whose KV the decode worker keeps
    booked: float  # monotonic seconds
    expires: float
    predicted_tokens: int  # cached prompt tokens expected
    told_by: str = ""  # router that booked it; "": this one
    prediction: Prediction = field(default_factory=Prediction)


class Reservations:
    """All attempts under way; their sums, and what they leave free, are columns of the fleet's table.

    Releasing one twice changes nothing.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._by_attempt: dict[tuple[str, int], Reservation] = {}

    def reserve(self, request_id: str, attempt: int, reservation: Reservation) -> None:
        """Books an attempt; a repeated one replaces the first."""
        self.release(request_id, attempt)
        self._by_attempt[request_id, attempt] = reservation
        self._book(reservation, 1)

    def release(self, request_id: str, attempt: int) -> Reservation | None:
        """Ends an attempt's booking. None: it is not known."""
        reservation = self._by_attempt.pop((request_id, attempt), None)
        if reservation is not None:
            self._book(reservation, -1)
        return reservation

    def get(self, request_id: str, attempt: int) -> Reservation | None:
        """An attempt's booking. None: it is not known."""
        return self._by_attempt.get((request_id, attempt))

    def told_by(self, router: str) -> list[tuple[tuple[str, int], Reservation]]:
        """Attempts that another router booked; "": that were booked here."""
        return [entry for entry in self._by_attempt.items() if entry[1].told_by == router]

    def adopt(self, router: str) -> None:
        """What a router booked that is gone counts as booked here."""
        for key, reservation in self.told_by(router):
            self._by_attempt[key] = replace(reservation, told_by="")

    def expire(self, now: float) -> int:
        """Ends bookings whose lease is over; returns how many."""
        over = [key for key, reservation in self._by_attempt.items() if reservation.expires <= now]
        for request_id, attempt in over:
            self.release(request_id, attempt)
        return len(over)

    def forget(self, row: int) -> None:
        """Ends what is booked on a worker that is gone. Where it was to prefill, the decode worker now computes."""
        for key, reservation in list(self._by_attempt.items()):
            if reservation.decode == row:
                self.release(*key)
            elif reservation.prefill == row:
                self.reserve(*key, replace(reservation, prefill=None))

    def queued(self, now: float) -> NDArray[np.float64]:
        """Prompt tokens that each worker has yet to compute, as predicted: it has worked at its rate since it was told.

        Nobody tells when a prompt is computed. Where the rate is not measured, all that is booked counts.
        """
        table = self._fleet.table
        # The maximum of NaN and a number by `fmax` is the number.
        worked = np.fmax(table["prefill_rate"], 0.0) * np.maximum(0.0, now - table["queue_at"])
        queued: NDArray[np.float64] = np.minimum(np.maximum(table["queue"] - worked, 0.0), table["prefill_tokens"])
        return queued

    def __len__(self) -> int:
        """Attempts under way."""
        return len(self._by_attempt)

    def _book(self, reservation: Reservation, sign: int) -> None:
        table, decode, computing = self._fleet.table, reservation.decode, reservation.decode
        table["requests"][decode] += sign
        table["decode_tokens"][decode] += sign * reservation.decode_tokens
        table["free_tokens"][decode] -= sign * reservation.decode_tokens
        if reservation.prefill is not None:
            computing = reservation.prefill
            table["requests"][computing] += sign
        if sign > 0:
            # As `queued`, of one worker: numbers are quicker than arrays of one.
            rate: float = table["prefill_rate"][computing]
            since: float = reservation.booked - table["queue_at"][computing]
            worked = rate * max(0.0, since) if rate > 0 else 0.0
            before: float = table["queue"][computing] - worked
            booked: float = table["prefill_tokens"][computing]
            table["queue"][computing] = min(max(before, 0.0), booked) + reservation.prefill_tokens
            table["queue_at"][computing] = reservation.booked
        table["prefill_tokens"][computing] += sign * reservation.prefill_tokens
