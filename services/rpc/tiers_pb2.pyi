from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TopRequest(_message.Message):
    __slots__ = ("count",)
    COUNT_FIELD_NUMBER: _ClassVar[int]
    count: int
    def __init__(self, count: _Optional[int] = ...) -> None: ...

class TopReply(_message.Message):
    __slots__ = ("prefixes",)
    PREFIXES_FIELD_NUMBER: _ClassVar[int]
    prefixes: _containers.RepeatedCompositeFieldContainer[Prefix]
    def __init__(self, prefixes: _Optional[_Iterable[_Union[Prefix, _Mapping]]] = ...) -> None: ...

class Prefix(_message.Message):
    __slots__ = ("block_hash", "tokens", "uses")
    BLOCK_HASH_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    USES_FIELD_NUMBER: _ClassVar[int]
    block_hash: bytes
    tokens: int
    uses: int
    def __init__(self, block_hash: _Optional[bytes] = ..., tokens: _Optional[int] = ..., uses: _Optional[int] = ...) -> None: ...

class VerifyRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class VerifyReply(_message.Message):
    __slots__ = ("right", "wrong")
    RIGHT_FIELD_NUMBER: _ClassVar[int]
    WRONG_FIELD_NUMBER: _ClassVar[int]
    right: int
    wrong: int
    def __init__(self, right: _Optional[int] = ..., wrong: _Optional[int] = ...) -> None: ...

class CopyRequest(_message.Message):
    __slots__ = ("worker", "block_hashes", "seconds")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    worker: str
    block_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    seconds: float
    def __init__(self, worker: _Optional[str] = ..., block_hashes: _Optional[_Iterable[bytes]] = ..., seconds: _Optional[float] = ...) -> None: ...

class CopyReply(_message.Message):
    __slots__ = ("kept",)
    KEPT_FIELD_NUMBER: _ClassVar[int]
    kept: int
    def __init__(self, kept: _Optional[int] = ...) -> None: ...

class DropRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DropReply(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    def __init__(self, blocks: _Optional[int] = ...) -> None: ...

class PinRequest(_message.Message):
    __slots__ = ("name", "owner", "block_hashes", "seconds")
    NAME_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    name: str
    owner: str
    block_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    seconds: float
    def __init__(self, name: _Optional[str] = ..., owner: _Optional[str] = ..., block_hashes: _Optional[_Iterable[bytes]] = ..., seconds: _Optional[float] = ...) -> None: ...

class PinReply(_message.Message):
    __slots__ = ("blocks", "seconds", "limit")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    seconds: float
    limit: str
    def __init__(self, blocks: _Optional[int] = ..., seconds: _Optional[float] = ..., limit: _Optional[str] = ...) -> None: ...

class KeepPinRequest(_message.Message):
    __slots__ = ("name", "lasting")
    NAME_FIELD_NUMBER: _ClassVar[int]
    LASTING_FIELD_NUMBER: _ClassVar[int]
    name: str
    lasting: str
    def __init__(self, name: _Optional[str] = ..., lasting: _Optional[str] = ...) -> None: ...

class KeepPinReply(_message.Message):
    __slots__ = ("found",)
    FOUND_FIELD_NUMBER: _ClassVar[int]
    found: bool
    def __init__(self, found: _Optional[bool] = ...) -> None: ...

class ReadAheadRequest(_message.Message):
    __slots__ = ("block_hashes",)
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    block_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, block_hashes: _Optional[_Iterable[bytes]] = ...) -> None: ...

class ReadAheadReply(_message.Message):
    __slots__ = ("taken",)
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    taken: bool
    def __init__(self, taken: _Optional[bool] = ...) -> None: ...

class UnpinRequest(_message.Message):
    __slots__ = ("names", "all")
    NAMES_FIELD_NUMBER: _ClassVar[int]
    ALL_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[str]
    all: bool
    def __init__(self, names: _Optional[_Iterable[str]] = ..., all: _Optional[bool] = ...) -> None: ...

class UnpinReply(_message.Message):
    __slots__ = ("pins",)
    PINS_FIELD_NUMBER: _ClassVar[int]
    pins: int
    def __init__(self, pins: _Optional[int] = ...) -> None: ...

class PinsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PinsReply(_message.Message):
    __slots__ = ("lasting", "sessions", "blocks", "here", "most")
    LASTING_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HERE_FIELD_NUMBER: _ClassVar[int]
    MOST_FIELD_NUMBER: _ClassVar[int]
    lasting: _containers.RepeatedCompositeFieldContainer[PinState]
    sessions: int
    blocks: int
    here: int
    most: int
    def __init__(self, lasting: _Optional[_Iterable[_Union[PinState, _Mapping]]] = ..., sessions: _Optional[int] = ..., blocks: _Optional[int] = ..., here: _Optional[int] = ..., most: _Optional[int] = ...) -> None: ...

class PinState(_message.Message):
    __slots__ = ("name", "blocks", "here", "block_hash")
    NAME_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HERE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASH_FIELD_NUMBER: _ClassVar[int]
    name: str
    blocks: int
    here: int
    block_hash: bytes
    def __init__(self, name: _Optional[str] = ..., blocks: _Optional[int] = ..., here: _Optional[int] = ..., block_hash: _Optional[bytes] = ...) -> None: ...
