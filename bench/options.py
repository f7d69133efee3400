"""The flags that all `tandem bench` commands share, and the configuration that they make."""

import dataclasses
import inspect
import json
import re
from collections.abc import Callable
from enum import StrEnum
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, cast, get_type_hints

import typer

from bench.config import Arrival, LoadConfig, WorkloadConfig
from bench.errors import BenchError

_UNITS = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_REQUESTS = 100  # when neither a number nor a duration is given


class EndpointChoice(StrEnum):
    """Which API is measured."""

    completions = "completions"
    chat = "chat"


class ArrivalChoice(StrEnum):
    """When conversations start in an open loop."""

    poisson = "poisson"
    constant = "constant"
    gamma = "gamma"
    ramp = "ramp"
    trace = "trace"


def _flag(*names: str, text: str, group: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=group, **more)


_TARGET, _LOAD, _WORK, _OUT = "Target", "Load", "Workload", "Measures and output"


@dataclasses.dataclass
class Options:
    """One field a flag. Lengths are in tokens; times in seconds, or with a unit: 200ms, 90s, 2m, 1h."""

    url: Annotated[str, _flag(text="Server: any OpenAI-compatible one.", group=_TARGET)] = "http://127.0.0.1:8000"
    model: Annotated[str, _flag(text="Model name.  [default: the first that is served]", group=_TARGET)] = ""
    endpoint: Annotated[
        EndpointChoice | None, _flag(text="API to use.  [default: what suits the workload]", group=_TARGET)
    ] = None
    tokenizer: Annotated[
        str, _flag(text="Folder or tokenizer.json of the model.  [default: looked for by name]", group=_TARGET)
    ] = ""
    api_key: Annotated[str, _flag(text="Key of the server.", group=_TARGET, envvar="TANDEM_API_KEY")] = ""
    rate: Annotated[str, _flag(text="Open loop: conversations started per second.", group=_LOAD)] = ""
    concurrency: Annotated[str, _flag(text="Closed loop: conversations in flight.  [default: 8]", group=_LOAD)] = ""
    arrival: Annotated[
        ArrivalChoice | None, _flag(text="Gaps of the open loop.  [default: trace if timed, else poisson]", group=_LOAD)
    ] = None
    burstiness: Annotated[float, _flag(text="gamma: 1 is Poisson, less is burstier.", group=_LOAD)] = 1.0
    ramp_to: Annotated[float | None, _flag(text="ramp: rate at the end of --duration.", group=_LOAD)] = None
    num_requests: Annotated[
        int | None, _flag(text="Requests in all, warm-up included.  [default: 100]", group=_LOAD, min=1)
    ] = None
    duration: Annotated[str, _flag(text="Time in which requests are sent.", group=_LOAD)] = ""
    warmup: Annotated[int, _flag(text="First requests, sent and not counted.", group=_LOAD, min=0)] = 0
    seed: Annotated[int, _flag(text="Of prompts, lengths, arrivals.", group=_LOAD, min=0)] = 0
    timeout: Annotated[str, _flag(text="Longest time for one answer.", group=_LOAD)] = "10m"
    workers: Annotated[int, _flag(text="Load processes.", group=_LOAD, min=1)] = 1
    workload: Annotated[
        str,
        _flag(
            text="random, shared-prefix, multi-turn, sonnet, sharegpt, mooncake, azure, burstgpt or lengths.",
            group=_WORK,
        ),
    ] = "random"
    data: Annotated[str, _flag(text="File of the workload.  [default: a small sample]", group=_WORK)] = ""
    input_len: Annotated[
        str, _flag(text="Prompt tokens: 256, 100-300, normal:256,64, lognormal:256,128.", group=_WORK)
    ] = "256"
    output_len: Annotated[str, _flag(text="Answer tokens, as --input-len.", group=_WORK)] = "64"
    prefix_len: Annotated[
        int, _flag(text="shared-prefix: common tokens of a group; multi-turn: system prompt.", group=_WORK, min=0)
    ] = 128
    groups: Annotated[int, _flag(text="shared-prefix: groups.", group=_WORK, min=1)] = 8
    turns: Annotated[str, _flag(text="multi-turn: questions of a conversation.", group=_WORK)] = "3"
    think: Annotated[str, _flag(text="multi-turn: seconds before the next question.", group=_WORK)] = "1"
    speed: Annotated[float, _flag(text="Traces: 2 replays twice as fast.", group=_WORK)] = 1.0
    length_scale: Annotated[str, _flag(text="Traces: 1/16 divides all lengths by 16.", group=_WORK)] = "1"
    limit: Annotated[int, _flag(text="Traces: no more requests than this; 0: all.", group=_WORK, min=0)] = 0
    window: Annotated[str, _flag(text="Traces: part of it, like 10m-20m.", group=_WORK)] = ""
    mix: Annotated[str, _flag(text="Unruly clients: slow=5%,disconnect=10%,cancel=5%,bad=5%.", group=_WORK)] = ""
    slow_rate: Annotated[float, _flag(text="Slow clients: bytes per second.", group=_WORK)] = 2000.0
    leave_after: Annotated[str, _flag(text="Disconnecting clients: tokens they wait for.", group=_WORK)] = "1-16"
    temperature: Annotated[float, _flag(text="0 is greedy.", group=_WORK)] = 0.0
    stop_at_eos: Annotated[
        bool, _flag("--stop-at-eos", text="Answers may end early; else ignore_eos is sent.", group=_WORK)
    ] = False
    extra_body: Annotated[str, _flag(text="JSON object added to every request.", group=_WORK)] = ""
    slo: Annotated[str, _flag(text="Goodput for this, like ttft=200ms,tpot=10ms,itl_p99=20ms.", group=_OUT)] = ""
    json: Annotated[Path | None, _flag("--json", text="Write the summary here.", group=_OUT)] = None
    records: Annotated[
        Path | None, _flag(text="Write a record for each request here: .jsonl or .parquet.", group=_OUT)
    ] = None
    report: Annotated[Path | None, _flag(text="Write an HTML report here; it opens offline.", group=_OUT)] = None
    plots: Annotated[Path | None, _flag(text="Write the pictures into this folder, as PNG.", group=_OUT)] = None
    keep_text: Annotated[bool, _flag("--keep-text", text="Keep the answers' text in --records.", group=_OUT)] = False
    max_send_lag: Annotated[str, _flag(text="A run whose own lag p99 is above is not valid.", group=_OUT)] = "10ms"
    quiet: Annotated[bool, _flag("--quiet", text="No live view.", group=_OUT)] = False


def with_options(*chosen: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command a flag for each field of Options, or for those `chosen`; it is called with `options`, one."""
    hints = get_type_hints(Options, include_extras=True)
    fields = [field for field in dataclasses.fields(Options) if not chosen or field.name in chosen]
    flags = [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name]
        )
        for field in fields
    ]

    def decorated(command: Callable[..., None]) -> Callable[..., None]:
        own = [p for p in inspect.signature(command).parameters.values() if p.name != "options"]

        @wraps(command)
        def called(**given: Any) -> None:
            options = Options(**{field.name: given.pop(field.name) for field in fields})
            command(**given, options=options)

        shown = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]
        called.__signature__ = inspect.Signature(shown + flags)  # type: ignore[attr-defined]
        called.__annotations__ = {parameter.name: parameter.annotation for parameter in shown + flags}
        return called

    return decorated


def seconds(text: str, flag: str) -> float:
    """Seconds of "90", "90s", "200ms", "2m" or "1h". Raises BenchError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|m|h|)\s*", text)
    if match is None:
        raise BenchError(f"{flag} {text!r} is no time; write e.g. 90s, 2m or 200ms")
    if not float(match[1]):
        raise BenchError(f"{flag} must be above 0")
    return float(match[1]) * _UNITS[match[2]]


def scale(text: str, flag: str) -> float:
    """A factor above 0, like 0.5 or 1/16. Raises BenchError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:/\s*(\d+(?:\.\d+)?))?\s*", text)
    value = 0.0 if match is None or (match[2] and not float(match[2])) else float(match[1]) / float(match[2] or 1)
    if value <= 0:
        raise BenchError(f"{flag} {text!r} is no factor above 0; write e.g. 0.5 or 1/16")
    return value


def number(text: str, flag: str) -> float:
    """A number above 0. Raises BenchError."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise BenchError(f"{flag} {text!r} is no number above 0")
    return value


def between(value: float, flag: str, least: float, most: float) -> float:
    """The value. Raises BenchError where it is not within these bounds, as no NaN is."""
    if not least <= value <= most:
        raise BenchError(f"{flag} {value:g} must be between {least:g} and {most:g}")
    return value


def load_config(options: Options) -> LoadConfig:
    """The configuration without rate and concurrency: each command reads these in its own way. Raises BenchError."""
    from bench.workloads.registry import kind_of

    kind = kind_of(options.workload)
    if options.speed <= 0:
        raise BenchError(f"--speed {options.speed:g} must be above 0")
    if options.slow_rate <= 0:
        raise BenchError(f"--slow-rate {options.slow_rate:g} must be above 0")
    arrival = options.arrival.value if options.arrival else ""
    if not arrival:
        arrival = "ramp" if options.ramp_to else "trace" if kind.timed and not options.rate else "poisson"
    try:
        extra = json.loads(options.extra_body) if options.extra_body else {}
    except ValueError as error:
        raise BenchError(f"--extra-body is no JSON: {error}") from error
    if not isinstance(extra, dict):
        raise BenchError('--extra-body must be a JSON object like {"top_p": 0.9}')
    if options.num_requests and options.warmup >= options.num_requests:
        raise BenchError(f"--warmup {options.warmup} leaves none of the {options.num_requests} requests to count")
    bounded = options.num_requests or options.duration or (arrival == "trace" and not options.concurrency)
    return LoadConfig(
        url=options.url,
        model=options.model,
        endpoint=options.endpoint.value if options.endpoint else kind.endpoint,
        tokenizer=options.tokenizer,
        workload=WorkloadConfig(
            name=options.workload,
            data=options.data,
            input_len=options.input_len,
            output_len=options.output_len,
            prefix_len=options.prefix_len,
            groups=options.groups,
            turns=options.turns,
            think=options.think,
            speed=options.speed,
            length_scale=scale(options.length_scale, "--length-scale"),
            limit=options.limit,
            window=options.window,
            mix=options.mix,
            slow_rate=options.slow_rate,
            leave_after=options.leave_after,
        ),
        arrival=cast(Arrival, arrival),
        burstiness=options.burstiness,
        ramp_to=options.ramp_to,
        num_requests=options.num_requests if bounded else _REQUESTS,
        duration=seconds(options.duration, "--duration") if options.duration else None,
        warmup=options.warmup,
        seed=options.seed,
        timeout=seconds(options.timeout, "--timeout"),
        ignore_eos=not options.stop_at_eos,
        temperature=options.temperature,
        extra_body=extra,
        workers=options.workers,
        max_send_lag_ms=1e3 * seconds(options.max_send_lag, "--max-send-lag"),
        keep_text=options.keep_text,
    )
