"""Workers of Kubernetes deployments, one for each role, by their scale."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager

import httpx2
import structlog
from lightkube import AsyncClient
from lightkube.core.exceptions import ConfigError
from lightkube.models.autoscaling_v1 import ScaleSpec
from lightkube.resources.apps_v1 import Deployment
from lightkube.resources.core_v1 import Pod

from planner.window import ROLES, Role, Worker
from services.cluster_state import ClusterState
from services.config import ConfigError as SettingError
from services.planner.actuators import ActuatorFailed
from services.rpc import cluster_pb2

log = structlog.get_logger()

_GOES_FIRST = {"metadata": {"annotations": {"controller.kubernetes.io/pod-deletion-cost": "-1000"}}}


class KubernetesActuator:
    """Changes replicas of `deployments` by one: role=NAME, or MODEL/role=NAME for one model alone, comma separated.

    Those without a MODEL are of one model, too: that of their workers. Another one has none, and so can neither grow
    nor shrink.
    Which pod goes is said by its deletion cost, before the scale. Who may not patch pods leaves that to Kubernetes,
    which mostly takes the youngest. A worker that has taken another role still counts for the deployment that started
    it. Raises SettingError for what are no deployments, or where there is no API server.
    """

    def __init__(self, state: ClusterState, deployments: str, client: AsyncClient | None = None) -> None:
        self._state = state
        self._deployments: dict[str, dict[Role, str]] = {}  # by model; "": of the one that has none of its own
        for part in filter(None, deployments.split(",")):
            of, _, deployment = part.rpartition("=")
            model, _, name = of.rpartition("/")
            role = next((role for role in ROLES if role == name), None)
            if role is None or not deployment:
                raise SettingError(f"planner_deployments: {part!r} is no deployment: write e.g. decode=tandem-decode")
            self._deployments.setdefault(model, {})[role] = deployment
        if not self._deployments:
            raise SettingError("planner_deployments is not set: name deployments, as decode=tandem-decode")
        try:
            self._client = client or AsyncClient()
        except ConfigError as error:
            raise SettingError(f"planner_actuator: no Kubernetes API server is known here ({error})") from error
        self._since: dict[str, float] = {}  # when a worker that is to come was first missed, unix seconds
        self._first = ""  # the model of those that are named without one; empty: nobody knows
        self._told: set[str] = set()  # models of which the log says that they have no deployment

    async def starting(self, model: str) -> list[Worker]:
        """Replicas that are asked for and are no members yet."""
        found = []
        for role, deployment in self._of(model).items():
            missing = await self._replicas(deployment) - len(self._members(deployment, model))
            names = [f"{deployment}#{number}" for number in range(missing)]
            self._since = {k: v for k, v in self._since.items() if not k.startswith(f"{deployment}#") or k in names}
            for name in names:
                since = self._since.setdefault(name, time.time())
                found.append(Worker(name=name, role=role, state="starting", since=since))
        return found

    async def add(self, model: str, role: Role) -> None:
        """One replica more."""
        if (deployment := self._of(model).get(role)) is None:
            others = f": those without a model are of {self._first}" if self._first not in ("", model) else ""
            told = f"planner_deployments names none for {role} workers of {model}{others}"
            raise ActuatorFailed(f"{told}; name one as {model}/{role}=NAME")
        await self._scale(deployment, await self._replicas(deployment) + 1)

    async def remove(self, name: str, member: cluster_pb2.Member | None) -> None:
        """One replica less: this one. SIGTERM has it drain."""
        deployment = _deployment_of(name)
        if not any(deployment in of.values() for of in self._deployments.values()):
            raise ActuatorFailed(f"{name} is of no deployment in planner_deployments")
        replicas = await self._replicas(deployment)
        if replicas < 1:
            raise ActuatorFailed(f"{deployment} has no replica that could go")
        if member is not None and not await self._goes_first(name) and not self._any_may_go(deployment, member):
            raise ActuatorFailed(f"without the right to patch pods {name} is not chosen, and who decodes last might go")
        await self._scale(deployment, replicas - 1)

    async def close(self) -> None:
        """Disconnects."""
        await self._client.close()

    async def _goes_first(self, name: str) -> bool:
        """Whether the pod will be the one that goes. False: this account may not patch pods."""
        async with _told():
            try:
                await self._client.patch(Pod, name, _GOES_FIRST)
            except httpx2.HTTPStatusError as error:
                if error.response.status_code != httpx2.codes.FORBIDDEN:
                    raise
                return False
        return True

    def _any_may_go(self, deployment: str, member: cluster_pb2.Member) -> bool:
        """Whether a worker that decodes is left whichever pod of the deployment goes."""
        left = [
            each
            for each in self._state.members("decode", "aggregated")
            if each.model.name == member.model.name and not (each.draining or each.asleep)
        ]
        elsewhere = all(_deployment_of(each.name) != deployment for each in left)
        return member.role != "prefill" or len(left) > 1 or elsewhere

    def _of(self, model: str) -> dict[Role, str]:
        if (own := self._deployments.get(model)) is not None:
            return own
        shared = self._deployments.get("", {})
        if shared and self._is_first(model, shared.values()):
            return shared
        if model not in self._told:
            self._told.add(model)
            log.warning("planner_deployments names none for a model: its workers stay as many as they are", model=model)
        return {}

    def _is_first(self, model: str, deployments: Collection[str]) -> bool:
        """Whether the deployments without a model are its: as their workers say, or, without any, as it asks first."""
        members = self._state.members(*ROLES)
        within = {member.model.name for member in members if _deployment_of(member.name) in deployments}
        if within and self._first not in within:
            self._first = min(within)
        elsewhere = any(member.model.name == model for member in members)
        if not (self._first or within or elsewhere):
            self._first = model
        return self._first == model

    def _members(self, deployment: str, model: str) -> list[cluster_pb2.Member]:
        """Those that count among its replicas: Kubernetes counts none that it has told to end."""
        members = [member for member in self._state.members(*ROLES) if not member.leaving]
        return [m for m in members if _deployment_of(m.name) == deployment and m.model.name == model]

    async def _replicas(self, deployment: str) -> int:
        async with _told():
            scale = await self._client.get(Deployment.Scale, deployment)
        return (scale.spec.replicas or 0) if scale.spec is not None else 0

    async def _scale(self, deployment: str, replicas: int) -> None:
        async with _told():
            await self._client.patch(Deployment.Scale, deployment, Deployment.Scale(spec=ScaleSpec(replicas=replicas)))


def _deployment_of(name: str) -> str:
    """Of a pod, DEPLOYMENT-REPLICASET-POD, or of one that is to come, DEPLOYMENT#NUMBER."""
    deployment, number, _ = name.partition("#")
    return deployment if number else name.rsplit("-", 2)[0]


@asynccontextmanager
async def _told() -> AsyncIterator[None]:
    try:
        yield
    except httpx2.HTTPError as error:  # ApiError is one
        raise ActuatorFailed(f"the Kubernetes API server refuses or does not answer: {error}") from error
