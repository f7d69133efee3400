"""`python -m bench.distserve_point`: DistServe's published example of a placement search, searched by ours.

The README of `simdistserve` in github.com/LLMServe/DistServe gives one command, and what it ideally finds: OPT-13B on
four A100s of 80 GB, ShareGPT lengths, 300 requests, first tokens within 200 ms and later ones within 100 ms each for
90 % of the requests: 1.56 requests/s a GPU with two GPUs that prefill together and one that decodes. Its search stops
once it knows the rate to 0.25 requests/s a GPU, which is the tolerance.

Facts taken from there, no code: the coefficients of its profiles in milliseconds
(`estimators/profile_data/profiler-a100-80g.distserve.json`: prefill, and decode below 95 sequences), the tokens that
a cache holds (`max_num_tokens.csv`), and 300 lengths of its ShareGPT workload (`benchmarks/alignment/
data-ground-truth/opt-13b-sharegpt-workload/distserve-300-3.exp`, here `replay/distserve_sharegpt.csv`). Its arrivals
are NumPy's legacy gamma gaps of shape 1 and seed 0. A step with prompts takes a + b x tokens + c x the sum of their
lengths squared there; so `prompt_token_context` is twice c, as a prompt token has half the prompt before it.

It is searched twice: as DistServe serves, whose prefill steps take all prompts that wait and whose decode workers
compute none; and as we do, with 1,280 tokens a step and a router that has decode workers compute prompts where that is
much sooner.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from bench.config import LoadConfig, WorkloadConfig
from bench.measure.slo import parse_slo
from bench.replay.trials import Trials
from planner.offer import Offer
from planner.simulator.demand import Demand, Trace
from planner.simulator.settings import Settings
from planner.simulator.timing import Timing
from planner.sizing import Deployment, Goodput, families, most_goodput, placements

BLOCK_SIZE = 16  # tokens: with blocks as long as half a request much of a cache would stay empty
PUBLISHED, TOLERANCE = 1.56, 0.25  # requests/s a GPU
GPUS = 4
SLO = "ttft=200ms,tpot=100ms"
LENGTHS = Path(__file__).parent / "replay" / "distserve_sharegpt.csv"

# By tensor-parallel degree: prefill a, b, c; decode a constant, a token kept, a sequence; tokens that the cache holds.
_PROFILES = {
    1: (
        (16.456860431694288, 0.09264750660897617, 6.474785740229194e-06),
        (19.934702624895458, 0.0006269356524350583, 0.03850697740828398),
        66_144,
    ),
    2: (
        (13.402703359246601, 0.06234291581603636, 2.226884309113053e-06),
        (13.294796350285385, 0.00034109219700723494, 0.06296393225243659),
        163_008,
    ),
    4: (
        (10.965724575862776, 0.034619455295915404, 4.7511361198071533e-07),
        (10.256231678259395, 0.00018786702316166354, 0.03269273629225551),
        356_736,
    ),
}
_TOKEN_BYTES = 2 * 2 * 40 * 5120  # OPT-13B: keys and values in 16 bits, 40 layers, hidden size 5,120


def offers(*, whole_prompts: bool) -> list[Offer]:
    """A100s in groups of 1, 2 and 4. `whole_prompts`: a step takes all prompts that wait, as DistServe's do."""
    found = []
    for gpus, (prefill, decode, kv_tokens) in _PROFILES.items():
        timing = Timing(
            step=decode[0] / 1e3,
            prompt_step=prefill[0] / 1e3,
            prompt_token=prefill[1] / 1e3,
            prompt_token_context=2 * prefill[2] / 1e3,
            sequence=decode[2] / 1e3,
            kept_token=decode[1] / 1e3,
            token_bytes=_TOKEN_BYTES,
        )
        offer = Offer(gpu="A100", gpus=gpus, timing=timing, kv_tokens=kv_tokens)
        found.append(msgspec.structs.replace(offer, max_batched_tokens=kv_tokens) if whole_prompts else offer)
    return found


def sharegpt(count: int | None = None) -> Trace:
    """The first of its requests, 300 at most, with Poisson arrivals. No prompt begins as another one does."""
    lengths = np.loadtxt(LENGTHS, delimiter=",", skiprows=1, dtype=int)[:count]
    demands = [
        Demand(
            prompt,
            output,
            [(number << 32 | at).to_bytes(16, "little") for at in range((prompt + output) // BLOCK_SIZE)],
            block_size=BLOCK_SIZE,
        )
        for number, (prompt, output) in enumerate(lengths.tolist(), start=1)
    ]
    gaps = np.random.RandomState(0).gamma(1.0, 1.0, len(demands) - 1)
    return Trace("ShareGPT", demands, np.concatenate([[0.0], np.cumsum(gaps)]))


def trials_of(trace: Trace, console: Console | None = None, *, ours: bool) -> Trials:
    """Simulations of it; DistServe's own has no delays between processes, and here they are."""
    settings = Settings(block_size=BLOCK_SIZE)
    settings = settings if ours else replace(settings, local_prefill_tokens=0)
    config = LoadConfig(url="", model="opt-13b", workload=WorkloadConfig(name="lengths"))
    return Trials(trace, config, settings, parse_slo(SLO), 0.9, console, "prefix" if ours else "least_outstanding")


def as_published(deployment: Deployment) -> bool:
    """Whether DistServe's search looks at it: one instance of each side."""
    return deployment.family.prefill is not None and deployment.prefill == deployment.others == 1


def main() -> None:
    """Prints what both kinds of batching come to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", type=float, default=0.03, help="share of a rate to which it is looked for")
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--all", action="store_true", help="more than one instance a side, and aggregated ones, too")
    arguments = parser.parse_args()
    written = {}
    for name, ours in (("as DistServe serves", False), ("as we serve", True)):
        trials = trials_of(sharegpt(), Console(stderr=True), ours=ours)
        able = [family for family in families(offers(whole_prompts=not ours)) if trials.can(family)]
        looked_at = [one for one in placements(able, GPUS) if arguments.all or as_published(one)]
        found = most_goodput(looked_at, trials.capacity, trials.holds, precision=arguments.precision, all_of_them=True)
        written[name] = [
            {"cluster": str(each.deployment), "gpus": each.deployment.gpus, "rate": each.rate} for each in found
        ]
        show(name, found, trials)
    if arguments.json is not None:
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(written), indent=2) + b"\n")


def show(name: str, found: list[Goodput], trials: Trials) -> None:
    """A table, and how far the best of DistServe's space is from what it published."""
    console = Console()
    table = Table(title=f"{name}: requests/s for which {SLO} holds for 90 %")
    for column in ("cluster", "GPUs", "requests/s", "a GPU", "TTFT p90, ms", "TPOT p90, ms"):
        table.add_column(column, justify="left" if column == "cluster" else "right")
    for each in found:
        trial = trials.run(each.deployment, each.rate) if each.rate else None
        late = (f"{trial.ttft_p90_ms:.0f}", f"{trial.tpot_p90_ms or 0:.1f}") if trial else ("", "")
        table.add_row(
            str(each.deployment), str(each.deployment.gpus), f"{each.rate:.2f}", f"{each.for_cost:.2f}", *late
        )
    console.print(table)
    best = next(each for each in found if as_published(each.deployment))
    verdict = "within" if abs(best.for_cost - PUBLISHED) <= TOLERANCE else "not within"
    console.print(
        f"best of one instance a side: {best.for_cost:.2f} requests/s a GPU with {best.deployment}; "
        f"published {PUBLISHED} with 1P (2 x A100), 1D (1 x A100): {verdict} {TOLERANCE}"
    )


if __name__ == "__main__":
    main()
