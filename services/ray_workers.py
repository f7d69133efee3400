"""Workers on the nodes of a Ray cluster: an actor each, in a place of its own.

Those of the start have a placement group together, so that all of them fit or none is started; what such a worker
leaves when it is ended stays Tandem's, for one that comes. Who comes when these places are taken has a group alone,
which is given back with it. It waits for resources as long as it is wished for, so that Ray may start nodes for it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from services.config import WorkerConfig, config_file, given, load
from services.ray_actor import RayWorker
from services.ray_plan import CannotRun, RayPlan, RayWorkerPlan, does_not_fit, is_taken

_PLACE_SECONDS = 8.0  # free resources are given out within one
_STOP_SECONDS = 6.0  # less than the supervisor's patience
_POLL_SECONDS = 0.5
_PASSED_ON = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS", "PYTHONUNBUFFERED")


@dataclass(frozen=True, slots=True)
class _Place:
    """A bundle of a placement group."""

    group: PlacementGroup
    number: int
    bundle: dict[str, float]
    stays: bool  # when its worker goes

    @property
    def options(self) -> dict[str, Any]:
        """Of what is to run there."""
        strategy = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=self.number)
        resources = {"num_cpus": self.bundle["CPU"], "num_gpus": self.bundle.get("GPU", 0)}
        return resources | {"scheduling_strategy": strategy}


@dataclass(slots=True, eq=False)
class _Worker:
    plan: RayWorkerPlan
    place: _Place
    call: Any  # that looks whether the node has what it needs; then its actor's `run`; None: it is given up
    actor: Any = None
    is_leaving: bool = False


class RayWorkers:
    """All that the plan says, and what is wished besides (`services.elastic.Workers`)."""

    def __init__(self, plan: RayPlan, examine: Callable[[str], str]) -> None:
        self._plan = plan
        self._examine = ray.remote(examine)
        self._workers: dict[str, _Worker] = {}
        self._free: list[_Place] = []
        self._groups: list[PlacementGroup] = []
        self._made = 0  # groups; no two may have one name

    @property
    def kinds(self) -> list[tuple[str, str]]:
        """Role and model of each worker of the plan."""
        return [(worker.role, _model(worker)) for worker in self._plan.workers]

    @property
    def models(self) -> dict[str, str]:
        """By the name of each worker that runs, starts, waits for a place, is about to end or cannot run: its model."""
        return {name: _model(worker.plan) for name, worker in self._workers.items()}

    def begin(self) -> None:
        """Finds places for the plan's workers, or raises CannotRun."""
        bundles = {worker.name: _bundle(worker) for worker in self._plan.workers}
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        if problem := does_not_fit(bundles, nodes):
            raise CannotRun(problem)
        group = self._group(list(bundles.values()))
        if not group.wait(_PLACE_SECONDS):
            raise CannotRun(is_taken(bundles, ray.available_resources(), nodes))
        for number, worker in enumerate(self._plan.workers):
            self._put(worker, _Place(group, number, bundles[worker.name], stays=True))

    async def run(self, name: str, role: str, like: int) -> None:
        """Has Ray find a place for one more; `watch` starts it there."""
        worker = msgspec.structs.replace(self._plan.workers[like], name=name, role=role)
        bundle = _bundle(worker)
        place = next((each for each in self._free if each.bundle == bundle), None)
        if place is not None:
            self._free.remove(place)
        else:
            place = _Place(self._group([bundle]), 0, bundle, stays=False)
        self._put(worker, place)

    def end(self, name: str) -> None:
        """Has one drain and end, and leave its place."""
        worker = self._workers[name]
        if worker.actor is None:
            self._drop(worker)
        elif not worker.is_leaving:
            worker.is_leaving = True
            worker.actor.stop.remote()  # its `run` returns then, also if Ray has to make it anew before

    async def watch(self, stop: asyncio.Event) -> None:
        """Until `stop`. Raises CannotRun for a worker of the plan that Ray or the worker itself gave up."""
        while not stop.is_set():
            calls = {worker.call: worker for worker in self._workers.values() if worker.call is not None}
            if not calls:
                await asyncio.sleep(_POLL_SECONDS)
                continue
            done, _ = await asyncio.to_thread(ray.wait, list(calls), timeout=_POLL_SECONDS)
            for call in done:
                worker = calls[call]
                reason = await asyncio.to_thread(_answer, call, worker.plan.name)
                if self._workers.get(worker.plan.name) is worker and not stop.is_set():  # still, after the wait
                    self._goes_on(worker, reason)

    def stop(self) -> None:
        """Has all drain and end, and gives all places back."""
        actors = [worker.actor for worker in self._workers.values() if worker.actor is not None]
        if stopping := [actor.stop.remote() for actor in actors]:
            ray.wait(stopping, num_returns=len(stopping), timeout=_STOP_SECONDS)
        for group in self._groups:
            remove_placement_group(group)

    def _goes_on(self, worker: _Worker, reason: str) -> None:
        """The worker's call has returned, with why it cannot run if that is so. Raises CannotRun."""
        if worker.is_leaving:
            self._drop(worker)
        elif reason and worker.plan in self._plan.workers:
            raise CannotRun(reason)
        elif reason:
            print(f"{worker.plan.name}: {reason}", flush=True)
            self._leave(worker)
            worker.call = worker.actor = None  # until it is wished away
        elif worker.actor is None:
            plan = worker.plan
            worker.actor = (
                ray.remote(RayWorker)
                # `run` is made again with each restart, and `stop` comes beside it.
                .options(**worker.place.options, max_restarts=-1, max_task_retries=-1, max_concurrency=2)
                .remote(plan.name, plan.role, plan.model, _environment(plan.settings))
            )
            worker.call = worker.actor.run.remote()

    def _put(self, worker: RayWorkerPlan, place: _Place) -> None:
        looked = self._examine.options(**place.options).remote(worker.model)
        self._workers[worker.name] = _Worker(worker, place, looked)

    def _drop(self, worker: _Worker) -> None:
        if worker.call is not None:
            self._leave(worker)
        del self._workers[worker.plan.name]

    def _leave(self, worker: _Worker) -> None:
        if worker.actor is not None:
            ray.kill(worker.actor)
        if worker.place.stays:
            self._free.append(worker.place)
        else:
            remove_placement_group(worker.place.group)
            self._groups.remove(worker.place.group)

    def _group(self, bundles: list[dict[str, float]]) -> PlacementGroup:
        self._made += 1
        name = f"tandem-{os.getpid()}-{self._made}"
        group = placement_group(bundles, strategy=self._plan.strategy.upper(), name=name)
        self._groups.append(group)
        return group


def _model(worker: RayWorkerPlan) -> str:
    return worker.settings.get("model_name", "")


def _answer(call: Any, name: str) -> str:
    """Why the worker cannot run; empty: it can, or it was stopped."""
    try:
        return str(ray.get(call) or "")
    except RayError as error:
        return f"Ray cannot run {name}: {error}"


def _bundle(worker: RayWorkerPlan) -> dict[str, float]:
    """What a worker takes of its node: a device for each rank, or its compute threads. Raises ConfigError."""
    config = load(WorkerConfig, worker.settings, config_file())
    ranks = config.tensor_parallel
    return {"CPU": ranks, "GPU": ranks} if config.device == "cuda" else {"CPU": ranks * config.threads}


def _environment(settings: dict[str, str]) -> dict[str, str]:
    """What the worker is told: all settings of flags, environment and file, since the file is on this machine alone."""
    told = {
        f"TANDEM_{name.upper()}": str(value)
        for name, (value, _) in given(WorkerConfig, settings, config_file()).items()
    }
    return told | {name: value for name, value in os.environ.items() if name in _PASSED_ON or name.startswith("OTEL_")}
