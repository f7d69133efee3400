"""Which deployment a load needs, by the performance model: for when there is no time to simulate, as in `sizing`.

Prefill workers decide over first tokens and decode workers over the others, so each is looked at by itself and the
fewest of both are combined. All workers aggregated is a choice like any other. What there is already is kept to where
nothing else is clearly cheaper.

The rate is not known but forecast, so each of its likely values is looked at, and a deployment's attainment is the
share of all requests that may come: those of a burst count as many as they are. So capacity is kept for a burst where
its requests are too many to be late, and not where they are few.
"""

from collections.abc import Iterator, Mapping
from typing import Literal

import msgspec
import numpy as np

from planner.decision import Option
from planner.offer import Offer
from planner.performance import Corrections, Load, Performance, Shares
from planner.window import ROLES, Role

Family = Literal["disaggregated", "aggregated"]
Counts = tuple[int, int, int]  # workers by role, in the order of ROLES
Bounds = Mapping[Role, tuple[int, int]]  # fewest and most workers; all roles, in the order of ROLES

_FEWER = 0.9  # of the GPUs: with what another family, or size of workers, must do before it is changed to


class Weighed:
    """Deployments of one kind of worker, up to `most` workers, under one load."""

    def __init__(
        self, offer: Offer, load: Load, ttft: float, tpot: float, most: int, corrections: Corrections | None = None
    ) -> None:
        self.offer = offer
        self._load, self._most = load, most
        self._arguments = ttft, tpot, most, corrections
        self._multiples = np.array([each for each in load.spread if each > 0] or [1.0])
        self._weights = self._multiples / self._multiples.sum()  # shares of the requests
        models = self._models(1.0)
        self._first = np.stack([model.prefill() for model in models])  # [rates, workers + 1], as all of them
        self._room, self._tokens = (
            np.stack(shares) for shares in zip(*(each.decode() for each in models), strict=True)
        )
        self._both = [np.stack(shares) for shares in zip(*(each.aggregated() for each in models), strict=True)]
        self._decode = self._room * self._tokens

    def option(self, prefill: int, decode: int, aggregated: int = 0) -> Option:
        """What is predicted. Where all roles are mixed, the load is split by the number of workers."""
        first, tokens, both = self._shares(prefill, decode, aggregated)
        return Option(
            prefill=prefill,
            decode=decode,
            aggregated=aggregated,
            tensor_parallel=self.offer.gpus,
            ttft_attainment=first,
            tpot_attainment=tokens,
            attainment=both,
            gpus=self.offer.gpus * (prefill + decode + aggregated),
        )

    def smallest(self, wanted: float, bounds: Bounds, near: Counts, family: Family) -> Option | None:
        """The fewest workers that keep to `wanted`; of equals the one with fewest changes from `near`."""
        options = [self.option(*counts) for counts in self._fewest(wanted, bounds, family)]
        return min(options, key=lambda each: (changes(each, near), -each.attainment), default=None)

    def best(self, workers: int, bounds: Bounds, family: Family) -> Option | None:
        """Of so many workers at most the option with the most requests in time. None: none is within the bounds."""
        (least_p, most_p), (least_d, most_d), (least_a, most_a) = (bounds[role] for role in ROLES)
        if family == "aggregated":
            count = min(most_a, workers - least_p - least_d)
            return self.option(least_p, least_d, count) if count >= max(1, least_a) else None
        best = None
        for prefill in range(max(1, least_p), min(most_p, workers - least_a - max(1, least_d)) + 1):
            count = min(most_d, workers - least_a - prefill)
            share = float(self._apart(prefill)[count])
            if best is None or share > best[0]:
                best = share, prefill, count
        return None if best is None else self.option(best[1], best[2], least_a)

    def _fewest(self, wanted: float, bounds: Bounds, family: Family) -> Iterator[Counts]:
        """All splits of the fewest workers that do."""
        (least_p, most_p), (least_d, most_d), (least_a, most_a) = (bounds[role] for role in ROLES)
        if family == "aggregated":
            for count in range(max(1, least_a), min(most_a, self._most - least_p - least_d) + 1):
                if self._shares(least_p, least_d, count)[2] >= wanted:
                    yield least_p, least_d, count
                    return
            return
        room = self._most - least_a
        needed: list[tuple[int, int]] = []
        for prefill in range(max(1, least_p), min(most_p, room - 1) + 1):
            good = self._apart(prefill) >= wanted
            count = max(1, least_d, int(np.argmax(good)))
            if good.any() and count <= min(most_d, room - prefill):
                needed.append((prefill, count))
        fewest = min((prefill + count for prefill, count in needed), default=0)
        for prefill, count in needed:
            if prefill + count <= fewest and fewest - prefill <= most_d:
                yield prefill, fewest - prefill, least_a

    def _models(self, part: float) -> list[Performance]:
        """Of a part of the load, at each of its rates."""
        rates = (self._load.rate * part * self._multiples).tolist()
        loads = (msgspec.structs.replace(self._load, rate=rate) for rate in rates)
        return [Performance(self.offer, load, *self._arguments) for load in loads]

    def _apart(self, prefill: int) -> Shares:
        """Attainment with so many prefill workers, by the number of decode workers."""
        shares: Shares = (self._weights * self._first[:, prefill]) @ self._decode
        return shares

    def _shares(self, prefill: int, decode: int, aggregated: int) -> tuple[float, float, float]:
        """First tokens in time, other tokens in time, both."""
        if not aggregated:
            first, tokens = self._first[:, prefill] * self._room[:, decode], self._tokens[:, decode]
        elif not decode or not prefill:
            first, tokens = (shares[:, aggregated] for shares in self._both)
        else:
            part = aggregated / (prefill + decode + aggregated)
            first, tokens = np.zeros_like(self._weights), np.zeros_like(self._weights)
            for at, (both, apart) in enumerate(zip(self._models(part), self._models(1 - part), strict=True)):
                (firsts, others), (room, gaps) = both.aggregated(), apart.decode()
                first[at] = part * firsts[aggregated] + (1 - part) * apart.prefill()[prefill] * room[decode]
                tokens[at] = part * others[aggregated] + (1 - part) * gaps[decode]
        weights = self._weights
        return float(weights @ first), float(weights @ tokens), float(weights @ (first * tokens))


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """What there is, the smallest that does, and all that were looked at."""

    current: Option
    smallest: Option  # that holds; the best there can be if none does
    options: tuple[Option, ...]
    family: Family
    weighed: Weighed  # of the smallest


def choose(
    offers: tuple[Offer, ...],
    present: Offer,
    load: Load,
    have: Counts,
    bounds: Bounds,
    *,
    ttft: float,
    tpot: float,
    wanted: float,
    gpus: int,
    corrections: Corrections,
) -> Choice | None:
    """Among all offers and families. None: no deployment is within the bounds and the budget of `gpus`."""
    families: list[Family] = ["disaggregated"] if bounds["prefill"][1] and bounds["decode"][1] else []
    families += ["aggregated"] if bounds["aggregated"][1] else []
    now: Family = "aggregated" if have[2] > have[0] + have[1] else "disaggregated"
    found: list[tuple[bool, Option, Family, Weighed]] = []
    current = None
    for offer in offers:
        most = max(1, gpus // offer.gpus)
        weighed = Weighed(offer, load, ttft, tpot, max(most, sum(have)), corrections)
        if offer is present:
            current = msgspec.structs.replace(weighed.option(*have), note="as it is")
        for family in families:
            near = have if offer is present else (0, 0, 0)
            option = weighed.smallest(wanted, bounds, near, family)
            if option is None or option.gpus > gpus:
                option = weighed.best(most, bounds, family)
            if option is not None:
                note = "the fewest" if option.attainment >= wanted else "the most"
                option = msgspec.structs.replace(option, note=f"{note}, {family}")
                found.append((offer is present and family == now and sum(have) > 0, option, family, weighed))
    if not found or current is None:
        return None
    holding = [each for each in found if each[1].attainment >= wanted]
    if not holding:
        chosen = max(found, key=lambda each: (each[1].attainment, each[0]))
    else:
        chosen = min(holding, key=lambda each: (each[1].gpus, not each[0], -each[1].attainment))
        kept = next((each for each in holding if each[0]), chosen)
        # A change of the family takes workers away before others are ready: not while all are needed.
        if current.attainment < wanted or chosen[1].gpus > _FEWER * kept[1].gpus:
            chosen = kept
    return Choice(
        current=current,
        smallest=chosen[1],
        options=(current, *(each[1] for each in found)),
        family=chosen[2],
        weighed=chosen[3],
    )


def changes(option: Option, near: Counts) -> int:
    """Workers by which two deployments differ; a flip counts as one."""
    off = [option.count(role) - count for role, count in zip(ROLES, near, strict=True)]
    return max(sum(each for each in off if each > 0), -sum(each for each in off if each < 0))
