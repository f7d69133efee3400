"""The process by which `tandem up --on ray` has Ray run its workers, and the planner's wishes for others.

`python -m services.ray_launcher PLAN`, a child of `tandem up` with the cluster's settings in its environment. It is a
process of its own since Ray ends whoever uses it when it loses its head node: gateway, router and state live on, and
the launcher is started again until Ray is back. What was wished for stands in the cluster state meanwhile.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from urllib.parse import urlsplit

import msgspec

from services.config import ClusterConfig, config_file, load
from services.elastic import Wishes
from services.planner.wanted import Wanted
from services.ray_plan import CannotRun, RayPlan
from services.supervisor import EXIT_CONFIGURATION

_CONNECT_SECONDS = 5.0


def main() -> None:
    """Runs until SIGTERM. Ends with status 78 for what a restart would not mend, with another for what it may."""
    plan = msgspec.json.decode(sys.argv[1], type=RayPlan)
    # Lines come as they were printed, and when they were.
    os.environ |= {"RAY_DEDUP_LOGS": "0", "RAY_COLOR_PREFIX": "0"}
    try:
        _connect(plan)
        asyncio.run(_run(plan))
    except CannotRun as error:
        print(f"error: {error}", flush=True)
        sys.exit(EXIT_CONFIGURATION)


def _connect(plan: RayPlan) -> None:
    """Raises CannotRun where nobody answers, and what Ray raises, with which another try may well succeed."""
    import ray

    where = plan.address or os.environ.get("RAY_ADDRESS", "")
    if where.startswith("ray://"):
        parts = urlsplit(where)
        try:
            socket.create_connection((parts.hostname or "", parts.port or 0), _CONNECT_SECONDS).close()
        except OSError as error:
            raise CannotRun(
                f"nobody answers at {where} ({error}): is that the head node, and its port --ray-client-server-port?"
            ) from error
    try:
        ray.init(where or "auto", namespace="tandem", logging_level="warning")
    except ConnectionError as error:
        if where:
            raise
        raise CannotRun(
            "no Ray cluster runs on this machine: `ray start --head` starts one, `ray start --address HOST:6379` has "
            "this machine join one, and --on ray://HOST:10001 uses one from outside"
        ) from error


async def _run(plan: RayPlan) -> None:
    import ray

    from services.ray_workers import RayWorkers

    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)  # Ray has set its own
    workers, following = RayWorkers(plan, _examine), None
    try:
        await asyncio.to_thread(workers.begin)
        if plan.most_workers is not None:
            config = load(ClusterConfig, {}, config_file())
            wishes = Wishes(Wanted(config.state, config.cluster), workers, plan.most_workers)
            following = asyncio.create_task(wishes.follow())
            following.add_done_callback(lambda _: stop.set())  # by what Ray raises: it is to be started again then
        await workers.watch(stop)
        if following is not None and following.done():
            following.result()
    finally:
        if following is not None:
            following.cancel()
        workers.stop()
        ray.shutdown()


def _examine(model: str) -> str:
    """On a node: what it lacks. Ray carries this function there as it is, while the actor's class must be there."""
    import ray

    try:
        from services.ray_actor import model_here
    except ImportError as error:
        return (
            f"node {ray.util.get_node_ip_address()} lacks this version of Tandem ({error}): "
            "pip install 'tandem-serve[worker,ray]' there, for the Python that runs Ray"
        )
    return model_here(model)[1]


if __name__ == "__main__":
    main()
