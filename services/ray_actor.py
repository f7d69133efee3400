"""A worker of the cluster on a Ray node: an actor that runs `tandem serve` as its child and shares its fate."""

import functools
import os
import subprocess
import sys
import threading
import time
import warnings

import ray

from services.config import WorkerConfig
from services.process import die_with_parent
from services.supervisor import EXIT_CONFIGURATION

# The node's own do not count: a worker must be the same wherever Ray puts it.
_SETTINGS = {f"TANDEM_{name.upper()}" for name in (*WorkerConfig.__struct_fields__, "config")}
_YOUNG_SECONDS = 30.0  # a worker that ends sooner
_YOUNG_PAUSE = 2.0  # is started again after so long; Ray itself does not wait
_HOPELESS_PAUSE = 10.0  # one that this node's model or configuration kept from running


def model_here(model: str) -> tuple[str, str]:
    """The model's folder on this node, or why there is none."""
    done = subprocess.run([sys.executable, "-m", "engine.weights.resolve", model], capture_output=True, text=True)
    if done.returncode == 0:
        return done.stdout.splitlines()[-1], ""
    return "", (
        f"node {ray.util.get_node_ip_address()}: {done.stderr.strip().removeprefix('error: ')}; "
        "the model must be found by the same name on all nodes that Ray may choose"
    )


class RayWorker:
    """Made, restarted and moved to other nodes by Ray. Made of `environment`, what the child is told beside its node's
    own, and `model`, as a user of this node would name it.

    The worker is a process of its own: Ray's threads stay out of its steps, and its exit status tells why it ended.
    """

    def __init__(self, name: str, role: str, model: str, environment: dict[str, str]) -> None:
        self._name = name
        self._role = role
        self._model = model
        self._environment = environment
        self._stopping = threading.Event()
        self._child: subprocess.Popen[bytes] | None = None

    def __repr__(self) -> str:
        """Stands before each line that the actor and its child print."""
        return self._name

    def run(self) -> str:
        """Serves until `stop`, and returns nothing then; else why the worker cannot run, found at its first start.

        Whenever it ends otherwise the actor ends, too, and Ray starts both again: the call is then made anew.
        """
        began = time.monotonic()
        folder, reason = model_here(self._model)
        if not reason:
            code = self._serve(folder)
            if code == EXIT_CONFIGURATION:
                reason = f"{self._name} cannot run with this configuration; see its last lines above"
            else:
                print(f"the worker ended with status {code}", flush=True)
        if self._stopping.is_set():
            return ""
        if reason and not _was_restarted():
            return reason
        if reason:
            print(reason, flush=True)
        young = time.monotonic() - began < _YOUNG_SECONDS
        self._stopping.wait(_HOPELESS_PAUSE if reason else _YOUNG_PAUSE if young else 0)
        if not self._stopping.is_set():
            os._exit(1)
        return ""

    def stop(self) -> None:
        """Has the worker drain and end."""
        self._stopping.set()
        if self._child is not None:
            self._child.terminate()
            self._child.wait()

    def _serve(self, folder: str) -> int:
        """Runs `tandem serve`; its exit status. In this thread to its end, as the child dies with the thread."""
        address = ray.util.get_node_ip_address()
        own = {"TANDEM_MODEL": folder, "TANDEM_BIND": address, "TANDEM_NAME": self._name}
        child = subprocess.Popen(
            [sys.executable, "-m", "services.cli", "serve", self._role],
            stdin=subprocess.DEVNULL,
            env={name: value for name, value in os.environ.items() if name not in _SETTINGS} | self._environment | own,
            preexec_fn=functools.partial(die_with_parent, os.getpid()),
        )
        print(f"pid {child.pid} on node {address}", flush=True)
        self._child = child
        if self._stopping.is_set():
            child.terminate()
        return child.wait()


def _was_restarted() -> bool:
    """Whether Ray has started this actor before."""
    with warnings.catch_warnings(action="ignore"):  # Ray asks itself in a way that it advises against
        return bool(ray.get_runtime_context().was_current_actor_reconstructed)
