"""How to start a planned deployment: a command of this machine, an override of compose.yaml, values of the Helm chart.

Files are JSON behind a comment, which is YAML as well.
"""

import json
import shlex
from pathlib import Path
from typing import Any, Literal

from bench.errors import BenchError
from planner.offer import Offer
from planner.sizing import Deployment

Form = Literal["compose", "helm"]

# Label nvidia.com/gpu.product that GPU feature discovery gives nodes; of cards by the names of `planner.priors`.
_PRODUCTS = {
    "A100": "NVIDIA-A100-SXM4-80GB",
    "H100": "NVIDIA-H100-80GB-HBM3",
    "H200": "NVIDIA-H200",
    "B200": "NVIDIA-B200",
    "L40S": "NVIDIA-L40S",
}
_NAMES: dict[Form, str] = {"compose": "compose.plan.yaml", "helm": "values.plan.yaml"}


def parse_write(text: str) -> tuple[Form, Path]:
    """Of "helm", or "helm=FILE". Raises BenchError."""
    form, _, file = text.partition("=")
    if form not in _NAMES:
        raise BenchError(f"--write {text!r}: give compose or helm, or with a file, as helm=values.yaml")
    path = Path(file or _NAMES[form])
    if not path.absolute().parent.is_dir() or path.is_dir():
        raise BenchError(f"--write {text}: {path} cannot be a file")
    return form, path


def start_command(deployment: Deployment) -> str:
    """How to start it on one machine; where sides differ in GPUs a worker, what to do instead."""
    offer, first = deployment.family.offer, deployment.family.prefill
    if first is None:
        flags = ["--aggregated", str(deployment.others)]
    else:
        flags = ["--prefill", str(deployment.prefill), "--decode", str(deployment.others)]
    if first is not None and first.gpus != offer.gpus:
        sides = f"{first.gpus} GPUs for each worker that prefills and {offer.gpus} for each that decodes"
        return f"{sides}: `tandem up` has workers of one size, --write compose or helm says how to start these"
    flags += ["--tensor-parallel", str(offer.gpus)] if offer.gpus > 1 else []
    return shlex.join(["tandem", "up", *flags])


def pools(deployment: Deployment) -> dict[str, tuple[int, Offer]]:
    """Workers by role, and what they are."""
    offer, first = deployment.family.offer, deployment.family.prefill
    if first is None:
        return {"aggregated": (deployment.others, offer)}
    return {"prefill": (deployment.prefill, first), "decode": (deployment.others, offer)}


def write_deployment(form: Form, path: Path, deployment: Deployment, *, measured: bool) -> Path:
    """Writes it. `measured`: step times are those of a machine that is there, so that nothing is said of cards unless a
    worker has several. Raises BenchError.
    """
    on_gpus = not measured or any(offer.gpu or offer.gpus > 1 for _, offer in pools(deployment).values())
    if form == "helm":
        content = helm_values(deployment, on_gpus=on_gpus)
        how = f"helm install tandem k8s/tandem -f {path} -f YOUR-VALUES.yaml   # with model.path and model.volume"
    else:
        content = compose_override(deployment, on_gpus=on_gpus)
        profile = " --profile aggregated" if "aggregated" in pools(deployment) and not on_gpus else ""
        how = f"docker compose -f compose.yaml -f {path}{profile} up"
    text = f"# {deployment}, of `tandem plan`. In a checkout:\n#   {how}\n" + json.dumps(content, indent=2) + "\n"
    try:
        path.write_text(text)
    except OSError as error:
        raise BenchError(f"--write: {path} cannot be written: {error.strerror}") from None
    return path


def helm_values(deployment: Deployment, *, on_gpus: bool) -> dict[str, Any]:
    """Pools of the chart; where cards differ, each on nodes of its own."""
    found: dict[str, Any] = {}
    wanted = pools(deployment)
    differ = len({offer.gpu for _, offer in wanted.values()}) > 1
    for role, (count, offer) in wanted.items():
        pool: dict[str, Any] = {"role": role, "replicas": count}
        if on_gpus:
            pool["gpus"] = offer.gpus
            pool["tolerations"] = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
        if differ:
            pool["nodeSelector"] = {"nvidia.com/gpu.product": _PRODUCTS.get(offer.gpu, offer.gpu)}
        found[role] = pool
    return {"pools": {role: found.get(role) for role in dict.fromkeys(["prefill", "decode", *found])}}


def compose_override(deployment: Deployment, *, on_gpus: bool) -> dict[str, Any]:
    """Numbers of containers; on GPUs one service a worker, each with cards of its own. Raises BenchError."""
    wanted = pools(deployment)
    if len({offer.gpu for _, offer in wanted.values()}) > 1:
        raise BenchError("--write compose: one machine has one kind of card, and this plan has two: give --write helm")
    services: dict[str, Any] = {role: {"deploy": {"replicas": 0}} for role in ("prefill", "decode")}
    if not on_gpus:
        return {"services": services | {role: {"deploy": {"replicas": count}} for role, (count, _) in wanted.items()}}
    card = 0
    for role, (count, offer) in wanted.items():
        for number in range(1, count + 1):
            cards = [str(each) for each in range(card, card + offer.gpus)]
            card += offer.gpus
            services[f"{role}-{number}"] = {
                # Not of `gpu`: its list of devices, and its profile, would stay beside these.
                "extends": {"file": "compose.yaml", "service": "prefill"},
                "image": "${TANDEM_GPU_IMAGE:-tandem-worker-gpu}",
                "build": {"target": "worker-gpu"},
                "command": ["serve", role],
                "environment": {
                    "TANDEM_DEVICE": "cuda",
                    "TANDEM_TENSOR_PARALLEL": str(offer.gpus),
                    "TRITON_CACHE_DIR": "/triton",
                },
                "tmpfs": ["/triton:exec"],  # compiled launchers
                "deploy": {
                    "replicas": 1,
                    "resources": {
                        "reservations": {
                            "devices": [{"driver": "nvidia", "device_ids": cards, "capabilities": ["gpu"]}]
                        }
                    },
                },
            }
    return {"services": services}
