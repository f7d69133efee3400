"""Tensor parallelism: what each rank loads, and tokens and logits that do not depend on the number of ranks."""

import io
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest
import torch
from supervised import runs

from engine.attention.base import Span
from engine.attention.table_rows import TableRows
from engine.config import ModelError, read_config
from engine.engine import Engine, EngineConfig
from engine.parallel.group import ALONE, RankError, TensorParallelGroup, rank_config
from engine.parallel.messages import Plan, Replay, SpanReader, SpanWriter, framed, messages
from engine.request import Request, SamplingParams
from engine.weights.load import load_model
from kv_transfer.connectors.shared_memory import SharedSegment


def share_of(rank: int) -> TensorParallelGroup:
    """One of two ranks that never meet."""
    return TensorParallelGroup(rank, 2, "cpu", Path("unused"))


def named_weights(folder: Path, group) -> dict[str, torch.Tensor]:
    model, _ = load_model(folder, dtype=torch.float64, group=group)
    return {name: parameter.data for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("family", ["biased", "qwen2", "qwen3"])
def test_ranks_load_disjoint_shares_of_the_whole(family: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(f"{family}_folder")
    whole = named_weights(folder, ALONE)
    first, second = (named_weights(folder, share_of(rank)) for rank in (0, 1))
    config = read_config(folder)
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    fused = {"qkv": [q, kv, kv], "gate_up": [config.intermediate_size] * 2}
    for name, expected in whole.items():
        a, b = first[name], second[name]
        _, module, kind = f".{name}".rsplit(".", 2)
        if module in fused:
            halves = zip(*(x.split([n // 2 for n in fused[module]]) for x in (a, b)), strict=True)
            assert torch.equal(torch.cat([part for pair in halves for part in pair]), expected), name
        elif module in ("output", "down"):
            assert torch.equal(torch.cat((a, b), 1) if kind == "weight" else a + b, expected), name
            assert kind == "weight" or not b.any()
        elif module == "lm_head":
            assert torch.equal(torch.cat((a, b)), expected), name
        else:
            assert torch.equal(a, expected) and torch.equal(b, expected), name


def test_dummy_weights_are_those_of_one_rank(qwen2_folder: Path) -> None:
    whole, _ = load_model(qwen2_folder, dtype=torch.float64, dummy_seed=4)
    share, _ = load_model(
        qwen2_folder, dtype=torch.float64, dummy_seed=4, group=TensorParallelGroup(1, 2, "cpu", Path())
    )
    assert torch.equal(share.layers[1].mlp.down.weight, whole.layers[1].mlp.down.weight.chunk(2, dim=1)[1])
    assert torch.equal(share.lm_head.weight, whole.lm_head.weight.chunk(2)[1])


def test_models_that_do_not_split(llama_folder: Path) -> None:
    with pytest.raises(ModelError, match="2 KV heads cannot be split evenly over 4 ranks: choose another tensor_para"):
        rank_config(read_config(llama_folder), 4)


CONFIG = EngineConfig(block_size=8, num_blocks=90, max_batched_tokens=29, max_running=8, threads=1)
SAMPLINGS = [
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 1.0, "seed": 11},
    {"temperature": 0.0, "logprobs": 3, "prompt_logprobs": 2},
    {"temperature": 0.8, "top_p": 0.9, "seed": 12, "repetition_penalty": 1.1},
]


def requests_of(vocab_size: int, count: int = 12) -> list[Request]:
    """Prompts of mixed lengths, some with a common prefix: chunks, prefix hits, waiting and preemption all happen."""
    generator = torch.Generator().manual_seed(5)
    common = torch.randint(3, vocab_size, (40,), generator=generator).tolist()
    requests = []
    for i in range(count):
        length = int(torch.randint(1, 70, (1,), generator=generator))
        prompt = torch.randint(3, vocab_size, (length,), generator=generator).tolist()
        sampling = SamplingParams(max_tokens=20, **SAMPLINGS[i % len(SAMPLINGS)])
        prompt = common + prompt if i % 3 == 0 else prompt
        requests.append(Request(request_id=str(i), prompt_token_ids=prompt, sampling=sampling))
    return requests


def answers(engine: Engine, requests: list[Request]) -> dict[str, tuple[list[int], list[float]]]:
    """(tokens, all log probabilities) by request; requests come two a step."""
    waiting = list(requests)
    found: dict[str, tuple[list[int], list[float]]] = {request.request_id: ([], []) for request in requests}
    while waiting or engine.has_work():
        for request in waiting[:2]:
            engine.add(request)
        del waiting[:2]
        for output in engine.step().outputs:
            assert output.error is None
            tokens, logprobs = found[output.request_id]
            tokens += output.token_ids
            for entry in (*(output.logprobs or ()), *(output.prompt_logprobs or ())):
                logprobs += [] if entry is None else [entry.logprob, *(value for _, value in entry.top)]
    return found


@pytest.mark.parametrize(("family", "size"), [("llama", 2), ("qwen2", 2), ("qwen3", 2), ("biased", 4)])
def test_tokens_and_logits_are_those_of_one_rank(family: str, size: int, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(f"{family}_folder")
    one = Engine.build(folder, CONFIG)
    requests = requests_of(one.vocab_size, count=24 // size)
    expected = answers(one, requests)
    engine = Engine.build(folder, msgspec.structs.replace(CONFIG, tensor_parallel=size))
    try:
        assert engine.kv_cache.spec.num_kv_heads * size == one.kv_cache.spec.num_kv_heads
        found = answers(engine, requests)
        assert {key: tokens for key, (tokens, _) in found.items()} == {key: t for key, (t, _) in expected.items()}
        for key, (_, logprobs) in found.items():
            assert logprobs == pytest.approx(expected[key][1], abs=1e-3, rel=1e-3)
        # Alone, in other blocks and over cached prefixes: the very same bits.
        for one_request in requests:
            assert answers(engine, [one_request])[one_request.request_id] == found[one_request.request_id]
        assert engine.stats().free_blocks == CONFIG.num_blocks
    finally:
        engine.close()


def test_ranks_keep_equal_block_tables() -> None:
    """Lists grow, end and are replaced, more than a table has rows: every rank gives each the same row and content."""
    rng = random.Random(3)
    writer, reader = SpanWriter(16), SpanReader()
    ours, theirs = TableRows(8), TableRows(8)
    lists = [[rng.randrange(1000)] for _ in range(14)]
    for step in range(400):
        for i in rng.sample(range(14), 4):
            if rng.random() < 0.2:
                lists[i] = [rng.randrange(1000)]
            else:
                lists[i] += [rng.randrange(1000) for _ in range(rng.randrange(3))]
        spans = [Span(lists[i], len(lists[i]) - 1, 1 + step % 3) for i in rng.sample(range(14), rng.randrange(1, 9))]
        sent = writer.write(spans)
        pipe = io.BytesIO(framed(Replay(sent, [step], [0]) if step % 2 else Plan(sent)))
        (message,) = messages(pipe)
        assert isinstance(message, Replay if step % 2 else Plan)
        received = reader.read(message.spans)
        assert received == spans
        assert theirs.rows_of([s.block_ids for s in received]) == ours.rows_of([s.block_ids for s in spans])


def test_a_message_that_is_cut_off_is_none() -> None:
    frame = framed(Replay(SpanWriter(2).write([Span([5], 0, 1)]), [1], [0]))
    assert len(list(messages(io.BytesIO(frame + frame)))) == 2
    assert [len(list(messages(io.BytesIO(frame + frame[:cut])))) for cut in range(len(frame))] == [1] * len(frame)


def test_a_rank_that_dies_ends_the_steps(qwen3_folder: Path) -> None:
    lost: list[RankError] = []
    engine = Engine.build(qwen3_folder, msgspec.structs.replace(CONFIG, tensor_parallel=2), on_rank_lost=lost.append)
    try:
        (pid,) = children()
        engine.add(requests_of(engine.vocab_size)[0])
        engine.step()
        os.kill(pid, signal.SIGKILL)
        message = rf"rank 1 of 2 \(process {pid}\) was ended by signal 9"
        with pytest.raises(RankError, match=message):
            while engine.has_work():
                engine.step()
        deadline = time.monotonic() + 10
        while not lost and time.monotonic() < deadline:
            time.sleep(0.01)
        assert [str(error).startswith(f"rank 1 of 2 (process {pid})") for error in lost] == [True]
    finally:
        engine.close()


def test_what_a_peer_writes_first_stays(llama_folder: Path) -> None:
    """A slow rank must not clear its share of the cache after the engine is said to be there."""

    def allocate(num_blocks: int, block_bytes: int) -> SharedSegment:
        (pid,) = children()
        os.kill(pid, signal.SIGSTOP)
        timer = threading.Timer(1, os.kill, (pid, signal.SIGCONT))
        timer.start()
        segments.append((SharedSegment(num_blocks * block_bytes, num_blocks), timer))
        return segments[0][0]

    segments: list[tuple[SharedSegment, threading.Timer]] = []
    config = msgspec.structs.replace(CONFIG, tensor_parallel=2, allocate=allocate)
    engine = Engine.build(llama_folder, config)
    segment, timer = segments[0]
    try:
        engine.pages.tensor.fill_(1)
        timer.join()
        engine.add(Request(request_id="r", prompt_token_ids=[1], sampling=SamplingParams(max_tokens=1)))
        while engine.has_work():  # which the other rank can do only once it has built its share
            engine.step()
        held = (engine.pages.tensor == 1).flatten(1).all(1)
        assert held.sum() == len(held) - 2, "all but the block that each rank has written to"
    finally:
        engine.close()
        segment.unlink()


def test_a_model_that_cannot_be_loaded_leaves_no_process(llama_folder: Path) -> None:
    with pytest.raises(ModelError, match="cannot be split evenly"):
        Engine.build(llama_folder, msgspec.structs.replace(CONFIG, tensor_parallel=4))
    assert children() == []


def test_a_rank_ends_with_rank_0(llama_folder: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from engine.engine import Engine, EngineConfig; "
        "engine = Engine.build(Path(sys.argv[1]), EngineConfig(num_blocks=9, tensor_parallel=2)); "
        "print('built', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(llama_folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "built\n"
        (rank,) = children(process.pid)
        process.kill()
        process.wait()
        deadline = time.monotonic() + 10
        while runs(rank) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not runs(rank)


def children(of: int | None = None) -> list[int]:
    """Processes of other ranks that a process, or this one, has started."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            if parent == (of or os.getpid()) and b"engine.parallel.follow" in (path.parent / "cmdline").read_bytes():
                found.append(int(path.parent.name))
        except OSError:  # it has ended
            continue
    return found
