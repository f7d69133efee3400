"""Docker for tests: a daemon, images of this checkout, and compose.yaml as a project of its own that leaves nothing."""

import contextlib
import functools
import http.server
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from cluster.harness import free_port

ROOT = Path(__file__).parents[2]
BASE = "python:3.11-slim"
REDIS = "redis:7.4-alpine"
STAND_IN = "tandem-stand-in"  # for the base image, where no registry can be reached
INDEX_PORT = 18931  # always the same: layers depend on the URL
TORCH = next(line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch=="))


def command(*arguments: str, env: dict[str, str], timeout: float = 120) -> str:
    """Standard output; fails with both ends of what it said."""
    done = subprocess.run(arguments, cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout)
    if done.returncode != 0:
        pytest.fail(f"{' '.join(arguments)}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return done.stdout


@contextlib.contextmanager
def docker(folder: Path) -> Iterator[dict[str, str]]:
    """The environment with which `docker compose` works here; skips where it cannot."""
    try:
        ready = subprocess.run(
            ["bash", str(ROOT / "deploy/docker.sh"), str(folder)], capture_output=True, text=True, timeout=300
        )
        if ready.returncode != 0:
            pytest.skip(f"no Docker here: {ready.stderr.strip().splitlines()[-1]}")
        yield os.environ | {"DOCKER_CONFIG": str(folder)}
    finally:
        if (number := folder / "dockerd.pid").exists():
            daemon = int(number.read_text())
            with contextlib.suppress(ProcessLookupError):
                os.kill(daemon, signal.SIGTERM)
                while (state := Path(f"/proc/{daemon}/stat")).exists() and state.read_text().split()[2] != "Z":
                    time.sleep(0.1)


@contextlib.contextmanager
def torch_index(folder: Path) -> Iterator[str | None]:
    """URL of an index with the CPU build of torch, if pip is configured to find that elsewhere than images would."""
    wheels = folder / "torch"
    got = subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(wheels), f"{TORCH}+cpu"],
        capture_output=True,
    )
    if got.returncode != 0:
        yield None
        return
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", INDEX_PORT), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def stand_in_for_redis(env: dict[str, str]) -> str:
    """Builds what replaces the Redis image where no registry can be reached, and what it is built on."""
    if subprocess.run(["docker", "image", "inspect", STAND_IN], env=env, capture_output=True).returncode != 0:
        command("bash", "deploy/base-image.sh", sys.executable, STAND_IN, env=env)  # again, all layers would be new
    build = f"docker buildx build --network host --build-arg BASE={STAND_IN} -t {STAND_IN}-redis"
    command(*build.split(), "--file", "tests/images/redis.Dockerfile", "tests/images", env=env)
    return f"{STAND_IN}-redis"


def redis_image(env: dict[str, str]) -> str:
    """The image of Redis that compose.yaml names, or its stand-in."""
    pulled = subprocess.run(["docker", "pull", "--quiet", REDIS], env=env, capture_output=True, timeout=300)
    return REDIS if pulled.returncode == 0 else stand_in_for_redis(env)


def docker_folder(folders: pytest.TempPathFactory) -> Path:
    """Where Docker's plugins are kept, from one run to the next if there is a place for them."""
    return ROOT / ".venv/docker" if (ROOT / ".venv").is_dir() else folders.mktemp("docker")


def build_images(env: dict[str, str], folder: Path) -> dict[str, str]:
    """Builds what compose.yaml says, on a stand-in where no base image can be had; returns how to use it."""
    settings = {"TANDEM_CONTROL_IMAGE": "tandem-test-control", "TANDEM_WORKER_IMAGE": "tandem-test-worker"}
    if subprocess.run(["docker", "pull", "--quiet", BASE], env=env, capture_output=True, timeout=300).returncode != 0:
        settings |= {"BASE": STAND_IN, "BUILD_NETWORK": "host", "REDIS_IMAGE": stand_in_for_redis(env)}
    secrets = dict.fromkeys(("TANDEM_CLUSTER_KEY", "TANDEM_ADMIN_KEY", "REDIS_PASSWORD"), "of no use for a build")
    with torch_index(folder) as index:
        build = env | settings | secrets | ({"TORCH_INDEX": index, "BUILD_NETWORK": "host"} if index else {})
        command("docker", "compose", "build", "router", "prefill", env=build, timeout=800)
    for name in ("TANDEM_CONTROL_IMAGE", "TANDEM_WORKER_IMAGE"):
        size = command("docker", "image", "inspect", "--format", "{{.Size}}", settings[name], env=env)
        print(f"{settings[name]}: {int(size) / 1e6:.0f} MB")
    return env | settings


class Project:
    """`docker compose` with settings of its own."""

    def __init__(self, env: dict[str, str], folder: Path) -> None:
        self.name = f"tandem-test-{os.getpid()}"
        self.url, self.admin = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
        ports = {"TANDEM_PORT": self.url.rpartition(":")[2], "TANDEM_ADMIN_PORT": self.admin.rpartition(":")[2]}
        self.env = env | ports | {"COMPOSE_PROFILES": "planner", "TANDEM_PLANNER_INTERVAL": "1"}
        self._file = folder / "env"
        command("bash", "deploy/env.sh", str(self._file), env=env)
        lines = [line.split("=", 1) for line in self._file.read_text().splitlines() if "=" in line and line[0] != "#"]
        self.settings = {name: value for name, value in lines}
        self.headers = {"authorization": f"Bearer {self.settings['TANDEM_API_KEYS']}"}

    def compose(self, *arguments: str, timeout: float = 120) -> str:
        """Standard output."""
        options = ("--project-name", self.name, "--env-file", str(self._file))
        return command("docker", "compose", *options, *arguments, env=self.env, timeout=timeout)

    def docker(self, *arguments: str) -> str:
        """Standard output."""
        return command("docker", *arguments, env=self.env)

    def containers(self, service: str = "") -> dict[str, dict[str, Any]]:
        """What `docker inspect` says of each, by name."""
        label = f"label=com.docker.compose.project={self.name}"
        found = self.docker("ps", "--all", "--quiet", "--filter", label).split()
        details = json.loads(self.docker("inspect", *found)) if found else []
        return {
            one["Name"].removeprefix("/"): one
            for one in details
            if service in ("", one["Config"]["Labels"]["com.docker.compose.service"])
        }

    def left(self) -> dict[str, list[str]]:
        """What there is of it, by kind."""
        label = ("--quiet", "--filter", f"label=com.docker.compose.project={self.name}")
        kinds = {"containers": ("ps", "--all"), "networks": ("network", "ls"), "volumes": ("volume", "ls")}
        return {kind: self.docker(*ask, *label).split() for kind, ask in kinds.items()}

    def metrics(self) -> str:
        """Of the whole cluster."""
        headers = {"authorization": f"Bearer {self.settings['TANDEM_ADMIN_KEY']}"}
        return httpx.get(self.admin + "/metrics", headers=headers, timeout=10).raise_for_status().text
