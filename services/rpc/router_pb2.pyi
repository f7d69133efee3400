from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    UNTOLD: _ClassVar[Outcome]
    OK: _ClassVar[Outcome]
    CLIENT_ERROR: _ClassVar[Outcome]
    WORKER_ERROR: _ClassVar[Outcome]
    LOST: _ClassVar[Outcome]
    TIMED_OUT: _ClassVar[Outcome]
    ABORTED: _ClassVar[Outcome]
UNTOLD: Outcome
OK: Outcome
CLIENT_ERROR: Outcome
WORKER_ERROR: Outcome
LOST: Outcome
TIMED_OUT: Outcome
ABORTED: Outcome

class PlaceRequest(_message.Message):
    __slots__ = ("request_id", "attempt", "prompt_tokens", "max_tokens", "deadline_seconds", "tenant", "weight", "priority", "local_prefill_only", "exclude_incarnations", "model", "chains", "session")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    LOCAL_PREFILL_ONLY_FIELD_NUMBER: _ClassVar[int]
    EXCLUDE_INCARNATIONS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    CHAINS_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    prompt_tokens: int
    max_tokens: int
    deadline_seconds: float
    tenant: str
    weight: float
    priority: int
    local_prefill_only: bool
    exclude_incarnations: _containers.RepeatedScalarFieldContainer[str]
    model: str
    chains: _containers.RepeatedCompositeFieldContainer[HashChain]
    session: str
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., max_tokens: _Optional[int] = ..., deadline_seconds: _Optional[float] = ..., tenant: _Optional[str] = ..., weight: _Optional[float] = ..., priority: _Optional[int] = ..., local_prefill_only: _Optional[bool] = ..., exclude_incarnations: _Optional[_Iterable[str]] = ..., model: _Optional[str] = ..., chains: _Optional[_Iterable[_Union[HashChain, _Mapping]]] = ..., session: _Optional[str] = ...) -> None: ...

class HashChain(_message.Message):
    __slots__ = ("layout", "block_hashes")
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    layout: str
    block_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, layout: _Optional[str] = ..., block_hashes: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Endpoint(_message.Message):
    __slots__ = ("name", "incarnation", "address")
    NAME_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    name: str
    incarnation: str
    address: str
    def __init__(self, name: _Optional[str] = ..., incarnation: _Optional[str] = ..., address: _Optional[str] = ...) -> None: ...

class Placement(_message.Message):
    __slots__ = ("decode", "prefill", "decode_cached_blocks", "prefill_cached_blocks", "reason", "source", "held_seconds")
    DECODE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    HELD_SECONDS_FIELD_NUMBER: _ClassVar[int]
    decode: Endpoint
    prefill: Endpoint
    decode_cached_blocks: int
    prefill_cached_blocks: int
    reason: str
    source: PrefixSource
    held_seconds: float
    def __init__(self, decode: _Optional[_Union[Endpoint, _Mapping]] = ..., prefill: _Optional[_Union[Endpoint, _Mapping]] = ..., decode_cached_blocks: _Optional[int] = ..., prefill_cached_blocks: _Optional[int] = ..., reason: _Optional[str] = ..., source: _Optional[_Union[PrefixSource, _Mapping]] = ..., held_seconds: _Optional[float] = ...) -> None: ...

class PrefixSource(_message.Message):
    __slots__ = ("worker", "tokens", "tier")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    worker: Endpoint
    tokens: int
    tier: str
    def __init__(self, worker: _Optional[_Union[Endpoint, _Mapping]] = ..., tokens: _Optional[int] = ..., tier: _Optional[str] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("request_id", "attempt", "cached_tokens", "outcome", "decode", "prefill", "prefill_failed", "ttft_seconds", "output_tokens", "decode_seconds")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FAILED_FIELD_NUMBER: _ClassVar[int]
    TTFT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DECODE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    cached_tokens: int
    outcome: Outcome
    decode: str
    prefill: str
    prefill_failed: bool
    ttft_seconds: float
    output_tokens: int
    decode_seconds: float
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., outcome: _Optional[_Union[Outcome, str]] = ..., decode: _Optional[str] = ..., prefill: _Optional[str] = ..., prefill_failed: _Optional[bool] = ..., ttft_seconds: _Optional[float] = ..., output_tokens: _Optional[int] = ..., decode_seconds: _Optional[float] = ...) -> None: ...

class ReleaseReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("request",)
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    request: str
    def __init__(self, request: _Optional[str] = ...) -> None: ...

class ExplainReply(_message.Message):
    __slots__ = ("placements",)
    PLACEMENTS_FIELD_NUMBER: _ClassVar[int]
    placements: _containers.RepeatedCompositeFieldContainer[Explanation]
    def __init__(self, placements: _Optional[_Iterable[_Union[Explanation, _Mapping]]] = ...) -> None: ...

class Explanation(_message.Message):
    __slots__ = ("attempt", "seconds_ago", "policy", "prompt_tokens", "reason", "source", "rankings", "left_out", "held_seconds", "predicted_tokens", "found_tokens", "ttft_seconds", "tpot_seconds", "model")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    SECONDS_AGO_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    RANKINGS_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    HELD_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FOUND_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TTFT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TPOT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    attempt: str
    seconds_ago: float
    policy: str
    prompt_tokens: int
    reason: str
    source: str
    rankings: _containers.RepeatedCompositeFieldContainer[Ranking]
    left_out: _containers.RepeatedCompositeFieldContainer[LeftOut]
    held_seconds: float
    predicted_tokens: int
    found_tokens: int
    ttft_seconds: float
    tpot_seconds: float
    model: str
    def __init__(self, attempt: _Optional[str] = ..., seconds_ago: _Optional[float] = ..., policy: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., reason: _Optional[str] = ..., source: _Optional[str] = ..., rankings: _Optional[_Iterable[_Union[Ranking, _Mapping]]] = ..., left_out: _Optional[_Iterable[_Union[LeftOut, _Mapping]]] = ..., held_seconds: _Optional[float] = ..., predicted_tokens: _Optional[int] = ..., found_tokens: _Optional[int] = ..., ttft_seconds: _Optional[float] = ..., tpot_seconds: _Optional[float] = ..., model: _Optional[str] = ...) -> None: ...

class LeftOut(_message.Message):
    __slots__ = ("name", "reason")
    NAME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    name: str
    reason: str
    def __init__(self, name: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class Ranking(_message.Message):
    __slots__ = ("role", "candidates", "best")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    BEST_FIELD_NUMBER: _ClassVar[int]
    role: str
    candidates: int
    best: _containers.RepeatedCompositeFieldContainer[RankedWorker]
    def __init__(self, role: _Optional[str] = ..., candidates: _Optional[int] = ..., best: _Optional[_Iterable[_Union[RankedWorker, _Mapping]]] = ...) -> None: ...

class RankedWorker(_message.Message):
    __slots__ = ("name", "cost", "cached_tokens", "expected_tokens", "fetchable_tokens", "queued_tokens", "kept_tokens", "requests", "waiting_for_blocks")
    NAME_FIELD_NUMBER: _ClassVar[int]
    COST_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FETCHABLE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KEPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    name: str
    cost: float
    cached_tokens: int
    expected_tokens: int
    fetchable_tokens: int
    queued_tokens: float
    kept_tokens: float
    requests: int
    waiting_for_blocks: int
    def __init__(self, name: _Optional[str] = ..., cost: _Optional[float] = ..., cached_tokens: _Optional[int] = ..., expected_tokens: _Optional[int] = ..., fetchable_tokens: _Optional[int] = ..., queued_tokens: _Optional[float] = ..., kept_tokens: _Optional[float] = ..., requests: _Optional[int] = ..., waiting_for_blocks: _Optional[int] = ...) -> None: ...

class ShedRequest(_message.Message):
    __slots__ = ("model", "share", "seconds")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    model: str
    share: float
    seconds: float
    def __init__(self, model: _Optional[str] = ..., share: _Optional[float] = ..., seconds: _Optional[float] = ...) -> None: ...

class ShedReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("policy", "mode", "reason", "precision", "recall", "caches", "blocks", "reservations", "routers", "staleness_seconds", "left_out", "queued", "slo_ttft", "slo_tpot", "models")
    class CachesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    POLICY_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    PRECISION_FIELD_NUMBER: _ClassVar[int]
    RECALL_FIELD_NUMBER: _ClassVar[int]
    CACHES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RESERVATIONS_FIELD_NUMBER: _ClassVar[int]
    ROUTERS_FIELD_NUMBER: _ClassVar[int]
    STALENESS_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    SLO_TTFT_FIELD_NUMBER: _ClassVar[int]
    SLO_TPOT_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    policy: str
    mode: str
    reason: str
    precision: float
    recall: float
    caches: _containers.ScalarMap[str, int]
    blocks: int
    reservations: int
    routers: int
    staleness_seconds: float
    left_out: _containers.RepeatedCompositeFieldContainer[LeftOut]
    queued: int
    slo_ttft: float
    slo_tpot: float
    models: _containers.RepeatedCompositeFieldContainer[ServedModel]
    def __init__(self, policy: _Optional[str] = ..., mode: _Optional[str] = ..., reason: _Optional[str] = ..., precision: _Optional[float] = ..., recall: _Optional[float] = ..., caches: _Optional[_Mapping[str, int]] = ..., blocks: _Optional[int] = ..., reservations: _Optional[int] = ..., routers: _Optional[int] = ..., staleness_seconds: _Optional[float] = ..., left_out: _Optional[_Iterable[_Union[LeftOut, _Mapping]]] = ..., queued: _Optional[int] = ..., slo_ttft: _Optional[float] = ..., slo_tpot: _Optional[float] = ..., models: _Optional[_Iterable[_Union[ServedModel, _Mapping]]] = ...) -> None: ...

class ServedModel(_message.Message):
    __slots__ = ("name", "workers", "queued", "shed")
    class WorkersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    SHED_FIELD_NUMBER: _ClassVar[int]
    name: str
    workers: _containers.ScalarMap[str, int]
    queued: int
    shed: float
    def __init__(self, name: _Optional[str] = ..., workers: _Optional[_Mapping[str, int]] = ..., queued: _Optional[int] = ..., shed: _Optional[float] = ...) -> None: ...
