"""A rank's share of a model in memory: what engines with caches of any size are made of."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from engine.config import ModelConfig, fingerprint
from engine.layers.decoder import Decoder
from engine.offload import Offload
from engine.parallel.group import Group
from engine.weights.load import load_model
from engine.weights.read import Progress

if TYPE_CHECKING:
    from engine.engine import EngineConfig


@dataclass(frozen=True)
class LoadedModel:
    """A model, or one rank's share of it."""

    model: Decoder
    config: ModelConfig
    fingerprint: str
    group: Group
    elsewhere: int  # bytes of the CUDA device that were in use before: by other processes, by the driver
    weights: int  # bytes of the CUDA device that the model took
    offload: Offload
    kv_scales: tuple[tuple[int, int], ...] = ()  # of its KV cache, see KVCacheSpec


def load(folder: Path, config: "EngineConfig", group: Group, progress: Progress) -> LoadedModel:
    """Loads this rank's share of the model of a Hugging Face folder. Raises ModelError, or DoesNotFit."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    if config.device == "cpu":
        # Tensors of 2 MiB and more in huge pages, where Linux gives them: torch reads this variable once, at its first.
        os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    elsewhere = 0 if config.device == "cpu" else in_use(config.device)
    model, model_config = load_model(
        folder,
        dtype=getattr(torch, config.dtype),
        device=config.device,
        quantization=config.quantization,
        kv_fp8=config.kv_dtype == "fp8",
        dummy_seed=config.dummy_seed,
        group=group,
        progress=progress,
    )
    weights = 0 if config.device == "cpu" else in_use(config.device) - elsewhere
    group.join()
    identity = fingerprint(folder, config.dtype, config.quantization)
    if config.dummy_seed is not None:
        identity += f"-dummy-{config.dummy_seed}"
    return LoadedModel(model, model_config, identity, group, elsewhere, weights, Offload(model), model.kv_scales)


def in_use(device: str) -> int:
    """Bytes of a CUDA device that anybody uses, without what torch only keeps for later."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return total - free
