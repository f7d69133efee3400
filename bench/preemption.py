"""Preempted requests, whose KV comes back or is computed again: `python -m bench.preemption --json F`.

A prefill and a decode worker with the default model on CPU, and the KV service, started by `tandem up`. More streams
begin at once than the decode worker has blocks for, so that some are preempted and go on later. The same prompts are
answered in turns while the KV service runs and while it is stopped (SIGSTOP), which makes workers compute again; turns
share no cache. What is compared, by ratios of each pair of turns: the seconds until all answers are there, and the
longest time for which a stream stood still. The answers must be the same.
"""

import argparse
import concurrent.futures
import json
import os
import platform
import random
import statistics
import tempfile
import time
from itertools import repeat
from pathlib import Path
from typing import Any

from bench.tier_cluster import Answer, Target, service, start

_STREAMS = 4
_PROMPT, _ANSWER = 512, 96  # tokens
_BLOCKS = 142  # of a worker, of 16 tokens: ten too few for all answers
_OUTCOMES = ("swapped", "recomputed")


def turn(target: Target, prompts: list[list[int]], salt: str) -> tuple[float, list[Answer], dict[str, float]]:
    """Seconds until all streams have ended, their answers, and what came of preempted ones."""
    before = {outcome: target.metric("tandem_preemptions_total", outcome=outcome) for outcome in _OUTCOMES}
    began = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(_STREAMS) as pool:
        answers = list(pool.map(target.complete, prompts, repeat(_ANSWER), repeat(salt)))
    seconds = time.perf_counter() - began
    time.sleep(1.0)  # metrics
    after = {outcome: target.metric("tandem_preemptions_total", outcome=outcome) for outcome in _OUTCOMES}
    return seconds, answers, {outcome: after[outcome] - before[outcome] for outcome in _OUTCOMES}


def measured(target: Target, rounds: int, rng: random.Random) -> dict[str, Any]:
    """Pairs of turns."""
    pairs, outcomes, exact = [], {outcome: 0.0 for outcome in _OUTCOMES}, True
    target.complete([rng.randrange(3, 49_000) for _ in range(_PROMPT)])
    for number in range(rounds):
        prompts = [[rng.randrange(3, 49_000) for _ in range(_PROMPT)] for _ in range(_STREAMS)]
        found: dict[bool, tuple[float, float]] = {}
        answers: dict[bool, list[Answer]] = {}
        for swaps in (True, False) if number % 2 else (False, True):
            target.copies(swaps)
            seconds, answers[swaps], came = turn(target, prompts, f"{number} {swaps}")
            found[swaps] = seconds, max(answer.gap for answer in answers[swaps])
            outcomes = {outcome: outcomes[outcome] + came[outcome] for outcome in _OUTCOMES}
            told = f"{came['swapped']:.0f} swapped, {came['recomputed']:.0f} recomputed"
            print(f"round {number}: {seconds:.1f} s, longest gap {found[swaps][1]:.2f} s, {told}", flush=True)
        exact &= all(one.equals(two) for one, two in zip(answers[True], answers[False], strict=True))
        pairs.append(found)
    target.copies(True)
    return {
        "seconds_ratio": statistics.median(found[True][0] / found[False][0] for found in pairs),
        "gap_ratio": statistics.median(found[True][1] / found[False][1] for found in pairs),
        "seconds": [[found[True][0], found[False][0]] for found in pairs],
        "gaps": [[found[True][1], found[False][1]] for found in pairs],
        "token_exact": exact,
        **outcomes,
    }


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write the report")
    parser.add_argument("--threads", type=int, default=1, help="compute threads of each worker")
    parser.add_argument("--rounds", type=int, default=6, help="pairs of turns")
    usual = {"device": "cpu", "kv_memory_host": "2GiB", "kv_disk": "4GiB", "log": None}
    parser.set_defaults(**usual, model=None, dummy_seed=None, max_model_len=None, kv_memory=None)
    arguments = parser.parse_args()
    workers = ("--prefill", "1", "--decode", "1", "--kv-blocks", str(_BLOCKS))
    with tempfile.TemporaryDirectory(prefix="tandem-preemption-") as folder:
        target = start(Path(folder), arguments, *workers, *service(Path(folder), arguments))
        try:
            found = measured(target, arguments.rounds, random.Random(1))
        finally:
            target.close()
    sizes = {"streams": _STREAMS, "prompt_tokens": _PROMPT, "answer_tokens": _ANSWER, "kv_blocks": _BLOCKS}
    shape = {"model": target.model, "threads": arguments.threads, "rounds": arguments.rounds}
    report = shape | sizes | {"cpu": platform.processor(), "load": os.getloadavg()} | found
    print(json.dumps(report, indent=2))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
