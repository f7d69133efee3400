"""What `tandem up --on ray` asks of a Ray cluster, and whether the cluster has it. Without Ray itself."""

import importlib.util
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import msgspec

from services.config import ConfigError, is_loopback

Resources = Mapping[str, float]  # Ray's name of a resource -> how much
_ELSEWHERE = "192.0.2.1"  # reserved for documents: of no machine, so it is reached by the default route


class CannotRun(Exception):
    """Another try would end the same way; the message says what to do."""


class RayWorkerPlan(msgspec.Struct, frozen=True):
    """One worker: a bundle of the placement group and the actor in it."""

    name: str
    role: str
    model: str  # as a user would name it on each node
    settings: dict[str, str]  # of this worker alone


class RayPlan(msgspec.Struct, frozen=True):
    """What the launcher is told on its command line, so there is nothing secret in it."""

    address: str  # ray://HOST:PORT; empty: $RAY_ADDRESS, else the cluster that this machine is part of
    strategy: Literal["spread", "pack"]
    workers: list[RayWorkerPlan]
    most_workers: int | None = None  # of a model, as `Wishes` takes it; None: the planner's wishes are not followed


def check_address(on: str) -> str:
    """The address in `--on`; empty for `--on ray`. Raises ConfigError, also where Ray is not installed."""
    parts = urlsplit(on)
    if on != "ray" and not (parts.scheme == "ray" and parts.hostname and parts.port):
        raise ConfigError(f"--on {on}: write ray for the Ray cluster of this machine, or ray://HOST:10001 for another")
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("--on ray needs Ray, here and on its nodes: pip install 'tandem-serve[ray]'")
    return "" if on == "ray" else on


def model_on_nodes(model: str) -> str:
    """The name by which each node finds the model itself: a path is made absolute."""
    path = Path(model).expanduser()
    return str(path.resolve()) if path.exists() else model


def own_address(ray_address: str) -> str:
    """The IPv4 address by which Ray's nodes reach this machine; loopback if there can be no other machine."""
    host = urlsplit(ray_address).hostname
    for target in (host, _ELSEWHERE) if host else (_ELSEWHERE,):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((target, 9))  # of a datagram socket: asks for a route and sends nothing
            except OSError:
                continue
            if not is_loopback(address := str(probe.getsockname()[0])):
                return address
    return "127.0.0.1"


def does_not_fit(bundles: Mapping[str, Resources], nodes: list[Resources]) -> str:
    """Why these bundles find no place even if nothing else ran on the nodes; empty if they do."""
    left = [dict(node) for node in nodes]
    for name, bundle in sorted(bundles.items(), key=lambda item: _size(item[1]), reverse=True):
        # The fullest node that will do, so that large bundles find room.
        room = sorted((node for node in left if _holds(node, bundle)), key=_size)
        if not room:
            return (
                f"{name} needs {told(bundle)} of one node, and no node of the Ray cluster has that beside the other "
                f"workers: {_all_told(nodes)}; start fewer workers, lower --threads, or add nodes"
            )
        for resource, amount in bundle.items():
            room[0][resource] -= amount
    return ""


def is_taken(bundles: Mapping[str, Resources], free: Resources, nodes: list[Resources]) -> str:
    """Says that others use what these bundles need."""
    needed = {
        resource: sum(bundle.get(resource, 0) for bundle in bundles.values())
        for resource in sorted({resource for bundle in bundles.values() for resource in bundle})
    }
    return (
        f"the workers ({', '.join(bundles)}) need {told(needed)}, and others use the Ray cluster's: {told(free)} are "
        f"free of {_all_told(nodes)}; `ray status` shows who has them"
    )


def told(resources: Resources) -> str:
    """For people, as `2 CPU, 1 GPU`; what is no CPU or GPU is left out."""
    return ", ".join(f"{resources[name]:g} {name}" for name in ("CPU", "GPU") if resources.get(name)) or "0 CPU"


def _all_told(nodes: list[Resources]) -> str:
    return f"{len(nodes)} nodes with " + "; ".join(told(node) for node in nodes)


def _holds(node: Resources, bundle: Resources) -> bool:
    return all(node.get(resource, 0) >= amount for resource, amount in bundle.items())


def _size(resources: Resources) -> tuple[float, float]:
    return resources.get("GPU", 0), resources.get("CPU", 0)
