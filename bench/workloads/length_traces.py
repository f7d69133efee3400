"""Traces and tables that know only lengths: Azure's and BurstGPT's CSV, and plain ones. Each prompt is its own."""

import csv
import math
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from bench.config import WorkloadConfig
from bench.errors import BenchError
from bench.workloads.base import Conversation, Synthetic, Turn, Words
from bench.workloads.trace_time import schedule

# Headers in lower case; the first that a file has is taken.
_TIME = ("timestamp", "timestamp_s", "arrived_at")
_INPUT = ("contexttokens", "request tokens", "num_prefill_tokens", "prompt_tokens", "input_tokens", "input_length")
_OUTPUT = ("generatedtokens", "response tokens", "num_decode_tokens", "output_tokens", "output_length")
_MOST = 2**31  # no model reads that many tokens: such a length is a mistake


class LengthTrace(msgspec.Struct, kw_only=True):
    """Requests in the order of the file; each array has one entry a request."""

    timestamps: NDArray[np.float64] | None  # seconds, from any origin; None: the table has none
    input_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    skipped: int  # rows that say 0 tokens were read or answered: requests that failed


def length_trace(config: WorkloadConfig, seed: int, words: Words) -> Iterator[Conversation]:
    """One request a row of `config.data`, with text that no other row has. Raises BenchError.

    Rows without timestamps come in the order of the file, and only a limit chooses among them.
    """
    trace = read_lengths(Path(config.data))
    if trace.timestamps is not None:
        rows, starts = schedule(trace.timestamps, config, seed)
        at: Sequence[float | None] = starts.tolist()
    elif config.window:
        raise BenchError(f"{config.data} has no timestamps, so there is no window of it; use a limit instead")
    else:
        rows = np.arange(len(trace.input_tokens))[: config.limit or None]
        at = [None] * len(rows)
    scale_tokens(1, config.length_scale)  # a bad scale shall show here, not when the first request is made
    return (
        Conversation(
            turns=[
                Turn(
                    text=(Synthetic((seed, row), scale_tokens(int(trace.input_tokens[row]), config.length_scale)),),
                    output_tokens=scale_tokens(int(trace.output_tokens[row]), config.length_scale),
                    shared_tokens=0,
                )
            ],
            at=start,
        )
        for row, start in zip(rows.tolist(), at, strict=True)
    )


def scale_tokens(tokens: int, scale: float) -> int:
    """A length times `scale`, at least 1 token. Raises BenchError for a scale that is not above 0."""
    if not 0 < scale < math.inf:
        raise BenchError(f"length scale must be above 0, not {scale:g}; 1/16 divides all lengths by 16")
    return max(1, round(tokens * scale))


def read_lengths(path: Path) -> LengthTrace:
    """The requests of a CSV file whose header names a column of input and one of output lengths, in tokens.

    A column of timestamps may stand beside them: wall clock times in ISO 8601 (taken as UTC if they do not say) or
    seconds. Raises BenchError with file and line for what cannot be read.
    """
    times: list[float] = []
    inputs: list[int] = []
    outputs: list[int] = []
    skipped = 0
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file)
            header = [name.strip().lower() for name in next(reader, [])]
            time_column = _find(header, _TIME)
            input_column, output_column = _find(header, _INPUT), _find(header, _OUTPUT)
            if input_column is None or output_column is None:
                raise BenchError(
                    f"{path}:1: no columns of lengths. There must be one of {', '.join(_INPUT)} "
                    f"and one of {', '.join(_OUTPUT)}; the header is {','.join(header)[:200]!r}"
                )
            for row in reader:
                if not row:
                    continue
                try:
                    read, answered = _tokens(row[input_column]), _tokens(row[output_column])
                    at = _time(row[time_column]) if time_column is not None else 0.0
                except (ValueError, IndexError) as error:
                    reason = "fewer columns than the header" if isinstance(error, IndexError) else error
                    raise BenchError(f"{path}:{reader.line_num}: {reason}") from None
                if not read or not answered:
                    skipped += 1
                    continue
                times.append(at)
                inputs.append(read)
                outputs.append(answered)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise BenchError(f"cannot read {path} as CSV: {error}") from error
    if not inputs:
        raise BenchError(f"{path} holds no request ({skipped} rows without input or output tokens were skipped)")
    return LengthTrace(
        timestamps=np.array(times) if time_column is not None else None,
        input_tokens=np.array(inputs),
        output_tokens=np.array(outputs),
        skipped=skipped,
    )


def _find(header: list[str], names: Sequence[str]) -> int | None:
    return next((header.index(name) for name in names if name in header), None)


def _tokens(text: str) -> int:
    try:
        tokens = int(text)
    except ValueError:
        raise ValueError(f"{text!r} is no number of tokens") from None
    if not 0 <= tokens < _MOST:
        raise ValueError(f"{text} is no number of tokens")
    return tokens


def _time(text: str) -> float:
    """Seconds, of a number or a date."""
    try:
        seconds = float(text)
    except ValueError:
        try:
            moment = datetime.fromisoformat(text.strip())
        except ValueError:
            raise ValueError(f"{text!r} is no timestamp: neither seconds nor a date like 2023-11-16 18:15:46") from None
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    if not math.isfinite(seconds):
        raise ValueError(f"{text!r} is no timestamp")
    return seconds
