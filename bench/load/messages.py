"""What load processes and their coordinator tell each other: msgpack behind a length of 4 bytes, over pipes."""

import asyncio
from collections.abc import Callable

import msgspec

from bench.config import LoadConfig
from bench.measure.record import Record

_LENGTH = 4
_LONGEST = 256 << 20  # bytes of a message


class Prepare(msgspec.Struct, tag="prepare"):
    """To a load process: be number `shard` of `shards`. The first message."""

    config: LoadConfig
    api_key: str
    shard: int
    shards: int


class Start(msgspec.Struct, tag="start"):
    """To a load process: the run starts at this time.monotonic()."""

    at: float


class Stop(msgspec.Struct, tag="stop"):
    """To a load process: send no more and give up what is under way."""


class Ready(msgspec.Struct, tag="ready"):
    """From a load process: prepared. `planned`: requests of the whole run, 0: as many as fit the duration."""

    planned: int


class Progress(msgspec.Struct, tag="progress"):
    """From a load process: what happened since the last of these."""

    sent: int
    in_flight: int
    records: list[Record]  # that ended
    first_tokens: list[float]  # TTFT of answers that began, seconds
    chunks: int
    send_lag_ms: list[float]
    loop_lag_ms: list[float]


class Finished(msgspec.Struct, tag="finished"):
    """From a load process: all is over."""


class Failed(msgspec.Struct, tag="failed"):
    """From a load process: it cannot go on, and why."""

    message: str


ToProcess = Prepare | Start | Stop
FromProcess = Ready | Progress | Finished | Failed

_encode = msgspec.msgpack.Encoder().encode
decode_to_process: Callable[[bytes], ToProcess] = msgspec.msgpack.Decoder(ToProcess).decode
decode_from_process: Callable[[bytes], FromProcess] = msgspec.msgpack.Decoder(FromProcess).decode


def frame(message: ToProcess | FromProcess) -> bytes:
    """The message as bytes of a pipe."""
    data = _encode(message)
    return len(data).to_bytes(_LENGTH, "big") + data


async def read_frame(reader: asyncio.StreamReader) -> bytes | None:
    """The next message, undecoded; None at the end of the pipe. Raises ValueError for one that is too long."""
    try:
        length = int.from_bytes(await reader.readexactly(_LENGTH), "big")
        if length > _LONGEST:
            raise ValueError(f"a message of {length} bytes is longer than {_LONGEST}")
        return await reader.readexactly(length)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
