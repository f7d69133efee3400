"""Workers that do much worse than their peers: out for a while, longer each time, and never many at once.

A breaker sees a worker that fails nearly always. This sees one that fails far more often than the others do, or whose
prompts take far longer against what was predicted: a sick device, a noisy neighbour.
"""

import numpy as np
from numpy.typing import NDArray

from router.fleet import Fleet

_MEMORY = 60.0  # seconds in which what is known of a worker fades to 1 / e
_ENOUGH = 8.0  # attempts of a worker, and of its peers together, before it is judged
_SHARE, _TIMES_SHARE = 0.2, 5.0  # attempts that failed: at least so many, and so many times the peers' share
_TIMED = 16.0  # attempts of a worker whose times are compared, and of at least one peer
_TIMES_LATE = 4.0  # actual against predicted seconds to the first token: so many times the peers' median
_OUT, _LONGEST_OUT = 30.0, 300.0  # seconds; doubled each time
_MOST_OUT = 0.5  # of the workers of a role and model
_SEEN = np.dtype(
    [
        ("attempts", "f8"),  # that ended well or failed; fading
        ("faults", "f8"),  # those that failed
        ("timed", "f8"),  # those that computed a prompt for which a time was predicted
        ("lateness", "f8"),  # sum over those of log(actual / predicted)
        ("out_until", "f8"),  # monotonic seconds
        ("times", "i4"),  # that it was put out in a row
    ]
)


class Outliers:
    """What is known of each row of the fleet's table."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._seen: NDArray[np.void] = np.zeros(len(fleet.table), _SEEN)
        self._faded_at: float | None = None

    def ended(self, row: int, *, failed: bool) -> None:
        """An attempt ended at a worker."""
        self._fit()
        self._seen["attempts"][row] += 1
        self._seen["faults"][row] += failed

    def timed(self, row: int, ratio: float) -> None:
        """A worker computed a prompt. `ratio`: of the actual seconds to the first token to the predicted ones, > 0."""
        self._fit()
        self._seen["timed"][row] += 1
        self._seen["lateness"][row] += np.log(ratio)

    def out(self, now: float) -> NDArray[np.bool_]:
        """Which workers are out, `[n]`."""
        self._fit()
        is_out: NDArray[np.bool_] = self._seen["out_until"] > now
        return is_out

    def until(self, row: int) -> float:
        """When a worker comes back, monotonic seconds."""
        return float(self._seen["out_until"][row])

    def forget(self, row: int) -> None:
        """The worker has left."""
        self._fit()
        self._seen[row] = np.zeros((), _SEEN)

    def judge(self, shut: NDArray[np.bool_], now: float) -> list[tuple[int, str]]:
        """Puts outliers out; (row, reason) of each. `shut`: workers that get nothing already; they count as out."""
        self._fit()
        self._fade(now)
        table, out = self._fleet.table, self.out(now) | shut
        found = []
        for pool in self._fleet.pools():
            members = table["ready"] & pool
            room = int(_MOST_OUT * members.sum()) - int((members & out).sum())
            for reason, badness in (("faults", self._faults(members)), ("lateness", self._lateness(members))):
                for row in np.argsort(-badness):
                    if room <= 0 or not badness[row] > 0:
                        break
                    if not out[row]:
                        out[row] = True
                        room -= 1
                        self._put_out(int(row), now)
                        found.append((int(row), reason))
        return found

    def _faults(self, members: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Share of attempts that failed where it is an outlier, else 0, `[n]`."""
        attempts = np.where(members, self._seen["attempts"], 0.0)
        faults = np.where(members, self._seen["faults"], 0.0)
        peers = attempts.sum() - attempts
        share, peers_share = faults / np.maximum(attempts, 1.0), (faults.sum() - faults) / np.maximum(peers, 1.0)
        is_outlier = (attempts >= _ENOUGH) & (peers >= _ENOUGH)
        is_outlier &= (share >= _SHARE) & (share >= _TIMES_SHARE * peers_share)
        return np.where(is_outlier, share, 0.0)

    def _lateness(self, members: NDArray[np.bool_]) -> NDArray[np.float64]:
        """How many times as late as its peers a worker is where it is an outlier, else 0, `[n]`."""
        timed = members & (self._seen["timed"] >= _TIMED)
        late = np.zeros(len(timed))
        if timed.sum() > 1:
            mean = self._seen["lateness"][timed] / self._seen["timed"][timed]
            # Of two the lower one; of more the usual one, which a single outlier does not move.
            times = np.exp(mean - np.quantile(mean, 0.5, method="lower"))
            late[timed] = np.where(times >= _TIMES_LATE, times, 0.0)
        return late

    def _put_out(self, row: int, now: float) -> None:
        """What was known until now is void when it comes back."""
        seen = self._seen
        again = now - seen["out_until"][row] < _LONGEST_OUT and seen["times"][row]
        times = min(int(seen["times"][row]) + 1, 16) if again else 1
        seen[row] = np.zeros((), _SEEN)
        seen["times"][row] = times
        seen["out_until"][row] = now + min(_OUT * 2.0 ** (times - 1), _LONGEST_OUT)

    def _fade(self, now: float) -> None:
        factor = 1.0 if self._faded_at is None else np.exp(-(now - self._faded_at) / _MEMORY)
        for column in ("attempts", "faults", "timed", "lateness"):
            self._seen[column] *= factor
        self._faded_at = now

    def _fit(self) -> None:
        """As long as the table."""
        if (more := len(self._fleet.table) - len(self._seen)) > 0:
            self._seen = np.concatenate([self._seen, np.zeros(more, _SEEN)])
