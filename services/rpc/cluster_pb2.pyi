from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Member(_message.Message):
    __slots__ = ("name", "role", "incarnation", "grpc_address", "tokens_address", "events_address", "pid", "host", "model", "load", "draining", "asleep", "fetches", "sends", "tiers", "gpu", "gpus", "start_seconds", "leaving")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    GRPC_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    EVENTS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    ASLEEP_FIELD_NUMBER: _ClassVar[int]
    FETCHES_FIELD_NUMBER: _ClassVar[int]
    SENDS_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    GPU_FIELD_NUMBER: _ClassVar[int]
    GPUS_FIELD_NUMBER: _ClassVar[int]
    START_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    name: str
    role: str
    incarnation: str
    grpc_address: str
    tokens_address: str
    events_address: str
    pid: int
    host: str
    model: ModelCard
    load: Load
    draining: bool
    asleep: bool
    fetches: bool
    sends: bool
    tiers: _containers.RepeatedScalarFieldContainer[str]
    gpu: str
    gpus: int
    start_seconds: float
    leaving: bool
    def __init__(self, name: _Optional[str] = ..., role: _Optional[str] = ..., incarnation: _Optional[str] = ..., grpc_address: _Optional[str] = ..., tokens_address: _Optional[str] = ..., events_address: _Optional[str] = ..., pid: _Optional[int] = ..., host: _Optional[str] = ..., model: _Optional[_Union[ModelCard, _Mapping]] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., draining: _Optional[bool] = ..., asleep: _Optional[bool] = ..., fetches: _Optional[bool] = ..., sends: _Optional[bool] = ..., tiers: _Optional[_Iterable[str]] = ..., gpu: _Optional[str] = ..., gpus: _Optional[int] = ..., start_seconds: _Optional[float] = ..., leaving: _Optional[bool] = ...) -> None: ...

class ModelCard(_message.Message):
    __slots__ = ("name", "fingerprint", "layout", "block_size", "max_model_len", "num_blocks", "hash_vector")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HASH_VECTOR_FIELD_NUMBER: _ClassVar[int]
    name: str
    fingerprint: str
    layout: str
    block_size: int
    max_model_len: int
    num_blocks: int
    hash_vector: bytes
    def __init__(self, name: _Optional[str] = ..., fingerprint: _Optional[str] = ..., layout: _Optional[str] = ..., block_size: _Optional[int] = ..., max_model_len: _Optional[int] = ..., num_blocks: _Optional[int] = ..., hash_vector: _Optional[bytes] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("running", "waiting", "free_blocks", "steps", "waiting_for_blocks", "prefill_tokens_per_second", "fetch_tokens_per_second", "restore_tokens_per_second", "generated_tokens", "computed_tokens", "cached_tokens", "fetched_tokens", "restored_tokens", "links")
    class RestoreTokensPerSecondEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    FETCH_TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    RESTORE_TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FETCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RESTORED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    running: int
    waiting: int
    free_blocks: int
    steps: int
    waiting_for_blocks: int
    prefill_tokens_per_second: float
    fetch_tokens_per_second: float
    restore_tokens_per_second: _containers.ScalarMap[str, float]
    generated_tokens: int
    computed_tokens: int
    cached_tokens: int
    fetched_tokens: int
    restored_tokens: int
    links: _containers.RepeatedCompositeFieldContainer[Link]
    def __init__(self, running: _Optional[int] = ..., waiting: _Optional[int] = ..., free_blocks: _Optional[int] = ..., steps: _Optional[int] = ..., waiting_for_blocks: _Optional[int] = ..., prefill_tokens_per_second: _Optional[float] = ..., fetch_tokens_per_second: _Optional[float] = ..., restore_tokens_per_second: _Optional[_Mapping[str, float]] = ..., generated_tokens: _Optional[int] = ..., computed_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., fetched_tokens: _Optional[int] = ..., restored_tokens: _Optional[int] = ..., links: _Optional[_Iterable[_Union[Link, _Mapping]]] = ...) -> None: ...

class Link(_message.Message):
    __slots__ = ("peer", "connector", "bytes", "transfers")
    PEER_FIELD_NUMBER: _ClassVar[int]
    CONNECTOR_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    peer: str
    connector: str
    bytes: int
    transfers: int
    def __init__(self, peer: _Optional[str] = ..., connector: _Optional[str] = ..., bytes: _Optional[int] = ..., transfers: _Optional[int] = ...) -> None: ...

class MetricsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class MetricsReply(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: bytes
    def __init__(self, text: _Optional[bytes] = ...) -> None: ...
