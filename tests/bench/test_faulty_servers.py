"""`tandem bench run` against servers that fail: each failure is counted by its kind, and the run goes on."""

import itertools
import time
from pathlib import Path

import msgspec
import pytest
from load_runs import LoadRun, RunningLoad, load_run

from bench.scripted_server import Fault, Script, ScriptedAnswer, ScriptedServer, Sent, start_server

GOOD = ScriptedAnswer(ttft=0.03, gaps=(0.01,))
FAULTS = {
    "http_429": Fault(kind="http", status=429, headers={"Retry-After": "7"}),
    "http_500": Fault(kind="http", status=500),
    "http_503": Fault(kind="http", status=503),
    "connection_lost": Fault(kind="reset", at=2),
    "timeout": Fault(kind="stall", at=2),
    "malformed_sse": Fault(kind="malformed", at=2),
    "error_event": Fault(kind="error_event", at=2),
    "incomplete": Fault(kind="cut", at=2),
}


def failing(fault: Fault) -> ScriptedAnswer:
    return msgspec.structs.replace(GOOD, fault=fault)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> tuple[LoadRun, list[Sent]]:
    """A run against a server that makes every mistake three times, each followed by a good answer."""
    folder = tmp_path_factory.mktemp("mixed")
    bad = [*map(failing, FAULTS.values()), msgspec.structs.replace(GOOD, tokens=0)]
    answers = [answer for one in bad for answer in (one, GOOD)]
    with start_server(folder, Script(answers=answers)) as server:
        run = load_run(server.url, folder, rate=40, arrival="constant", num_requests=3 * len(answers), timeout="1s")
        return run, server.log()


def test_each_failure_is_counted_by_its_kind(mixed: tuple[LoadRun, list[Sent]]) -> None:
    run, _log = mixed
    assert run.summary.errors == dict.fromkeys([*FAULTS, "empty"], 3)
    assert (run.summary.requests, run.summary.completed) == (54, 27)
    assert set(run.summary.error_examples) == set(run.summary.errors)


def test_failures_are_in_no_latency(mixed: tuple[LoadRun, list[Sent]]) -> None:
    run, _log = mixed
    assert run.summary.ttft_ms.count == run.summary.e2e_ms.count == 27
    assert run.summary.itl_ms.count == 27 * 7
    assert run.summary.tokens.output == 27 * 8
    assert run.summary.e2e_ms.max is not None and run.summary.e2e_ms.max < 1000  # none of the timeouts


def test_the_report_tells_of_failures(mixed: tuple[LoadRun, list[Sent]]) -> None:
    run, _log = mixed
    for kind in run.summary.errors:
        assert kind in run.shown
    assert "as the script has it" in run.summary.error_examples["http_500"]
    assert "as the script has it" in run.summary.error_examples["error_event"]


def test_what_came_before_a_failure_is_kept(mixed: tuple[LoadRun, list[Sent]]) -> None:
    run, _log = mixed
    came = {kind: {len(one.chunks) for one in run.records if one.error == kind} for kind in run.summary.errors}
    assert came == {kind: {0} if kind.startswith("http") or kind == "empty" else {2} for kind in came}


def test_retry_after_is_recorded(mixed: tuple[LoadRun, list[Sent]]) -> None:
    run, _log = mixed
    assert {(one.status, one.retry_after) for one in run.records if one.error == "http_429"} == {(429, 7)}
    assert run.summary.retry_after_s is not None
    assert (run.summary.retry_after_s.count, run.summary.retry_after_s.p50) == (3, 7)


def test_a_client_that_gives_up_hangs_up(mixed: tuple[LoadRun, list[Sent]]) -> None:
    _run, log = mixed
    assert [sent.left for sent in log if sent.fault == "stall"] == [True] * 3
    assert [sent.left for sent in log if not sent.fault] == [False] * 30  # good ones and empty ones


def test_a_closed_loop_waits_as_long_as_it_is_told(tmp_path: Path) -> None:
    busy = failing(Fault(kind="http", status=429, headers={"Retry-After": "1"}))
    with start_server(tmp_path, Script(answers=[busy, GOOD])) as server:
        run = load_run(server.url, tmp_path, concurrency=1, num_requests=4)
        log = server.log()
    assert run.summary.errors == {"http_429": 2}
    waits = [after.received - before.end for before, after in itertools.pairwise(log)]
    assert waits[0] >= 1 and waits[2] >= 1 and waits[1] < 1


def test_connections_that_are_closed_without_an_answer(tmp_path: Path) -> None:
    with start_server(tmp_path, Script(answers=[failing(Fault(kind="close"))])) as server:
        run = load_run(server.url, tmp_path, concurrency=2, num_requests=4)
    assert run.summary.errors == {"connection_lost": 4}
    assert (run.summary.completed, run.summary.valid) == (0, False)
    assert run.summary.ttft_ms.p50 is None


def test_a_stream_without_done_is_complete(tmp_path: Path) -> None:
    with start_server(tmp_path, Script(answers=[failing(Fault(kind="no_done"))])) as server:
        run = load_run(server.url, tmp_path, concurrency=2, num_requests=4)
    assert (run.summary.errors, run.summary.completed) == ({}, 4)


def test_no_server(tmp_path: Path) -> None:
    with start_server(tmp_path, Script(answers=[GOOD])) as server:
        server.kill()
        shown = RunningLoad(server.url, tmp_path, concurrency=1, num_requests=1).end(1)
    assert f"{server.url} does not answer" in shown and "Traceback" not in shown


def wait_for_answers(server: ScriptedServer, number: int) -> None:
    deadline = time.monotonic() + 60
    while len(server.log()) < number:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_server_killed_in_the_run_and_started_again(tmp_path: Path) -> None:
    answer = ScriptedAnswer(ttft=0.2, gaps=(0.05,))
    before, after = tmp_path / "before", tmp_path / "after"
    before.mkdir()
    after.mkdir()
    with start_server(before, Script(answers=[answer])) as server:
        load = RunningLoad(server.url, tmp_path, rate=20, arrival="constant", num_requests=80)
        wait_for_answers(server, 5)
        server.kill()
        answered = len(server.log())
        time.sleep(0.5)
    with start_server(after, Script(answers=[answer]), server.port) as again:
        run = load.wait()
        answered += len(again.log())
    assert set(run.summary.errors) == {"connection_lost", "connection_refused"}
    assert run.summary.completed == answered
    assert run.summary.completed + sum(run.summary.errors.values()) == run.summary.requests == 80
    kinds = [one.error for one in run.records]
    assert kinds[0] == kinds[-1] == ""  # it went on where the server did
    lost = [one for one in run.records if one.error == "connection_lost"]
    assert any(one.chunks for one in lost)  # in the middle of their answers
