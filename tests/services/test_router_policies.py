"""Every policy in the router's service: placements go where it says. The formulas: tests/router/test_policies.py."""

from collections import Counter

import pytest
from router_cluster import Cluster, chain, cluster, eventually

from router.policies import POLICIES
from services.rpc import router_pb2

WORKERS = ("a", "b")


async def ask(made: Cluster, prompt: str, session: str = "") -> str:
    """Where a request goes that has ended before the next one."""
    placement = await made.place(chain(prompt), session=session)
    await made.router.Release(router_pb2.ReleaseRequest(request_id=f"r{made._number}"))
    return placement.decode.incarnation


@pytest.mark.parametrize("policy", POLICIES)
async def test_requests_go_where_the_policy_says(policy: str) -> None:
    async with cluster(policy=policy, fetch_tokens=0) as made:
        holder, _ = [await made.join(name, "aggregated") for name in WORKERS]
        if policy in ("prefix", "overlap"):  # they look at caches
            await made.followed(holder)
            holder.store(chain("same"))

            async def known() -> bool:
                return await made.cached(holder, chain("same")) == len(chain("same"))

            await eventually(known)
        same = [await ask(made, "same") for _ in range(8)]
        if policy in ("prefix", "overlap", "history", "session"):
            assert len(set(same)) == 1
        if policy in ("prefix", "overlap"):
            assert set(same) == {"a"}
        different = Counter([await ask(made, f"prompt {number}", f"user {number}") for number in range(40)])
        if policy == "round_robin":
            assert Counter(same) == {"a": 4, "b": 4} and different == {"a": 20, "b": 20}
        assert set(different) == set(WORKERS)
        if policy == "session":
            assert len({await ask(made, f"another {number}", "user 3") for number in range(4)}) == 1
