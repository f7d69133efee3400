"""From the records of a run to its summary."""

from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

from bench.config import LoadConfig
from bench.measure.record import INTERRUPTED, Record, RunResult
from bench.measure.slo import Slo
from bench.measure.statistics import distribution, wilson
from bench.measure.summary_format import (
    Check,
    Clients,
    Distribution,
    Goodput,
    Objective,
    Summary,
    Throughput,
    Tokens,
)


def counted(records: Iterable[Record]) -> list[Record]:
    """Those that the numbers are about: no warm-up and no unruly client."""
    return [record for record in records if not record.warmup and record.client == "normal"]


def completed(records: Iterable[Record]) -> list[Record]:
    """Those of the counted ones whose answer came whole."""
    return [record for record in counted(records) if not record.error]


def latencies(records: Sequence[Record]) -> dict[str, list[list[float]]]:
    """Seconds of each request under ttft, tpot, itl and e2e: one value, for itl the gaps, or none if it has none."""
    return {
        "ttft": [record.chunks[:1] for record in records],
        "tpot": [[record.tpot] if record.tpot >= 0 else [] for record in records],
        "itl": [record.gaps for record in records],
        "e2e": [[record.e2e] if record.end >= 0 else [] for record in records],
    }


def summarise(config: LoadConfig, result: RunResult, slo: Slo | None = None, check: Check | None = None) -> Summary:
    """The summary of a run. Its numbers are defined in docs/bench.md."""
    ours = counted(result.records)
    whole = completed(ours)
    failed = [record for record in ours if record.error and record.error != INTERRUPTED]
    seconds = measured_seconds(ours)
    tokens = _tokens(config, whole)
    found = {name: distribution(values, config.seed) for name, values in latencies(whole).items()}
    waits = [[record.retry_after] for record in failed if record.retry_after >= 0]
    send_lag, loop_lag = (_lag(values) for values in (result.lag.send, result.lag.loop))
    reasons = _doubts(config, send_lag, loop_lag, bool(whole))
    return Summary(
        config=config,
        started_at=datetime.fromtimestamp(result.started_at, UTC).isoformat(timespec="milliseconds"),
        measured_s=seconds,
        valid=not reasons,
        invalid_because=reasons,
        interrupted=result.interrupted,
        requests=len(ours),
        completed=len(whole),
        unfinished=len(ours) - len(whole) - len(failed),
        errors=_by_kind(failed),
        error_examples={record.error: record.detail for record in reversed(failed)},  # the first of each kind stays
        retry_after_s=distribution(waits, config.seed, scale=1.0) if waits else None,
        ttft_ms=found["ttft"],
        tpot_ms=found["tpot"],
        itl_ms=found["itl"],
        e2e_ms=found["e2e"],
        throughput=_throughput(len(whole), tokens, seconds),
        tokens=tokens,
        goodput=_goodput(slo, whole + failed, seconds) if slo is not None else None,
        clients=_clients(result.records),
        check=check,
        send_lag_ms=send_lag,
        loop_lag_ms=loop_lag,
    )


def measured_seconds(records: Sequence[Record]) -> float:
    """From the first send to the last end, of those that the end of the run did not cut off; 0 without any."""
    records = [record for record in records if record.error != INTERRUPTED]
    if not records:
        return 0.0
    return max(record.end for record in records) - min(record.sent for record in records)


def _by_kind(records: Iterable[Record]) -> dict[str, int]:
    return dict(Counter(record.error for record in records).most_common())


def _lag(milliseconds: Sequence[float]) -> Distribution:
    # No intervals: lags of neighbours depend on each other, so a bootstrap would claim too much.
    return distribution([[value] for value in milliseconds], resamples=0, scale=1.0)


def _doubts(config: LoadConfig, send_lag: Distribution, loop_lag: Distribution, any_completed: bool) -> list[str]:
    """Why the numbers do not tell of the server."""
    limit = config.max_send_lag_ms
    mend = "lower the load, use more --workers, or free the machine"
    doubts = [
        f"the load generator itself was late: {name} p99 is {lag.p99:.3g} ms, above {limit:g} ms; {mend}"
        for name, lag in (("send lag", send_lag), ("loop lag", loop_lag))
        if lag.p99 is not None and lag.p99 > limit
    ]
    return doubts if any_completed else ["no request was completed", *doubts]


def _tokens(config: LoadConfig, whole: Sequence[Record]) -> Tokens:
    cached = [record.cached_tokens for record in whole if record.cached_tokens >= 0]
    shared = [record.shared_tokens for record in whole if record.shared_tokens >= 0]
    return Tokens(
        input=sum(record.prompt_tokens if record.prompt_tokens >= 0 else record.input_tokens for record in whole),
        output=sum(record.tokens for record in whole),
        cached=sum(cached) if cached else None,
        predicted_cached=sum(shared) if shared else None,
        wrong_input_length=sum(
            record.prompt_tokens >= 0 and record.input_tokens > 0 and record.prompt_tokens != record.input_tokens
            for record in whole
        ),
        wrong_output_length=sum(_wrong_output(config, record) for record in whole),
    )


def _wrong_output(config: LoadConfig, record: Record) -> bool:
    if record.completion_tokens < 0 or not record.output_tokens:
        return False
    early = record.completion_tokens < record.output_tokens
    return record.completion_tokens > record.output_tokens or (early and config.ignore_eos)


def _throughput(requests: int, tokens: Tokens, seconds: float) -> Throughput:
    if not seconds:
        return Throughput()
    return Throughput(
        requests_per_s=requests / seconds,
        output_tokens_per_s=tokens.output / seconds,
        input_tokens_per_s=tokens.input / seconds,
        total_tokens_per_s=(tokens.input + tokens.output) / seconds,
    )


def _goodput(slo: Slo, records: Sequence[Record], seconds: float) -> Goodput:
    met = [slo.met(record) for record in records]
    good = sum(all(of_request.values()) for of_request in met)

    def share(number: int) -> float:
        return number / len(records) if records else 0.0

    return Goodput(
        slo=slo.text,
        requests_per_s=good / seconds if seconds else 0.0,
        attainment=share(good),
        ci95=wilson(good, len(records)),
        objectives=[
            Objective(
                name=limit.name,
                limit_ms=limit.ms,
                attainment=share(sum(of_request[limit.name] for of_request in met)),
            )
            for limit in slo.limits
        ],
    )


def _clients(records: Iterable[Record]) -> dict[str, Clients]:
    unruly: dict[str, list[Record]] = {}
    for record in records:
        if record.client != "normal" and not record.warmup:
            unruly.setdefault(record.client, []).append(record)
    return {
        client: Clients(
            sent=len(theirs),
            as_expected=sum(not record.error for record in theirs),
            unexpected=_by_kind(record for record in theirs if record.error not in ("", INTERRUPTED)),
        )
        for client, theirs in sorted(unruly.items())
    }
