"""Sleep and wake: memory goes back and comes again, and tokens are those of an engine that never slept."""

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from engine.engine import Engine, EngineBusy, EngineConfig
from engine.layers.decoder import Decoder
from engine.memory import DoesNotFit
from engine.offload import move_storages
from engine.parallel.group import RankError
from engine.request import BlockStored, CacheCleared, Request, SamplingParams
from engine.weights.load import load_model

CONFIG = EngineConfig(kv_memory=96 << 20, block_size=8, max_batched_tokens=64, max_running=8, threads=1)
PROMPT = list(range(3, 60))


def build(folder: Path, ranks: int) -> Engine:
    return Engine.build(folder, msgspec.structs.replace(CONFIG, tensor_parallel=ranks))


@pytest.fixture(scope="module", params=[1, 2], ids=["one-rank", "two-ranks"])
def shared(request: pytest.FixtureRequest) -> Iterator[tuple[int, list[Engine]]]:
    """(ranks, the engine of all tests, if one lives). Another rank is a process that takes seconds to import torch."""
    engines: list[Engine] = []
    yield request.param, engines
    for engine in engines:
        engine.close()


@pytest.fixture
def engine(shared: tuple[int, list[Engine]], llama_folder: Path) -> Engine:
    """Awake and idle, with empty caches and no event left, as if it were new."""
    ranks, engines = shared
    if not engines:
        engines.append(build(llama_folder, ranks))
    assert not engines[0].has_work()
    engines[0].wake()
    engines[0].clear_cache()
    engines[0].drain_events()
    return engines[0]


def ask(engine: Engine, name: str = "x", prompt: list[int] = PROMPT, tokens: int = 20) -> tuple[list[int], int]:
    """(tokens, how many of the prompt were cached)."""
    sampling = SamplingParams(max_tokens=tokens, temperature=0.7, seed=4)
    engine.add(Request(request_id=name, prompt_token_ids=prompt, sampling=sampling))
    outputs = []
    while engine.has_work():
        outputs += engine.step().outputs
    assert [output.error for output in outputs if output.error] == []
    return [token for output in outputs for token in output.token_ids], outputs[0].cached_tokens


def resident() -> int:
    """Bytes of this process that lie in memory."""
    kib = re.search(r"^VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert kib
    return int(kib[1]) << 10


def test_tokens_are_the_same_after_a_sleep(engine: Engine) -> None:
    expected = ask(engine)
    assert ask(engine)[1] == 56  # the prefix cache works
    for _ in range(2):
        engine.sleep()
        engine.sleep()  # changes nothing
        engine.wake()
        engine.wake()
        assert ask(engine) == expected
    engine.sleep()
    assert engine.asleep and not engine.has_work()


def test_caches_are_forgotten_and_told_so(engine: Engine) -> None:
    ask(engine)
    known, generation = engine.snapshot_hashes(), engine.generation(0)
    assert len(known) >= 7
    engine.drain_events()
    engine.sleep()
    assert engine.drain_events() == [CacheCleared()] and engine.snapshot_hashes() == []
    engine.wake()
    assert engine.drain_events() == []
    engine.add(Request(request_id="y", prompt_token_ids=PROMPT, sampling=SamplingParams(max_tokens=1)))
    assert [event for event in engine.step().events if isinstance(event, BlockStored)]
    assert engine.generation(0) >= generation  # an old reference is still told from a new one


def test_one_of_several_ranks_that_finds_no_room_ends_them_all(
    engine: Engine, shared: tuple[int, list[Engine]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room() -> None:
        raise DoesNotFit("the device has 1.0 GiB free")

    engine.sleep()
    several = engine._config.tensor_parallel > 1
    with monkeypatch.context() as patch, pytest.raises(RankError if several else DoesNotFit, match=r"1\.0 GiB free"):
        patch.setattr(engine, "take_memory", no_room)
        engine.wake()
    assert engine.asleep
    if several:
        shared[1].remove(engine)
        engine.close()
    else:
        engine.wake()
        assert len(ask(engine)[0]) == 20


def test_a_sleeping_engine_refuses(engine: Engine) -> None:
    engine.sleep()
    late = Request(request_id="late", prompt_token_ids=PROMPT, sampling=SamplingParams())
    with pytest.raises(ValueError, match="asleep"):
        engine.reserve(late)
    engine.add(late)
    (output,) = engine.step().outputs
    assert (output.finish_reason, output.error) == ("error", "the engine is asleep")
    engine.wake()
    assert len(ask(engine)[0]) == 20


def test_a_busy_engine_does_not_sleep(engine: Engine) -> None:
    expected = ask(engine)[0]
    engine.clear_cache()
    engine.add(Request(request_id="x", prompt_token_ids=PROMPT, sampling=SamplingParams(max_tokens=2)))
    with pytest.raises(EngineBusy, match="1 requests are under way"):
        engine.sleep()
    while engine.has_work():
        engine.step()
    assert engine.reserve(Request(request_id="r", prompt_token_ids=PROMPT, sampling=SamplingParams())) is not None
    with pytest.raises(EngineBusy, match=r"1 requests are under way and \d+ KV blocks"):
        engine.sleep()
    detached = engine.detach("r", then_wait=False)
    while engine.has_work():
        engine.step()
    with pytest.raises(EngineBusy, match=rf"0 requests are under way and {len(detached)} KV blocks"):
        engine.sleep()
    engine.release_blocks(detached)
    engine.sleep()
    engine.wake()
    assert ask(engine)[0] == expected


def test_memory_goes_back(llama_folder: Path) -> None:
    engine = Engine.build(llama_folder, CONFIG)
    before = resident()
    engine.sleep()
    assert before - resident() > 90 << 20
    engine.wake()
    assert not engine.kv_cache.tensor.any()


def test_memory_that_somebody_gave(llama_folder: Path) -> None:
    """It is released and reserved by whoever gave it; if it cannot be had again, the engine stays asleep."""

    class Given:
        def __init__(self, size: int) -> None:
            self.buffer = bytearray(size)
            self.calls: list[str] = []

        path = None

        def release(self) -> None:
            self.calls.append("release")

        def reserve(self) -> None:
            self.calls.append("reserve")
            if len(self.calls) == 2:
                raise MemoryError("gone")

    given: list[Given] = []

    def allocate(num_blocks: int, block_bytes: int) -> Given:
        given.append(Given(num_blocks * block_bytes))
        return given[0]

    engine = Engine.build(llama_folder, EngineConfig(num_blocks=64, block_size=8, allocate=allocate))
    expected = ask(engine)[0]
    engine.sleep()
    with pytest.raises(MemoryError):
        engine.wake()
    assert engine.asleep
    engine.wake()
    assert given[0].calls == ["release", "reserve", "reserve"]
    assert ask(engine)[0] == expected


def test_tied_weights_stay_tied_when_they_move(qwen3_folder: Path) -> None:
    model, _ = load_model(qwen3_folder, dtype=torch.float16)  # which no CPU packs
    assert isinstance(model, Decoder) and model.rotary is not None
    tensors = [*model.parameters(), *model.buffers()]
    assert any(tensor is model.rotary.cos for tensor in tensors)
    before = [(tensor.clone(), tensor.stride()) for tensor in tensors]
    moved: list[torch.Tensor] = []

    def move(data: torch.Tensor) -> torch.Tensor:
        moved.append(data.clone())
        return moved[-1]

    with torch.inference_mode():
        move_storages(tensors, move)
    for tensor, (values, stride) in zip(tensors, before, strict=True):
        assert torch.equal(tensor, values) and tensor.stride() == stride
        assert any(tensor.untyped_storage().data_ptr() == data.untyped_storage().data_ptr() for data in moved)
    assert model.lm_head.weight.data_ptr() == model.embedding.weight.data_ptr()
    assert len(moved) == len(tensors) - 1
