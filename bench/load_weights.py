"""How fast a checkpoint is loaded, beside mapping its file and copying tensors: `python -m bench.load_weights`.

Writes a bfloat16 checkpoint, then loads it both ways in turns: from the page cache, or with --cold from the disk. A
table of seconds and GB/s, one row a round, goes to stdout.
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from bench.gpu_engine import SHAPES
from engine.config import read_config
from engine.models.registry import model_class
from engine.weights.place import Place
from engine.weights.read import read_tensors
from engine.weights.safetensors_file import stored_tensors


def write_checkpoint(folder: Path, shape: str, layers: int) -> None:
    """A model of `layers` layers in bfloat16."""
    (folder / "config.json").write_text(json.dumps(SHAPES[shape] | {"num_hidden_layers": layers}))
    config = read_config(folder)
    with torch.device("meta"):
        places = model_class(config)(config).places()
    tensors = {name: torch.full(place.shape, 0.5, dtype=torch.bfloat16) for name, place in places.items()}
    save_file(tensors, folder / "model.safetensors")


def fresh_places(folder: Path, dtype: torch.dtype, device: str) -> dict[str, Place]:
    """The places of a model without weights."""
    config = read_config(folder)
    with torch.device("meta"):
        model = model_class(config)(config)
    return model.to(dtype).to_empty(device=device).places()


def mapped(folder: Path, places: dict[str, Place]) -> None:
    """Maps the file and copies tensor by tensor."""
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - not a dict
            places[name].destination.copy_(file.get_tensor(name))


def parallel(folder: Path, places: dict[str, Place]) -> None:
    """As the engine does."""
    tensors = stored_tensors(folder / "model.safetensors")
    read_tensors([(tensor, places[tensor.name]) for tensor in tensors], lambda done, total, name: None)


def evict(path: Path) -> None:
    """Drops the file from the page cache."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> None:
    """Command line of this module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-8b")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--cold", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_checkpoint(folder, arguments.shape, arguments.layers)
        path = folder / "model.safetensors"
        size = path.stat().st_size
        path.read_bytes()
        print(f"{arguments.shape}, {arguments.layers} layers, {size / 1e9:.2f} GB, {arguments.device}", end=", ")
        print("from the disk" if arguments.cold else "from the page cache", end=", ")
        print(f"{os.cpu_count()} cores, torch {torch.__version__}, {torch.get_num_threads()} threads\n")
        print("| into | round | mapped, s | GB/s | parallel, s | GB/s | ratio |\n|---|---|---|---|---|---|---|")
        for dtype in (torch.bfloat16, torch.float32):
            for number in range(1, arguments.rounds + 1):
                seconds = []
                for way in (mapped, parallel):
                    places = fresh_places(folder, dtype, arguments.device)
                    if arguments.cold:
                        evict(path)
                    started = time.monotonic()
                    way(folder, places)
                    if arguments.device != "cpu":
                        torch.cuda.synchronize()
                    seconds.append(time.monotonic() - started)
                    del places
                cells = " | ".join(f"{s:.2f} | {size / s / 1e9:.2f}" for s in seconds)
                print(f"| {dtype} | {number} | {cells} | {seconds[0] / seconds[1]:.2f} |", flush=True)


if __name__ == "__main__":
    main()
