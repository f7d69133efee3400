"""Attention over the paged cache by several libraries, in one run: `python -m bench.attention_choices [--fa3 FILE]`.

Ours (Triton) beside those that can be had: FlashInfer where it is installed (it compiles itself on first use),
FlashAttention 3 from the file `_vllm_fa3_C.abi3.so` of a vLLM wheel, and torch's own on contiguous keys and values,
which no paging slows down. All compute the same cases; of each the error against float32 and the time are shown.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 16  # of an 8B Llama
LAYERS = 4  # of a cache, so that blocks lie apart as they do in a whole one
CASES = {
    "prefill 1 x 1,024": ([0], 1024),
    "prefill 1 x 4,096": ([0], 4096),
    "prefill 1 x 16,384": ([0], 16384),
    "prefill 4 x 512 after 3,584 cached": ([3584] * 4, 512),
    "decode 1 x 1,024": ([1023], 1),
    "decode 1 x 16,384": ([16383], 1),
    "decode 32 x 1,024": ([1023] * 32, 1),
    "decode 128 x 1,024": ([1023] * 128, 1),
    "decode 32 x 8,192": ([8191] * 32, 1),
}


@dataclass
class Case:
    """Sequences that each compute `length` tokens after `start` cached ones; bfloat16."""

    starts: list[int]
    length: int
    q: torch.Tensor  # [tokens, heads, dim]
    cache: torch.Tensor  # [blocks, page, kv_heads, 2 * dim]
    tables: torch.Tensor  # int32 [sequences, pages]

    @property
    def ends(self) -> list[int]:
        """Tokens of each sequence that are in the cache."""
        return [start + self.length for start in self.starts]

    def contiguous(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [sequences, kv_heads, tokens, dim]."""
        kv = self.cache[self.tables.long()].reshape(len(self.starts), -1, KV_HEADS, 2 * DIM)[:, : self.ends[0]]
        k, v = kv.transpose(1, 2).split_with_sizes((DIM, DIM), dim=-1)
        return k.contiguous(), v.contiguous()


def case(starts: list[int], length: int) -> Case:
    """Random contents, blocks in random order."""
    pages = -(-(starts[0] + length) // PAGE)
    blocks = len(starts) * pages
    cache = torch.randn(blocks, LAYERS, PAGE, KV_HEADS, 2 * DIM, device="cuda", dtype=torch.bfloat16)[:, 1]
    tables = torch.randperm(blocks, device="cuda").int().view(len(starts), pages)
    q = torch.randn(len(starts) * length, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    return Case(starts, length, q, cache, tables)


def ours(case: Case) -> Callable[[], torch.Tensor]:
    """Triton kernels of `engine.kernels`."""
    from engine.kernels.paged_attention import paged_decode, paged_prefill, prefill_splits, prefill_tile

    n, count = case.length, len(case.starts)
    rows = torch.arange(count, device="cuda").repeat_interleave(n).int()
    positions = torch.cat([torch.arange(start, start + n, device="cuda") for start in case.starts]).int()
    out = torch.empty_like(case.q)
    if n == 1:
        each = torch.arange(count, device="cuda").int()

        def run() -> torch.Tensor:
            paged_decode(case.q, case.cache, case.tables, rows, positions, each, out, DIM**-0.5)
            return out

        return run
    size = prefill_tile(DIM)
    pieces = [(i * n + j, min(size, n - j)) for i in range(count) for j in range(0, n, size)]
    splits = prefill_splits(len(pieces), HEADS, max(case.ends))
    tiles = [(*piece, split, splits) for piece in pieces for split in range(splits)]
    tile_tensor = torch.tensor(tiles, device="cuda", dtype=torch.int32)

    def run_prefill() -> torch.Tensor:
        paged_prefill(
            case.q, case.cache, case.tables, rows, positions, tile_tensor, out, DIM**-0.5, is_split=splits > 1
        )
        return out

    return run_prefill


def flashinfer(case: Case) -> Callable[[], torch.Tensor]:
    """FlashInfer's wrappers, planned once as an engine would for all layers of a step."""
    import flashinfer as library

    count, pages = case.tables.shape
    space = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    indptr = torch.arange(count + 1, dtype=torch.int32) * pages
    last = torch.tensor([(end - 1) % PAGE + 1 for end in case.ends], dtype=torch.int32)
    kv = case.cache.split_with_sizes((DIM, DIM), dim=-1)
    if case.length == 1:
        decode = library.BatchDecodeWithPagedKVCacheWrapper(space, "NHD", use_tensor_cores=True)
        decode.plan(indptr, case.tables.view(-1), last, HEADS, KV_HEADS, DIM, PAGE, q_data_type=case.q.dtype)
        return lambda: decode.run(case.q, kv)
    prefill = library.BatchPrefillWithPagedKVCacheWrapper(space, "NHD")
    begins = torch.arange(count + 1, dtype=torch.int32) * case.length
    prefill.plan(
        begins, indptr, case.tables.view(-1), last, HEADS, KV_HEADS, DIM, PAGE, causal=True, q_data_type=case.q.dtype
    )
    return lambda: prefill.run(case.q, kv)


def flash_attention_3(case: Case) -> Callable[[], torch.Tensor]:
    """The operator of the library that `--fa3` names; how it splits is planned by itself in each call."""
    n, count = case.length, len(case.starts)
    k, v = case.cache.split_with_sizes((DIM, DIM), dim=-1)
    begins = (torch.arange(count + 1, device="cuda") * n).int()
    used = torch.tensor(case.ends, device="cuda", dtype=torch.int32)
    out = torch.empty_like(case.q)
    before = [case.q, k, v, None, None, None, out, begins, None, None, None, used, n, max(case.ends), case.tables]
    after = [*[None] * 8, DIM**-0.5, True, -1, -1, 0.0, True, None, 0, None, 0, None, 1, 0, None]

    def run() -> torch.Tensor:
        torch.ops._vllm_fa3_C.fwd(*before, *after)
        return out

    return run


def torch_contiguous(case: Case) -> Callable[[], torch.Tensor]:
    """torch's fused attention on keys and values that lie in order, where it needs no mask."""
    if case.length > 1 and case.starts[0]:
        raise ValueError("a chunk after cached tokens needs a mask, which the fused kernels do not take")
    k, v = case.contiguous()
    q = case.q.view(len(case.starts), case.length, HEADS, DIM).transpose(1, 2).contiguous()
    causal = case.length > 1

    def run() -> torch.Tensor:
        found = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
        return found.transpose(1, 2).reshape(case.q.shape)

    return run


def reference(case: Case) -> torch.Tensor:
    """Float32, of the first sequence's last 64 tokens: [tokens, heads, dim]."""
    k, v = (x[0].float().repeat_interleave(HEADS // KV_HEADS, 0) for x in case.contiguous())
    count = min(64, case.length)
    q = case.q[case.length - count : case.length].float()
    scores = torch.einsum("qhd,hkd->hqk", q, k) * DIM**-0.5
    places = torch.arange(case.ends[0] - count, case.ends[0], device="cuda")
    scores = scores.masked_fill(torch.arange(k.shape[1], device="cuda") > places[:, None], -torch.inf)
    return torch.einsum("hqk,hkd->qhd", scores.softmax(-1), v)


def microseconds(run: Callable[[], torch.Tensor]) -> float:
    """Of one call in a CUDA graph of ten, so that the CPU does not count."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            run()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    graph.replay()
    begin.record()
    for _ in range(5):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) * 1e3 / 50


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fa3", type=Path, help="shared library with FlashAttention 3's operators")
    parser.add_argument("--json", type=Path, help="where to write the report")
    arguments = parser.parse_args()
    choices: dict[str, Callable[[Case], Callable[[], torch.Tensor]]] = {"ours": ours, "torch": torch_contiguous}
    try:
        import flashinfer as _  # noqa: F401

        choices["flashinfer"] = flashinfer
    except ImportError:
        print("FlashInfer is not installed: left out")
    if arguments.fa3:
        torch.ops.load_library(arguments.fa3)  # type: ignore[no-untyped-call]
        choices["fa3"] = flash_attention_3
    report: dict[str, Any] = {"card": torch.cuda.get_device_name(), "torch": torch.__version__, "cases": {}}
    torch.manual_seed(0)
    for name, (starts, length) in CASES.items():
        one = case(starts, length)
        want = reference(one)
        row: dict[str, Any] = {}
        for choice, make in choices.items():
            try:
                run = make(one)
                got = run()[max(0, length - 64) : length].float()
                error = float((got - want).norm() / want.norm())
                row[choice] = {"us": microseconds(run), "error": error}
            except Exception as error:  # a library that cannot do a case is shown, not hidden
                row[choice] = {"refused": str(error).splitlines()[0][:200]}
        report["cases"][name] = row
        print(
            name,
            {k: r.get("refused") or f"{r['us']:.1f} us, error {r['error']:.1e}" for k, r in row.items()},
            flush=True,
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
