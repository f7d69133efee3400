from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TimelinesRequest(_message.Message):
    __slots__ = ("request",)
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    request: str
    def __init__(self, request: _Optional[str] = ...) -> None: ...

class TimelinesReply(_message.Message):
    __slots__ = ("timelines", "boot_id", "now")
    TIMELINES_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    NOW_FIELD_NUMBER: _ClassVar[int]
    timelines: _containers.RepeatedCompositeFieldContainer[Timeline]
    boot_id: str
    now: float
    def __init__(self, timelines: _Optional[_Iterable[_Union[Timeline, _Mapping]]] = ..., boot_id: _Optional[str] = ..., now: _Optional[float] = ...) -> None: ...

class Timeline(_message.Message):
    __slots__ = ("transfer_id", "worker", "peer", "incarnation", "sends", "connector", "marks", "pushes", "pushes_left_out", "bytes")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SENDS_FIELD_NUMBER: _ClassVar[int]
    CONNECTOR_FIELD_NUMBER: _ClassVar[int]
    MARKS_FIELD_NUMBER: _ClassVar[int]
    PUSHES_FIELD_NUMBER: _ClassVar[int]
    PUSHES_LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    transfer_id: str
    worker: str
    peer: str
    incarnation: str
    sends: bool
    connector: str
    marks: _containers.RepeatedCompositeFieldContainer[Mark]
    pushes: _containers.RepeatedCompositeFieldContainer[Push]
    pushes_left_out: int
    bytes: int
    def __init__(self, transfer_id: _Optional[str] = ..., worker: _Optional[str] = ..., peer: _Optional[str] = ..., incarnation: _Optional[str] = ..., sends: _Optional[bool] = ..., connector: _Optional[str] = ..., marks: _Optional[_Iterable[_Union[Mark, _Mapping]]] = ..., pushes: _Optional[_Iterable[_Union[Push, _Mapping]]] = ..., pushes_left_out: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...

class Mark(_message.Message):
    __slots__ = ("event", "at", "detail")
    EVENT_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    event: str
    at: float
    detail: str
    def __init__(self, event: _Optional[str] = ..., at: _Optional[float] = ..., detail: _Optional[str] = ...) -> None: ...

class Push(_message.Message):
    __slots__ = ("layer", "tokens", "at", "seconds", "bytes", "layers")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    layer: int
    tokens: int
    at: float
    seconds: float
    bytes: int
    layers: int
    def __init__(self, layer: _Optional[int] = ..., tokens: _Optional[int] = ..., at: _Optional[float] = ..., seconds: _Optional[float] = ..., bytes: _Optional[int] = ..., layers: _Optional[int] = ...) -> None: ...
