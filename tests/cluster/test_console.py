"""The console and `tandem top` on a real cluster: the state, the page in a browser, the chat, the terminal."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from cluster.harness import Cluster, start_cluster, stop_cluster
from cluster.tiny import tiny_model

from services.live import Live

CLUSTER = "<img src=x onerror=document.title=1>"
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --hide-scrollbars --window-size=1280,1600 --timeout=8000"
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("console")
    flags = "--dummy-seed 3 --kv-blocks 256 --max-model-len 1024 --threads 1 --local-prefill-tokens 1 --slo-ttft 60"
    model = str(tiny_model(folder / "model"))
    env = {"TANDEM_CLUSTER": CLUSTER.replace(" ", "/"), "TANDEM_PLANNER": "advise", "TANDEM_PLANNER_INTERVAL": "0.5"}
    cluster = start_cluster(folder, *flags.split(), model=model, env=env)
    try:
        yield cluster
    finally:
        stop_cluster(cluster)


def ask(cluster: Cluster, text: str) -> None:
    body = {"model": cluster.model, "prompt": text, "max_tokens": 8, "ignore_eos": True}
    httpx.post(cluster.url + "/v1/completions", json=body, timeout=120).raise_for_status()


def state(cluster: Cluster) -> Live:
    return msgspec.json.decode(httpx.get(cluster.admin + "/api/live", timeout=30).content, type=Live)


def decision(cluster: Cluster) -> dict[str, Any] | None:
    """The planner's latest one, if there is any."""
    (found,) = httpx.get(cluster.admin + "/admin/planner", timeout=30).json().values()
    return found[-1] if found else None


def until_moved(cluster: Cluster) -> Live:
    """The state once a heartbeat has told of KV that came."""
    deadline = time.monotonic() + 60
    while not (live := state(cluster)).links and time.monotonic() < deadline:
        time.sleep(0.2)
    return live


def test_the_state_tells_what_happened(cluster: Cluster) -> None:
    for number in range(3):
        ask(cluster, f"{number} and some more words of a prompt " * 8)
    live = until_moved(cluster)
    assert [view.role for view in live.workers] == ["prefill", "decode"]
    assert {view.state for view in live.workers} == {"ready"} and live.workers[0].blocks == 256
    (link,) = live.links
    assert (link.source_name, link.target_name) == ("prefill-0", "decode-0") and link.bytes > 0 and link.transfers >= 1
    assert live.traffic.outcomes == {"ok": len(live.requests)} and len(live.requests) >= 3
    assert live.traffic.attainment == 1.0 and live.traffic.slo_ttft == 60 and live.traffic.slo_tpot is None
    latest = live.requests[0]
    stages = {bar.stage for bar in latest.bars}
    assert latest.output_tokens == 8 and {"place", "prefill", "transfer", "decode"} <= stages
    assert all(0 <= bar.start <= bar.start + bar.seconds <= latest.seconds + 0.01 for bar in latest.bars)
    assert (
        live.routers[0].mode == "prefix"
        and live.gateways[0].here
        and [(each.name, each.state) for each in live.models] == [(cluster.model, "ready")]
    )


def test_the_stream_goes_on(cluster: Cluster) -> None:
    times = []
    with httpx.stream("GET", cluster.admin + "/api/live/stream", timeout=30) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        for line in response.iter_lines():
            if line.startswith("data: "):
                times.append(json.loads(line[6:])["at"])
            if len(times) == 2:
                break
    assert times[1] > times[0]


def test_it_is_not_on_the_port_of_clients(cluster: Cluster) -> None:
    for path in ("/", "/api/live", "/api/live/stream", "/app.js"):
        assert httpx.get(cluster.url + path, timeout=30).status_code == 404


def test_the_page_may_load_its_own_files_only(cluster: Cluster) -> None:
    page = httpx.get(cluster.admin + "/", timeout=30)
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
    for name in ("app.js", "planner.js", "state.js", "style.css", "uPlot.iife.min.js", "uPlot.min.css", "icon.svg"):
        assert f'"{name}"' in page.text
        assert httpx.get(f"{cluster.admin}/{name}", timeout=30).status_code == 200
    assert "innerHTML" not in httpx.get(cluster.admin + "/app.js", timeout=30).text


def test_the_chat_streams_through_the_api(cluster: Cluster) -> None:
    body = {
        "model": cluster.model,
        "messages": [{"role": "user", "content": "hello"}],
        "stream": True,
        "max_tokens": 4,
        "ignore_eos": True,
    }
    answer = httpx.post(cluster.admin + "/v1/chat/completions", json=body, timeout=120)
    assert answer.status_code == 200 and answer.text.endswith("data: [DONE]\n\n") and answer.text.count("data: ") > 2
    stranger = httpx.post(
        cluster.admin + "/v1/chat/completions", json=body, headers={"origin": "http://elsewhere.test"}, timeout=10
    )
    assert stranger.status_code == 403


def test_a_browser_draws_the_page(cluster: Cluster, tmp_path: Path) -> None:
    ask(cluster, "words for the page " * 10)
    until_moved(cluster)
    deadline = time.monotonic() + 60
    while not (found := decision(cluster)) or found["chosen"] is None:  # it has measured what requests are like
        assert time.monotonic() < deadline
        ask(cluster, "words for the planner")
        time.sleep(0.2)
    command = ["timeout", "90", "chromium", *FLAGS.split(), f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom"]
    dom = subprocess.run([*command, cluster.admin + "/"], capture_output=True, text=True, timeout=100).stdout
    assert "prefill-0" in dom and "decode-0" in dom and "running" in dom and "<canvas" in dom
    assert 'class="good"' in dom and "shared_memory" in dom and "TTFT p95" in dom
    assert "advise, decision" in dom and ">wanted</td>" in dom and "TPOT kept" in dom
    shot = Path(os.environ.get("CONSOLE_SHOT", tmp_path / "console.png"))
    subprocess.run([*command[:-1], f"--screenshot={shot}", cluster.admin + "/"], capture_output=True, timeout=100)
    assert shot.stat().st_size > 20_000
    assert "<title>Tandem</title>" in dom and "&lt;img" in dom and "<img" not in dom


def top(cluster: Cluster, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "services.cli", "top", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_top_prints_tables_and_json(cluster: Cluster) -> None:
    once = top(cluster, "--once", "--url", cluster.url)
    assert once.returncode == 0 and "prefill-0" in once.stdout and "TTFT p50" in once.stdout, once.stderr
    told = top(cluster, "--json", "--admin", cluster.admin)
    assert len(msgspec.json.decode(told.stdout, type=Live).workers) == 2


def test_top_says_what_is_wrong(cluster: Cluster) -> None:
    for address, word in ((cluster.url, "is it an admin port?"), ("http://127.0.0.1:9", "does not answer")):
        failed = top(cluster, "--once", "--admin", address)
        assert failed.returncode == 78 and word in failed.stderr and "Traceback" not in failed.stderr


async def test_the_screen_draws(cluster: Cluster) -> None:
    pytest.importorskip("textual", reason="the extra `ui` is not installed")
    from services.admin_client import AdminClient
    from services.top_screen import Top

    app = Top(AdminClient(cluster.admin, ""))
    async with app.run_test(size=(120, 34)) as pilot:
        await pilot.pause()
        drawn = app.export_screenshot()
    assert "prefill-0" in drawn and "decode-0" in drawn
