"""The same load on several targets in alternation, so that drift of the machine hits all alike."""

import asyncio
from contextlib import AsyncExitStack

import msgspec

from bench.config import LoadConfig
from bench.errors import BenchError
from bench.measure.experiment import Experiment, Probe, Run
from bench.measure.ratios import ratios
from bench.sweep import INTERRUPTED
from bench.targets import Started, Target


def turns(targets: list[Target], number: int) -> list[Target]:
    """The order of round `number`, from 0: every second one is the reverse of the one before, every pair begins with
    another target. Over 2 x targets rounds each target has each place twice."""
    first = number // 2 % len(targets)
    order = targets[first:] + targets[:first]
    return order[::-1] if number % 2 else order


async def compare_targets(
    base: LoadConfig,
    targets: list[Target],
    rounds: int,
    keep_running: bool,
    probe: Probe,
    stop: asyncio.Event | None = None,
    ready_timeout: float = 600.0,
) -> Experiment:
    """`rounds` runs of each target, and ratios to the first target.

    A round has one seed for all targets, each round another. Commands run for their turn only, or, with
    `keep_running`, all of them all the time. Ends early when `stop` is set or a target fails, and keeps what it has.
    Raises BenchError when a target fails before each had its first run.
    """
    _require_comparable(targets)
    runs: list[Run] = []
    stopped_because = ""

    def stopped() -> bool:
        return stop is not None and stop.is_set()

    try:
        async with AsyncExitStack() as running:
            if keep_running:
                targets = [
                    Target(
                        name=target.name,
                        url=await running.enter_async_context(Started(target, ready_timeout, stop=stop)),
                    )
                    for target in targets
                ]
            order = [(number, target) for number in range(rounds) for target in turns(targets, number)]
            for number, target in order:
                async with Started(target, ready_timeout, stop=stop) as url:
                    config = msgspec.structs.replace(base, url=url, seed=base.seed + number)
                    run = await probe(config, f"{target.name}, round {number + 1}")
                    runs.append(msgspec.structs.replace(run, target=target.name))
                if stopped():
                    break
    except BenchError as error:
        if len({run.target for run in runs}) < len(targets) and not (stopped() and runs):
            raise
        stopped_because = str(error)
    if stopped():
        stopped_because = INTERRUPTED
    whole = [run for run in runs if not run.summary.interrupted]
    by_target = {target.name: [run for run in whole if run.target == target.name] for target in targets}
    first, *others = by_target
    return Experiment(
        kind="compare",
        title=f"{base.workload.name}: {', '.join(others)} against {first}",
        runs=runs,
        ratios=[ratio for name in others for ratio in ratios(by_target[first], by_target[name], name, base.seed)],
        stopped_because=stopped_because,
    )


def _require_comparable(targets: list[Target]) -> None:
    if len(targets) < 2:
        raise BenchError("compare needs two targets or more")
    names = [target.name for target in targets]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise BenchError(f"two targets are called {twice}: give them names, like 'one={twice} ...' 'other={twice} ...'")
