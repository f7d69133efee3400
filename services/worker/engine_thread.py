"""The engine's own thread: it alone touches the engine; everybody else posts calls to it.

The loop is: run posted calls, compute one step, hand the step's results to the event loop in one go. On a device calls
run inside steps as well, all the while the engine waits for the device before it plans ahead.
"""

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from engine.engine import Engine, StepOutput

HANG_SECONDS = 10.0  # without progress, with work to do: the worker is not alive, and renews no lease

T = TypeVar("T")
_STOP = object()


class EngineThread:
    """Runs `engine` until `stop`.

    After each step `on_step` runs on the event loop; `on_crash` runs there if the thread's loop itself fails.
    """

    def __init__(
        self, engine: Engine, on_step: Callable[[StepOutput], None], on_crash: Callable[[Exception], None]
    ) -> None:
        self.engine = engine
        self._on_step = on_step
        self._on_crash = on_crash
        self._calls: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._failed_call: Exception | None = None
        engine.listen = self._run_posted
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.last_progress = time.monotonic()  # moves with every step and call, and while there is nothing to do

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def post(self, call: Callable[[], object]) -> None:
        """Has `call` run on the engine thread, soon; its result is dropped, its exception ends the worker."""
        self._calls.put(call)

    async def call(self, call: Callable[[], T]) -> T:
        """Runs `call` on the engine thread and returns its result, or raises its exception."""
        future: asyncio.Future[T] = self._loop.create_future()

        def resolve(result: T | None, error: Exception | None) -> None:
            if not future.cancelled():
                if error is not None:
                    future.set_exception(error)
                else:
                    future.set_result(result)  # type: ignore[arg-type]

        def run() -> None:
            try:
                result = call()
            except Exception as error:  # handed to the caller
                self._loop.call_soon_threadsafe(resolve, None, error)
            else:
                self._loop.call_soon_threadsafe(resolve, result, None)

        self._calls.put(run)
        return await future

    def stop(self) -> None:
        """Ends the thread after the present step; waits for it."""
        self._calls.put(_STOP)
        self._thread.join(timeout=5)

    def _run(self) -> None:
        try:
            while self._run_calls():
                if self.engine.has_work():
                    output = self.engine.step()
                    if self._failed_call is not None:
                        raise self._failed_call
                    self.last_progress = time.monotonic()
                    self._loop.call_soon_threadsafe(self._on_step, output)
        except Exception as error:
            self._loop.call_soon_threadsafe(self._on_crash, error)

    def _run_posted(self) -> None:
        """Inside a step: runs what has been posted so far. The step goes on, whatever comes of it."""
        try:
            for _ in range(self._calls.qsize()):
                item = self._calls.get_nowait()
                if item is _STOP:
                    self._calls.put(item)  # for when the step is over
                    return
                item()  # type: ignore[operator]
        except Exception as error:
            self._failed_call = error

    def _run_calls(self) -> bool:
        """Runs what was posted; waits for a call while there is nothing to compute. False: stop."""
        while True:
            try:
                item = self._calls.get(block=not self.engine.has_work(), timeout=0.25)
            except queue.Empty:
                if self.engine.has_work():
                    return True
                self.last_progress = time.monotonic()
                continue
            if item is _STOP:
                return False
            item()  # type: ignore[operator]
            self.last_progress = time.monotonic()  # who only serves what is kept makes no steps
