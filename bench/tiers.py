"""Prefixes that come back from where they are kept against computing them: `python -m bench.tiers [--quick] --json F`.

One aggregated worker, with the default model on CPU or any with `--model`, and the KV service with host memory, a
disk and a Redis, all started here. Each prompt is sent when nobody has it (computed); once host memory has it and the
worker has forgotten it (host), and again at once (cached); when the service was killed, so that only the disk has it,
whose file the kernel was told to forget (disk); the same with the file in the kernel's memory (page_cache); and when
the service was killed and the disk's file is gone, so that only Redis has it (redis). All are greedy. What is compared
is the time to the first token over HTTP, medians over rounds. The bytes of a prefix over what a tier takes longer than
the worker's own cache are held against the medium's limit (`tier_limits`). What was not restored was computed, as that
was believed to be quicker, by the router, who did not have it asked for, or by the worker: it counts with what it took.

On CPU the worker forgets by `tandem sleep` and `tandem wake`. With `--device cuda` it has room for less than one
round's prompts (`--kv-memory`), so that each round makes it forget the others: two are needed.

What another worker has (peer) is measured with a cluster of its own, without a KV service: two workers on the device,
to which the router gives requests in turn, so that one computes a prompt and the other is asked for it next. They are
aggregated workers on CPU; such ones on CUDA devices get nothing from each other, so there they are decode workers
without prefill workers, which compute prompts themselves.

With `--background`: what it costs streams that the KV service copies what is computed. A prefill and a decode worker
answer the same load again and again, in turns while the service copies and while it is stopped (SIGSTOP); what is
compared is the time for each token after the first, and what is told is the ratio of each pair of turns.
"""

import argparse
import concurrent.futures
import contextlib
import json
import os
import platform
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import tier_limits
from bench.tier_cluster import Answer, Target, service, start
from services.embedded_state import EmbeddedState

_BLOCK = 16  # tokens
_PINNED_SECONDS = 20.0
_WARM = 10  # prompts at most, before peers are measured
_STREAMS, _PROMPT, _ANSWER = 4, 512, 128  # of a turn with `--background`; tokens
LENGTHS, QUICK_LENGTHS, CUDA_LENGTHS = (1024, 4096, 8000), (1024, 4096), (1024, 4096, 8192, 32768)
KEPT = {"host": "host", "disk": "disk", "page_cache": "disk", "redis": "redis"}  # to the service's name of it
TIERS = (*KEPT, "peer")
LIMITS = {"host": "host_to_device", "disk": "disk", "page_cache": "page_cache", "redis": "redis", "peer": "in_place"}
_PEERS = {"cpu": ("--aggregated", "2"), "cuda": ("--prefill", "0", "--decode", "2")}

Rounds = list[dict[int, dict[str, Answer]]]  # of each the answers by length and way


def chosen(text: str) -> tuple[str, ...]:
    """Those of a list with commas, in the order in which they are measured. Raises ArgumentTypeError."""
    names = text.split(",")
    if unknown := [name for name in names if name not in TIERS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(TIERS)}")
    return tuple(tier for tier in TIERS if tier in names)


def base(tier: str, way: str) -> str:
    """What is compared with a tier: `way` is computed or cached, in the same cluster."""
    return f"peer_{way}" if tier == "peer" else way


def restore(target: Target, prompt: list[int], tier: str) -> Answer:
    """What comes of a prompt that only this tier, or a peer, has."""
    name = "tandem_kv_fetched_blocks_total" if tier == "peer" else "tandem_tier_hit_blocks_total"
    labels = {} if tier == "peer" else {"tier": KEPT[tier]}
    before, asked = target.metric(name, **labels), target.metric("tandem_router_fetches_total")
    answer = target.complete(prompt)
    hits = target.metric(name, **labels) - before
    if answer.cached and not hits:
        raise RuntimeError(f"{answer.cached} tokens came, but not from {tier}")
    answer.from_tier = int(hits) * _BLOCK if answer.cached else 0
    answer.asked = target.metric("tandem_router_fetches_total") > asked
    return answer


def is_exact(answers: Sequence[dict[str, Answer]], tiers: Sequence[str], like: str) -> bool:
    """Whether each tier has restored a prompt, and all that was restored gave the answer of `like`, as for `base`."""
    restored = [(ways[base(tier, like)], ways[tier]) for ways in answers for tier in tiers if ways[tier].from_tier]
    by_each = all(any(ways[tier].from_tier for ways in answers) for tier in tiers)
    return bool(tiers) and by_each and all(wanted.equals(answer) for wanted, answer in restored)


def summary(rounds: Rounds, tiers: Sequence[str], kv_bytes: float, limits: dict[str, float]) -> dict[str, Any]:
    """Of all rounds. `kv_bytes`: of one token. `limits`: of media, in bytes per second."""
    lengths: dict[str, Any] = {}
    for length in rounds[0]:
        seconds = {way: statistics.median(answers[length][way].ttft for answers in rounds) for way in rounds[0][length]}
        row: dict[str, Any] = {f"{way}_ttft_s": value for way, value in seconds.items()}
        for tier in tiers:
            row[f"{tier}_speedup"] = seconds[base(tier, "computed")] / seconds[tier]
            row[f"{tier}_asked"] = statistics.mean(answers[length][tier].asked for answers in rounds)
            row[f"{tier}_restored"] = statistics.mean(answers[length][tier].from_tier / length for answers in rounds)
            if row[f"{tier}_restored"] > 0.5:
                longer = max(1e-9, seconds[tier] - seconds[base(tier, "cached")])
                row[f"{tier}_bytes_per_s"] = rate = length * kv_bytes / longer
                if (limit := limits.get(LIMITS[tier])) is not None:
                    row[f"{tier}_of_limit"] = rate / limit
        lengths[str(length)] = row
    longest = lengths["8192" if "8192" in lengths else max(lengths, key=int)]
    speedups = {f"{tier}_speedup": longest[f"{tier}_speedup"] for tier in tiers}
    return speedups | {"lengths": lengths, "limits_bytes_per_s": limits}


def turn(target: Target, rng: random.Random) -> list[float]:
    """Seconds for each token after the first, of streams that begin at once with prompts that nobody has seen."""
    prompts = [[rng.randrange(3, 49_000) for _ in range(_PROMPT)] for _ in range(_STREAMS)]
    with concurrent.futures.ThreadPoolExecutor(_STREAMS) as pool:
        return [answer.tpot for answer in pool.map(target.complete, prompts, [_ANSWER] * _STREAMS)]


def keep_apart(target: Target) -> None:
    """Gives the decode worker the last of this process's cores, and all others what is left."""
    *others, last = sorted(os.sched_getaffinity(0))
    for name, pid in target.pids.items():
        for thread in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setaffinity(int(thread.name), [last] if name == "decode-0" else others)
    os.sched_setaffinity(0, others)


def background(target: Target, rounds: int, rng: random.Random) -> dict[str, Any]:
    """What copying costs streams: ratios of turns with it to turns without."""
    turn(target, rng)
    pairs, copied = [], 0.0
    for number in range(rounds):
        seconds = {}
        for copies in (True, False) if number % 2 else (False, True):
            target.copies(copies)
            before = target.metric("tandem_tier_stored_blocks_total", tier="host") if copies else 0.0
            seconds[copies] = statistics.median(turn(target, rng))
            copied += target.metric("tandem_tier_stored_blocks_total", tier="host") - before if copies else 0.0
        pairs.append(seconds)
        print(f"round {number}: {1e3 * seconds[True]:.2f} ms a token, {1e3 * seconds[False]:.2f} without", flush=True)
    ratios = sorted(seconds[True] / seconds[False] for seconds in pairs)
    low, median, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else 3 * ratios
    return {
        "background_ratio": median,
        "background_ratio_quartiles": [low, high],
        "background_ratios": ratios,
        "tpot_copying_s": statistics.median(seconds[True] for seconds in pairs),
        "tpot_stopped_s": statistics.median(seconds[False] for seconds in pairs),
        "copied_blocks_a_turn": copied / rounds,
        "streams": _STREAMS,
        "prompt_tokens": _PROMPT,
        "answer_tokens": _ANSWER,
    }


def tell(number: int, length: int, **answers: Answer) -> None:
    """Prints a line."""
    words = [
        f"{way} {1e3 * each.ttft:.1f} ms" + f" ({each.from_tier} restored)" * each.asked
        for way, each in answers.items()
    ]
    print(f"round {number}: {length} tokens: {', '.join(words)}", flush=True)


def copying(arguments: argparse.Namespace, rounds: int, rng: random.Random) -> dict[str, Any]:
    """`background` with a cluster of its own."""
    with tempfile.TemporaryDirectory(prefix="tandem-tiers-") as name:
        folder = Path(name)
        flags = ["--prefill", "1", "--decode", "1", *service(folder, arguments)]
        with contextlib.closing(start(folder, arguments, *flags)) as target:
            if arguments.apart:
                keep_apart(target)
            return {"model": target.model} | background(target, rounds, rng)


def kept(
    target: Target,
    prompts: list[dict[int, list[int]]],
    rounds: Rounds,
    warm: list[int],
    tiers: Sequence[str],
    folder: Path,
) -> float:
    """Time to the first token, computed and restored from tiers of the KV service. The bytes of a token's KV.

    `warm`: a prompt that goes before what is measured. `folder` is the disk's.
    """
    target.complete(warm)
    blocks = len(warm) // _BLOCK
    for number, of_round in enumerate(prompts):
        for length, prompt in of_round.items():
            ways = rounds[number][length]
            ways["computed"], ways["cached"] = target.complete(prompt), target.complete(prompt)
            blocks += length // _BLOCK
            started = time.perf_counter()
            target.wait("tandem_tier_blocks", blocks, tier="host")  # before the worker has no room for it any more
            tell(number, length, computed=ways["computed"], cached=ways["cached"])
            print(f"    kept {time.perf_counter() - started:.1f} s later", flush=True)
    kv_bytes = target.metric("tandem_tier_bytes", tier="host") / target.metric("tandem_tier_blocks", tier="host")
    for name in {KEPT[tier] for tier in tiers}:
        target.wait("tandem_tier_blocks", blocks, tier=name)
    for tier in tiers:
        for file in folder.glob("*.blocks"):
            if tier == "disk":
                tier_limits.forget(file)
            elif tier == "redis":
                file.unlink()
        if tier != "host":
            target.kill_service(blocks, KEPT[tier])
        if not target.on_device:
            target.forget()
        target.complete(warm)  # so the two are linked, and shared memory is being pinned
        if target.on_device:
            time.sleep(_PINNED_SECONDS)  # until it is
        for number, of_round in enumerate(prompts):
            for length, prompt in of_round.items():
                rounds[number][length][tier] = answer = restore(target, prompt, tier)
                tell(number, length, **{tier: answer})
    return kv_bytes / _BLOCK


def in_turns(target: Target, prompt: list[int]) -> dict[str, Answer]:
    """What one of two workers computes, the other is asked for next, and the first has cached: so they change parts."""
    computed = target.complete(prompt)
    target.settle()
    answer = restore(target, prompt, "peer")
    target.settle()
    return {"peer_computed": computed, "peer": answer, "peer_cached": target.complete(prompt)}


def from_peer(
    target: Target, prompts: list[dict[int, list[int]]], rounds: Rounds, warm: list[int]
) -> tuple[float, dict[str, float]]:
    """Time to the first token where the other of two workers has computed the prompt.

    `warm`: a prompt that goes before, until each of the two has got one, so that they are linked and have measured it.
    The bytes of a token's KV, 0 if none came, and those that came by connector.
    """
    came = 0
    for number in range(_WARM):
        came = came + 1 if in_turns(target, warm[number:] + warm[:number])["peer"].from_tier else 0
        if came == 2:
            break
    for number, of_round in enumerate(prompts):
        for length, prompt in of_round.items():
            rounds[number][length] |= (ways := in_turns(target, prompt))
            tell(number, length, **ways)
    moved = target.by_label("tandem_kv_transfer_bytes_total", "connector")
    blocks = target.metric("tandem_kv_fetched_blocks_total")
    return sum(moved.values()) / blocks / _BLOCK if blocks else 0.0, moved


def restored(arguments: argparse.Namespace, lengths: Sequence[int], count: int, rng: random.Random) -> dict[str, Any]:
    """Time to the first token, computed and restored, by two clusters in turn."""
    tiers = arguments.tiers
    of_service = [tier for tier in tiers if tier in KEPT]
    warm = [rng.randrange(3, 49_000) for _ in range(512)]
    prompts = [{length: [rng.randrange(3, 49_000) for _ in range(length)] for length in lengths} for _ in range(count)]
    rounds: Rounds = [defaultdict(dict) for _ in range(count)]
    found: dict[str, Any] = {}
    limits = tier_limits.to_device() if arguments.device == "cuda" else {}
    kv_bytes = 0.0
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tandem-tiers-")))
        if of_service:
            flags = ["--aggregated", "1", *service(folder, arguments, "disk" in map(KEPT.get, of_service))]
            if "redis" in of_service:
                server = stack.enter_context(contextlib.closing(EmbeddedState(memory="0")))
                flags += ["--kv-redis", server.url]
            with contextlib.closing(start(folder, arguments, *flags)) as target:
                kv_bytes = kept(target, prompts, rounds, warm, of_service, folder)
            if "redis" in of_service:
                limits |= tier_limits.of_redis(server.url, int(kv_bytes * _BLOCK))
            if "disk" in map(KEPT.get, of_service):
                limits |= tier_limits.of_disk(folder)
        if "peer" in tiers:
            flags = [*_PEERS[arguments.device], "--policy", "round_robin"]
            with contextlib.closing(start(folder, arguments, *flags)) as target:
                before = [rng.randrange(3, 49_000) for _ in range(min(lengths))]
                moved, found["peer_bytes_by_connector"] = from_peer(target, prompts, rounds, before)
            kv_bytes = kv_bytes or moved
            limits |= tier_limits.in_place(arguments.device)
    # On a device other steps give other last bits: there an answer is compared with that of the worker's own cache.
    like = "computed" if arguments.device == "cpu" else "cached"
    exact = is_exact([ways for each in rounds for ways in each.values()], tiers, like)
    found |= {"model": target.model, "kv_bytes_per_token": kv_bytes, "token_exact": exact}
    return found | summary(rounds, tiers, kv_bytes, limits)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round (with --background two), up to 4,096 tokens")
    parser.add_argument("--json", type=Path, help="where to write the report")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="compute threads of the worker")
    parser.add_argument("--rounds", type=int, help="default 3, with --background 10")
    parser.add_argument(
        "--tiers",
        type=chosen,
        default=TIERS,
        metavar="TIER,...",
        help=f"where prefixes are to come back from; default: {','.join(TIERS)}",
    )
    parser.add_argument("--background", action="store_true", help="what it costs streams that blocks are copied")
    parser.add_argument(
        "--apart",
        action="store_true",
        help="with --background: the decode worker has a core that nobody else computes on",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the workers compute")
    parser.add_argument("--model", help="as for tandem up; default: its own")
    parser.add_argument("--dummy-seed", type=int, help="random weights, for a model's folder that has none")
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--kv-memory", help="of a worker, as 5GiB; with --device cuda less than a round of prompts")
    parser.add_argument("--kv-memory-host", default="2GiB", help="of the KV service: more than all rounds' prompts")
    parser.add_argument("--kv-disk", default="4GiB", help="the same")
    parser.add_argument("--log", type=Path, help="where to leave the cluster's log")
    parser.add_argument("--lengths", type=int, nargs="+", help="of prefixes, in tokens")
    arguments = parser.parse_args()
    usual = (2 if arguments.quick else 10) if arguments.background else 1 if arguments.quick else 3
    least = 2 if arguments.device == "cuda" and not arguments.background else 1
    count, rng = arguments.rounds or max(least, usual), random.Random(1)
    if count < least:
        parser.error("--device cuda needs --rounds 2 or more: one round makes the worker forget the other")
    lengths = QUICK_LENGTHS if arguments.quick else LENGTHS if arguments.device == "cpu" else CUDA_LENGTHS
    if arguments.background:
        found = copying(arguments, count, rng)
    else:
        found = restored(arguments, arguments.lengths or lengths, count, rng)
    made = {"device": arguments.device, "threads": arguments.threads, "rounds": count}
    report = made | {"cpu": platform.processor()} | found
    print(json.dumps(report, indent=2))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
