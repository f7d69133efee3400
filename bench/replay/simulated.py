"""One simulated run: what a client would have measured."""

import re
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import msgspec
import numpy as np
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from bench.config import LoadConfig
from bench.errors import BenchError
from bench.measure.experiment import Run
from bench.measure.record import LagSamples, Record, RunResult
from bench.measure.slo import Slo
from bench.measure.summary import summarise
from bench.options import between
from bench.replay.piloted import NO_PLANNER, Piloting, refused, told
from planner.fitting import Profile
from planner.simulator.cluster import ORACLE, Cluster, Flight
from planner.simulator.demand import Trace
from planner.simulator.job import BLOCK_SIZE
from planner.simulator.settings import KvSettings, Settings
from planner.simulator.timing import Timing
from router.policies import POLICIES

HOST_FLAG, DISK_FLAG, REDIS_FLAG = "--kv-memory-host", "--kv-disk", "--kv-redis"
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT]i?B)?", re.IGNORECASE)
_MOST_KV_TOKENS, _MOST_TIER_TOKENS, _MOST_ALL_TOKENS = 1e8, 1e12, 1e10  # of a worker, of a tier, of all workers
_UNITS = {f"{letter}{i}b": (1024 if i else 1000) ** (at + 1) for at, letter in enumerate("kmgt") for i in ("", "i")}


def settings_of(
    workers: int,
    prefill: int,
    routers: int,
    kv_tokens: int | None,
    timing: Path | None,
    seed: int,
    tiers: Mapping[str, str | None] = MappingProxyType({}),
) -> Settings:
    """What flags say; `tiers` by the names of flags. Raises BenchError."""
    if prefill >= workers:
        raise BenchError(f"of {workers} workers {prefill} cannot prefill: at least one must decode")
    settings = Settings(workers=workers, prefill_workers=prefill, routers=routers, seed=seed)
    if timing is not None:
        profile = profile_of(timing)
        settings = replace(settings, timing=profile.timing)
        kv_tokens = kv_tokens if kv_tokens is not None else profile.kv_tokens
    if kv_tokens is not None:
        settings = replace(settings, kv_tokens=require_kv_tokens(kv_tokens))
    tokens = {flag: _tokens(flag, text, settings.timing) for flag, text in tiers.items() if text is not None}
    if not tokens:
        return settings
    if not tokens.get(HOST_FLAG):
        raise BenchError(f"{next(iter(tokens))}: what lies there passes through host memory: give {HOST_FLAG}, too")
    kv = KvSettings(tokens[HOST_FLAG], tokens.get(DISK_FLAG, 0), tokens.get(REDIS_FLAG, 0))
    return replace(settings, kv=kv)


def require_kv_tokens(tokens: int) -> int:
    """Of a flag or a profile, for one worker. Raises BenchError."""
    return int(between(tokens, "the KV cache of a worker, in tokens:", 1, _MOST_KV_TOKENS))


def profile_of(path: Path) -> Profile:
    """Of a file of --timing. Raises BenchError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Profile)
    except (OSError, msgspec.MsgspecError) as error:
        raise BenchError(f"{path} says no timing: {error}") from error


def _tokens(flag: str, text: str, timing: Timing) -> int:
    """Of a tier that is as large as `text` says. Raises BenchError."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise BenchError(f"{flag} {text}: give tokens, as 2000000, or a size, as 64GiB")
    number, unit = float(found[1]), (found[2] or "").lower()
    tokens = number * _UNITS[unit] / timing.token_bytes if unit else number
    if tokens > _MOST_TIER_TOKENS:
        raise BenchError(f"{flag} holds more than {_MOST_TIER_TOKENS:g} tokens: give less")
    if tokens < BLOCK_SIZE:
        raise BenchError(f"{flag} {text} holds {int(tokens)} tokens, less than a block of {BLOCK_SIZE}: give more")
    return int(tokens)


def require_policy(policy: str, tiers: Mapping[str, str | None], piloting: Piloting = NO_PLANNER) -> None:
    """Raises BenchError for one that there is not, and for the oracle where there is what it does not know."""
    if policy == ORACLE and (piloting.mode == "act" or piloting.failures):
        flag = "--planner act" if piloting.mode == "act" else "--failures"
        raise BenchError(
            f"the oracle knows the workers of the beginning alone: leave {flag} out, or take another --policy"
        )
    if policy == ORACLE and (flags := [flag for flag, text in tiers.items() if text is not None]):
        raise BenchError(f"the oracle sees workers' caches alone: leave {flags[0]} out, or take another --policy")
    if policy not in (*POLICIES, ORACLE):
        raise BenchError(f"there is no policy {policy!r}, but {', '.join([*POLICIES, ORACLE])}")


def require_room(trace: Trace, settings: Settings) -> None:
    """Raises BenchError where workers of some role have no room for the longest request, which would wait for ever."""
    whole = max(demand.prompt_tokens + demand.output_tokens for demand in trace.demands)
    # Who only prefills has the prompt alone, until a failure: then what is known of the answer is computed, too.
    prompt = whole if settings.failures else max(demand.prompt_tokens for demand in trace.demands)
    for most, offer in ((whole, settings.offer("decode")), (prompt, settings.offer("prefill"))):
        if most + 2 * offer.max_running >= offer.kv_tokens:
            raise BenchError(
                f"a request has {most} tokens, too many for workers that hold {offer.kv_tokens}: more than "
                f"{most + 2 * offer.max_running} are needed, by --kv-tokens or the file of --timing"
            )


def simulated(
    trace: Trace,
    config: LoadConfig,
    settings: Settings,
    *,
    policy: str,
    slo: Slo | None,
    label: str,
    console: Console | None,
    piloting: Piloting = NO_PLANNER,
) -> Run:
    """One run. `console`: where its progress is shown; None: nowhere. Raises BenchError."""
    settings = piloting.apply_to(settings)
    require_room(trace, settings)
    most = max(settings.workers, settings.slots) * max(settings.offer(role).kv_tokens for role in ("prefill", "decode"))
    if most > _MOST_ALL_TOKENS:
        raise BenchError(f"caches of {most:.3g} tokens in all are more than {_MOST_ALL_TOKENS:g}: lower --kv-tokens")
    cluster = Cluster(trace, trace.own_rate, policy, settings)
    autopilot = piloting.pilot(cluster, slo)
    began = time.time()
    columns = (TextColumn("{task.description}"), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=console is None, transient=True) as progress:
        task = progress.add_task(label, total=len(trace.demands))
        cluster.run(lambda: progress.advance(task))
    config = msgspec.structs.replace(config, url="", model="simulated")
    records = [_record(flight, config) for flight in cluster.flights]
    records += refused(cluster, trace.times.tolist(), config.warmup)
    records.sort(key=lambda record: record.id)
    result = RunResult(
        started_at=began, wall_seconds=cluster.ended_at, records=records, lag=LagSamples(), planned=len(records)
    )
    summary = summarise(config, result, slo)
    if settings.kv.host_tokens:
        summary.tokens.cached_by = _cached_by(cluster.flights[config.warmup :])
    if autopilot is not None:
        summary.planner = told(autopilot, cluster, piloting.mode)
    return Run(label=label, config=config, result=result, summary=summary)


def _cached_by(flights: list[Flight]) -> dict[str, int]:
    """Prompt tokens that nobody computed, by who had them."""
    found = Counter(worker=0, peer=0)
    for flight in flights:
        found["worker"] += flight.cached_tokens - flight.fetched_tokens
        found["peer"] += flight.fetched_tokens - flight.restored_tokens
        found.update(flight.restored_by)
    return dict(found)


def _record(flight: Flight, config: LoadConfig) -> Record:
    """As a client would have seen it; tokens are taken to come evenly."""
    demand, count = flight.demand, flight.demand.output_tokens
    first, last = flight.first_at - flight.came_at, flight.ended_at - flight.came_at
    return Record(
        id=flight.number,
        conversation=flight.number,
        warmup=flight.number < config.warmup,
        scheduled=flight.came_at,
        sent=flight.came_at,
        end=flight.ended_at,
        chunks=np.linspace(first, last, count).tolist(),
        input_tokens=demand.prompt_tokens,
        output_tokens=count,
        prompt_tokens=demand.prompt_tokens,
        completion_tokens=count,
        cached_tokens=flight.cached_tokens,
        status=200,
        finish_reason="length",
    )
