"""The admin route that tells the planner's latest decisions, as they stand in the cluster state."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from services.cluster_state import ClusterState
from services.gateway.errors import ApiError
from services.redis_client import REDIS_ERRORS

_MOST = 1000


class Decisions:
    """Of all models that workers have, and of those `served` that have no worker. `url`, `cluster`: of the state."""

    def __init__(self, state: ClusterState, url: str, cluster: str, served: tuple[str, ...]) -> None:
        self._state = state
        self._url = url
        self._cluster = cluster
        self._served = served

    def routes(self) -> list[BaseRoute]:
        """For the admin port."""
        return [Route("/admin/planner", self._planner)]

    async def _planner(self, request: Request) -> Response:
        """By model: the `last` decisions, oldest first, as `planner.decision` writes them."""
        text = request.query_params.get("last", "1")
        if not text.isascii() or not text.isdecimal() or not 1 <= int(text) <= _MOST:
            raise ApiError(400, f"`last` must be a number from 1 to {_MOST}", code="invalid_value")
        return Response(await self.latest(int(text)), media_type="application/json")

    async def latest(self, last: int) -> bytes:
        """JSON of the same. Raises ApiError where the cluster state does not answer."""
        from planner.decision import to_line
        from services.planner.journal import Journal

        there = {member.model.name for member in self._state.members("prefill", "decode", "aggregated")}
        found = {}
        for model in sorted(there.union(self._served)):
            journal = Journal(self._url, self._cluster, model)
            try:
                lines = [msgspec.Raw(to_line(decision)) for decision in await journal.latest(last)]
            except REDIS_ERRORS as error:
                raise ApiError(503, "The cluster state does not answer", code="no_cluster_state") from error
            finally:
                await journal.close()
            if lines or model in there:
                found[model] = lines
        return msgspec.json.encode(found)
