"""The arithmetic of device memory: what is left for the KV cache, and what is said when something does not fit."""

import subprocess
import sys
from pathlib import Path

import pytest

from engine.engine import Engine, EngineConfig
from engine.memory import (
    DeviceMemory,
    DoesNotFit,
    describe_cache,
    host_memory,
    model_len,
    require_cache,
    require_host_cache,
    require_weights,
    trial_blocks,
    trial_prompts,
)

GIB = 1 << 30
CARD = DeviceMemory(total=80 * GIB, elsewhere=GIB, weights=15 * GIB, work=3 * GIB)


def test_the_cache_gets_what_the_others_leave() -> None:
    assert CARD.reserve == int(1.6 * GIB)
    assert CARD.left == CARD.total - CARD.elsewhere - CARD.weights - CARD.work - CARD.reserve
    blocks = CARD.num_blocks(2 << 20, CARD.left)
    assert blocks * (2 << 20) <= CARD.left < (blocks + 1) * (2 << 20)
    assert CARD.num_blocks(2 << 20, GIB) == 512  # another rank has less
    assert describe_cache(25770, 16, 2 << 20) == "KV cache: 412,320 tokens (50.3 GiB)"
    assert describe_cache(3, 16, 1 << 20) == "KV cache: 48 tokens (3.0 MiB)"
    assert describe_cache(1, 16, 12288) == "KV cache: 16 tokens (12.0 KiB)"


@pytest.mark.parametrize("weights", [76 * GIB, 79 * GIB, 100 * GIB])
def test_no_room_for_a_block(weights: int) -> None:
    card = DeviceMemory(total=80 * GIB, elsewhere=GIB, weights=weights, work=3 * GIB)
    with pytest.raises(DoesNotFit) as told:
        card.num_blocks(2 << 20, card.left)
    for words in ("80.0 GiB, weights take", f"{weights // GIB:.1f} GiB", "CUDA graphs 3.0 GiB", "others 1.0 GiB"):
        assert words in str(told.value)
    assert "1.6 GiB stay free" in str(told.value) and "--max-batched-tokens" in str(told.value)


def test_weights_and_caches_that_do_not_fit() -> None:
    require_weights(10 * GIB, 10 * GIB, 80 * GIB)
    with pytest.raises(DoesNotFit, match=r"the weights need 140\.0 GiB; the device has 78\.5 GiB of 80\.0 GiB free"):
        require_weights(140 * GIB, 785 * GIB // 10, 80 * GIB)
    require_cache(10 * GIB, 10 * GIB, 80 * GIB)
    with pytest.raises(
        DoesNotFit, match=r"KV cache needs 70\.0 GiB; .* has 60\.0 GiB of 80\.0 GiB free\. .*--kv-memory"
    ):
        require_cache(70 * GIB, 60 * GIB, 80 * GIB)


def test_a_cache_that_the_machine_has_no_room_for(llama_folder: Path) -> None:
    free, total = host_memory()
    assert 0 < free < total
    require_host_cache(GIB, GIB, 4 * GIB)
    with pytest.raises(DoesNotFit, match=r"needs 9\.0 GiB; the machine has 2\.5 GiB of 4\.0 GiB free\. Lower --kv-mem"):
        require_host_cache(9 * GIB, 5 * GIB // 2, 4 * GIB)
    with pytest.raises(DoesNotFit, match="the KV cache needs"):
        Engine.build(llama_folder, EngineConfig(kv_memory=2 * total, threads=1))
    with pytest.raises(DoesNotFit, match="the KV cache needs"):  # the two ranks' together
        Engine.build(llama_folder, EngineConfig(kv_memory=total * 2 // 3, threads=1, tensor_parallel=2))


def test_longest_request() -> None:
    size = {"num_blocks": 100, "block_size": 16, "block_bytes": 2 << 20}
    assert model_len(None, 1000, **size) == 1000
    assert model_len(None, 131_072, **size) == 1600  # as far as the cache goes
    assert model_len(800, 1000, **size) == 800
    assert model_len(4000, 1000, **size) == 1000  # no more than the model was made for
    assert model_len(1600, 4096, **size) == 1600
    with pytest.raises(DoesNotFit, match=r"--max-model-len 1601 needs a KV cache of 202\.0 MiB; .* for 1600 tokens"):
        model_len(1601, 4096, **size)
    with pytest.raises(DoesNotFit, match=r"at least one block of 2\.0 MiB"):
        model_len(None, 4096, **size | {"num_blocks": 0})


@pytest.mark.parametrize("budget", [1, 7, 512, 16384])
@pytest.mark.parametrize("running", [1, 64, 256])
@pytest.mark.parametrize("longest", [3, 2048, 131_072])
def test_trial_steps_use_the_budget_and_find_room(budget: int, running: int, longest: int) -> None:
    single, chunk, crowd = trial_prompts(budget, running, longest)
    assert single == [1]
    assert chunk == [min(budget, longest)]
    assert len(crowd) == running and len(set(crowd)) == 1 and crowd[0] <= longest
    assert sum(crowd) <= max(budget, running)
    assert crowd[0] == longest or sum(crowd) > budget - running
    for block_size in (1, 16, 128):
        blocks = trial_blocks([single, chunk, crowd], block_size)
        for lengths in (single, chunk, crowd):
            held = sum(-(-(length + 2) // block_size) for length in lengths)
            assert held + len(lengths) <= blocks  # and one free for each that runs


def test_needs_no_torch() -> None:
    code = "import sys, engine.memory; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
