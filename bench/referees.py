"""`tandem bench` beside aiperf and guidellm, same load: `python -m bench.referees --aiperf BIN --guidellm BIN`.

Each tool keeps the same number of streams open on the same server, with prompts and answers of the same lengths in
tokens, in alternating rounds. Their medians are compared; a tool that is not named is left out. Tools end well
although requests failed, and tell of the others alone: a round counts only if all of them were answered in full
length. The server is a scripted one, whose delays do not depend on who else uses the machine, or the one at --url.

The tools want a tokenizer: aiperf takes one only from a Hugging Face cache, so one is made of --tokenizer, offline.
"""

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.scripted_server import Script, ScriptedAnswer, start_server

METRICS = ("ttft_ms p50", "tpot_ms p50", "requests_per_s", "output_tokens_per_s")
AGREEMENT = 0.05
_REVISION = "0" * 40  # any name of a snapshot will do
_LONGEST = 600.0  # seconds of one tool's run

Measured = dict[str, float]


@dataclass
class Load:
    """The same for all tools."""

    url: str
    model: str
    tokenizer: Path  # folder
    input_tokens: int
    output_tokens: int
    streams: int
    requests: int
    folder: Path

    def run(self, command: list[str]) -> None:
        """Runs a tool without network. Raises RuntimeError with the end of its output if it fails."""
        environment = os.environ | {"HF_HOME": str(self.folder / "hf"), "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_LONGEST)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}\n{(done.stdout + done.stderr)[-3000:]}")


def tandem(load: Load, seed: int) -> Measured:
    """`tandem bench run`."""
    path = load.folder / "tandem.json"
    lengths = ["--input-len", str(load.input_tokens), "--output-len", str(load.output_tokens)]
    size = ["--concurrency", str(load.streams), "--num-requests", str(load.requests), "--seed", str(seed)]
    command = [sys.executable, "-m", "services.cli", "bench", "run", "--url", load.url, "--quiet", *lengths, *size]
    load.run([*command, "--tokenizer", str(load.tokenizer), "--json", str(path)])
    found = json.loads(path.read_text())
    return {
        "ttft_ms p50": found["ttft_ms"]["p50"],
        "tpot_ms p50": found["tpot_ms"]["p50"],
        "requests_per_s": found["throughput"]["requests_per_s"],
        "output_tokens_per_s": found["throughput"]["output_tokens_per_s"],
        "completed": found["completed"],
        "output_tokens": found["tokens"]["output"],
    }


def aiperf(load: Load, seed: int, binary: str) -> Measured:
    """NVIDIA's aiperf. Its inter token latency is (latency - TTFT) / (tokens - 1), which is TPOT here."""
    folder = load.folder / f"aiperf-{seed}"
    lengths = {"synthetic-input-tokens": load.input_tokens, "output-tokens": load.output_tokens}
    command = [binary, "profile", "--model", load.model, "--url", load.url, "--endpoint-type", "completions"]
    command += ["--streaming", "--tokenizer", "local/tok", "--ui", "none", "--random-seed", str(seed)]
    for name, value in lengths.items():
        command += [f"--{name}-mean", str(value), f"--{name}-stddev", "0"]
    command += ["--concurrency", str(load.streams), "--request-count", str(load.requests)]
    load.run([*command, "--use-server-token-count", "--extra-inputs", "ignore_eos:true", "--artifact-dir", str(folder)])
    found = json.loads((folder / "profile_export_aiperf.json").read_text())
    return {
        "ttft_ms p50": found["time_to_first_token"]["p50"],
        "tpot_ms p50": found["inter_token_latency"]["p50"],
        "requests_per_s": found["request_throughput"]["avg"],
        "output_tokens_per_s": found["output_token_throughput"]["avg"],
        "completed": found["request_count"]["avg"],
        "output_tokens": found["output_sequence_length"]["sum"],
    }


def guidellm(load: Load, seed: int, binary: str) -> Measured:
    """guidellm. Its ITL is (last - first token) / (tokens - 1) of a request, which is TPOT here."""
    path = load.folder / f"guidellm-{seed}.json"
    command = [binary, "run", "--disable-console", "--output", f"kind=json,path={path}"]
    command += ["--backend", f"kind=openai_http,target={load.url},model={load.model},request_format=/v1/completions"]
    command += ["--tokenizer", f"kind=hf_auto,model={load.tokenizer}", "--seed", f"kind=static,value={seed}"]
    sizes = f"prompt_tokens={load.input_tokens},output_tokens={load.output_tokens}"
    command += ["--data", f"kind=synthetic_text,{sizes}", "--profile", f"kind=concurrent,streams={load.streams}"]
    load.run([*command, "--constraint", f"kind=max_requests,count={load.requests}"])
    found = json.loads(path.read_text())["benchmarks"][0]["metrics"]
    return {
        "ttft_ms p50": found["time_to_first_token_ms"]["successful"]["median"],
        "tpot_ms p50": found["inter_token_latency_ms"]["successful"]["median"],
        "requests_per_s": found["requests_per_second"]["successful"]["mean"],
        "output_tokens_per_s": found["output_tokens_per_second"]["successful"]["mean"],
        "completed": found["request_totals"]["successful"],
        "output_tokens": found["output_token_count"]["successful"]["total_sum"],
    }


def in_full(tool: str, load: Load, measured: Measured) -> Measured:
    """What was measured. Raises RuntimeError unless every request was answered, in the length that was asked for."""
    tokens = load.requests * load.output_tokens
    if measured["completed"] != load.requests or measured["output_tokens"] != tokens:
        raise RuntimeError(
            f"{tool} completed {measured['completed']:.0f} of {load.requests} requests with "
            f"{measured['output_tokens']:.0f} of {tokens} tokens: medians of such rounds are not compared"
        )
    return measured


@contextlib.contextmanager
def _server(arguments: argparse.Namespace, folder: Path) -> Iterator[tuple[str, str]]:
    """(address, model)."""
    if arguments.url:
        yield arguments.url, arguments.model
        return
    answers = [ScriptedAnswer(ttft=0.08 + 0.01 * (i % 7), gaps=(0.015 + 0.001 * (i % 5),)) for i in range(35)]
    with start_server(folder, Script(answers=answers, model=arguments.model)) as server:
        yield server.url, arguments.model


def main() -> None:
    """The command. Exits 1 when a median of a referee differs by more than 5 %."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--aiperf", help="path of aiperf")
    parser.add_argument("--guidellm", help="path of guidellm")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder of the model's tokenizer")
    parser.add_argument("--url", default="", help="server; without it a scripted one is started")
    parser.add_argument("--model", default="SmolLM2-135M-Instruct")
    parser.add_argument("--input-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--requests", type=int, default=80)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="where to write the report")
    arguments = parser.parse_args()
    tools: dict[str, Callable[[Load, int], Measured]] = {"tandem": tandem}
    if arguments.aiperf:
        tools["aiperf"] = lambda load, seed: aiperf(load, seed, arguments.aiperf)
    if arguments.guidellm:
        tools["guidellm"] = lambda load, seed: guidellm(load, seed, arguments.guidellm)
    with tempfile.TemporaryDirectory(prefix="tandem-referees-") as name, _server(arguments, Path(name)) as (url, model):
        _make_hub_cache(Path(name) / "hf", arguments.tokenizer)
        sizes = (arguments.input_tokens, arguments.output_tokens, arguments.streams, arguments.requests)
        load = Load(url, model, arguments.tokenizer, *sizes, Path(name))
        rounds = []
        for number in range(arguments.rounds):
            order = list(tools.items())[:: -1 if number % 2 else 1]
            rounds.append({tool: in_full(tool, load, measure(load, number + 1)) for tool, measure in order})
            print(f"round {number + 1}: {json.dumps(rounds[-1])}", flush=True)
    report = _compared(list(tools), rounds) | {"rounds": rounds, "streams": load.streams, "requests": load.requests}
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    sys.exit(not report["agree"])


def _compared(tools: list[str], rounds: list[dict[str, Measured]]) -> dict[str, Any]:
    """Medians over the rounds, and each referee's relative to ours."""
    medians = {tool: {m: statistics.median(one[tool][m] for one in rounds) for m in METRICS} for tool in tools}
    ratios = {tool: {m: medians[tool][m] / medians["tandem"][m] for m in METRICS} for tool in tools if tool != "tandem"}
    for metric in METRICS:
        cells = ", ".join(f"{tool} {medians[tool][metric]:.2f}" for tool in tools)
        apart = ", ".join(f"{tool} / tandem {each[metric]:.3f}" for tool, each in ratios.items())
        print(f"{metric:<20} {cells}; {apart}")
    agree = all(abs(value - 1) <= AGREEMENT for each in ratios.values() for value in each.values())
    return {"medians": medians, "ratios": ratios, "agree": agree}


def _make_hub_cache(home: Path, tokenizer: Path) -> None:
    """A Hugging Face cache that holds the tokenizer as the model local/tok."""
    model = home / "hub" / "models--local--tok"
    snapshot = model / "snapshots" / _REVISION
    snapshot.mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(_REVISION)
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copy(tokenizer / name, snapshot)


if __name__ == "__main__":
    main()
