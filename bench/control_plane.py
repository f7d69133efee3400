"""Where gateways and routers end: `python -m bench.control_plane --workers 64 --rate 100 --routers 1,2,4,8`.

Requests of one shape come to a simulated cluster, whose gateways and routers are cores with queues
(`planner.simulator.control_plane`). Where one of them has more work than time, times to the first token grow for as
long as the load lasts; told is by how many seconds in each second, with the work that came to the busiest router and
gateway in cores. What a router does is measured first, by its own code in this process with as many workers; what calls
cost beside that, and what a gateway takes, is measured on real processes and given by flags.
"""

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from bench.router_decision import BLOCK_SIZE, make_placer
from bench.router_load import new_chain
from engine.request import BlockRemoved, BlockStored, KvEventBatch
from planner.simulator import job
from planner.simulator.cluster import Cluster
from planner.simulator.control_plane import ControlCosts
from planner.simulator.demand import Demand, Trace
from planner.simulator.settings import Settings
from router.fit import Measured
from router.placer import Placer
from router.shared_load import SharedLoad
from router.snapshot import Ask
from services.rpc import router_pb2

_LAYOUT = "layout"
_COLUMNS = (
    "workers",
    "requests/s",
    "gateways",
    "routers",
    "TTFT p50, ms",
    "in the last quarter",
    "grows, s/s",
    "router, cores",
    "gateway, cores",
)
_ROUND = 100  # requests
_ROUNDS = 8  # of which the least is taken, as other work on the machine makes each longer


def router_seconds(workers: int, prompt: int, output: int) -> tuple[float, float, float]:
    """CPU seconds of this process: a request placed and released, the same as another router hears of it, and the KV
    of a token heard of, twice: when it is stored, and when it goes.
    """
    rng, blocks = random.Random(1), (prompt + output) // BLOCK_SIZE
    placers = [make_placer(workers, "prefix") for _ in range(2)]
    one, other = (SharedLoad(name, placer) for name, placer in zip("ab", placers, strict=True))
    one.join("b", 0.0)
    other.join("a", 0.0)
    spent = np.zeros((_ROUNDS + 1, 3))  # the first one warms up
    stored: list[tuple[int, list[bytes]]] = []
    for number in range(_ROUND * len(spent)):
        round_ = spent[number // _ROUND]
        hashes = new_chain(rng, blocks)
        message = router_pb2.PlaceRequest(
            request_id=f"{number}",
            chains=[router_pb2.HashChain(layout=_LAYOUT, block_hashes=hashes[: prompt // BLOCK_SIZE])],
            prompt_tokens=prompt,
            max_tokens=output,
        ).SerializeToString()
        row, seconds, told = _placed(placers[0], one, message, number)
        round_[0] += seconds
        began = time.thread_time()
        for each in told:
            other.take_in(each, float(number))
        round_[1] += time.thread_time() - began
        stored.append((row, hashes))
        round_[2] += _heard(placers[0], row, BlockStored(hashes))
        if len(stored) > _ROUND:
            gone, hashes = stored.pop(0)
            round_[2] += _heard(placers[0], gone, BlockRemoved(hashes))
    placed, booked, heard = (spent[1:].min(axis=0) / _ROUND).tolist()
    return placed, booked, heard / (blocks * BLOCK_SIZE)


def _placed(placer: Placer, shared: SharedLoad, message: bytes, number: int) -> tuple[int, float, list[bytes]]:
    """A request from its bytes to its release: the worker, CPU seconds, and what other routers are told."""
    began = time.thread_time()
    request = router_pb2.PlaceRequest.FromString(message)
    key = (request.request_id, 0)
    chains = [(chain.layout, list(chain.block_hashes)) for chain in request.chains]
    ask = Ask(request.prompt_tokens, request.max_tokens)
    placed = placer.place(key, ask, chains, (), now=float(number), lease=600.0)
    shared.booked(key, chains)
    booked = shared.message(float(number))
    reservation = placer.reservations.release(*key)
    assert reservation is not None
    placer.learn(reservation, Measured(0.05, 200, 1.0))
    shared.released(key)
    told = [each for each in (booked, shared.message(float(number))) if each is not None]
    return placed.decision.computing, time.thread_time() - began, told


def _heard(placer: Placer, row: int, event: BlockStored | BlockRemoved) -> float:
    message = msgspec.msgpack.encode(KvEventBatch("", 0, [event]))
    began = time.thread_time()
    placer.told(row, msgspec.msgpack.decode(message, type=KvEventBatch).events)
    return time.thread_time() - began


def load(rate: float, seconds: float, prompt: int, output: int) -> Trace:
    """Poisson arrivals of prompts that have nothing in common."""
    rng, count = np.random.default_rng(1), max(2, round(rate * seconds))
    blocks = (prompt + output) // job.BLOCK_SIZE
    demands = [
        Demand(prompt, output, [b"%d %d" % (number, block) for block in range(blocks)]) for number in range(count)
    ]
    return Trace("control plane", demands, np.cumsum(rng.exponential(1 / rate, count)))


def run(trace: Trace, workers: int, routers: int, costs: ControlCosts, policy: str) -> dict[str, Any]:
    """One simulation."""
    began = time.process_time()
    cluster = Cluster(trace, trace.own_rate, policy, Settings(workers=workers, routers=routers, control=costs, seed=1))
    cluster.run()
    assert cluster.plane is not None
    came = np.array([flight.came_at for flight in cluster.flights])
    ttft = np.array([flight.ttft for flight in cluster.flights])
    tpot = np.array([flight.tpot for flight in cluster.flights])
    lasts = float(trace.times[-1])
    late = came > lasts / 2
    return {
        "workers": workers,
        "routers": routers,
        "gateways": costs.gateways,
        "rate": trace.own_rate,
        "requests": len(came),
        "ttft_p50": float(np.median(ttft)),
        "ttft_p50_last_quarter": float(np.median(ttft[came > 0.75 * lasts])),
        "ttft_grows": float(np.polyfit(came[late], ttft[late], 1)[0]),  # seconds in each second
        "tpot_p90": float(np.percentile(tpot, 90)),
        "router_cores": max(core.busy for core in cluster.plane.routers) / lasts,
        "gateway_cores": max(core.busy for core in cluster.plane.gateways) / lasts,
        "cpu_s": time.process_time() - began,
    }


def main() -> None:
    """Prints a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--rate", default="100", help="requests a second; several with commas")
    parser.add_argument("--routers", default="1,2,4,8", help="several with commas")
    parser.add_argument("--gateways", default="", help="several with commas  [default: so many that none is full]")
    parser.add_argument("--seconds", type=float, default=20.0, help="for which requests come")
    parser.add_argument("--input-len", type=int, default=2000)
    parser.add_argument("--output-len", type=int, default=200)
    parser.add_argument("--call-ms", type=float, default=4.0, help="of a router for a request beside its own code")
    parser.add_argument("--gateway-ms", type=float, default=5.8, help="of a gateway for a request")
    parser.add_argument("--token-us", type=float, default=67.0, help="of a gateway for a token of an answer")
    parser.add_argument("--policy", default="prefix", help="of the simulated routers; what it takes is not counted")
    parser.add_argument("--json", type=Path, help="all numbers, added to what the file has")
    options = parser.parse_args()
    placed, booked, token = router_seconds(options.workers, options.input_len, options.output_len)
    print(f"a router's own code: {1e3 * placed:.2f} ms a request, {1e3 * booked:.2f} ms one of another's, ", end="")
    print(f"{1e9 * token:.0f} ns a token\n")
    print("| " + " | ".join(_COLUMNS) + " |\n|" + "---:|" * len(_COLUMNS))
    rows: list[dict[str, Any]] = []
    for rate in map(float, options.rate.split(",")):
        trace = load(rate, options.seconds, options.input_len, options.output_len)
        each = options.gateway_ms / 1e3 + options.output_len * options.token_us / 1e6
        enough = int(rate * each / 0.6) + 1
        for gateways in map(int, options.gateways.split(",")) if options.gateways else (enough,):
            costs = ControlCosts(
                gateways=gateways,
                gateway_request=options.gateway_ms / 1e3,
                gateway_token=options.token_us / 1e6,
                router_request=placed + options.call_ms / 1e3,
                router_booking=booked,
                router_token=token,
            )
            for routers in map(int, options.routers.split(",")):
                row = run(trace, options.workers, routers, costs, options.policy)
                rows.append(row | {"costs": {name: getattr(costs, name) for name in costs.__dataclass_fields__}})
                print(
                    f"| {options.workers} | {rate:g} | {gateways} | {routers} | {1e3 * row['ttft_p50']:.0f} "
                    f"| {1e3 * row['ttft_p50_last_quarter']:.0f} | {row['ttft_grows']:.2f} | {row['router_cores']:.2f} "
                    f"| {row['gateway_cores']:.2f} |",
                    flush=True,
                )
    if options.json is not None:
        before = json.loads(options.json.read_text()) if options.json.is_file() else []
        options.json.write_text(json.dumps([*before, *rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
