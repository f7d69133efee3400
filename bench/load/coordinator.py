"""Runs one load: starts the load processes together, gathers their records, tells how it goes, ends it when asked."""

import asyncio
import collections
import contextlib
import os
import sys
import time
from collections.abc import Callable

import msgspec
import numpy as np

from bench.config import LoadConfig
from bench.errors import BenchError
from bench.load.messages import (
    Failed,
    Finished,
    FromProcess,
    Prepare,
    Progress,
    Ready,
    Start,
    Stop,
    ToProcess,
    decode_from_process,
    frame,
    read_frame,
)
from bench.measure.record import LagSamples, Record, RunResult

_LEAD = 0.25  # seconds between the order to start and the start, so that all processes begin together
_RECENT = 10.0  # seconds that the live numbers look back
_GIVE_UP = 10.0  # seconds for a process to end after its last message


class LiveState(msgspec.Struct, kw_only=True):
    """How a run goes. Recent means the last 10 s; times in milliseconds, None without any."""

    elapsed: float = 0.0
    sent: int = 0
    in_flight: int = 0
    done: int = 0
    errors: dict[str, int] = {}
    request_rate: float = 0.0  # sent per second
    output_rate: float = 0.0  # messages with text per second: tokens, for most servers
    ttft_p50: float | None = None
    ttft_p90: float | None = None
    tpot_p50: float | None = None
    tpot_p90: float | None = None


OnState = Callable[[LiveState], None]


class _Process:
    """One load process and its pipes."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls) -> "_Process":
        return cls(
            await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "bench.load.process"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env=os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
            )
        )

    def tell(self, message: ToProcess) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(ConnectionError):  # a dead process shows when it is heard
            self._process.stdin.write(frame(message))

    async def hear(self) -> FromProcess:
        """The next message. Raises BenchError when the process cannot go on."""
        assert self._process.stdout is not None
        data = await read_frame(self._process.stdout)
        if data is None:
            raise BenchError(f"a load process ended with status {await self._process.wait()} in the middle of the run")
        message = decode_from_process(data)
        if isinstance(message, Failed):
            raise BenchError(message.message)
        return message

    async def end(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), _GIVE_UP)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()


class _Gathering:
    """What came in so far."""

    def __init__(self, origin: float) -> None:
        self.records: list[Record] = []
        self.lag = LagSamples()
        self._origin = origin
        self._state = LiveState()
        self._in_flight: dict[int, int] = {}
        self._recent: collections.deque[tuple[float, Progress]] = collections.deque()

    def add(self, process: int, progress: Progress) -> None:
        self.records += progress.records
        self.lag.send += progress.send_lag_ms
        self.lag.loop += progress.loop_lag_ms
        self._in_flight[process] = progress.in_flight
        self._state.sent += progress.sent
        self._state.done += len(progress.records)
        for record in progress.records:
            if record.error:
                self._state.errors[record.error] = self._state.errors.get(record.error, 0) + 1
        self._recent.append((time.monotonic(), progress))

    def state(self) -> LiveState:
        now = time.monotonic()
        while self._recent and self._recent[0][0] < now - _RECENT:
            self._recent.popleft()
        elapsed = max(now - self._origin, 1e-3)
        span = min(elapsed, _RECENT)
        recent = [progress for _, progress in self._recent]
        ttft = [1e3 * seconds for progress in recent for seconds in progress.first_tokens]
        tpot = [1e3 * record.tpot for progress in recent for record in progress.records if record.tpot >= 0]
        state = msgspec.structs.replace(
            self._state,
            elapsed=elapsed,
            in_flight=sum(self._in_flight.values()),
            request_rate=sum(progress.sent for progress in recent) / span,
            output_rate=sum(progress.chunks for progress in recent) / span,
        )
        state.ttft_p50, state.ttft_p90 = _percentiles(ttft)
        state.tpot_p50, state.tpot_p90 = _percentiles(tpot)
        return state


def _percentiles(values: list[float]) -> tuple[float | None, float | None]:
    if not values:
        return None, None
    middle, high = np.percentile(values, (50, 90))
    return float(middle), float(high)


async def run_load(
    config: LoadConfig, api_key: str = "", on_state: OnState | None = None, stop: asyncio.Event | None = None
) -> RunResult:
    """Runs `config`, whose model and tokenizer are known by now. Returns when all answers have ended.

    When `stop` is set no more is sent, what is under way is given up as `interrupted`, and what there is is returned.
    Raises BenchError when the load cannot be made; errors of the server are in the records.
    """
    processes = [await _Process.start() for _ in range(config.workers)]
    try:
        for number, process in enumerate(processes):
            process.tell(Prepare(config, api_key, number, len(processes)))
        ready = await asyncio.gather(*(process.hear() for process in processes))
        planned = max(message.planned for message in ready if isinstance(message, Ready))
        origin, started_at = time.monotonic() + _LEAD, time.time() + _LEAD
        for process in processes:
            process.tell(Start(origin))
        gathering = _Gathering(origin)

        async def listen(number: int, process: _Process) -> None:
            while not isinstance(message := await process.hear(), Finished):
                assert isinstance(message, Progress)
                gathering.add(number, message)
                if on_state is not None:
                    on_state(gathering.state())

        async def obey(event: asyncio.Event) -> None:
            await event.wait()
            for process in processes:
                process.tell(Stop())

        stopping = None if stop is None else asyncio.create_task(obey(stop))
        try:
            async with asyncio.TaskGroup() as listeners:
                for number, process in enumerate(processes):
                    listeners.create_task(listen(number, process))
        except* BenchError as errors:
            raise errors.exceptions[0] from None
        finally:
            if stopping is not None:
                stopping.cancel()
    finally:
        await asyncio.gather(*(process.end() for process in processes))
    return RunResult(
        started_at=started_at,
        wall_seconds=time.monotonic() - origin,
        records=sorted(gathering.records, key=lambda record: record.id),
        lag=gathering.lag,
        interrupted=stop is not None and stop.is_set(),
        planned=planned,
    )
