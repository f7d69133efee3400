"""A router among workers of several models."""

import grpc
import pytest
from router_cluster import chain, cluster, eventually

from services.rpc import cluster_pb2


async def test_only_workers_of_the_model_that_is_asked_for() -> None:
    async with cluster() as made:
        worker = await made.join("a", held=chain("hot"))
        worker.member.model.name = "other"
        made.service.on_change("updated", worker.member)
        await made.join("b")

        async def known() -> bool:
            return await made.cached(worker, chain("hot")) == 10

        await eventually(known)
        for model, incarnation in (("m", "b"), ("other", "a"), ("", "a")):
            assert (await made.place(chain("hot"), model=model)).decode.incarnation == incarnation
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await made.place(model="nobody's")
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        assert ("retry-after", "1") in list(refused.value.trailing_metadata() or ())


async def test_prefill_worker_is_one_of_the_model_too() -> None:
    async with cluster(local_prefill_tokens=0) as made:
        prefill = await made.join("p", "prefill")
        prefill.member.model.MergeFrom(cluster_pb2.ModelCard(name="other"))
        made.service.on_change("updated", prefill.member)
        await made.join("d")
        assert not (await made.place(model="m")).HasField("prefill")
        await made.join("q", "prefill")
        assert (await made.place(model="m")).prefill.incarnation == "q"


@pytest.mark.parametrize("policy", ["prefix", "history", "two_choices", "least_outstanding", "round_robin", "random"])
async def test_models_that_are_asked_for_in_turn_use_all_their_workers(policy: str) -> None:
    async with cluster(policy=policy) as made:
        for name in "abcd":
            worker = await made.join(name, "aggregated")
            worker.member.model.name = "m" if name in "ab" else "other"
            made.service.on_change("updated", worker.member)
        taken: dict[str, list[str]] = {"m": [], "other": []}
        for number in range(40):
            model = ("m", "other")[number % 2]
            placement = await made.place(chain(f"{number}"), model=model)
            taken[model].append(placement.decode.incarnation)
        assert {model: set(workers) for model, workers in taken.items()} == {"m": {"a", "b"}, "other": {"c", "d"}}
        if policy in ("least_outstanding", "round_robin"):
            assert all(workers.count(name) == 10 for workers in taken.values() for name in set(workers))
