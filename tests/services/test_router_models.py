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
