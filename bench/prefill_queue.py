"""Order of prompts on a prefill worker: `python -m bench.prefill_queue`.

The engine's own scheduler runs against a clock of its own: a step takes `--step-ms` and `--token-us` for each of its
tokens. Prompts arrive at random (exponential gaps), 70 % of 64 to 2,048 tokens and 30 % of 8,192 to 32,768. For each
load (of what the worker can compute) and each `max_overtaking` (0: order of arrival) the same prompts run. Printed are
seconds to the first token, and by how many tokens of later prompts one was overtaken at most, in multiples of its own
and after what one step may add.
"""

import argparse
import random

import numpy as np

from engine.block_pool import BlockPool
from engine.hashing import root_hash
from engine.request import Request, SamplingParams
from engine.scheduler import Scheduler
from engine.sequence import Sequence, State

BLOCK_SIZE = 256  # tokens: coarse, since only the order matters here
SHORT, LONG = (64, 2048), (8192, 32768)  # tokens
SHORT_SHARE = 0.7


def draw_prompts(count: int, tokens_per_second: float, seed: int) -> list[tuple[float, int]]:
    """(seconds of the arrival, tokens) of each prompt, for a load of that many tokens a second."""
    rng = random.Random(seed)
    mean = SHORT_SHARE * sum(SHORT) / 2 + (1 - SHORT_SHARE) * sum(LONG) / 2
    now, prompts = 0.0, []
    for _ in range(count):
        now += rng.expovariate(tokens_per_second / mean)
        prompts.append((now, rng.randint(*(SHORT if rng.random() < SHORT_SHARE else LONG))))
    return prompts


def simulate(
    prompts: list[tuple[float, int]], max_overtaking: int, budget: int, seconds: float, per_token: float, kv_tokens: int
) -> tuple[np.ndarray, np.ndarray]:
    """(seconds to the first token, overtaken by so many multiples of its own tokens beyond one step) of each prompt."""
    pool = BlockPool(kv_tokens // BLOCK_SIZE)
    scheduler = Scheduler(
        pool,
        block_size=BLOCK_SIZE,
        max_batched_tokens=budget,
        max_mixed_prefill_tokens=budget,
        max_running=64,
        max_model_len=1 << 20,
        max_overtaking=max_overtaking,
    )
    root = root_hash(fingerprint="simulated", layout="simulated", block_size=BLOCK_SIZE)
    first_tokens, overtaken = np.zeros(len(prompts)), np.zeros(len(prompts))
    arrived, now = 0, 0.0
    while arrived < len(prompts) or scheduler.sequences:
        if not scheduler.sequences:
            now = max(now, prompts[arrived][0])
        while arrived < len(prompts) and prompts[arrived][0] <= now:
            request = Request(
                request_id=str(arrived),
                prompt_token_ids=[arrived] * prompts[arrived][1],  # nothing shared
                sampling=SamplingParams(max_tokens=1),
            )
            scheduler.add(Sequence(request, arrived, BLOCK_SIZE, root))
            arrived += 1
        step = scheduler.schedule(now)
        now += seconds + per_token * step.num_tokens
        for sequence in scheduler.complete(step, {e.sequence.request_id: 0 for e in step.entries if e.samples}):
            assert sequence.state is State.FINISHED
            first_tokens[sequence.arrival] = now - prompts[sequence.arrival][0]
            beyond_a_step = max(0, sequence.overtaken_tokens - budget)
            overtaken[sequence.arrival] = beyond_a_step / sequence.num_prompt_tokens
    return first_tokens, overtaken


def main() -> None:
    """Command line; prints a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loads", type=float, nargs="+", default=[0.5, 0.7, 0.85, 0.95])
    parser.add_argument("--max-overtaking", type=int, nargs="+", default=[0, 1, 2, 4, 8, 1000])
    parser.add_argument("--prompts", type=int, default=1500, help="of each seed")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--max-batched-tokens", type=int, default=2048)
    parser.add_argument("--step-ms", type=float, default=6.0)
    parser.add_argument("--token-us", type=float, default=27.6)
    parser.add_argument("--kv-tokens", type=int, default=360_000)
    arguments = parser.parse_args()
    budget, seconds, per_token = arguments.max_batched_tokens, arguments.step_ms / 1e3, arguments.token_us / 1e6
    capacity = budget / (seconds + per_token * budget)
    print(f"{capacity:.0f} tokens a second at most; seconds to the first token\n")
    print("| load | max_overtaking | mean | p50 | p99 | longest | short: p50 / p99 | long: p50 / p99 | overtaken |")
    print("|---|---|---|---|---|---|---|---|---|")
    for load in arguments.loads:
        drawn = [draw_prompts(arguments.prompts, load * capacity, seed) for seed in arguments.seeds]
        short = np.concatenate([[tokens <= SHORT[1] for _, tokens in prompts] for prompts in drawn])
        for times in arguments.max_overtaking:
            runs = [simulate(prompts, times, budget, seconds, per_token, arguments.kv_tokens) for prompts in drawn]
            first = np.concatenate([run[0] for run in runs])
            most = max(run[1].max() for run in runs)
            parts = " | ".join("{:.2f} / {:.2f}".format(*np.percentile(first[m], [50, 99])) for m in (short, ~short))
            middle = " | ".join(f"{x:.2f}" for x in (first.mean(), *np.percentile(first, [50, 99]), first.max()))
            print(f"| {load:g} | {times} | {middle} | {parts} | {most:.1f} |", flush=True)


if __name__ == "__main__":
    main()
