"""What a request will need that waits in the router is read into host memory by the KV service that has it below."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from router.placer import Placer
from services.read_ahead import ReadAhead
from services.rpc import cluster_pb2
from services.security import ClusterKey


class Prefetch:
    """`members`: by row. Nothing less than `fetch_tokens` is asked for; 0: nothing."""

    def __init__(
        self, placer: Placer, members: Mapping[int, cluster_pb2.Member], fetch_tokens: int, key: ClusterKey | None
    ) -> None:
        self._placer = placer
        self._members = members
        self._fetch_tokens = fetch_tokens
        self._ahead = ReadAhead(key)

    def begin(self, chains: Sequence[tuple[str, list[bytes]]]) -> None:
        """For a request that begins to wait, by layout and hashes of its prompt's blocks."""
        fleet = self._placer.fleet
        services = {member.incarnation: member for member in self._members.values() if len(member.tiers) > 1}
        for layout, hashes in chains if services and self._fetch_tokens else ():
            depths = self._placer.index.depths(hashes, len(fleet.table))
            alike = fleet.table["ready"] & (fleet.table["layout"] == fleet.layout(layout))
            own = int(np.max(depths, where=alike & (fleet.table["tier"] == 0), initial=0))
            for member in services.values():
                rows = fleet.rows(member.incarnation)
                near, far = max(own, int(depths[rows[0]])), int(depths[rows[-1]])
                if alike[rows[0]] and (far - near) * member.model.block_size >= self._fetch_tokens:
                    self._ahead.ask(member.grpc_address, hashes[:far])
