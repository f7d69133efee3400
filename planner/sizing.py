"""How many workers of which kind a load needs, and how many of them should only prefill.

A bound comes from the work alone: fewer workers cannot do enough of it in the time that the objectives leave, which
goes on after the last request has come; and no kind of worker will do on which too many requests would be late even
alone. From there on deployments are tried, in a simulation or otherwise. Near a number of workers only splits are tried
whose workers would be about equally busy.
"""

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from planner.offer import Offer
from planner.simulator.demand import Trace

_GROWTH = 1.25  # from one number of workers that does not hold to the next that is tried
_SMALLEST = 1e-3  # of a capacity: lower rates are not looked for


@dataclass(frozen=True, slots=True)
class Objectives:
    """Seconds that a request may take, and the share of the requests that must keep to all of them."""

    ttft: float = math.inf
    tpot: float = math.inf
    e2e: float = math.inf
    share: float = 1.0

    @property
    def prompt(self) -> float:
        """Until its prompt is computed; inf: nothing says when."""
        return min(self.ttft, self.e2e)

    def answer(self, tokens: int) -> float:
        """Until an answer of so many tokens has ended; inf: nothing says when."""
        return min(self.e2e, self.ttft + (self.tpot * (tokens - 1) if tokens > 1 else 0.0))


@dataclass(frozen=True, slots=True)
class Work:
    """What a load asks for, in workers that do nothing else and are never idle."""

    prefill: float
    decode: float
    hidden: float = 0.0  # of both, that aggregated workers do at once: weights are read while prompts are computed

    @property
    def together(self) -> float:
        """For workers that do both."""
        return self.prefill + self.decode - self.hidden


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


def work_of(trace: Trace, family: Family, objectives: Objectives) -> Work:
    """The least work, done evenly until the last request has come, and in the time that its objectives leave then."""
    total = _total(trace, family, objectives.tpot, 1.0)
    span = _span(trace, lambda tokens: tokens * family.offer.timing.step)
    last = max(demand.output_tokens for demand in trace.demands)
    prompts, answers = (
        max(1e-9, span + (left if math.isfinite(left) else 0.0))
        for left in (objectives.prompt, objectives.answer(last))
    )
    return Work(total.prefill / prompts, total.decode / answers, total.hidden / max(prompts, answers))


def fewest(trace: Trace, family: Family, objectives: Objectives) -> Deployment:
    """With fewer workers too many requests would be late, whatever becomes of the others.

    Answers that are late themselves are taken to put off no later question.
    """
    total = _total(trace, family, objectives.tpot, objectives.share)
    span = _span(trace, objectives.answer)
    prompts = span + objectives.prompt
    answers = span + max(objectives.answer(demand.output_tokens) for demand in trace.demands)
    if family.prefill is None:
        return family.of(0, _whole(max(total.prefill / prompts, total.together / answers)))
    return family.of(_whole(total.prefill / prompts), _whole(total.decode / answers))


def _whole(workers: float) -> int:
    return max(1, math.ceil(workers - 1e-9))


def _total(trace: Trace, family: Family, tpot: float, share: float) -> Work:
    """The least work in workers' seconds: of each part only the easiest `share` of the requests.

    All prefixes are cached that can be, steps with prompts are full, and those of answers as full as caches and `tpot`
    seconds a token let them be.
    """
    first, offer = family.prefill or family.offer, family.offer
    chunk, prompt, timing = first.max_batched_tokens, first.timing, offer.timing
    token = max(prompt.step, prompt.prompt_step + prompt.prompt_token * chunk) / chunk
    count = math.ceil(share * len(trace.demands) - 1e-9)
    tokens, contexts, each, filled = list[float](), list[float](), list[float](), [list[float]() for _ in range(3)]
    for demand, cached in zip(trace.demands, trace.endless_cached, strict=True):
        computed, later = demand.prompt_tokens - cached, demand.output_tokens - 1
        kept = demand.prompt_tokens + demand.output_tokens / 2
        sequence = timing.sequence + timing.kept_token * kept
        tokens.append(token * computed)
        contexts.append(prompt.prompt_token_context * computed * (cached + demand.prompt_tokens) / 2)
        each.append(later * sequence)
        for which, part in enumerate((1 / offer.max_running, (kept - cached) / offer.kv_tokens, 0.0)):
            filled[which].append(later * min(1.0, part))  # of steps
        filled[2][-1] = later * min(1.0, sequence / max(1e-12, tpot - timing.step))

    def easiest(values: list[float]) -> float:
        return sum(values if count == len(values) else heapq.nsmallest(count, values))

    computing, reading = easiest(tokens), timing.step * max(map(easiest, filled))
    return Work(computing + easiest(contexts), reading + easiest(each), min(computing, reading))


def alone(trace: Trace, family: Family, objectives: Objectives) -> float:
    """Share of the requests that keep to TTFT and TPOT with all workers to themselves and all prefixes cached."""
    first, timing = family.prefill or family.offer, family.offer.timing
    good = 0
    for demand, cached in zip(trace.demands, trace.endless_cached, strict=True):
        seconds = first.timing.prompt(cached, demand.prompt_tokens, first.max_batched_tokens)
        token = timing.step + timing.sequence + timing.kept_token * demand.prompt_tokens
        in_time = first.timing.arrival(demand.prompt_tokens) + seconds <= objectives.ttft
        good += in_time and (demand.output_tokens == 1 or token <= objectives.tpot)
    return good / len(trace.demands)


def _span(trace: Trace, answered: Callable[[int], float]) -> float:
    """Seconds from the first request to the last: later questions wait for answers, which take what `answered` says for
    their tokens, and for thinking.
    """
    comes: list[float] = []
    for demand, due in zip(trace.demands, trace.times.tolist(), strict=True):
        if demand.follows is not None:
            answer = answered(trace.demands[demand.follows].output_tokens)
            due = max(due, comes[demand.follows] + answer + demand.think)
        comes.append(due)
    return max(comes) - min(comes)


def least(family: Family, work: Work) -> Deployment:
    """The fewest workers that do so much work."""
    if family.prefill is None:
        return family.of(0, _whole(work.together))
    return family.of(_whole(work.prefill), _whole(work.decode))


def splits(family: Family, work: Work, workers: int) -> list[Deployment]:
    """Deployments of so many workers that are worth a try: those whose sides would be about as busy."""
    if family.prefill is None:
        return [family.of(0, workers)]
    share = work.prefill / (work.prefill + work.decode)
    near = {math.floor(share * workers), math.ceil(share * workers), round(share * workers) + 1}
    counts = {min(max(1, count), workers - 1) for count in near} if workers > 1 else set()
    return [family.of(count, workers - count) for count in sorted(counts)]


def cheapest(
    works: Iterable[tuple[Family, Work, Deployment]],
    most: int,
    gpus: int | None,
    holds: Callable[[Deployment], bool],
) -> Deployment | None:
    """Of up to `most` workers and so many GPUs the deployment that `holds` for the least cost. None: none does.

    Of each family come its work, and the fewest workers that might do. Families come in the order of what these cost,
    and nothing is tried that costs as much as what was found. In each the number of workers is bisected, so more
    workers are taken to do no harm.
    """
    best: Deployment | None = None

    def below(bound: float) -> Callable[[Deployment], bool]:
        return lambda one: (gpus is None or one.gpus <= gpus) and one.cost < bound

    for family, work, least_of_all in sorted(works, key=lambda each: each[2].cost):
        allowed = below(math.inf if best is None else best.cost)
        held = _smallest(family, work, least_of_all.workers, most, allowed, holds)
        while held:
            best = min(held, key=lambda one: one.cost)
            # Where one side's workers are the dearer ones, more workers may cost less.
            held = _tried(family, work, range(best.workers + 1, most + 1), below(best.cost), holds)
    return best


def _tried(
    family: Family,
    work: Work,
    counts: Iterable[int],
    allowed: Callable[[Deployment], bool],
    holds: Callable[[Deployment], bool],
) -> list[Deployment]:
    """Of the first number of workers for which something holds that is allowed, all that does."""
    for count in counts:
        if held := [one for one in splits(family, work, count) if allowed(one) and holds(one)]:
            return held
    return []


def _smallest(
    family: Family,
    work: Work,
    least_of_all: int,
    most: int,
    allowed: Callable[[Deployment], bool],
    holds: Callable[[Deployment], bool],
) -> list[Deployment]:
    """Those of the fewest workers that are allowed and hold. Looks first where the work says, then above or below."""
    counts = [count for count in range(least_of_all, most + 1) if any(map(allowed, splits(family, work, count)))]
    if not counts:
        return []
    below, most = least_of_all - 1, counts[-1]
    count = next((each for each in counts if each >= least(family, work).workers), most)
    while not (found := _tried(family, work, [count], allowed, holds)):
        if count >= most:
            return []
        below, count = count, min(most, max(count + 1, round(_GROWTH * count)))
    while count - below > 1:
        middle = (below + count) // 2
        fewer = _tried(family, work, [middle], allowed, holds)
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
    it; less than a thousandth of the capacity is 0. Who could not be better than the best even at capacity is left out,
    unless `all_of_them` are wanted.
    """
    found: list[Goodput] = []
    best = 0.0
    for deployment in sorted(deployments, key=lambda one: -capacity(one) / one.cost):
        low, high = 0.0, capacity(deployment)
        if high / deployment.cost <= best and not all_of_them:
            continue
        none = _SMALLEST * high  # so that it ends, too, where no rate holds
        while high - low > precision * high and high > none:
            middle = (low + high) / 2
            low, high = (middle, high) if holds(deployment, middle) else (low, middle)
            if high / deployment.cost <= best and not all_of_them:
                break
        found.append(Goodput(deployment, low))
        best = max(best, low / deployment.cost)
    return sorted(found, key=lambda one: (-one.for_cost, one.deployment.cost))
