"""Turns one step of a command into a `Run`: settles the configuration, shows the load live, checks the answers."""

import asyncio
import contextlib
import signal
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

import msgspec
from rich.console import Console

from bench.check import check_expected, check_greedy, expected_answers, require_greedy
from bench.config import LoadConfig
from bench.load.body import Dialogue
from bench.load.coordinator import run_load
from bench.load.plan import plan
from bench.load.server import ask_text, settle
from bench.measure.experiment import Run
from bench.measure.record import Record, RunResult
from bench.measure.slo import Slo
from bench.measure.summary import summarise
from bench.measure.summary_format import Check
from bench.report.live import LiveView
from bench.workloads.words import TokenWords


class Runner:
    """What the steps of one command have in common."""

    def __init__(
        self,
        api_key: str,
        slo: Slo | None,
        console: Console | None,
        check: str = "",
        expect: Path | None = None,
    ) -> None:
        """`console`: where the live view goes; None: nowhere. `check`: "greedy" asks a sample again."""
        self.stop = asyncio.Event()
        self._api_key = api_key
        self._slo = slo
        self._console = console
        self._check = check
        # Read before the load, so that no run is lost.
        self._expected = None if expect is None else expected_answers(expect)

    async def probe(self, config: LoadConfig, label: str) -> Run:
        """One load run. Raises BenchError when it cannot be made."""
        if self._check or self._expected:
            config = msgspec.structs.replace(config, keep_text=True)
        if self._check:
            require_greedy(config)  # before the load, so that no run is lost
        config = await settle(config, self._api_key)
        if self._console is None:
            result = await run_load(config, self._api_key, None, self.stop)
        else:
            with LiveView(self._console, label, config.num_requests, config.duration) as view:
                result = await run_load(config, self._api_key, view.update, self.stop)
        check = await self._compared(config, result)
        summary = summarise(config, result, self._slo, check)
        return Run(label=label, config=config, result=result, summary=summary)

    async def _compared(self, config: LoadConfig, result: RunResult) -> Check | None:
        if self._expected is not None:
            return check_expected(result.records, self._expected)
        if not self._check or self.stop.is_set():
            return None
        asked_again = _Again(config, result.records)
        return await check_greedy(
            config, result.records, lambda record: ask_text(config, self._api_key, asked_again.body(record))
        )

    @contextlib.contextmanager
    def stopped_by_signals(self) -> Iterator[None]:
        """Ctrl-C and SIGTERM set `stop`: the report of what there is still comes. The second Ctrl-C ends at once."""
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None

        def interrupted() -> None:
            if self.stop.is_set():
                task.cancel()
            self.stop.set()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, interrupted)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)


class _Again:
    """The bodies of requests that were sent, made again from the plan and the answers."""

    def __init__(self, config: LoadConfig, records: list[Record]) -> None:
        self._config = config
        self._words = TokenWords.from_file(Path(config.tokenizer))
        self._answers = {(record.conversation, record.turn): record.text for record in records}
        last = max((record.conversation for record in records), default=-1)
        sent = takewhile(lambda planned: planned.number <= last, plan(config, self._words))
        self._planned = {planned.number: planned for planned in sent}

    def body(self, record: Record) -> dict[str, object]:
        """What was asked in `record`."""
        dialogue = Dialogue(self._config, self._words, self._planned[record.conversation].conversation)
        for turn in range(record.turn):
            dialogue.ask(turn)
            dialogue.hear(self._answers[record.conversation, turn])
        body, _ = dialogue.ask(record.turn)
        return body
