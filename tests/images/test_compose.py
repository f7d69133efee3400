"""compose.yaml in a real Docker daemon: images build, a cluster serves, loses a worker, stops, and leaves nothing."""

import concurrent.futures
import json
import os
import re
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from images.compose import ROOT, Project, build_images, docker, docker_folder

pytestmark = [pytest.mark.docker, pytest.mark.timeout(900)]
MODEL = "SmolLM2-135M-Instruct"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with docker(docker_folder(tmp_path_factory)) as found:
        yield found


@pytest.fixture(scope="module")
def project(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    folder = tmp_path_factory.mktemp("compose")
    running = Project(build_images(environment, folder), folder)
    try:
        running.compose("up", "--detach", "--no-build", "--wait", timeout=600)
        yield running
    finally:
        running.compose("down", "--volumes", "--timeout", "5")


def ask(project: Project, question: str, num_tokens: int, started: threading.Semaphore | None = None) -> str:
    """The answer of a stream that must end well; `started` is released when its first text is there."""
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    text = ""
    url = project.url + "/v1/chat/completions"
    with httpx.stream("POST", url, json=body, headers=project.headers, timeout=300) as answer:
        assert answer.status_code == 200, answer.read()
        lines = [line for line in answer.iter_lines() if line] if started is None else _signalled(answer, started)
    assert lines[-1] == "data: [DONE]", lines[-1]
    for line in lines[:-1]:
        event = json.loads(line.removeprefix("data: "))
        assert "error" not in event, event
        text += "".join(choice["delta"].get("content") or "" for choice in event["choices"])
    return text


def _signalled(answer: httpx.Response, started: threading.Semaphore) -> list[str]:
    lines: list[str] = []
    for line in filter(None, answer.iter_lines()):
        lines.append(line)
        if len(lines) == 5:
            started.release()
    return lines


def test_without_keys_nothing_starts(environment: dict[str, str]) -> None:
    done = subprocess.run(
        ["docker", "compose", "--env-file", os.devnull, "config"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0 and "deploy/env.sh" in done.stderr


def test_profiles(project: Project) -> None:
    """What all profiles mount is in this repository, and what they publish is for this machine."""
    config = json.loads(project.compose("--profile", "*", "config", "--format", "json"))
    assert {"prefill", "aggregated", "gpu", "prometheus", "grafana", "otel", "tempo"} <= config["services"].keys()
    for name, service in config["services"].items():
        assert {port["host_ip"] for port in service.get("ports", [])} <= {"127.0.0.1"}, name
        mounts = [volume["source"] for volume in service.get("volumes", []) if volume["type"] == "bind"]
        assert [source for source in mounts if not Path(source).exists()] == [], name


def test_containers_are_locked(project: Project) -> None:
    """No root, nothing to write to, no capabilities; only the gateway has ports, on loopback."""
    containers = project.containers()
    assert len(containers) == 8  # gateway, router, planner, Redis, two of each worker
    for name, container in containers.items():
        host = container["HostConfig"]
        assert container["Config"]["User"] not in ("", "0", "root"), name
        assert host["ReadonlyRootfs"] and host["CapDrop"] == ["ALL"] and not host["Privileged"], name
        assert container["State"]["Health"]["Status"] == "healthy", name
        published = {binding["HostIp"] for bindings in host["PortBindings"].values() for binding in bindings}
        assert published == ({"127.0.0.1"} if "gateway" in name else set()), name


def test_chat(project: Project) -> None:
    """Only with a key; the KV cache moves from one container to another."""
    question = "What is the capital of France? Say it in one sentence, and then tell me about its rivers and bridges."
    assert "Paris" in ask(project, question, 24)
    assert httpx.post(project.url + "/v1/chat/completions", json={}, timeout=10).status_code == 401
    assert httpx.get(project.admin + "/metrics", headers=project.headers, timeout=10).status_code == 401
    moved = re.findall(r"^tandem_kv_transfer_bytes_total\{.*\} (\S+)$", project.metrics(), re.MULTILINE)
    assert sum(map(float, moved)) > 0


def test_the_planner_sees_them_and_advises(project: Project) -> None:
    """It hears of the gateway, the router and workers in other containers, and the gateway of its decisions."""
    headers = {"authorization": f"Bearer {project.settings['TANDEM_ADMIN_KEY']}"}
    decision = {}
    for _ in range(60):
        told = httpx.get(project.admin + "/admin/planner", headers=headers, timeout=10).raise_for_status().json()
        if told.get(MODEL):
            (decision,) = told[MODEL]
            break
        time.sleep(0.5)
    assert decision["mode"] == "advise" and decision["window"]["arrivals"] is not None
    assert decision["have"] == {"prefill": 2, "decode": 2, "aggregated": 0}


def test_a_decode_container_is_killed(project: Project) -> None:
    """Every stream goes on, with the text that it would have had."""
    questions = [f"Tell me a story about the number {number}, a fox and a river." for number in range(8)]
    expected = [ask(project, question, 48) for question in questions]
    started = threading.Semaphore(0)
    with concurrent.futures.ThreadPoolExecutor(len(questions)) as pool:
        answers = [pool.submit(ask, project, question, 48, started) for question in questions]
        for _ in questions[:6]:
            assert started.acquire(timeout=120)
        busy = max(project.containers("decode"))
        project.docker("kill", "--signal", "KILL", busy)
        assert [answer.result() for answer in answers] == expected
    assert project.containers("decode")[busy]["State"]["ExitCode"] == 137
    assert "Paris" in ask(project, "What is the capital of France?", 12)


def test_stop_drains(project: Project) -> None:
    """SIGTERM ends every process by itself, with status 0, and a running answer first."""
    started = threading.Semaphore(0)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, project, "Count to one hundred.", 64, started)
        assert started.acquire(timeout=120)
        project.compose("stop", "decode", "prefill")
        assert answer.result()
    project.compose("stop")
    states = {name: container["State"]["ExitCode"] for name, container in project.containers().items()}
    assert sorted(states.values()) == [0] * 7 + [137], states  # the killed one


def test_down_leaves_nothing(project: Project) -> None:
    assert all(project.left().values())
    project.compose("down", "--volumes")
    assert project.left() == {"containers": [], "networks": [], "volumes": []}
