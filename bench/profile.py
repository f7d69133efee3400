"""`tandem profile`: what steps take on a cluster that runs, for `tandem simulate` and `tandem plan`."""

import asyncio
import math
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bench.errors import BenchError
from bench.options import Options, load_config, with_options

if TYPE_CHECKING:
    from bench.measure.record import Record
    from bench.runner import Runner
    from planner.fitting import AnswerTime, Profile, PromptTime

_PROMPTS_EACH = 5  # of a length, behind one that is not counted
_WAITING, _BACK_TO_BACK = 4, 16  # prompts of a length that are there at once, and in all: there is always a next one
_LONGEST = 2  # lengths of which this is measured: of short ones gateways, too, are kept busy
_BUSY = "tandem_gateway_loop_seconds"  # of a gateway's metrics
_ANSWER_TOKENS = 48  # at least, while all are decoded together


@with_options("url", "model", "tokenizer", "api_key", "seed", "json", "quiet")
def profile(
    options: Options,
    prompts: Annotated[str, typer.Option(help="Lengths of prompts, tokens.")] = "64,256,512,1024,1800",
    batches: Annotated[str, typer.Option(help="Numbers of answers that are decoded together.")] = "1,2,4,8",
    contexts: Annotated[str, typer.Option(help="Lengths of the prompts before these answers.")] = "64,1024",
    admin: Annotated[
        str,
        typer.Option(help="Admin port of the cluster: for what gateways take, which card it is, and its room."),
    ] = "",
    admin_key: Annotated[str, typer.Option(envvar="TANDEM_ADMIN_KEY", help="Key of the admin port.")] = "",
) -> None:
    """Measures what prompts and answers take, and fits the step times that `--timing` of a simulation reads.

    The cluster should have one worker that prefills and one that decodes, or one that does both, and nobody else should
    use it. Takes a minute or more; a third of it is prompts that come alone. Then the longest come several at once:
    what a prompt takes more alone is its way to the worker, in which that could compute another one. With --admin the
    profile also has what requests and tokens take the gateway, behind which others wait.

    Example:

      tandem profile --json here.json && tandem simulate --timing here.json --workers 4 --rate 2

      tandem profile --admin http://127.0.0.1:8090 --json here.json
    """
    import msgspec
    from rich.console import Console

    from bench.output import require_writable
    from bench.runner import Runner

    errors = Console(stderr=True)
    try:
        require_writable(options)
        lengths, sizes, before = (
            _numbers(text, flag)
            for text, flag in ((prompts, "--prompts"), (batches, "--batches"), (contexts, "--contexts"))
        )
        if len(lengths) < 3 or len(sizes) * len(before) < 3:
            raise BenchError("too little to fit: give three --prompts, and three pairs of --batches and --contexts")
        runner = Runner(options.api_key, None, None if options.quiet else errors)
        status = members_at(admin, admin_key) if admin else None  # what is wrong with it is told before minutes go by
        busy = (lambda: gateway_seconds(admin, admin_key)) if admin else lambda: None
        found = asyncio.run(_measure(runner, options, lengths, sizes, before, busy))
        if status is not None:
            card = card_of(status, found.model)
            timing = msgspec.structs.replace(found.timing, reserve_waits=not card["gpu"])
            found = msgspec.structs.replace(found, timing=timing, **card)
    except (BenchError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    _show(found, Console())
    if options.json is not None:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n")


async def _measure(
    runner: "Runner",
    options: Options,
    lengths: list[int],
    sizes: list[int],
    contexts: list[int],
    busy: Callable[[], float | None],
) -> "Profile":
    """`busy`: seconds that gateways were so far; None: nobody tells.

    Raises BenchError where a request fails, ValueError where too little was measured.
    """
    import msgspec
    import numpy as np

    from bench.config import LoadConfig
    from planner.fitting import AnswerTime, GatewayTime, PromptTime, fit_timing
    from planner.simulator.timing import Timing

    model = ""
    gateway: list[GatewayTime] = []

    async def run(label: str, clients: int, requests: int, input_len: int, output_len: int, seed: int) -> Any:
        nonlocal model
        config: LoadConfig = load_config(options)
        workload = msgspec.structs.replace(config.workload, input_len=str(input_len), output_len=str(output_len))
        began, before = time.monotonic(), busy()
        done = await runner.probe(
            msgspec.structs.replace(
                config,
                workload=workload,
                concurrency=clients,
                num_requests=requests + clients,
                warmup=clients,
                seed=seed,
            ),
            label,
        )
        if done.summary.completed < requests:
            raise BenchError(
                f"{label}: {done.summary.errors or 'not all were answered'}: {done.summary.error_examples}"
            )
        model, records = done.config.model, done.result.records
        if before is not None and (after := busy()) is not None:
            tokens = sum(each.prompt_tokens for each in records), sum(each.tokens for each in records)
            gateway.append(GatewayTime(len(records), *tokens, time.monotonic() - began, after - before))
        return done

    alone: list[PromptTime] = []
    together: list[AnswerTime] = []
    for number, length in enumerate(lengths):
        done = await run(f"prompts of {length}", 1, _PROMPTS_EACH, length, 1, options.seed + number)
        alone.append(PromptTime(length, done.summary.ttft_ms.p50 / 1e3))
    number = len(lengths)
    queued: list[PromptTime] = []
    for one in sorted(alone, key=lambda each: each.tokens)[-_LONGEST:]:
        number += 1
        label = f"prompts of {one.tokens}, back to back"
        done = await run(label, _WAITING, _BACK_TO_BACK, one.tokens, 1, options.seed + number)
        queued.append(back_to_back(done.result.records, one))
    for context in contexts:
        prompt = float(np.interp(context, [one.tokens for one in alone], [one.seconds for one in alone]))
        step = 0.0
        for size in sizes:
            number += 1
            label = f"{size} answers after prompts of {context}"
            # The first answer goes on until the last prompt is computed, and then some more.
            tokens = _ANSWER_TOKENS + (math.ceil(size * prompt / step) if step else 0)
            done = await run(label, size, 2 * size, context, tokens, options.seed + number)
            together.append(answers_together(done.result.records, size))
            step = step or together[-1].seconds
    return fit_timing(alone, together, Timing(), model, back_to_back=queued, gateway=gateway)


def members_at(admin: str, key: str) -> Any:
    """What the admin port says of the cluster's members. Raises BenchError."""
    import json

    try:
        return json.loads(_read(admin, "/admin/status", key))
    except (OSError, ValueError) as error:  # URLError is one, and what is no JSON or URL the other
        raise BenchError(f"--admin {admin}: no admin port says what the workers are: {error}") from None


def gateway_seconds(admin: str, key: str) -> float | None:
    """For which the loops of all gateways were busy so far; None: some gateway does not tell."""
    try:
        lines = _read(admin, "/metrics", key).decode().splitlines()
    except OSError:  # minutes of measurements are no reason to end for that
        return None
    up = [line for line in lines if line.startswith("tandem_member_up{") and 'role="gateway"' in line]
    told = [float(line.rpartition(" ")[2]) for line in lines if line.startswith(_BUSY + "{")]
    return sum(told) if told and len(told) == len(up) else None


def _read(admin: str, path: str, key: str) -> bytes:
    """Raises OSError, ValueError."""
    import urllib.request

    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy of the environment
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    request = urllib.request.Request(admin.rstrip("/") + path, headers=headers)
    with opener.open(request, timeout=10) as answer:
        found: bytes = answer.read()
        return found


def card_of(status: Any, model: str) -> dict[str, Any]:
    """`gpu`, `gpus` and `kv_tokens` of a model's workers, of an answer of `/admin/status`. Raises BenchError."""
    workers = [each for each in status["members"] if each["model"] == model and each["gpus"]]
    if not workers:
        raise BenchError(f"the cluster behind --admin has no worker of {model}")
    if len(kinds := {(each["gpu"], each["gpus"]) for each in workers}) > 1:
        told = "; ".join(f"{each['name']} {each['gpus']} x {each['gpu'] or 'CPU'}" for each in workers)
        raise BenchError(f"a profile is of one kind of worker, and these are several: {told}")
    ((gpu, gpus),) = kinds
    return {"gpu": gpu, "gpus": gpus, "kv_tokens": min(each["kv_tokens"] for each in workers)}


def back_to_back(records: "list[Record]", alone: "PromptTime") -> "PromptTime":
    """Seconds that each prompt took, of many of a length, of which some always waited. What one takes `alone`, its way
    included, goes by once. Raises BenchError where all of them were as quick.
    """
    from planner.fitting import PromptTime

    begin = min(each.sent for each in records)
    end = max(each.sent + each.chunks[0] if each.chunks else each.end for each in records)  # a token may have no text
    if end - begin <= alone.seconds:
        raise BenchError(f"{len(records)} prompts of {alone.tokens} took no longer than one alone: is it busy?")
    return PromptTime(alone.tokens, (end - begin - alone.seconds) / (len(records) - 1))


def answers_together(records: "list[Record]", size: int) -> "AnswerTime":
    """Seconds a token while exactly `size` answers were under way, and no prompt: `size` clients ask no more at once.

    Raises BenchError if they never were.
    """
    from planner.fitting import AnswerTime

    spans = [(each.sent + each.chunks[0], each.sent + each.chunks[-1]) for each in records if len(each.chunks) > 1]
    seconds = tokens = kept = 0.0
    for each in records:
        each_gap = (each.tokens - 1) / max(1, len(each.chunks) - 1)  # a message may carry several tokens
        for number, (begin, end) in enumerate(zip(each.chunks, each.chunks[1:], strict=False)):
            if sum(first <= each.sent + begin and last >= each.sent + end for first, last in spans) == size:
                seconds += end - begin
                tokens += each_gap
                kept += each_gap * (each.prompt_tokens + number * each_gap)
    if not tokens:
        raise BenchError(f"{size} answers were never under way together: the cluster is busy, or has no room for them")
    return AnswerTime(size, kept / tokens, seconds / tokens)


def _numbers(text: str, flag: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise BenchError(f"{flag} {text!r} must be whole numbers above 0, like 64,256")
    return [int(part) for part in parts]


def _show(found: "Profile", console: Any) -> None:
    from rich.table import Table

    table = Table(title=f"{found.model}: what was measured, and what the fit makes of it")
    for column in ("", "measured, ms", "fit, ms", "fit / measured"):
        table.add_column(column, justify="right" if column else "left")
    rows = [(f"prompt of {one.tokens}, first token", one.seconds) for one in found.prompts]
    rows += [(f"prompt of {one.tokens}, back to back", one.seconds) for one in found.back_to_back]
    rows += [(f"{one.sequences} answers at {one.context:.0f}, a token", one.seconds) for one in found.answers]
    ratios = [*found.prompt_ratios, *found.back_to_back_ratios, *found.answer_ratios]
    for (name, seconds), ratio in zip(rows, ratios, strict=True):
        table.add_row(name, f"{1e3 * seconds:.1f}", f"{1e3 * seconds * ratio:.1f}", f"{ratio:.2f}")
    console.print(table)
    if found.gateway:
        request, token = 1e3 * found.timing.gateway_request, 1e6 * found.timing.gateway_token
        console.print(f"gateway: {request:.1f} ms a request, {token:.0f} us a token of an answer")
