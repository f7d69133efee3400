"""A cluster whose load swings from long prompts to long answers, with and without the planner.

`python -m bench.planner_live --json F [--plot F.svg]`: starts `tandem up` twice, sends both the same requests at the
same times, open loop, and compares what share of them kept to the objectives, in buckets of their arrival. Before that
one prefill and one decode worker are profiled, so that the planner knows how fast they are (`--profile F`: known
already). All on CPU with the default model, unless --model and --dummy-seed say otherwise.
"""

import argparse
import contextlib
import http.client
import json
import os
import platform
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bench.core_shares import core_shares

_TIMEOUT = 120.0  # of a request, seconds
_BUCKET = 10.0  # seconds of arrivals that are taken together


@dataclass(frozen=True)
class Phase:
    """Traffic of one kind."""

    name: str
    prompt: int  # tokens
    output: int
    rate: float  # requests a second


@dataclass
class Answer:
    """What a client saw. Seconds; `at` after the beginning of the load."""

    at: float
    phase: str
    ttft: float = 0.0
    tpot: float = 0.0
    tokens: int = 0
    error: str = ""

    def keeps(self, ttft: float, tpot: float) -> bool:
        """Whether it kept to the objectives."""
        return not self.error and self.ttft <= ttft and self.tpot <= tpot


@dataclass
class Side:
    """One of the two runs."""

    planner: str
    answers: list[Answer] = field(default_factory=list)
    roles: list[tuple[float, int, int]] = field(default_factory=list)  # seconds, prefill and decode workers
    decisions: list[dict[str, Any]] = field(default_factory=list)

    @property
    def flips(self) -> int:
        """Roles that workers were given."""
        done = [each for each in self.decisions if each["outcome"]]
        return sum(action["kind"] == "flip" for each in done for action in each["actions"][: each["outcome"]["done"]])

    def attained(self, ttft: float, tpot: float) -> float:
        """Share of all requests."""
        return sum(answer.keeps(ttft, tpot) for answer in self.answers) / max(1, len(self.answers))


class Target:
    """A cluster of `tandem up`."""

    def __init__(
        self,
        options: argparse.Namespace,
        folder: Path,
        prefill: int,
        decode: int,
        cores: Sequence[int] = (),
        **settings: Any,
    ) -> None:
        """`cores`: on which it runs; none: wherever this process may."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        command = [sys.executable, "-m", "services.cli", "up", "--json", "--port", str(port), "--admin-port", "0"]
        command += ["--prefill", str(prefill), "--decode", str(decode), "--threads", "1", "--model", options.model]
        command += ["--kv-memory", "512MiB", "--local-prefill-tokens", "0"]
        command += ["--dummy-seed", str(options.dummy_seed)] if options.dummy_seed is not None else []
        environment = os.environ | {f"TANDEM_{name.upper()}": str(value) for name, value in settings.items()}
        self._log = (folder / f"up-{prefill}-{decode}-{port}.log").open("w")
        command = ["taskset", "-c", ",".join(map(str, cores)), *command] if cores else command
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self._log, text=True, env=environment)
        assert self._process.stdout is not None
        for line in self._process.stdout:
            event = json.loads(line)
            if event["event"] == "ready":
                self.url, self.admin, self.model = event["url"], event["admin"], event["model"]
                self.pids: dict[str, int] = event["pids"]
                break
        else:
            raise RuntimeError(f"the cluster did not start; see {self._log.name}")
        threading.Thread(target=self._process.stdout.read, daemon=True).start()

    def ask(self, path: str) -> Any:
        """JSON of the admin port."""
        connection = http.client.HTTPConnection(urlsplit(self.admin).netloc, timeout=10)
        connection.request("GET", path)
        return json.loads(connection.getresponse().read())

    def stop(self) -> None:
        """Ends the cluster."""
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(timeout=30)
        self._log.close()


def send(target: Target, phase: Phase, prompt: list[int], answer: Answer) -> None:
    """One streamed request."""
    body = {"model": target.model, "prompt": prompt, "max_tokens": phase.output, "temperature": 0, "logprobs": 0}
    text = json.dumps(body | {"ignore_eos": True, "stream": True})
    started, last = time.perf_counter(), 0.0
    try:
        connection = http.client.HTTPConnection(urlsplit(target.url).netloc, timeout=_TIMEOUT)
        connection.request("POST", "/v1/completions", text, {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            answer.error = f"{response.status}: {response.read().decode()[:200]}"
            return
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                answer.error = str(chunk["error"])
                return
            new = sum(len(c["logprobs"]["tokens"]) for c in chunk["choices"] if c.get("logprobs"))
            if new:
                last = time.perf_counter()
                answer.ttft = answer.ttft or last - started
                answer.tokens += new
    except OSError as error:
        answer.error = repr(error)
        return
    if answer.tokens != phase.output:
        answer.error = f"{answer.tokens} tokens came instead of {phase.output}"
    answer.tpot = (last - started - answer.ttft) / max(1, answer.tokens - 1)


def schedule(phases: list[Phase], seconds: float, swings: int, seed: int) -> list[tuple[float, Phase, list[int]]]:
    """Poisson arrivals: (seconds, phase, prompt), the same for a seed."""
    draw = random.Random(seed)
    found, begin = [], 0.0
    for phase in phases * swings:
        at = draw.expovariate(phase.rate)
        while at < seconds:
            found.append((begin + at, phase, [draw.randrange(10, 40_000) for _ in range(phase.prompt)]))
            at += draw.expovariate(phase.rate)
        begin += seconds
    return found


def measure(target: Target, planned: list[tuple[float, Phase, list[int]]], side: Side) -> None:
    """Sends everything at its time, and watches roles meanwhile."""
    origin, over = time.monotonic(), threading.Event()

    def watch() -> None:
        while not over.wait(1.0):
            with contextlib.suppress(OSError, ValueError):
                names = [member["role"] for member in target.ask("/admin/status")["members"]]
                side.roles.append((time.monotonic() - origin, names.count("prefill"), names.count("decode")))

    threads = [threading.Thread(target=watch)]
    threads[0].start()
    for at, phase, prompt in planned:
        time.sleep(max(0.0, origin + at - time.monotonic()))
        answer = Answer(at, phase.name)
        side.answers.append(answer)
        threads.append(threading.Thread(target=send, args=(target, phase, prompt, answer)))
        threads[-1].start()
    for thread in threads[1:]:
        thread.join()
    over.set()
    threads[0].join()
    if side.planner == "act":
        (side.decisions,) = target.ask("/admin/planner?last=1000").values()


@contextlib.contextmanager
def running(options: argparse.Namespace, *args: Any, **settings: Any) -> Iterator[Target]:
    """A cluster, until the end of the block."""
    target = Target(options, *args, **settings)
    try:
        with core_shares(target.pids, options.core_share):
            yield target
    finally:
        target.stop()


def profile(options: argparse.Namespace, folder: Path) -> Path:
    """What steps take here, as the planner reads it."""
    if options.profile is not None:
        return Path(options.profile)
    file = folder / "profile.json"
    with running(options, folder, 1, 1) as target:
        command = [sys.executable, "-m", "services.cli", "profile", "--url", target.url, "--json", str(file), "--quiet"]
        if Path(options.model).is_dir():
            command += ["--tokenizer", options.model]
        command += ["--prompts", "64,512,1024", "--batches", "1,4", "--contexts", "64,512"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return file


def buckets(side: Side, ttft: float, tpot: float) -> list[tuple[float, float]]:
    """(middle of a bucket in seconds, share of its requests within the objectives)."""
    found: dict[int, list[bool]] = {}
    for answer in side.answers:
        found.setdefault(int(answer.at / _BUCKET), []).append(answer.keeps(ttft, tpot))
    return [((number + 0.5) * _BUCKET, sum(kept) / len(kept)) for number, kept in sorted(found.items())]


def plot(sides: list[Side], options: argparse.Namespace, phases: list[Phase], file: Path) -> None:
    """Attainment over time, and the roles that the planner gave."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    from bench.report.style import BLUE, GREY, ORANGE, STYLE

    with rc_context(STYLE):
        figure = Figure(figsize=(10, 6), layout="constrained")
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
        for side, colour in zip(sides, (GREY, BLUE), strict=True):
            points = buckets(side, options.ttft, options.tpot)
            label = "with the planner" if side.planner == "act" else "without"
            above.plot(*zip(*points, strict=True), color=colour, label=label, marker="o", markersize=3)
        above.set(ylabel="requests within objectives", ylim=(-0.03, 1.03))
        above.legend()
        for number in range(len(phases) * options.swings):
            name = phases[number % len(phases)].name
            above.text((number + 0.5) * options.phase_seconds, 1.04, name, ha="center", fontsize=8)
            for axes in (above, below):
                axes.axvline(number * options.phase_seconds, color=GREY, linewidth=0.6)
        at, prefill, decode = zip(*sides[1].roles, strict=True)
        below.step(at, prefill, color=ORANGE, where="post", label="prefill")
        below.step(at, decode, color=BLUE, where="post", label="decode")
        below.set(ylabel="workers", xlabel="seconds", ylim=(0, None))
        below.legend()
        figure.savefig(file)


def main() -> None:
    """Runs both and says what came."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, help="where all figures go")
    parser.add_argument("--plot", type=Path, help="a picture of attainment over time (.svg or .png)")
    parser.add_argument("--model", default="smollm2", help="folder or name of the model")
    parser.add_argument("--dummy-seed", type=int, help="random weights for a folder without any")
    parser.add_argument("--prefill", type=int, default=2, help="prefill workers at the start")
    parser.add_argument("--decode", type=int, default=2, help="decode workers at the start")
    parser.add_argument("--phase-seconds", type=float, default=90.0, help="of long prompts, then of long answers")
    parser.add_argument("--swings", type=int, default=2, help="how often both come")
    parser.add_argument("--prompts", default="1000,8,1.0", help="tokens in, tokens out, requests a second of the one")
    parser.add_argument("--answers", default="48,128,1.0", help="the same of the other")
    parser.add_argument("--ttft", type=float, default=5.0, help="objective, seconds")
    parser.add_argument("--tpot", type=float, default=0.1, help="objective, seconds")
    parser.add_argument("--interval", type=float, default=5.0, help="seconds between two decisions")
    parser.add_argument("--cool-down", type=float, default=10.0, help="seconds between two flips")
    parser.add_argument("--together", action="store_true", help="both clusters at once, each on half of the cores")
    parser.add_argument("--core-share", type=float, help="part of a core that each worker gets (all that there is)")
    parser.add_argument("--roles-alone", action="store_true", help="the number of workers stays as it is")
    parser.add_argument(
        "--start", type=float, default=60.0, help="seconds that a worker takes to start, as the planner is told"
    )
    parser.add_argument("--profile", help="file of `tandem profile`")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    phases = []
    for name, text in (("long prompts", options.prompts), ("long answers", options.answers)):
        prompt, output, rate = text.split(",")
        phases.append(Phase(name, int(prompt), int(output), float(rate)))
    planned = schedule(phases, options.phase_seconds, options.swings, options.seed)
    sides = [Side("off"), Side("act")]
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        settings = {
            "planner_profile": profile(options, folder),
            "planner_interval": options.interval,
            "planner_cool_down": options.cool_down,
            "planner_start": options.start,
            "planner_finish": 1.0,
            "planner_ttft": options.ttft,
            "planner_tpot": options.tpot,
            "planner_roles": "prefill,decode",
            "planner_minimum": "prefill=1,decode=1",
            "planner_actuator": "none" if options.roles_alone else "local",
        }

        def run(side: Side, cores: Sequence[int]) -> None:
            counts = options.prefill, options.decode
            with running(options, folder, *counts, cores=cores, planner=side.planner, **settings) as target:
                measure(target, planned, side)

        cores = sorted(os.sched_getaffinity(0))
        half = len(cores) // 2
        parts = (cores[:half], cores[half : 2 * half]) if options.together else ((), ())
        with ThreadPoolExecutor(2 if options.together else 1) as pool:
            list(pool.map(run, sides, parts))
    for side in sides:
        failed = [answer.error for answer in side.answers if answer.error]
        share = side.attained(options.ttft, options.tpot)
        ended = f"{len(failed)} of {len(side.answers)} failed, {side.flips} flips"
        print(f"planner {side.planner}: {100 * share:.1f} % within objectives, {ended}")
        for error in failed[:5]:
            print(f"  {error}")
    found = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "options": {name: str(value) for name, value in vars(options).items()},
        "attainment": {side.planner: side.attained(options.ttft, options.tpot) for side in sides},
        "failed": {side.planner: sum(bool(answer.error) for answer in side.answers) for side in sides},
        "flips": sides[1].flips,
        "buckets": {side.planner: buckets(side, options.ttft, options.tpot) for side in sides},
        "sides": [asdict(side) for side in sides],
    }
    options.json.write_text(json.dumps(found, indent=1) + "\n")
    if options.plot is not None:
        plot(sides, options, phases, options.plot)


if __name__ == "__main__":
    main()
