"""`tandem profile` on a server whose delays are known."""

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

import bench.profile
from bench.errors import BenchError
from bench.measure.record import Record
from bench.profile import answers_together, back_to_back, card_of, gateway_seconds
from bench.scripted_server import Script, ScriptedAnswer, start_server
from engine.weights.resolve import resolve
from planner.fitting import HOPS, PromptTime
from planner.simulator.timing import Timing

TTFT, GAP = 0.2, 0.03


def tandem(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "services.cli", *arguments, "--quiet"], capture_output=True, text=True, timeout=240
    )


def test_a_profile_is_never_quicker_than_the_server_and_a_simulation_reads_it(tmp_path: Path) -> None:
    with start_server(tmp_path, Script(answers=[ScriptedAnswer(ttft=TTFT, gaps=(GAP,))])) as server:
        flags = ("--prompts", "8,16,32", "--batches", "1,2", "--contexts", "8,32", "--tokenizer", str(resolve()))
        done = tandem("profile", "--url", server.url, *flags, "--json", str(tmp_path / "profile.json"))
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "profile.json").read_text())
    assert min(prompt["seconds"] for prompt in found["prompts"]) >= TTFT
    assert min(answer["seconds"] for answer in found["answers"]) >= GAP * 0.99
    assert [one["tokens"] for one in found["back_to_back"]] == [16, 32] and len(found["back_to_back_ratios"]) == 2
    timing = found["timing"]
    for prompt, ratio in zip(found["prompts"], found["prompt_ratios"], strict=True):
        tokens = prompt["tokens"]
        told = HOPS + Timing(**timing).arrival(tokens) + Timing(**timing).mixed(tokens, tokens**2 / 2, 0, 0.0)
        assert told == pytest.approx(ratio * prompt["seconds"], rel=1e-3)
    load = ("--workers", "1", "--rate", "0.5", "--num-requests", "5", "--input-len", "8", "--output-len", "20")
    done = tandem("simulate", "--timing", str(tmp_path / "profile.json"), *load, "--json", str(tmp_path / "s.json"))
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "s.json").read_text())
    assert summary["ttft_ms"]["p50"] > 1e3 * TTFT * 0.9 and summary["tpot_ms"]["p50"] > 1e3 * GAP * 0.9


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--prompts", "8,many"), "must be whole numbers above 0"),
        (("--prompts", "8,16"), "give three --prompts"),
        (("--url", "http://127.0.0.1:9"), "127.0.0.1:9"),
        (("--admin", "http://127.0.0.1:9"), "no admin port says what the workers are"),
    ],
)
def test_what_cannot_be_is_said(flags: tuple[str, ...], says: str) -> None:
    done = tandem("profile", "--tokenizer", str(resolve()), *flags)
    assert done.returncode == 1
    assert says in done.stderr and "Traceback" not in done.stderr


def test_a_profile_says_of_which_card_it_is() -> None:
    def worker(name: str, gpu: str, gpus: int, kv_tokens: int, model: str = "m") -> dict[str, object]:
        return {"name": name, "model": model, "gpu": gpu, "gpus": gpus, "kv_tokens": kv_tokens}

    gateway = {"name": "gateway", "model": "", "gpu": "", "gpus": 0, "kv_tokens": 0}
    other = worker("decode-9", "NVIDIA A100", 4, 5, "other")
    pair = [worker("prefill-0", "NVIDIA H200", 2, 9000), worker("decode-0", "NVIDIA H200", 2, 8000)]
    found = card_of({"members": [gateway, other, *pair]}, "m")
    assert found == {"gpu": "NVIDIA H200", "gpus": 2, "kv_tokens": 8000}
    with pytest.raises(BenchError, match="decode-1 1 x CPU"):
        card_of({"members": [*pair, worker("decode-1", "", 1, 10)]}, "m")
    with pytest.raises(BenchError, match="no worker of m"):
        card_of({"members": [gateway, other]}, "m")


def test_gateways_tell_how_long_they_were_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    def gateway(name: str) -> str:
        return f'tandem_member_up{{role="gateway",worker="{name}"}} 1.0\n'

    def busy(name: str, seconds: float) -> str:
        return f'tandem_gateway_loop_seconds{{role="gateway",worker="{name}"}} {seconds}\n'

    def told(text: str) -> float | None:
        monkeypatch.setattr(bench.profile, "_read", lambda *_: text.encode())
        return gateway_seconds("http://admin", "")

    both = 'tandem_member_up{role="decode",worker="d"} 1.0\n' + gateway("a") + gateway("b")
    assert told(both + busy("a", 1.5) + busy("b", 2.25)) == 3.75
    assert told(both + busy("a", 1.5)) is None, "one of an older version, or too busy to say"
    assert told("") is None

    def silent(*_: str) -> bytes:
        raise ConnectionResetError("the admin port is gone for a moment")

    monkeypatch.setattr(bench.profile, "_read", silent)
    assert gateway_seconds("http://admin", "") is None


def test_prompts_back_to_back_take_what_is_left_of_the_first_ones_way() -> None:
    # 0.3 s on its way and 0.1 s computed: the fourth is computed 0.3 s after the first.
    records = [
        Record(id=n, sent=5.0 + sent, chunks=[0.4 + 0.1 * n - sent]) for n, sent in enumerate((0.0, 0.0, 0.0, 0.45))
    ]
    found = back_to_back(records, PromptTime(64, 0.4))
    assert found.tokens == 64 and found.seconds == pytest.approx(0.1)
    silent = [msgspec.structs.replace(each, chunks=[], end=each.sent + each.chunks[0]) for each in records]
    assert back_to_back(silent, PromptTime(64, 0.4)).seconds == pytest.approx(0.1)
    with pytest.raises(BenchError, match="took no longer than one alone"):
        back_to_back(records, PromptTime(64, 0.8))


def test_answers_count_while_all_are_under_way_and_no_prompt_is() -> None:
    def answer(sent: float, *chunks: float, tokens: int) -> Record:
        return Record(id=0, sent=sent, chunks=list(chunks), prompt_tokens=100, completion_tokens=tokens)

    # The second one's prompt makes a gap of the first long; then both go on; the first ends, and the other is quicker.
    first = answer(0.0, 1.0, 1.1, 2.1, 2.3, 2.5, tokens=5)
    second = answer(1.0, 1.1, 1.3, 1.5, 1.6, 1.7, tokens=5)
    found = answers_together([first, second], 2)
    assert found.seconds == pytest.approx(0.2) and found.sequences == 2
    assert found.context == pytest.approx(((100 + 2) + (100 + 3) + (100 + 0) + (100 + 1)) / 4)
    assert answers_together([first], 1).seconds == pytest.approx(1.5 / 4)
    packed = answer(0.0, 1.0, 1.4, 1.8, tokens=5)  # two tokens a message
    assert answers_together([packed], 1).seconds == pytest.approx(0.2)
    with pytest.raises(BenchError, match="3 answers were never under way together"):
        answers_together([first, second], 3)
