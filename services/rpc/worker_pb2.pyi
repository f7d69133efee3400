from services.rpc import router_pb2 as _router_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Sampling(_message.Message):
    __slots__ = ("max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty", "logit_bias", "seed", "stop_token_ids", "logprobs", "prompt_logprobs", "eos_token_ids")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    min_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    seed: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: int
    prompt_logprobs: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., seed: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class SubmitRequest(_message.Message):
    __slots__ = ("request_id", "attempt", "prompt_token_ids", "output_token_ids", "sampling", "priority", "deadline_seconds", "cache_salt", "reply_to", "gateway_incarnation", "prefill", "worker_incarnation", "source")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    REPLY_TO_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    WORKER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    output_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: Sampling
    priority: int
    deadline_seconds: float
    cache_salt: str
    reply_to: str
    gateway_incarnation: str
    prefill: _router_pb2.Endpoint
    worker_incarnation: str
    source: _router_pb2.PrefixSource
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., output_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., priority: _Optional[int] = ..., deadline_seconds: _Optional[float] = ..., cache_salt: _Optional[str] = ..., reply_to: _Optional[str] = ..., gateway_incarnation: _Optional[str] = ..., prefill: _Optional[_Union[_router_pb2.Endpoint, _Mapping]] = ..., worker_incarnation: _Optional[str] = ..., source: _Optional[_Union[_router_pb2.PrefixSource, _Mapping]] = ...) -> None: ...

class SubmitReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("request_id", "attempt", "reason")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    reason: str
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class AbortReply(_message.Message):
    __slots__ = ("known",)
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    known: bool
    def __init__(self, known: _Optional[bool] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("leave",)
    LEAVE_FIELD_NUMBER: _ClassVar[int]
    leave: bool
    def __init__(self, leave: _Optional[bool] = ...) -> None: ...

class DrainReply(_message.Message):
    __slots__ = ("under_way",)
    UNDER_WAY_FIELD_NUMBER: _ClassVar[int]
    under_way: int
    def __init__(self, under_way: _Optional[int] = ...) -> None: ...

class UndrainRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class UndrainReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SetRoleRequest(_message.Message):
    __slots__ = ("role", "finish_seconds", "force")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    FINISH_SECONDS_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    role: str
    finish_seconds: float
    force: bool
    def __init__(self, role: _Optional[str] = ..., finish_seconds: _Optional[float] = ..., force: _Optional[bool] = ...) -> None: ...

class SetRoleReply(_message.Message):
    __slots__ = ("before", "seconds", "moved")
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    MOVED_FIELD_NUMBER: _ClassVar[int]
    before: str
    seconds: float
    moved: int
    def __init__(self, before: _Optional[str] = ..., seconds: _Optional[float] = ..., moved: _Optional[int] = ...) -> None: ...

class CacheSnapshotRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CacheSnapshotReply(_message.Message):
    __slots__ = ("incarnation", "sequence", "block_hashes", "tiers")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    sequence: int
    block_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    tiers: _containers.RepeatedCompositeFieldContainer[TierBlocks]
    def __init__(self, incarnation: _Optional[str] = ..., sequence: _Optional[int] = ..., block_hashes: _Optional[_Iterable[bytes]] = ..., tiers: _Optional[_Iterable[_Union[TierBlocks, _Mapping]]] = ...) -> None: ...

class TierBlocks(_message.Message):
    __slots__ = ("tier", "block_hashes")
    TIER_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    tier: str
    block_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, tier: _Optional[str] = ..., block_hashes: _Optional[_Iterable[bytes]] = ...) -> None: ...

class KvEventsRequest(_message.Message):
    __slots__ = ("after",)
    AFTER_FIELD_NUMBER: _ClassVar[int]
    after: int
    def __init__(self, after: _Optional[int] = ...) -> None: ...

class KvEventsReply(_message.Message):
    __slots__ = ("incarnation", "kept", "batches")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    kept: bool
    batches: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, incarnation: _Optional[str] = ..., kept: _Optional[bool] = ..., batches: _Optional[_Iterable[bytes]] = ...) -> None: ...

class SleepRequest(_message.Message):
    __slots__ = ("drain", "timeout_seconds")
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    drain: bool
    timeout_seconds: float
    def __init__(self, drain: _Optional[bool] = ..., timeout_seconds: _Optional[float] = ...) -> None: ...

class SleepReply(_message.Message):
    __slots__ = ("was_asleep", "seconds")
    WAS_ASLEEP_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    was_asleep: bool
    seconds: float
    def __init__(self, was_asleep: _Optional[bool] = ..., seconds: _Optional[float] = ...) -> None: ...

class WakeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WakeReply(_message.Message):
    __slots__ = ("was_awake", "seconds")
    WAS_AWAKE_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    was_awake: bool
    seconds: float
    def __init__(self, was_awake: _Optional[bool] = ..., seconds: _Optional[float] = ...) -> None: ...
