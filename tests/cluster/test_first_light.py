"""The promise of the project in one file: a real model, two workers, the KV cache moved, and the answer the same."""

import concurrent.futures
import json
import os
import re
import subprocess
import time
from pathlib import Path

import httpx
from cluster.harness import Cluster, start_cluster, stop_cluster
from cluster.tiny import tiny_model
from faults_hit import must_hit

QUESTION = {
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "temperature": 0,
    "max_tokens": 24,
}


def ask(cluster: Cluster, **changes: object) -> str:
    body = {"model": cluster.model} | QUESTION | changes
    answer = httpx.post(cluster.url + "/v1/chat/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def test_answers_and_moves_kv(cluster: Cluster) -> None:
    before = cluster.metric("tandem_kv_transfer_bytes_total")
    # A long question of its own, so that the prompt is neither cached nor short enough for local prefill.
    text = ask(cluster, messages=[{"role": "user", "content": "Please count: " + " ".join(map(str, range(60)))}])
    assert text
    assert cluster.metric("tandem_kv_transfer_bytes_total") > before
    assert "Paris" in ask(cluster)
    cluster.wait_idle()


def test_streams(cluster: Cluster) -> None:
    body = {"model": cluster.model, "stream": True} | QUESTION
    text, done = "", False
    with httpx.stream("POST", cluster.url + "/v1/chat/completions", json=body, timeout=120) as response:
        for line in response.iter_lines():
            if line == "data: [DONE]":
                done = True
            elif line.startswith("data: "):
                for choice in json.loads(line[6:])["choices"]:
                    text += choice["delta"].get("content") or ""
    assert done
    assert text == ask(cluster)


def test_same_text_alone_and_amid_others(cluster: Cluster) -> None:
    expected = ask(cluster)
    assert all(ask(cluster) == expected for _ in range(2))

    def noise(number: int) -> str:
        return ask(
            cluster, messages=[{"role": "user", "content": f"Tell me about the number {number}. " * (1 + number)}]
        )

    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        others = [pool.submit(noise, number) for number in range(6)]
        same = [pool.submit(ask, cluster) for _ in range(6)]
        assert {future.result() for future in same} == {expected}
        assert all(future.result() for future in others)
    cluster.wait_idle()


def test_up_leaves_nothing_behind(tmp_path: Path) -> None:
    options = ("--dummy-seed", "5", "--threads", "1", "--kv-memory", "64MiB")
    running = start_cluster(tmp_path, *options, model=str(tiny_model(tmp_path / "tiny")))
    pids = dict(running.pids)
    assert pids
    maps = "".join(Path(f"/proc/{pid}/maps").read_text() for pid in pids.values())
    segments = set(re.findall(r"/dev/shm/(tandem-kv-[0-9a-f]{32})\b", maps))
    assert segments, "the decode worker has its cache there"
    stopped = time.monotonic()
    stop_cluster(running)
    took = time.monotonic() - stopped
    assert running.process.returncode == 0
    for name, pid in pids.items():
        state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout.strip()
        assert state in ("", "Z") or state.startswith("Z"), (name, state)
    assert not segments & set(os.listdir("/dev/shm"))
    must_hit(took < 12, f"tandem up stopped after {took:.1f} s, and 10 are promised")
