"""`bench.referees` compares only rounds in which every request was answered in full length."""

from pathlib import Path

import pytest

from bench.referees import Load, in_full, tandem
from bench.scripted_server import Fault, Script, ScriptedAnswer, start_server
from engine.weights.resolve import resolve

GOOD = ScriptedAnswer(ttft=0.02, gaps=(0.002,))
REQUESTS, OUTPUT_TOKENS = 8, 6


def measured(folder: Path, answers: list[ScriptedAnswer]) -> dict[str, float]:
    with start_server(folder, Script(answers=answers)) as server:
        load = Load(server.url, "scripted", resolve(), 16, OUTPUT_TOKENS, 2, REQUESTS, folder)
        return in_full("tandem", load, tandem(load, 1))


def test_a_complete_round_is_taken(tmp_path: Path) -> None:
    found = measured(tmp_path, [GOOD])
    assert (found["completed"], found["output_tokens"]) == (REQUESTS, REQUESTS * OUTPUT_TOKENS)


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (ScriptedAnswer(fault=Fault(kind="http")), "completed 6 of 8 requests with 36 of 48 tokens"),
        (ScriptedAnswer(ttft=0.02, gaps=(0.002,), tokens=3), "completed 8 of 8 requests with 42 of 48 tokens"),
    ],
    ids=["failed", "short"],
)
def test_an_incomplete_round_is_refused(tmp_path: Path, other: ScriptedAnswer, told: str) -> None:
    with pytest.raises(RuntimeError, match=told):
        measured(tmp_path, [GOOD, GOOD, GOOD, other])
