"""A load process: sends its share of the run and tells the coordinator what came of it.

It is a process of its own so that drawing the live view never delays a request, and so that several can share a load
that is too much for one core. Started as `python -m bench.load.process`; speaks `bench.load.messages` on stdin and
stdout.
"""

import asyncio
import contextlib
import gc
import os
import signal
import sys
import time
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path

import msgspec
import uvloop

from bench.config import PATHS, LoadConfig
from bench.errors import BenchError
from bench.load.answer import Answer
from bench.load.body import Dialogue, digest, spoil
from bench.load.http import Pool, parse_url, request_bytes
from bench.load.messages import (
    Failed,
    Finished,
    FromProcess,
    Prepare,
    Progress,
    Ready,
    Start,
    Stop,
    decode_to_process,
    frame,
    read_frame,
)
from bench.load.plan import Planned, count, plan
from bench.measure.record import Record
from bench.workloads.base import Words
from bench.workloads.words import TokenWords

_TELL_EVERY = 0.1  # seconds between two messages to the coordinator
_TURN = 0.005  # seconds without a turn of the loop, at most
_HEARTBEAT = 0.01  # seconds; the timer whose lateness is the loop lag
_BACK_OFF = (0.1, 1.0)  # seconds that a closed loop waits after errors, the first time and at most


class Load:
    """The share of one process."""

    def __init__(self, prepare: Prepare, words: Words) -> None:
        self.config: LoadConfig = prepare.config
        self._words = words
        self._address = parse_url(self.config.url)
        self._pool = Pool(self._address)
        self._path = PATHS[self.config.endpoint]
        self._api_key = prepare.api_key
        share = (p for p in plan(self.config, words) if p.number % prepare.shards == prepare.shard)
        # The first one reads the data: before the start, so that it delays nothing.
        self._plan: Iterator[Planned] = chain(list(islice(share, 1)), share)
        slots, rest = divmod(self.config.concurrency or 0, prepare.shards)
        self._slots = slots + (prepare.shard < rest)
        self._running: dict[int, Answer] = {}
        self._origin = 0.0
        self._progress = Progress(0, 0, [], [], 0, [], [])
        self._told: dict[int, int] = {}  # chunks of running answers that were told, by request

    async def run(self, origin: float) -> None:
        """All of it, until every answer has ended. `origin`: time.monotonic() of the start."""
        self._origin = origin
        heart = asyncio.create_task(self._beat())
        try:
            await (self._open() if self.config.concurrency is None else self._closed())
        finally:
            heart.cancel()
            self._pool.close()

    async def _open(self) -> None:
        turned = time.monotonic()
        async with asyncio.TaskGroup() as conversations:
            for planned in self._plan:
                assert planned.due is not None
                dialogue = Dialogue(self.config, self._words, planned.conversation)
                asked = self._encoded(planned, dialogue, 0)  # ahead of time, so that it delays nothing
                due = self._origin + planned.due
                now = time.monotonic()
                # Behind its time it starts several before the loop turns: one a turn might never catch up.
                if due > now or now - turned > _TURN:
                    await asyncio.sleep(max(0.0, due - now))
                    turned = time.monotonic()
                conversations.create_task(self._converse(planned, dialogue, asked, due))

    async def _closed(self) -> None:
        await asyncio.sleep(max(0.0, self._origin - time.monotonic()))
        async with asyncio.TaskGroup() as slots:
            for _ in range(self._slots):
                slots.create_task(self._slot())

    async def _slot(self) -> None:
        """One client of the closed loop: a conversation after the other. After an error it waits before the next."""
        free = time.monotonic()
        pause = _BACK_OFF[0]
        for planned in self._plan:
            if self._expired():
                return
            dialogue = Dialogue(self.config, self._words, planned.conversation)
            record = await self._converse(planned, dialogue, self._encoded(planned, dialogue, 0), free)
            if record.error and planned.client == "normal":
                await asyncio.sleep(record.retry_after if record.retry_after >= 0 else pause)
                pause = min(2 * pause, _BACK_OFF[1])
            else:
                pause = _BACK_OFF[0]
            free = time.monotonic()

    async def _converse(self, planned: Planned, dialogue: Dialogue, asked: tuple[bytes, Record], due: float) -> Record:
        """All turns, as long as they succeed. Returns the last record."""
        request, record = asked
        turns = planned.conversation.turns
        for number, turn in enumerate(turns):
            if number:
                due = time.monotonic() + turn.think
                request, record = self._encoded(planned, dialogue, number)
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                if self._expired():
                    break
            answer = await self._send(planned, request, record, due, keep=self.config.keep_text or len(turns) > 1)
            if record.error or planned.client != "normal":
                break
            dialogue.hear("".join(answer.text))
        return record

    async def _send(self, planned: Planned, request: bytes, record: Record, due: float, keep: bool) -> Answer:
        record.scheduled = due - self._origin
        answer = Answer(record, self._origin, planned.manner, keep)
        self._running[record.id] = answer
        self._progress.sent += 1
        try:
            await answer.run(self._pool, request, self.config.timeout)
        finally:
            del self._running[record.id]
            self._count(answer)
            self._told.pop(record.id, None)
            if self.config.keep_text:
                record.text = "".join(answer.text)
            self._progress.send_lag_ms.append(max(0.0, 1e3 * (record.sent - record.scheduled)))  # timers have whole ms
            self._progress.records.append(record)
        return answer

    def _encoded(self, planned: Planned, dialogue: Dialogue, number: int) -> tuple[bytes, Record]:
        body, tokens = dialogue.ask(number)
        turn = planned.conversation.turns[number]
        record = Record(
            id=planned.first_id + number,
            conversation=planned.number,
            turn=number,
            client=planned.client,
            warmup=planned.first_id + number < self.config.warmup,
            input_tokens=tokens,
            output_tokens=turn.output_tokens,
            shared_tokens=turn.shared_tokens,
            prompt_digest=digest(body),
        )
        data = spoil(body, planned.number) if planned.client == "bad" else msgspec.json.encode(body)
        return request_bytes(self._address, "POST", self._path, data, self._api_key), record

    def _expired(self) -> bool:
        return self.config.duration is not None and time.monotonic() - self._origin >= self.config.duration

    async def _beat(self) -> None:
        while True:
            due = time.monotonic() + _HEARTBEAT
            await asyncio.sleep(_HEARTBEAT)
            self._progress.loop_lag_ms.append(max(0.0, 1e3 * (time.monotonic() - due)))

    def _count(self, answer: Answer) -> None:
        """Adds what has come of an answer since it was counted last."""
        chunks = answer.record.chunks
        told = self._told.get(answer.record.id, 0)
        if chunks and not told:
            self._progress.first_tokens.append(chunks[0])
        self._progress.chunks += len(chunks) - told
        self._told[answer.record.id] = len(chunks)

    def progress(self) -> Progress:
        """What happened since it was asked last."""
        for answer in self._running.values():
            self._count(answer)
        told = msgspec.structs.replace(self._progress, in_flight=len(self._running))
        self._progress = Progress(0, 0, [], [], 0, [], [])
        return told


async def _pipes() -> tuple[asyncio.StreamReader, asyncio.WriteTransport]:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    writer, _ = await loop.connect_write_pipe(asyncio.Protocol, os.fdopen(os.dup(1), "wb", 0))
    os.dup2(2, 1)  # whatever prints shall not break the frames
    return reader, writer


async def _serve() -> None:
    reader, writer = await _pipes()

    def tell(message: FromProcess) -> None:
        writer.write(frame(message))

    async def receive() -> Prepare | Start | Stop:
        data = await read_frame(reader)
        return Stop() if data is None else decode_to_process(data)

    prepare = await receive()
    if not isinstance(prepare, Prepare):
        return
    try:
        words = TokenWords.from_file(Path(prepare.config.tokenizer))
        load = Load(prepare, words)
        tell(Ready(count(prepare.config, words)))
    except BenchError as error:
        tell(Failed(str(error)))
        return
    start = await receive()
    if not isinstance(start, Start):
        return
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 1000)  # a collection delays requests, and a run makes few cycles
    running = asyncio.create_task(load.run(start.at))
    stopping = asyncio.create_task(receive())
    try:
        while not running.done():
            await asyncio.wait({running, stopping}, timeout=_TELL_EVERY, return_when=asyncio.FIRST_COMPLETED)
            tell(load.progress())
            if stopping.done() and not running.done():
                running.cancel()
                await asyncio.wait({running})
        tell(load.progress())
        with contextlib.suppress(asyncio.CancelledError):
            running.result()
        tell(Finished())
    except* BenchError as errors:
        tell(Failed(str(errors.exceptions[0])))
    finally:
        stopping.cancel()
        while writer.get_write_buffer_size():
            await asyncio.sleep(_HEARTBEAT)


def main() -> None:
    """Entry point. Signals reach the whole process group; the coordinator decides what they mean."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    uvloop.run(_serve())


if __name__ == "__main__":
    main()
