"""What `tandem bench run` reports is what a server with known delays says that it sent, and when."""

import itertools
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from load_runs import LoadRun, load_run

from bench.measure.summary_format import Distribution
from bench.scripted_server import Script, ScriptedAnswer, Sent, start_server

WITHIN_MS = 2.0
# A busy machine may wake the client late, by what the run itself tells as its loop lag. A wrong definition is wrong by
# a gap between tokens, and in every attempt.
ATTEMPTS = 4
REQUESTS = 20
SHORTEST_GAP_MS = 20.0
# Different answers, so that every percentile is another number.
ANSWERS = [
    ScriptedAnswer(ttft=0.02 + 0.012 * k, gaps=(SHORTEST_GAP_MS / 1e3, 0.035 + 0.003 * k, 0.05)) for k in range(10)
]


def true_ms(log: list[Sent]) -> dict[str, list[float]]:
    """Latencies as the server saw them, in milliseconds."""
    return {
        "ttft_ms": [1e3 * (sent.times[0] - sent.received) for sent in log],
        "tpot_ms": [1e3 * (sent.times[-1] - sent.times[0]) / (sent.tokens - 1) for sent in log],
        "itl_ms": [1e3 * gap for sent in log for gap in np.diff(sent.times)],
        "e2e_ms": [1e3 * (sent.end - sent.received) for sent in log],
    }


def deviations(run: LoadRun, log: list[Sent]) -> dict[str, float]:
    """Milliseconds by which each reported statistic is off."""
    found = {}
    for name, values in true_ms(log).items():
        reported: Distribution = getattr(run.summary, name)
        assert reported.count == len(values)
        truth = {"mean": np.mean(values)}
        truth |= {f"p{percent}": np.percentile(values, percent) for percent in (50, 90, 95, 99)}
        found |= {f"{name} {statistic}": abs(getattr(reported, statistic) - truth[statistic]) for statistic in truth}
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


MIXED = itertools.cycle([style(), style(crlf=True), style(comments=True), style(tokens_per_message=2)])


@pytest.mark.parametrize(
    ("answers", "endpoint"),
    [
        (ANSWERS, "chat"),
        ([change(answer) for answer, change in zip(ANSWERS, MIXED, strict=False)], "completions"),
        ([style(usage=False)(answer) for answer in ANSWERS], "completions"),
    ],
    ids=["chat", "every style", "no usage"],
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
        late = min(run.summary.loop_lag_ms.max or 0.0, SHORTEST_GAP_MS / 2)
        off = {name: by for name, by in deviations(run, log).items() if by > WITHIN_MS + late}
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
