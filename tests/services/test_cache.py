"""`tandem cache`: files of prompts that are none, and what a narrow terminal shows."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from services import cache, chat


def test_a_file_that_is_no_text_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "prompts").write_bytes(b"\x80\xff\n")
    with pytest.raises(SystemExit, match="78"):
        cache._lines(tmp_path / "prompts")
    assert "UTF-8" in capsys.readouterr().err


def test_json_nested_too_deeply_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="78"):
        cache._body('{"prompt": ' + "[" * 100_000, "prompts, line 3")
    assert "prompts, line 3 is no JSON" in capsys.readouterr().err


class Client:
    """Takes bodies."""

    bodies: list[dict[str, Any]]
    headers: Mapping[str, str] = {}

    def __init__(self, url: str, api_key: str) -> None:
        self.bodies = Client.bodies = []

    def first_model(self) -> str:
        return "first"

    def request(self, method: str, path: str, body: dict[str, Any], headers: Mapping[str, str]) -> "Client":
        self.bodies.append(body)
        return self

    def read(self) -> bytes:
        return b""


def test_each_line_is_a_prompt_of_its_own_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "Client", Client)
    monkeypatch.setattr(cache, "_running", lambda url: type("Running", (), {"url": "http://127.0.0.1:1"}))
    separated = "one\u2028two\x85three"
    lines = ({"prompt": separated}, {"prompt": "other", "model": "own", "max_tokens": 9})
    text = "\n".join(json.dumps(each, ensure_ascii=False) for each in lines)
    (tmp_path / "prompts").write_text(text + "\r\n\nplain\n", encoding="utf-8")
    found = [where.rpartition(" ")[2] for where, _, _ in cache._compute(tmp_path / "prompts", "", "", "")]
    assert found == ["1", "2", "4"] and Client.bodies[0]["prompt"] == separated
    assert [body["model"] for body in Client.bodies] == ["first", "own", "first"]
    assert {body["max_tokens"] for body in Client.bodies} == {1}


def test_names_of_pins_stay_whole_on_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    name = cache._pin_name("a prompt", "model", "key")
    tier = dict.fromkeys((*cache._GAUGES, *cache._COUNTERS), 0.0)
    pin = {"name": name, "hash": "0123456789abcdef" * 2, "blocks": 123, "blocks_here": 123}
    pinned = {"blocks": 123, "most_blocks": 200, "blocks_here": 123, "sessions": 0, "prompts": [pin]}
    state = {"name": "kv-0", "hit_rate": None, "missed_blocks": 0.0, "waiting_blocks": 0.0, "top": [], "pinned": pinned}
    cache._print(state | {"tiers": {"redis": tier}})
    said = capsys.readouterr().out
    assert name in said and "…" not in said
    (row,) = [line for line in said.splitlines() if "redis" in line]
    assert row.count("0 bytes") == 1  # what it holds, of no bound that is known
