"""How many workers of which kind a load needs, and how many of them should only prefill.

A bound comes from the work alone: no cluster with fewer workers can keep up, and no kind of worker will do on which
too many requests would be late even alone. From there on deployments are tried, in a simulation or otherwise. Near a
number of workers only splits are tried whose workers would be about equally busy.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from planner.offer import Offer
from planner.simulator.demand import Trace

_GROWTH = 1.25  # from one number of workers that does not hold to the next that is tried


@dataclass(frozen=True, slots=True)
class Work:
    """What a load asks for, in workers that do nothing else and are never idle."""

    prefill: float
    decode: float


@dataclass(frozen=True, slots=True)
class Family:
    """Kinds of workers that are combined: those that only prefill, and the others. `prefill` None: all do both."""

    offer: Offer
    prefill: Offer | None = None

    def of(self, prefill: int, others: int) -> "Deployment":
        """So many workers."""
        return Deployment(self, prefill, others)


@dataclass(frozen=True, slots=True)
class Deployment:
    """`prefill` workers that only prefill, and `others` that decode; they do all where there are none of the former."""

    family: Family
    prefill: int
    others: int

    @property
    def workers(self) -> int:
        """In all."""
        return self.prefill + self.others

    @property
    def gpus(self) -> int:
        """In all."""
        first = self.family.prefill
        return self.others * self.family.offer.gpus + (self.prefill * first.gpus if first else 0)

    @property
    def cost(self) -> float:
        """An hour, of all workers."""
        first = self.family.prefill
        return self.others * self.family.offer.cost + (self.prefill * first.cost if first else 0.0)

    def __str__(self) -> str:
        first, offer = self.family.prefill, self.family.offer
        named = any(each.gpu or each.gpus > 1 for each in (first or offer, offer))
        if first is None:
            return f"{self.others} aggregated" + (f" ({offer})" if named else "")
        return f"{self.prefill}P ({first}), {self.others}D ({offer})" if named else f"{self.prefill}P{self.others}D"


def families(offers: Sequence[Offer]) -> list[Family]:
    """Each kind aggregated, and each pair of kinds."""
    return [*map(Family, offers), *(Family(offer, first) for first in offers for offer in offers)]


def work_of(trace: Trace, family: Family, tpot: float | None) -> Work:
    """The least work: all prefixes cached that can be, decode steps as full as `tpot` seconds a token let them be."""
    first, offer = family.prefill or family.offer, family.offer
    timing, seconds = offer.timing, max(1e-9, _span(trace, offer.timing.step))
    computed = 1.0 - trace.endless_hit_rate
    prompts = (first.timing.prompt(0, demand.prompt_tokens, first.max_batched_tokens) for demand in trace.demands)
    output = sum(demand.output_tokens for demand in trace.demands)
    kept = sum((demand.prompt_tokens + demand.output_tokens / 2) * demand.output_tokens for demand in trace.demands)
    context = kept / output
    each = timing.sequence + timing.kept_token * context
    together = min(offer.max_running, offer.kv_tokens / context)
    if tpot is not None and each > 0:
        together = min(together, max(1.0, (tpot - timing.step) / each))
    return Work(computed * sum(prompts) / seconds, output / seconds * (timing.step + together * each) / together)


def alone(trace: Trace, family: Family, ttft: float | None, tpot: float | None) -> float:
    """Share of the requests that keep to both, in seconds, with all workers to themselves and all prefixes cached."""
    first, timing = family.prefill or family.offer, family.offer.timing
    good = 0
    for demand, cached in zip(trace.demands, trace.endless_cached, strict=True):
        seconds = first.timing.prompt(cached, demand.prompt_tokens, first.max_batched_tokens)
        token = timing.step + timing.sequence + timing.kept_token * demand.prompt_tokens
        in_time = ttft is None or first.timing.request + seconds <= ttft
        good += in_time and (tpot is None or demand.output_tokens == 1 or token <= tpot)
    return good / len(trace.demands)


def _span(trace: Trace, step: float) -> float:
    """Seconds from the first request to the last at the earliest: later questions wait for answers and for thinking."""
    comes: list[float] = []
    for demand, due in zip(trace.demands, trace.times.tolist(), strict=True):
        if demand.follows is not None:
            answer = trace.demands[demand.follows].output_tokens * step
            due = max(due, comes[demand.follows] + answer + demand.think)
        comes.append(due)
    return max(comes) - min(comes)


def least(family: Family, work: Work) -> Deployment:
    """The fewest workers that could do the work."""
    if family.prefill is None:
        return family.of(0, max(1, math.ceil(work.prefill + work.decode)))
    return family.of(max(1, math.ceil(work.prefill)), max(1, math.ceil(work.decode)))


def splits(family: Family, work: Work, workers: int) -> list[Deployment]:
    """Deployments of so many workers that are worth a try: those whose sides would be about as busy."""
    if family.prefill is None:
        return [family.of(0, workers)]
    share = work.prefill / (work.prefill + work.decode)
    near = {math.floor(share * workers), math.ceil(share * workers), round(share * workers) + 1}
    return [family.of(count, workers - count) for count in sorted(near) if 0 < count < workers]


def cheapest(
    works: Iterable[tuple[Family, Work]], most: int, gpus: int | None, holds: Callable[[Deployment], bool]
) -> Deployment | None:
    """Of up to `most` workers and so many GPUs the deployment that `holds` for the least cost. None: none does.

    Families come in the order of what they cost at least, and nothing is tried that costs as much as what was found.
    In each the number of workers is bisected, so more workers are taken to do no harm.
    """
    best: Deployment | None = None

    def below(bound: float) -> Callable[[Deployment], bool]:
        return lambda one: (gpus is None or one.gpus <= gpus) and one.cost < bound

    for family, work in sorted(works, key=lambda each: least(*each).cost):
        allowed = below(math.inf if best is None else best.cost)
        held = _smallest(family, work, most, allowed, holds)
        best = min(held, key=lambda one: one.cost, default=best)
    return best


def _smallest(
    family: Family,
    work: Work,
    most: int,
    allowed: Callable[[Deployment], bool],
    holds: Callable[[Deployment], bool],
) -> list[Deployment]:
    """Those of the fewest workers that are allowed and hold."""

    def tried(workers: int) -> list[Deployment]:
        return [one for one in splits(family, work, workers) if allowed(one) and holds(one)]

    fewest = least(family, work).workers
    counts = [count for count in range(fewest, most + 1) if any(map(allowed, splits(family, work, count)))]
    if not counts:
        return []
    below, count, most = fewest - 1, counts[0], counts[-1]
    while not (found := tried(count)):
        if count >= most:
            return []
        below, count = count, min(most, max(count + 1, round(_GROWTH * count)))
    while count - below > 1:
        middle = (below + count) // 2
        fewer = tried(middle)
        below, count, found = (below, middle, fewer) if fewer else (middle, count, found)
    return found


@dataclass(frozen=True, slots=True)
class Goodput:
    """The most requests a second that a deployment holds."""

    deployment: Deployment
    rate: float

    @property
    def for_cost(self) -> float:
        """Requests a second for each GPU, or for what is paid an hour where GPUs have prices."""
        return self.rate / self.deployment.cost


def placements(families: Iterable[Family], gpus: int) -> Iterator[Deployment]:
    """All deployments of up to so many GPUs."""
    for family in families:
        first = family.prefill
        if first is None:
            yield from (family.of(0, count) for count in range(1, gpus // family.offer.gpus + 1))
            continue
        for prefill in range(1, gpus // first.gpus + 1):
            left = gpus - prefill * first.gpus
            yield from (family.of(prefill, count) for count in range(1, left // family.offer.gpus + 1))


def most_goodput(
    deployments: Iterable[Deployment],
    capacity: Callable[[Deployment], float],
    holds: Callable[[Deployment, float], bool],
    *,
    precision: float,
    all_of_them: bool = False,
) -> list[Goodput]:
    """Requests a second for each cost, the best first, of deployments at all rates that `holds` is asked for.

    Each is bisected between 0 and its `capacity`, in requests a second, until that is known to `precision`, a share of
    the capacity. Who could not be better than the best even at capacity is left out, unless `all_of_them` are wanted.
    """
    found: list[Goodput] = []
    best = 0.0
    for deployment in sorted(deployments, key=lambda one: -capacity(one) / one.cost):
        low, high = 0.0, capacity(deployment)
        if high / deployment.cost <= best and not all_of_them:
            continue
        precise = precision * high  # of the capacity, so that it ends, too, where no rate holds
        while high - low > precise:
            middle = (low + high) / 2
            low, high = (middle, high) if holds(deployment, middle) else (low, middle)
            if high / deployment.cost <= best and not all_of_them:
                break
        found.append(Goodput(deployment, low))
        best = max(best, low / deployment.cost)
    return sorted(found, key=lambda one: (-one.for_cost, one.deployment.cost))
