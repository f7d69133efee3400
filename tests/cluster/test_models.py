"""Two models behind one gateway: each is served as it is alone, and one of them may be gone."""

import concurrent.futures
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from cluster.harness import Cluster, start_cluster, stop_cluster
from cluster.tiny import tiny_model

FLAGS = ("--threads", "1", "--kv-memory", "32MiB", "--local-prefill-tokens", "0")
WORKERS = {"small": "prefill=1,decode=1,dummy_seed=5", "wide": "aggregated=1,dummy_seed=6,block_size=8"}
TEXTS = [f"Chapter {number}. " + "It was a dark and stormy night, and " * (1 + number % 5) for number in range(8)]
CONTEXT = 512  # tokens, of wide
Answers = list[tuple[str, list[float], int]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    wide = tiny_model(folder / "b", hidden_size=96, num_hidden_layers=2, max_position_embeddings=CONTEXT)
    template = "{% for message in messages %}<{{ message.role }}> {{ message.content }}\n{% endfor %}<assistant>"
    (wide / "chat_template.jinja").write_text(template)
    return {"small": tiny_model(folder / "a"), "wide": wide}


@pytest.fixture(scope="module")
def alone(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answers]:
    """What each model answers on one aggregated worker in a cluster of its own."""
    found = {}
    for name, folder in folders.items():
        settings = ("--aggregated", "1", "--dummy-seed", WORKERS[name].partition("dummy_seed=")[2][0])
        cluster = start_cluster(tmp_path_factory.mktemp(name), *FLAGS, *settings, model=str(folder))
        try:
            found[name] = [ask(cluster, cluster.model, number) for number in range(len(TEXTS))]
        finally:
            stop_cluster(cluster)
    return found


@pytest.fixture(scope="module")
def both(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    small, wide = (f"{name}={folders[name]},{WORKERS[name]}" for name in ("small", "wide"))
    cluster = start_cluster(
        tmp_path_factory.mktemp("both"),
        *("--model", wide, "--model-aliases", "gpt-4o=small,org/large:latest=wide", *FLAGS),
        model=small,
        env={"TANDEM_WORKER_WAIT": "0.5"},
    )
    yield cluster
    stop_cluster(cluster)


def post(cluster: Cluster, model: str, **fields: Any) -> httpx.Response:
    body = {"model": model, "prompt": TEXTS[0], "max_tokens": 4, "ignore_eos": True} | fields
    return httpx.post(cluster.url + "/v1/completions", json=body, timeout=120)


def ask(cluster: Cluster, model: str, number: int) -> tuple[str, list[float], int]:
    """An answer to one of TEXTS: text, log-probabilities, tokens of the prompt. Every other one is a chat."""
    body = {"model": model, "max_tokens": 12, "seed": number, "ignore_eos": True}
    body |= {"temperature": 0.8 if number % 4 > 1 else 0.0}
    if number % 2:
        body |= {"messages": [{"role": "user", "content": TEXTS[number]}], "logprobs": True}
        answer = httpx.post(cluster.url + "/v1/chat/completions", json=body, timeout=120)
    else:
        answer = httpx.post(cluster.url + "/v1/completions", json=body | {"prompt": TEXTS[number], "logprobs": 0})
    assert answer.status_code == 200, answer.text
    choice, tokens = answer.json()["choices"][0], int(answer.json()["usage"]["prompt_tokens"])
    if number % 2:
        return choice["message"]["content"], [each["logprob"] for each in choice["logprobs"]["content"]], tokens
    return choice["text"], choice["logprobs"]["token_logprobs"], tokens


def test_each_answers_as_alone(both: Cluster, alone: dict[str, Answers]) -> None:
    names = {"small": ("small", "gpt-4o"), "wide": ("wide", "org/large:latest")}
    asked = [(model, name, n) for n in range(len(TEXTS)) for model, called in names.items() for name in called]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        got = list(pool.map(lambda each: ask(both, each[1], each[2]), asked))
    assert [got[n] for n, (model, _, number) in enumerate(asked) if got[n] != alone[model][number]] == []
    assert all(small[0] != wide[0] for small, wide in zip(alone["small"], alone["wide"], strict=True))
    assert alone["small"][1][2] != alone["wide"][1][2]  # a chat template of its own
    # KV moves between workers of the one that has two, and not to the other's.
    assert both.metric("tandem_kv_transfers_total", outcome="committed", model="small") >= len(TEXTS)
    assert both.metric("tandem_kv_transfers_total", outcome="recomputed") == 0
    assert both.metric("tandem_kv_transfer_bytes_total", model="wide") == 0
    both.wait_idle()


def test_names_and_limits(both: Cluster) -> None:
    listed = httpx.get(both.url + "/v1/models", timeout=30).json()["data"]
    contexts = {entry["id"]: entry["max_model_len"] for entry in listed}
    assert contexts == {"small": 2048, "wide": CONTEXT, "gpt-4o": 2048, "org/large:latest": CONTEXT}
    assert httpx.get(both.url + "/v1/models/org/large:latest", timeout=30).json()["id"] == "org/large:latest"
    long = [7] * CONTEXT
    assert post(both, "gpt-4o", prompt=long).json()["model"] == "gpt-4o"
    refused = post(both, "wide", prompt=long)
    assert refused.status_code == 400 and f"context is {CONTEXT} tokens" in refused.json()["error"]["message"]
    unknown = post(both, "nobody's")
    assert unknown.status_code == 404 and unknown.json()["error"]["param"] == "model"
    assert "there are: small, wide, gpt-4o, org/large:latest" in unknown.json()["error"]["message"]


def tandem(cluster: Cluster, *arguments: str) -> str:
    command = [sys.executable, "-m", "services.cli", *arguments, "--url", cluster.url]
    wide = os.environ | {"COLUMNS": "140"}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, env=wide).stdout


def test_what_is_told_of_them(both: Cluster) -> None:
    assert post(both, "org/large:latest").status_code == 200
    (placement,) = json.loads(tandem(both, "router", "explain", "--json"))
    assert placement["model"] == "wide" and placement["left_out"] == []
    assert [(each["role"], each["candidates"]) for each in placement["rankings"]] == [("decode", 1)]
    status = tandem(both, "router", "status")
    assert "model small: 1 decode, 1 prefill\n" in status and "model wide: 1 aggregated\n" in status
    top = tandem(both, "top", "--once")
    assert "small, wide, cluster" in top and re.search(r"^wide *\n.*\n *aggregated-0 +aggregated", top, re.M)
    assert both.metric("tandem_router_workers", model="wide", role="aggregated") == 1
    assert both.metric("tandem_generated_tokens_total", model="wide", worker="aggregated-0") > 0


def test_one_goes_on_without_the_other(both: Cluster) -> None:
    worker = both.pids["aggregated-0"]
    os.kill(worker, signal.SIGSTOP)
    try:
        deadline = time.monotonic() + 60
        while both.metric("tandem_router_workers", model="wide"):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        for name in ("wide", "org/large:latest"):
            refused = post(both, name)
            assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
            assert "No worker of the model `wide`" in refused.json()["error"]["message"]
        assert post(both, "small").status_code == 200 and post(both, "gpt-4o", stream=True).status_code == 200
        assert httpx.get(both.url + "/health", timeout=30).status_code == 200  # for those that there are
        models = httpx.get(both.admin + "/api/live", timeout=30).json()["models"]
        assert {each["name"]: each["state"] for each in models} == {"small": "ready", "wide": "waiting for workers"}
        assert len(httpx.get(both.url + "/v1/models", timeout=30).json()["data"]) == 4
    finally:
        os.kill(worker, signal.SIGCONT)
    deadline = time.monotonic() + 60
    while post(both, "wide").status_code != 200:
        assert time.monotonic() < deadline
        time.sleep(0.2)
