"""Requests that wait until the cluster has room: who goes next, and how much goes before a newcomer.

The lowest priority number goes first. Within a priority tenants share tokens by deficits: the tenant that got the
fewest tokens, divided by its weight, goes next, which is deficit round robin with a quantum of one token. Of two
tenants of weight one that wait all the time none is ahead by more than the largest request. A tenant that comes starts
level with the one that is served, or with what it still owes; so neither idle time nor an empty queue in between gains
anything.

Within a tenant each request has tokens that it may still let pass: at most `max_overtaking` times its own, less those
of later requests that went before it, and no more than leaves it time until its deadline. The request with the fewest
goes first, of equals the one with the earliest deadline; those with none left go by arrival. Hence short prompts pass
long ones, a deadline that comes near is heeded, and a request of n tokens is overtaken by later ones of its tenant
with less than `max_overtaking * n` tokens, and one request more. A request that is placed again lets none pass: a
stream that stalls is worse than one that starts late.
"""

from dataclasses import dataclass, field
from typing import Generic, TypeVar

_WINDOW = 128  # requests of a tenant that compete, oldest first: to rank thousands would take as long as a decision


@dataclass(slots=True, eq=False, kw_only=True)
class Waiting:
    """A request in the queue."""

    tenant: str
    weight: float = 1.0  # tokens that the tenant gets, against others' 1
    priority: int
    tokens: int  # that it costs
    deadline: float  # monotonic seconds
    resumes: bool = False  # its client has heard of it already: it does not let others pass
    overtaken: int = field(default=0, init=False)  # tokens of later requests of its tenant that went before it


W = TypeVar("W", bound=Waiting)


class FairQueue(Generic[W]):
    """At most `max_requests` with `max_tokens` together, but always one. Not thread-safe; time is an argument."""

    def __init__(self, max_requests: int, max_tokens: int, max_overtaking: int = 4) -> None:
        self.tokens = 0
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._max_overtaking = max_overtaking
        self._length = 0
        self._classes: dict[int, _Class[W]] = {}

    def __len__(self) -> int:
        """Requests that wait."""
        return self._length

    def fits(self, tokens: int) -> bool:
        """Whether a request of so many tokens may come in."""
        if not self._length:
            return self._max_requests > 0
        return self._length < self._max_requests and self.tokens + tokens <= self._max_tokens

    def add(self, waiting: W) -> None:
        """Comes in, behind the others of its tenant."""
        self._classes.setdefault(waiting.priority, _Class()).add(waiting)
        self._length += 1
        self.tokens += waiting.tokens

    def first(self, now: float, rate: float) -> W:
        """Who goes next, where `rate` tokens leave per second. The queue must not be empty."""
        of = self._classes[min(self._classes)]
        tenant = min(of.tenants, key=of.served.__getitem__)
        waiting = of.tenants[tenant][:_WINDOW]
        return min(waiting, key=lambda each: self._turn(each, now, rate))  # of equals the oldest one

    def take(self, waiting: W) -> None:
        """It goes: its tenant pays, and those before which it goes have let it pass."""
        of = self._classes[waiting.priority]
        for earlier in of.tenants[waiting.tenant]:
            if earlier is waiting:
                break
            earlier.overtaken += waiting.tokens
        of.pay(waiting)
        self.remove(waiting)

    def remove(self, waiting: W) -> None:
        """It waits no more."""
        of = self._classes[waiting.priority]
        of.remove(waiting)
        if not of.tenants:
            del self._classes[waiting.priority]
        self._length -= 1
        self.tokens -= waiting.tokens

    def ahead(self, waiting: Waiting, now: float, rate: float) -> float:
        """Tokens that would go before this request, if it came in now and nobody after it."""
        before = sum(of.tokens for priority, of in self._classes.items() if priority < waiting.priority)
        of = self._classes.get(waiting.priority)
        if of is None:
            return before
        least = self._passes(waiting, now, rate)
        own = sum(each.tokens for each in of.tenants.get(waiting.tenant, ()) if self._passes(each, now, rate) <= least)
        level = of.start(waiting.tenant) + own / waiting.weight  # what its tenant has got when its turn comes
        others = (
            min(sum(each.tokens for each in theirs), max(0.0, (level - of.served[tenant]) * theirs[0].weight))
            for tenant, theirs in of.tenants.items()
            if tenant != waiting.tenant
        )
        return before + own + sum(others)

    def _passes(self, waiting: Waiting, now: float, rate: float) -> float:
        """Tokens that it may still let pass."""
        if waiting.resumes:
            return 0.0
        patience = self._max_overtaking * waiting.tokens - waiting.overtaken
        return max(0.0, min(patience, (waiting.deadline - now) * rate - waiting.tokens))

    def _turn(self, waiting: Waiting, now: float, rate: float) -> tuple[float, float]:
        passes = self._passes(waiting, now, rate)
        return passes, waiting.deadline if passes else 0.0


class _Class(Generic[W]):
    """The requests of one priority, by tenant and arrival, and the tokens that each tenant got."""

    def __init__(self) -> None:
        self.tenants: dict[str, list[W]] = {}
        self.served: dict[str, float] = {}  # tokens by weight, of tenants that wait or are ahead
        self._level = 0.0  # of the tenant that was served last

    @property
    def tokens(self) -> int:
        """That wait."""
        return sum(each.tokens for waiting in self.tenants.values() for each in waiting)

    def start(self, tenant: str) -> float:
        """Tokens by weight that count as served to a tenant, if it waits or came now."""
        served = self.served.get(tenant, 0.0)
        return served if tenant in self.tenants else max(served, self._level)

    def add(self, waiting: W) -> None:
        self.served[waiting.tenant] = self.start(waiting.tenant)
        self.tenants.setdefault(waiting.tenant, []).append(waiting)

    def pay(self, waiting: W) -> None:
        self._level = self.served[waiting.tenant]
        self.served[waiting.tenant] += waiting.tokens / waiting.weight

    def remove(self, waiting: W) -> None:
        self.tenants[waiting.tenant].remove(waiting)
        if not self.tenants[waiting.tenant]:
            del self.tenants[waiting.tenant]
            self.served = {
                tenant: served
                for tenant, served in self.served.items()
                if served > self._level or tenant in self.tenants
            }
