"""The process of the planner: measures each model's traffic, decides, carries out, and tells why.

Of several planners the one with the lease decides; the others wait for it. A lease that is lost, or a cluster state
that does not answer, stops what is left of a decision. Nothing is remembered of an action but in the cluster state, so
whoever decides next, this process or its successor, starts from what is there.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path

import grpc.aio
import msgspec
import structlog

from planner.control import Controller, ControlSettings
from planner.decision import Action, Decision, Outcome
from planner.fitting import Profile
from planner.offer import Offer
from planner.window import NAN, ROLES, Pools, Role, Window, Worker, measured
from services.cluster_state import ClusterState
from services.config import ConfigError, PlannerConfig
from services.lease import Lease
from services.planner.actuators import Actuator, ActuatorFailed, LocalActuator, NoActuator
from services.planner.journal import Journal
from services.planner.metrics import PlannerMetrics
from services.planner.observe import Objectives, Observer
from services.planner.wanted import Wanted
from services.process import new_incarnation, stop_signal
from services.redis_client import REDIS_ERRORS
from services.rpc import cluster_pb2, router_pb2, router_pb2_grpc, worker_pb2, worker_pb2_grpc
from services.rpc_server import ChannelClosed, RpcServer, answer_of, make_channel
from services.security import key_of

log = structlog.get_logger()

_RESTORED = 500  # decisions that a planner reads when it starts
_FLIP_SECONDS = 90.0  # that a flip may take
_LEAST_LEASE = 10.0  # seconds
_ANSWER_SECONDS = 2.0  # of a router
_FIRST_INTERVALS = 3  # before the first decision about a model, whose workers may still start


class PlannerRefused(ConfigError):
    """Another planner, with other settings, decides about this cluster."""


async def serve(config: PlannerConfig) -> None:
    """Runs until SIGTERM. Raises PlannerRefused, ConfigError."""
    await Planner(config, stop_signal()).run()


class Planner:
    """The process, and what it knows of each model."""

    def __init__(self, config: PlannerConfig, stop: asyncio.Event) -> None:
        self._config = config
        self._stop = stop
        self._key = key_of(config)
        self._incarnation = new_incarnation()
        self._metrics = PlannerMetrics()
        self._state = ClusterState(config.state, config.cluster)
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._aims = Objectives(config.planner_ttft, config.planner_tpot, config.planner_attainment)
        self._observer = Observer(self._state, self._channel, self._aims)
        self._actuator = self._make_actuator()
        self._models: dict[str, _Model] = {}
        self._since: dict[tuple[str, str, str], float] = {}  # incarnation, role and state -> unix seconds
        self._lease_seconds = max(_LEAST_LEASE, 3 * config.planner_interval)  # of a model, and of what is shed
        self._settings = _settings(config)  # what is wrong with them is told at once

    async def run(self) -> None:
        """Registers, decides each interval, leaves."""
        config = self._config
        rpc = RpcServer(config.bind, config.rpc_port, self._key, self._metrics.registry)
        await self._state.connect()
        await rpc.start()
        member = cluster_pb2.Member(
            name=config.name,
            role="planner",
            incarnation=self._incarnation,
            grpc_address=rpc.address,
            pid=os.getpid(),
            host=socket.gethostname(),
        )
        await self._state.register(member)
        await rpc.set_healthy(True)
        log.info("ready", role="planner", mode=config.planner, interval=config.planner_interval)
        try:
            while not self._stop.is_set():
                await self._tick()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stop.wait(), config.planner_interval)
        finally:
            for model in self._models.values():
                with contextlib.suppress(*REDIS_ERRORS):
                    await model.lease.give_back()
                await model.journal.close()
            await self._actuator.close()
            await asyncio.gather(*(channel.close() for channel in self._channels.values()))
            await self._state.close()
            await rpc.stop()

    async def _tick(self) -> None:
        """One decision for each model that workers have, or had, or that is to be woken by requests."""
        there = {member.grpc_address for member in self._state.members()}
        for address in self._channels.keys() - there:
            await self._channels.pop(address).close()
        served = {member.model.name for member in self._state.members(*ROLES)}
        windows = await self._observer.windows(served | self._models.keys())
        for name, window in windows.items():
            await self._about(name, window, has_workers=name in served)

    async def _about(self, name: str, window: Window, *, has_workers: bool) -> None:
        try:
            if (model := self._models.get(name)) is None:
                if not has_workers and not await self._may_wake(name):
                    return
                model = self._models[name] = self._model(name)
            before, model.decided = model.decided, None
            holder = await model.lease.take()
            self._metrics.leads.labels(name).set(holder == model.identity)
            if holder != model.identity:
                model.leads = False
                self._wait_for(holder, model)
                return
            if not model.leads:
                await self._take_over(model)
            if before is not None and measured(window.attained):
                await self._tell_what_came(model, before, window)
            if not window.seconds or time.monotonic() < model.begins:  # nothing is known, or the cluster starts
                return
            pools = await self._pools(name)
            model.controller.settings = self._settings_of(name)
        except REDIS_ERRORS as error:
            log.warning("the planner holds: the cluster state does not answer", error=str(error))
            self._metrics.holds.labels("cluster_state").inc()
            return
        except ActuatorFailed as error:
            log.warning("the planner holds: nobody says which workers start", error=str(error))
            self._metrics.holds.labels("actuator").inc()
            return
        decision = model.controller.decide(window, pools, time.time())
        await self._see_to(model, msgspec.structs.replace(decision, most=model.most))

    async def _may_wake(self, name: str) -> bool:
        """Whether a model that only gateways know is at rest, rather than about to start.

        Kubernetes tells of workers that start. `tandem up` does not tell of its first ones: so there the planner before
        must have seen it at rest. Raises one of REDIS_ERRORS.
        """
        journal = Journal(self._config.state, self._config.cluster, name)
        try:
            before = await journal.latest(1)
        finally:
            await journal.close()
        if self._config.planner_actuator == "kubernetes":
            return bool(before) or bool(self._config.planner_minimum)
        return self._zero_is_asked and bool(before) and not any(before[-1].have.values())

    @property
    def _zero_is_asked(self) -> bool:
        minimum = _numbers(self._config.planner_minimum)
        return bool(minimum) and not sum(minimum.values())

    def _wait_for(self, holder: str, model: _Model) -> None:
        """Another planner decides. Raises PlannerRefused if it has other settings."""
        self._metrics.holds.labels("lease").inc()
        other, _, digest = holder.rpartition(" ")
        # One that was killed leaves its lease, and its name to whoever is started again.
        alive = any(_identity(member.name, member.incarnation) == other for member in self._state.members("planner"))
        if digest != model.digest and alive:
            raise PlannerRefused(
                f"{other} decides about {model.name} with other settings: stop it first, or give both the same"
            )

    def _model(self, name: str) -> _Model:
        config = self._config
        file = Path(config.planner_log) if config.planner_log else None
        journal = Journal(config.state, config.cluster, name, file)
        digest = _digest(config)
        identity = f"{_identity(config.name, self._incarnation)} {digest}"
        lease = self._state.lease(f"planner:{name}", identity, self._lease_seconds)
        return _Model(name, self._controller(name), journal, lease, identity, digest)

    async def _take_over(self, model: _Model) -> None:
        """Goes on where the planner before ended, if there was one. Raises one of REDIS_ERRORS."""
        before = await model.journal.latest(_RESTORED)
        if before:
            model.controller = self._controller(model.name)
            model.controller.restore(before)
            if self._settings.scales:  # else all that there may be is what there is
                model.most = max(model.most, *(decision.most for decision in before))
            if size := next((each.chosen.tensor_parallel for each in reversed(before) if each.chosen is not None), 0):
                offers = tuple(msgspec.structs.replace(offer, gpus=size) for offer in self._settings.offers)
                model.controller.settings = msgspec.structs.replace(model.controller.settings, offers=offers)
        model.begins = time.monotonic() + (0.0 if before else _FIRST_INTERVALS * self._config.planner_interval)
        model.leads = True

    def _controller(self, model: str) -> Controller:
        return Controller(msgspec.structs.replace(self._settings, model=model))

    async def _see_to(self, model: _Model, decision: Decision) -> None:
        """Carries a decision out, if that is wanted, and tells it."""
        self._metrics.decided(decision)
        await model.journal.write(decision)
        model.decided = decision
        if decision.actions:
            log.info("decided", model=model.name, actions=[str(each) for each in decision.actions], why=decision.reason)
        if decision.mode != "act":
            return
        if decision.shed and not any(action.kind == "shed" for action in decision.actions):
            try:
                await self._shed(model.name, decision.shed)  # or it would run out
            except ActuatorFailed as error:
                log.warning("some requests that should be shed are not", error=str(error))
        if decision.actions:
            await self._carry_out(model, decision)

    async def _carry_out(self, model: _Model, decision: Decision) -> None:
        done, failed = 0, []
        for action in decision.actions:
            try:
                if await model.lease.take() != model.identity:
                    raise ActuatorFailed("another planner has the lease")
                await self._act(model.name, action)
                done += 1
                self._metrics.actions.labels(action.kind, "done").inc()
            except (ActuatorFailed, *REDIS_ERRORS) as error:
                failed.append(f"{action}: {error}")
                self._metrics.actions.labels(action.kind, "failed").inc()
                log.warning("an action failed", action=str(action), error=str(error))
                break  # what follows may count on it; the next decision sees what is there
        outcome = Outcome(at=time.time(), done=done, failed=tuple(failed))
        model.decided = msgspec.structs.replace(decision, outcome=outcome)
        await model.journal.write(model.decided)

    async def _tell_what_came(self, model: _Model, decision: Decision, window: Window) -> None:
        """Of the decision before this window."""
        outcome = decision.outcome or Outcome(at=window.at)
        outcome = msgspec.structs.replace(outcome, at=window.at, attained=window.attained)
        await model.journal.write(msgspec.structs.replace(decision, outcome=outcome))
        if decision.actions:
            predicted = decision.chosen.attainment if decision.chosen is not None else NAN
            log.info(
                "came of it",
                model=model.name,
                decision=decision.number,
                attained=round(window.attained, 3),
                predicted=round(predicted, 3),
            )

    async def _act(self, model: str, action: Action) -> None:
        """Raises ActuatorFailed, or one of REDIS_ERRORS."""
        members = self._state.members(*ROLES)
        member = next((each for each in members if each.name == action.worker and each.model.name == model), None)
        match action.kind:
            case "flip":
                if member is None or action.role is None:
                    raise ActuatorFailed(f"{action.worker} is not there")
                await self._flip(member, action.role)
            case "add":
                assert action.role is not None
                await self._actuator.add(model, action.role)
            case "remove":
                if member is not None and not self._may_go(member, members):
                    raise ActuatorFailed(f"{member.name} is the last worker that decodes")
                await self._actuator.remove(action.worker, member)
            case "shed":
                await self._shed(model, action.share)

    async def _flip(self, member: cluster_pb2.Member, role: Role) -> None:
        stub = worker_pb2_grpc.RoleStub(self._channel(member.grpc_address))
        finish = self._config.planner_finish
        asked = worker_pb2.SetRoleRequest(role=role, finish_seconds=finish)
        try:
            await answer_of(stub.SetRole(asked, timeout=finish + _FLIP_SECONDS))
        except (grpc.aio.AioRpcError, ChannelClosed) as error:
            reason = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
            raise ActuatorFailed(f"{member.name} keeps its role: {reason}") from error

    async def _shed(self, model: str, share: float) -> None:
        """Routers refuse this part of the requests until a little after the next decisions. Raises ActuatorFailed."""
        asked = router_pb2.ShedRequest(model=model, share=share, seconds=self._lease_seconds)
        routers = self._state.members("router")

        async def told(router: cluster_pb2.Member) -> str:
            stub = router_pb2_grpc.RouterStub(self._channel(router.grpc_address))
            try:
                await answer_of(stub.Shed(asked, timeout=_ANSWER_SECONDS))
            except grpc.aio.AioRpcError as error:
                return f"{router.name}: {error.details()}"
            except ChannelClosed as error:
                return f"{router.name}: {error}"
            return ""

        if failed := [each for each in await asyncio.gather(*map(told, routers)) if each]:
            raise ActuatorFailed("; ".join(failed))

    def _may_go(self, member: cluster_pb2.Member, members: Sequence[cluster_pb2.Member]) -> bool:
        """Whether another worker that decodes is left, or the minimum asks for none, as decode=0 does."""
        others = [
            each
            for each in members
            if each.model.name == member.model.name
            and each.incarnation != member.incarnation
            and each.role in ("decode", "aggregated")
            and not (each.draining or each.asleep)
        ]
        return member.role == "prefill" or bool(others) or self._zero_is_asked

    async def _pools(self, model: str) -> Pools:
        """The workers as they are, and as they were asked for. Raises ActuatorFailed, or one of REDIS_ERRORS."""
        config, now = self._config, time.time()
        fixed = [each for each in config.planner_fixed.split(",") if each]
        workers = []
        for member in self._state.members(*ROLES):
            if member.model.name != model:
                continue
            away = member.draining or member.asleep
            state = "draining" if away else "ready"
            since = self._since.setdefault((member.incarnation, member.role, state), now)
            workers.append(
                Worker(
                    name=member.name,
                    role=_role(member.role),
                    state="draining" if away else "ready",
                    since=since,
                    gpus=max(1, member.gpus),
                    fixed=member.name in fixed or member.asleep,
                    start_seconds=member.start_seconds or NAN,
                )
            )
        sizes = {worker.role: worker.gpus for worker in workers}
        held = self._models[model]
        size = max(sizes.values(), default=held.controller.settings.offers[0].gpus)
        workers += [
            msgspec.structs.replace(each, gpus=sizes.get(each.role, size))
            for each in await self._actuator.starting(model)
        ]
        held.most = max(held.most, sum(worker.gpus for worker in workers))
        return Pools(
            workers=tuple(workers),
            minimum=_numbers(config.planner_minimum),
            maximum=_numbers(config.planner_maximum),
            gpus=config.planner_workers * size or held.most,
            fixed=tuple(role for role in ROLES if role in fixed),
        )

    def _settings_of(self, model: str) -> ControlSettings:
        """With what a worker is: card, size and room of those that there are, or were; else as the profile says."""
        cards = [member for member in self._state.members(*ROLES) if member.model.name == model and member.gpus]
        (offer,) = self._models[model].controller.settings.offers
        if cards:
            sizes = [member.gpus for member in cards]
            usual = max(sizes, key=sizes.count)
            of_usual = [member for member in cards if member.gpus == usual]
            room = min(member.model.num_blocks * member.model.block_size for member in of_usual)
            offer = msgspec.structs.replace(offer, gpu=of_usual[0].gpu, gpus=usual, kv_tokens=room)
        return msgspec.structs.replace(self._settings, model=model, offers=(offer,))

    def _make_actuator(self) -> Actuator:
        match self._config.planner_actuator:
            case "local":
                return LocalActuator(self._state, Wanted(self._config.state, self._config.cluster))
            case "kubernetes":
                from services.planner.kubernetes import KubernetesActuator

                return KubernetesActuator(self._state, self._config.planner_deployments)
        return NoActuator()

    def _channel(self, address: str) -> grpc.aio.Channel:
        if address not in self._channels:
            self._channels[address] = make_channel(address, self._key)
        return self._channels[address]


class _Model:
    """What is kept of a model between two decisions."""

    def __init__(
        self, name: str, controller: Controller, journal: Journal, lease: Lease, identity: str, digest: str
    ) -> None:
        self.name = name
        self.controller = controller
        self.journal = journal
        self.lease = lease
        self.identity = identity
        self.digest = digest
        self.leads = False  # this planner had the lease at the decision before
        self.begins = 0.0  # when the first decision may be, monotonic seconds
        self.most = 0  # GPUs of the workers that there were at once
        self.decided: Decision | None = None  # in the window that ends next


def _identity(name: str, incarnation: str) -> str:
    """What a lease says of a planner, before the digest of its settings."""
    return f"{name} {incarnation[:8]}"


def _role(text: str) -> Role:
    return next(role for role in ROLES if role == text)


def _settings(config: PlannerConfig) -> ControlSettings:
    """Of any model. Raises ConfigError."""
    offer = Offer()
    if config.planner_profile:
        try:
            profile = msgspec.json.decode(Path(config.planner_profile).read_bytes(), type=Profile)
        except (OSError, msgspec.MsgspecError) as error:
            raise ConfigError(
                f"planner_profile: {config.planner_profile} is none of `tandem profile`: {error}"
            ) from None
        offer = Offer(timing=profile.timing, gpu=profile.gpu, gpus=profile.gpus)
        if profile.kv_tokens is not None:
            offer = msgspec.structs.replace(offer, kv_tokens=profile.kv_tokens)
    _numbers(config.planner_minimum), _numbers(config.planner_maximum)
    named = config.planner_roles.split(",")
    if not named or any(role not in ROLES for role in named):
        raise ConfigError(f"planner_roles: {config.planner_roles!r} must be of {', '.join(ROLES)}, comma separated")
    try:
        return ControlSettings(
            mode=config.planner,
            ttft=config.planner_ttft,
            tpot=config.planner_tpot,
            attainment=config.planner_attainment,
            offers=(offer,),
            roles=tuple(role for role in ROLES if role in named),
            scales=config.planner_actuator != "none" or config.planner == "advise",
            interval=config.planner_interval,
            start_seconds=config.planner_start,
            flip_cool_down=config.planner_cool_down,
            shrink_cool_down=5 * config.planner_cool_down,
        )
    except ValueError as error:
        raise ConfigError(f"planner: {error}") from None


def _numbers(text: str) -> dict[Role, int]:
    """Numbers of `prefill=1,decode=2`. Raises ConfigError."""
    found: dict[Role, int] = {}
    for part in filter(None, text.split(",")):
        name, _, number = part.partition("=")
        if name not in ROLES or not number.isdecimal():
            raise ConfigError(f"{part!r} is no number of workers: write e.g. prefill=1,decode=2")
        found[_role(name)] = int(number)
    return found


def _digest(config: PlannerConfig) -> str:
    """What planners must have in common to take turns."""
    chosen = {name: getattr(config, name) for name in config.__struct_fields__ if name.startswith("planner")}
    chosen.pop("planner_log")
    return hashlib.sha256(msgspec.json.encode(chosen, order="sorted")).hexdigest()[:12]
