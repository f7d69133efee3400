"""What a worker is about to forget is copied by the KV service first."""

from __future__ import annotations

from collections.abc import Sequence

import grpc.aio
import structlog

from services.cluster_state import ClusterState
from services.rpc import cluster_pb2, tiers_pb2, tiers_pb2_grpc
from services.rpc_server import ChannelClosed, answer_of, make_channel
from services.security import ClusterKey

log = structlog.get_logger()


def keeper_of(own: cluster_pb2.Member, state: ClusterState) -> cluster_pb2.Member | None:
    """The KV service that keeps this worker's blocks."""
    model = own.model.fingerprint, own.model.layout
    found = (each for each in state.members("kv") if (each.model.fingerprint, each.model.layout) == model)
    return next((each for each in found if own.sends and not each.draining), None)


async def have_copied(
    hashes: Sequence[bytes], own: cluster_pb2.Member, keeper: cluster_pb2.Member, key: ClusterKey | None, seconds: float
) -> int:
    """Has the KV service copy what it lacks of these blocks, within `seconds`; how many of them are kept then."""
    request = tiers_pb2.CopyRequest(worker=own.incarnation, block_hashes=hashes, seconds=seconds)
    channel = make_channel(keeper.grpc_address, key)
    try:
        reply = await answer_of(tiers_pb2_grpc.TiersStub(channel).Copy(request, timeout=seconds + 1))
    except (grpc.aio.AioRpcError, ChannelClosed) as error:
        log.warning("the KV service does not copy what is forgotten", name=keeper.name, error=str(error))
        return 0
    finally:
        await channel.close()
    return int(reply.kept)
