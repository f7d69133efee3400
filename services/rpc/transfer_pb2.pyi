from services.rpc import router_pb2 as _router_pb2
from services.rpc import worker_pb2 as _worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ReceiverFrame(_message.Message):
    __slots__ = ("transfer_id", "hello", "order", "renew", "commit", "abort", "switched", "lost", "checksum")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    RENEW_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    SWITCHED_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    transfer_id: str
    hello: ReceiverHello
    order: Order
    renew: Renew
    commit: Commit
    abort: Abort
    switched: Switched
    lost: Lost
    checksum: int
    def __init__(self, transfer_id: _Optional[str] = ..., hello: _Optional[_Union[ReceiverHello, _Mapping]] = ..., order: _Optional[_Union[Order, _Mapping]] = ..., renew: _Optional[_Union[Renew, _Mapping]] = ..., commit: _Optional[_Union[Commit, _Mapping]] = ..., abort: _Optional[_Union[Abort, _Mapping]] = ..., switched: _Optional[_Union[Switched, _Mapping]] = ..., lost: _Optional[_Union[Lost, _Mapping]] = ..., checksum: _Optional[int] = ...) -> None: ...

class SenderFrame(_message.Message):
    __slots__ = ("transfer_id", "hello", "accepted", "first_token", "progress", "done", "failed", "abort_ack", "switch", "checksum")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    ABORT_ACK_FIELD_NUMBER: _ClassVar[int]
    SWITCH_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    transfer_id: str
    hello: SenderHello
    accepted: Accepted
    first_token: FirstToken
    progress: Progress
    done: Done
    failed: Failed
    abort_ack: AbortAck
    switch: Switch
    checksum: int
    def __init__(self, transfer_id: _Optional[str] = ..., hello: _Optional[_Union[SenderHello, _Mapping]] = ..., accepted: _Optional[_Union[Accepted, _Mapping]] = ..., first_token: _Optional[_Union[FirstToken, _Mapping]] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ..., done: _Optional[_Union[Done, _Mapping]] = ..., failed: _Optional[_Union[Failed, _Mapping]] = ..., abort_ack: _Optional[_Union[AbortAck, _Mapping]] = ..., switch: _Optional[_Union[Switch, _Mapping]] = ..., checksum: _Optional[int] = ...) -> None: ...

class ConnectorOffer(_message.Message):
    __slots__ = ("kind", "description")
    KIND_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    kind: str
    description: bytes
    def __init__(self, kind: _Optional[str] = ..., description: _Optional[bytes] = ...) -> None: ...

class ReceiverHello(_message.Message):
    __slots__ = ("incarnation", "fingerprint", "layout", "offers", "name")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    OFFERS_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    fingerprint: str
    layout: str
    offers: _containers.RepeatedCompositeFieldContainer[ConnectorOffer]
    name: str
    def __init__(self, incarnation: _Optional[str] = ..., fingerprint: _Optional[str] = ..., layout: _Optional[str] = ..., offers: _Optional[_Iterable[_Union[ConnectorOffer, _Mapping]]] = ..., name: _Optional[str] = ...) -> None: ...

class SenderHello(_message.Message):
    __slots__ = ("incarnation", "connector", "reason", "boot_id", "pid", "start_ticks")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    CONNECTOR_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    START_TICKS_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    connector: str
    reason: str
    boot_id: str
    pid: int
    start_ticks: int
    def __init__(self, incarnation: _Optional[str] = ..., connector: _Optional[str] = ..., reason: _Optional[str] = ..., boot_id: _Optional[str] = ..., pid: _Optional[int] = ..., start_ticks: _Optional[int] = ...) -> None: ...

class BlockReferences(_message.Message):
    __slots__ = ("incarnations", "block_ids", "generations", "content_hashes")
    INCARNATIONS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    CONTENT_HASHES_FIELD_NUMBER: _ClassVar[int]
    incarnations: _containers.RepeatedScalarFieldContainer[str]
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    generations: _containers.RepeatedScalarFieldContainer[int]
    content_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, incarnations: _Optional[_Iterable[str]] = ..., block_ids: _Optional[_Iterable[int]] = ..., generations: _Optional[_Iterable[int]] = ..., content_hashes: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Order(_message.Message):
    __slots__ = ("request_id", "attempt", "prompt_token_ids", "output_token_ids", "sampling", "priority", "deadline_seconds", "cache_salt", "reply_to", "skip_blocks", "blocks", "lease_seconds", "connector", "cached_only", "source", "traceparent", "block_hashes", "tier")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    REPLY_TO_FIELD_NUMBER: _ClassVar[int]
    SKIP_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    CONNECTOR_FIELD_NUMBER: _ClassVar[int]
    CACHED_ONLY_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    output_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _worker_pb2.Sampling
    priority: int
    deadline_seconds: float
    cache_salt: str
    reply_to: str
    skip_blocks: int
    blocks: BlockReferences
    lease_seconds: float
    connector: str
    cached_only: bool
    source: _router_pb2.PrefixSource
    traceparent: str
    block_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    tier: str
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., output_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_worker_pb2.Sampling, _Mapping]] = ..., priority: _Optional[int] = ..., deadline_seconds: _Optional[float] = ..., cache_salt: _Optional[str] = ..., reply_to: _Optional[str] = ..., skip_blocks: _Optional[int] = ..., blocks: _Optional[_Union[BlockReferences, _Mapping]] = ..., lease_seconds: _Optional[float] = ..., connector: _Optional[str] = ..., cached_only: _Optional[bool] = ..., source: _Optional[_Union[_router_pb2.PrefixSource, _Mapping]] = ..., traceparent: _Optional[str] = ..., block_hashes: _Optional[_Iterable[bytes]] = ..., tier: _Optional[str] = ...) -> None: ...

class Renew(_message.Message):
    __slots__ = ("lease_seconds",)
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    lease_seconds: float
    def __init__(self, lease_seconds: _Optional[float] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Abort(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Accepted(_message.Message):
    __slots__ = ("lease_seconds",)
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    lease_seconds: float
    def __init__(self, lease_seconds: _Optional[float] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("token_id", "logprob")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ...) -> None: ...

class FirstToken(_message.Message):
    __slots__ = ("token_id", "logprob", "top_logprobs", "cached_tokens", "queue_seconds", "prefill_seconds")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    top_logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    cached_tokens: int
    queue_seconds: float
    prefill_seconds: float
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ..., top_logprobs: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ..., cached_tokens: _Optional[int] = ..., queue_seconds: _Optional[float] = ..., prefill_seconds: _Optional[float] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("bytes", "layers")
    BYTES_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    layers: int
    def __init__(self, bytes: _Optional[int] = ..., layers: _Optional[int] = ...) -> None: ...

class Done(_message.Message):
    __slots__ = ("checksums", "turn", "seconds_since_compute", "bytes", "tier")
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    SECONDS_SINCE_COMPUTE_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    checksums: _containers.RepeatedScalarFieldContainer[int]
    turn: int
    seconds_since_compute: float
    bytes: int
    tier: str
    def __init__(self, checksums: _Optional[_Iterable[int]] = ..., turn: _Optional[int] = ..., seconds_since_compute: _Optional[float] = ..., bytes: _Optional[int] = ..., tier: _Optional[str] = ...) -> None: ...

class Failed(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class AbortAck(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Switch(_message.Message):
    __slots__ = ("turn", "connector", "reason")
    TURN_FIELD_NUMBER: _ClassVar[int]
    CONNECTOR_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    turn: int
    connector: str
    reason: str
    def __init__(self, turn: _Optional[int] = ..., connector: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class Switched(_message.Message):
    __slots__ = ("turn",)
    TURN_FIELD_NUMBER: _ClassVar[int]
    turn: int
    def __init__(self, turn: _Optional[int] = ...) -> None: ...

class Lost(_message.Message):
    __slots__ = ("turn", "reason")
    TURN_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    turn: int
    reason: str
    def __init__(self, turn: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...
