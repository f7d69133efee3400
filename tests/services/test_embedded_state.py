"""The embedded server starts though somebody else takes its port, and says when it cannot."""

from pathlib import Path

import pytest
import redis

from services.embedded_state import EmbeddedState, StateServerError, find_server


def _server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusals: int) -> Path:
    """A server that ends at its first starts, as where its port is taken; and a file with a line for each start."""
    real, starts, script = find_server(), tmp_path / "starts", tmp_path / "server"
    script.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && exec {real} "$@"\n'
        f'echo >> {starts}\n[ $(wc -l < {starts}) -le {refusals} ] && exit 1\nexec {real} "$@"\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("TANDEM_REDIS_SERVER", str(script))
    return starts


def test_another_port_is_taken_if_the_first_ones_are_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    starts = _server(tmp_path, monkeypatch, 2)
    state = EmbeddedState()
    try:
        assert redis.Redis.from_url(state.url).ping()
        assert len(starts.read_text().splitlines()) == 3
    finally:
        state.close()


def test_a_server_that_never_starts_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _server(tmp_path, monkeypatch, 1000)
    with pytest.raises(StateServerError, match="--state redis://"):
        EmbeddedState()
