"""How an engine starts on a CUDA device once its model is there.

A trial engine with a small cache captures its graphs and computes the largest steps. What it took tells how large the
cache of the real one can be. Along the way kernels are compiled, and what fails, fails at start.
"""

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import msgspec
import torch

from engine.kv_cache import KVCacheSpec
from engine.loaded import LoadedModel
from engine.memory import DeviceMemory, DoesNotFit, gib, require_cache, trial_blocks, trial_prompts
from engine.parallel.messages import Room
from engine.request import Request, SamplingParams

if TYPE_CHECKING:
    from engine.engine import Engine, EngineConfig

# The token is chosen on the device; or with everything that a request can ask for, which takes the most memory.
_PLAIN = SamplingParams(max_tokens=2, temperature=1.0)
_EVERYTHING = SamplingParams(
    max_tokens=2,
    temperature=1.0,
    top_k=50,
    top_p=0.9,
    min_p=0.01,
    repetition_penalty=1.1,
    frequency_penalty=0.1,
    presence_penalty=0.1,
    logit_bias={0: 1.0},
    logprobs=5,
    prompt_logprobs=0,
)


def start(
    loaded: LoadedModel,
    config: "EngineConfig",
    make: Callable[["EngineConfig"], "Engine"],
    on_stage: Callable[[str], None],
) -> "Engine":
    """An engine by `make`, warmed up; its cache is as large as the configuration says, or as there is room.

    Raises DoesNotFit.
    """
    longest = loaded.config.max_position_embeddings
    steps = trial_prompts(config.max_batched_tokens, config.max_running, min(config.max_model_len or longest, longest))
    block_bytes = KVCacheSpec.of(loaded.config, config.block_size, config.cache_dtype).block_bytes
    with out_of_memory_told(config.device):
        memory = None
        if config.num_blocks is not None or config.kv_memory is not None:
            needed = config.kv_memory or 0 if config.num_blocks is None else config.num_blocks * block_bytes
            require_cache(needed, *torch.cuda.mem_get_info(config.device))
        else:
            on_stage("a trial of the largest steps, which tells how much memory is left")
            blocks = trial_blocks(steps, config.block_size)
            trial = make(msgspec.structs.replace(config, num_blocks=blocks, max_model_len=None))
            warm_up(trial, steps)
            with loaded.group.together(Room()):
                memory, left = room(trial, loaded)
            del trial
            give_back()
            config = msgspec.structs.replace(config, num_blocks=memory.num_blocks(block_bytes, left))
            steps = steps[:1]
        on_stage(f"CUDA graphs of steps of up to {config.max_running} sequences")
        engine = make(config)
        engine.memory = memory
        warm_up(engine, steps)
    return engine


@contextlib.contextmanager
def out_of_memory_told(device: str) -> Iterator[None]:
    """Turns running out of the device's memory into DoesNotFit."""
    try:
        yield
    except RuntimeError as error:
        # A capture that runs out of memory fails once more when it ends, and the ranks of a group fail with it.
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, torch.OutOfMemoryError):
            cause = cause.__cause__ or cause.__context__
        if cause is None:
            raise
        raise _no_room(device, str(cause)) from error


def room(engine: "Engine", loaded: LoadedModel) -> tuple[DeviceMemory, int]:
    """Where this rank's memory went while `engine` computed the largest steps, and the bytes that all ranks have left.

    Torch has given nothing back since, so that what is free now was so at the peak.
    """
    cache = engine.kv_cache.tensor
    free, total = torch.cuda.mem_get_info(cache.device)
    work = total - free - loaded.elsewhere - loaded.weights - cache.nbytes
    memory = DeviceMemory(total=total, elsewhere=loaded.elsewhere, weights=loaded.weights, work=work)
    return memory, loaded.group.least(memory.left)


def give_back() -> None:
    """Gives memory back to the device that nobody refers to any more."""
    gc.collect()
    torch.cuda.empty_cache()


def warm_up(engine: "Engine", steps: list[list[int]]) -> None:
    """Computes prompts of these lengths, each step's at once. Raises DoesNotFit if that takes too much memory."""
    room = engine.max_model_len - 2
    for lengths in steps:
        for sampling in (_PLAIN, _EVERYTHING):
            for number, length in enumerate(lengths):
                prompt = [0] * max(1, min(length, room))
                engine.add(Request(request_id=f"warm-up-{number}", prompt_token_ids=prompt, sampling=sampling))
            while engine.has_work():
                for output in engine.step().outputs:
                    if output.error is None:
                        continue
                    if "OutOfMemory" in output.error:  # the engine gives what a step raises as text
                        raise _no_room(str(engine.kv_cache.tensor.device), output.error)
                    raise RuntimeError(f"a first step of {len(lengths)} prompts fails: {output.error}")
            engine.clear_cache()
    engine.drain_events()


def _no_room(device: str, error: str) -> DoesNotFit:
    free, total = torch.cuda.mem_get_info(device)
    return DoesNotFit(
        f"the device has {gib(total)}, of which {gib(free)} are free, and that is too little for KV cache, CUDA graphs "
        f"and the largest step: lower --kv-memory, --max-batched-tokens or --max-running, or stop what else uses the "
        f"device ({error})"
    )
