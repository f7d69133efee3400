"""Throughput of the engine on CPU against transformers, in one run: `python -m bench.cpu_engine --json F`.

Both serve the same requests (32 of 128 tokens in, 64 out, greedy, no end of sequence) with the same weights and
threads; rounds alternate, so that a noisy machine hits both. Reported are the medians and, as the rate least disturbed,
the best.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from engine.engine import Engine, EngineConfig
from engine.request import Request, SamplingParams
from engine.weights.resolve import DEFAULT_MODEL, resolve

# Output tokens per second of the same work on a quiet machine of two Zen 3 cores.
RECORDED = {"transformers": 69.0, "vllm_cpu": 88.0, "llamacpp_f16": 96.0}


class Workload:
    """Prompts without a shared prefix: int64 [requests, input_tokens], and how many tokens to write."""

    def __init__(self, requests: int, input_tokens: int, output_tokens: int, vocab_size: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.prompts = torch.randint(3, vocab_size, (requests, input_tokens), generator=generator)
        self.output_tokens = output_tokens

    @property
    def total(self) -> int:
        """Output tokens of one round."""
        return len(self.prompts) * self.output_tokens


def tandem_round(engine: Engine, work: Workload) -> dict[str, float]:
    """Seconds of one round: all of it, steps with prompt tokens, steps of decodes alone; mean of a decode step."""
    engine.clear_cache()
    sampling = SamplingParams(temperature=0.0, max_tokens=work.output_tokens)
    seconds = {True: 0.0, False: 0.0}
    decodes = tokens = 0
    started = time.perf_counter()
    for i, prompt in enumerate(work.prompts.tolist()):
        engine.add(Request(request_id=str(i), prompt_token_ids=prompt, sampling=sampling))
    while engine.has_work():
        output = engine.step()
        only_decodes = output.step.num_tokens == len(output.step.entries)
        seconds[only_decodes] += output.seconds
        decodes += only_decodes
        tokens += sum(len(one.token_ids) for one in output.outputs)
    elapsed = time.perf_counter() - started
    assert tokens == work.total, f"{tokens} tokens instead of {work.total}"
    return {
        "seconds": elapsed,
        "prefill_seconds": seconds[False],
        "decode_seconds": seconds[True],
        "decode_step_ms": 1e3 * seconds[True] / max(1, decodes),
    }


def transformers_round(model: Any, work: Workload) -> float:
    """Seconds of one static batch."""
    started = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(
            work.prompts,
            attention_mask=torch.ones_like(work.prompts),
            do_sample=False,
            min_new_tokens=work.output_tokens,
            max_new_tokens=work.output_tokens,
            eos_token_id=None,
            pad_token_id=0,
        )
    elapsed = time.perf_counter() - started
    assert out.shape[1] == work.prompts.shape[1] + work.output_tokens
    return elapsed


def load_transformers(folder: Path) -> Any:
    """The model as transformers serves it, in float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)  # in evaluation mode


def compare(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Runs the rounds and returns the report."""
    threads: int = arguments.threads
    engine = Engine.build(folder, EngineConfig(threads=threads, max_running=arguments.requests))
    work = Workload(arguments.requests, arguments.input_tokens, arguments.output_tokens, engine.vocab_size)
    reference = load_transformers(folder)
    ours: list[dict[str, float]] = []
    theirs: list[float] = []
    for number in range(arguments.rounds + 1):
        mine, other = tandem_round(engine, work), transformers_round(reference, work)
        rates = f"tandem {work.total / mine['seconds']:.1f} tok/s, transformers {work.total / other:.1f} tok/s"
        print(f"round {number}{' (warm-up)' if number == 0 else ''}: {rates}", flush=True)
        if number:
            ours.append(mine)
            theirs.append(other)
    median = {key: statistics.median(one[key] for one in ours) for key in ours[0]}
    ratio = statistics.median(other / mine["seconds"] for mine, other in zip(ours, theirs, strict=True))
    return {
        "model": folder.name,
        "requests": len(work.prompts),
        "input_tokens": work.prompts.shape[1],
        "output_tokens": work.output_tokens,
        "threads": threads,
        "rounds": len(ours),
        "tandem_tok_s": work.total / median["seconds"],
        "tandem_best_tok_s": work.total / min(one["seconds"] for one in ours),
        "tandem_prefill_seconds": median["prefill_seconds"],
        "tandem_decode_seconds": median["decode_seconds"],
        "tandem_decode_step_ms": median["decode_step_ms"],
        "transformers_tok_s": work.total / statistics.median(theirs),
        "transformers_best_tok_s": work.total / min(theirs),
        "ratio_to_transformers": ratio,
        "ratio_to_vllm_cpu": ratio * RECORDED["transformers"] / RECORDED["vllm_cpu"],
        "ratio_to_llamacpp_f16": ratio * RECORDED["transformers"] / RECORDED["llamacpp_f16"],
        "note": (
            "Ratios are medians over rounds of a pair. vLLM's CPU build and llama.cpp were not run here: their "
            f"{RECORDED['vllm_cpu']:.0f} and {RECORDED['llamacpp_f16']:.0f} tok/s on another machine are scaled by "
            f"what transformers does here against its {RECORDED['transformers']:.0f} tok/s there."
        ),
    }


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="name, Hugging Face folder or .gguf file")
    parser.add_argument("--json", type=Path, help="where to write the report")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--input-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=64)
    arguments = parser.parse_args()
    report = compare(resolve(arguments.model), arguments)
    text = json.dumps(report, indent=2)
    print(text)
    if arguments.json is not None:
        arguments.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
