"""What `tandem bench run` reports is what a server with known delays says that it sent, and when."""

import itertools
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from load_runs import LoadRun, load_run

from bench.measure.record import Record
from bench.measure.summary_format import Distribution
from bench.scripted_server import Script, ScriptedAnswer, Sent, start_server

WITHIN_MS = 2.0
# A busy machine wakes the client late now and then, by what the run itself tells as its loop lag. So the percentiles
# have that much room, and most values must be right without any: a wrong definition is wrong in most values, always.
ATTEMPTS = 8
REQUESTS = 20
SHORTEST_GAP_MS = 20.0
# Different answers, so that every percentile is another number.
ANSWERS = [
    ScriptedAnswer(ttft=0.02 + 0.012 * k, gaps=(SHORTEST_GAP_MS / 1e3, 0.035 + 0.003 * k, 0.05)) for k in range(10)
]


def reported_ms(records: list[Record]) -> dict[str, list[float]]:
    """Latencies as the client saw them, in milliseconds."""
    return {
        "ttft_ms": [1e3 * record.ttft for record in records],
        "tpot_ms": [1e3 * record.tpot for record in records],
        "itl_ms": [1e3 * gap for record in records for gap in record.gaps],
        "e2e_ms": [1e3 * record.e2e for record in records],
    }


def true_ms(log: list[Sent]) -> dict[str, list[float]]:
    """Latencies as the server saw them, in milliseconds."""
    return {
        "ttft_ms": [1e3 * (sent.times[0] - sent.received) for sent in log],
        "tpot_ms": [1e3 * (sent.times[-1] - sent.times[0]) / (sent.tokens - 1) for sent in log],
        "itl_ms": [1e3 * gap for sent in log for gap in np.diff(sent.times)],
        "e2e_ms": [1e3 * (sent.end - sent.received) for sent in log],
    }


def statistics(values: list[float]) -> dict[str, float]:
    percentiles = {f"p{percent}": float(np.percentile(values, percent)) for percent in (50, 90, 95, 99)}
    return {"mean": float(np.mean(values)), **percentiles}


def deviations(run: LoadRun, log: list[Sent]) -> dict[str, float]:
    """Milliseconds by which each reported statistic is off, and by which the values themselves are, in the middle."""
    found = {}
    came = reported_ms(run.records)
    for name, sent in true_ms(log).items():
        reported: Distribution = getattr(run.summary, name)
        assert reported.count == len(sent)
        for statistic, truth in statistics(sent).items():
            found[f"{name} {statistic}"] = abs(getattr(reported, statistic) - truth)
        found[f"{name} each"] = float(np.median(np.abs(np.subtract(came[name], sent))))
    return found


def measured(folder: Path, answers: list[ScriptedAnswer], **flags: object) -> tuple[LoadRun, list[Sent]]:
    """A run whose requests come one after the other, so that records and log are in the same order."""
    with start_server(folder, Script(answers=answers)) as server:
        run = load_run(
            server.url, folder, rate=20, arrival="constant", num_requests=REQUESTS, output_len="4-12", **flags
        )
        return run, server.log()


def style(**change: object) -> Callable[[ScriptedAnswer], ScriptedAnswer]:
    return lambda answer: msgspec.structs.replace(answer, **change)


STYLES = itertools.cycle([style(crlf=True), style(comments=True), style(crlf=True, comments=True)])


@pytest.mark.parametrize(
    ("answers", "endpoint"),
    [
        (ANSWERS, "chat"),
        ([change(answer) for answer, change in zip(ANSWERS, STYLES, strict=False)], "completions"),
        ([style(tokens_per_message=2)(answer) for answer in ANSWERS], "completions"),
        ([style(usage=False)(answer) for answer in ANSWERS], "completions"),
    ],
    ids=["chat", "every style", "several tokens a message", "no usage"],
)
def test_percentiles_are_those_of_the_server(tmp_path: Path, answers: list[ScriptedAnswer], endpoint: str) -> None:
    for attempt in range(ATTEMPTS):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        run, log = measured(folder, answers, endpoint=endpoint)
        assert run.summary.completed == run.summary.requests == len(log) == REQUESTS
        for record, sent in zip(run.records, log, strict=True):
            assert (len(record.chunks), record.tokens) == (len(sent.times), sent.tokens)
            assert record.tokens == record.output_tokens
        for name, values in reported_ms(run.records).items():
            shown = {statistic: getattr(getattr(run.summary, name), statistic) for statistic in statistics(values)}
            assert shown == pytest.approx(statistics(values))
        late = min(run.summary.loop_lag_ms.max or 0.0, SHORTEST_GAP_MS / 2)
        off = deviations(run, log)
        off = {name: by for name, by in off.items() if by > WITHIN_MS + (0 if name.endswith("each") else late)}
        if not off:
            return
    assert off == {}


def test_an_answer_split_at_every_byte_is_the_same_answer(tmp_path: Path) -> None:
    answers = [style(tokens=3, split=split, cached_tokens=5)(ANSWERS[0]) for split in (False, True)]
    run, _log = measured(tmp_path, answers, keep_text=True)
    whole, split = run.records[::2], run.records[1::2]
    assert {record.error for record in run.records} == {""}

    def content(record: object) -> tuple[object, ...]:
        names = ("text", "tokens", "prompt_tokens", "completion_tokens", "cached_tokens", "finish_reason", "status")
        return *(getattr(record, name) for name in names), len(record.chunks)

    assert {content(record) for record in split} == {content(record) for record in whole}
    assert whole[0].text == " 0 1 2"
