"""What the router predicts is told, compared with what gateways saw, and changed by it."""

from router_cluster import cluster

from services.rpc import router_pb2


async def test_predictions_are_told_and_learn_from_releases() -> None:
    async with cluster() as made:
        await made.join("d")

        async def place_and_release(number: int, **seen: float) -> router_pb2.Explanation:
            await made.place()
            told: router_pb2.Explanation = (
                await made.router.Explain(router_pb2.ExplainRequest(), timeout=5)
            ).placements[0]
            release = router_pb2.ReleaseRequest(request_id=f"r{number}", outcome=router_pb2.OK, output_tokens=11)
            release.ttft_seconds, release.decode_seconds = seen["ttft"], seen["decode"]
            await made.router.Release(release, timeout=5)
            return told

        first = await place_and_release(1, ttft=1.0, decode=1.0)
        assert 0 < first.ttft_seconds < 0.5 and 0 < first.tpot_seconds < 0.05
        for number in range(2, 60):
            last = await place_and_release(number, ttft=1.0, decode=1.0)
        assert 4 * first.ttft_seconds < last.ttft_seconds < 1.5 and 4 * first.tpot_seconds < last.tpot_seconds < 0.15
        for of in ("ttft", "tpot"):
            assert await made.metric("tandem_router_prediction_ratio_count", of=of) == 59
