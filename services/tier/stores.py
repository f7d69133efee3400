"""The stores beneath the KV service's host memory, as its settings say: disk, Redis, object store, nearest first."""

from __future__ import annotations

import structlog

from engine.kv_cache import KVCacheSpec
from kv_transfer.connectors.codec import CODECS
from kv_transfer.tiers.disk import DiskStore
from kv_transfer.tiers.object_store import ObjectStore
from kv_transfer.tiers.redis_store import RedisStore
from kv_transfer.tiers.remote import RemoteStore
from kv_transfer.tiers.store import BlockFormat, Store, StoreError
from services.config import STORES, ConfigError, KvConfig, bucket_of, disk_tier
from services.redis_client import redis_client
from services.rpc import cluster_pb2
from services.security import key_of

log = structlog.get_logger()


async def open_stores(config: KvConfig, card: cluster_pb2.ModelCard) -> list[Store]:
    """All of them, with what is there. Raises ConfigError."""
    spec = KVCacheSpec.parse(card.layout)
    settings = [name for name in STORES if getattr(config, name)]
    if spec.ranks > 1 and settings:
        log.warning("blocks of several ranks are kept in host memory alone", layout=card.layout)
        return []
    format = BlockFormat(card.fingerprint, card.layout, spec.block_bytes)
    codec = spec.dtype.itemsize if config.kv_compression == "zstd" else 0
    if codec and codec not in CODECS:
        raise ConfigError("kv_compression: there is no zstd: pip install 'tandem-serve[worker]', or set it to off")
    stores: list[Store] = []
    for name in settings:
        try:
            stores.append(await _open(name, config, format, codec))
        except StoreError as error:
            for store in stores:
                await store.close()
            raise ConfigError(f"{name}: {error}") from error
    return stores


async def _open(name: str, config: KvConfig, format: BlockFormat, codec: int) -> Store:
    if name == "kv_disk":
        folder, capacity = disk_tier(config.kv_disk)
        return await DiskStore.open(folder, format, capacity, config.kv_policy, config.kv_tenant_share)
    key = key_of(config)
    sealed = key.kv_streams if key else b""
    shared: RemoteStore
    if name == "kv_redis":
        client = redis_client(config.kv_redis)
        shared = RedisStore(client, format, cluster=config.cluster, key=sealed, codec=codec)
    else:
        endpoint, bucket, region = bucket_of(config.kv_s3)
        shared = ObjectStore(
            bucket, format, endpoint=endpoint, region=region, cluster=config.cluster, key=sealed, codec=codec
        )
    await shared.find()
    return shared
