"""Requests through a pair, some of them dropped by their client, and a judge of every token."""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
from chaos.mock_engine import reference
from chaos.pair import Pair

from engine.request import TokenBatch, TokenOutput
from services.rpc import router_pb2, worker_pb2
from services.zmq_sockets import pull_socket

DEADLINE_SECONDS = 20.0
_MOST_TIMES = 6  # the requests that were asked for
_HANG_SECONDS = 40.0  # nothing waits longer


@dataclass
class Asked:
    """A request under way."""

    expected: list[int]
    seen: set[int] = field(default_factory=set)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    finish: str | None = None
    error: str | None = None


@dataclass
class Outcome:
    """What became of all requests."""

    ends: Counter[str] = field(default_factory=Counter)  # exact, aborted, and what must not be: wrong, short, hung
    wrong_tokens: int = 0
    leftovers: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def clean(self) -> bool:
        """Every request ended, exactly or by its client's wish, and nothing is left of any."""
        return not (self.wrong_tokens or self.problems or any(self.leftovers.values()))


class Load:
    """Asks `pair`. Prompts share beginnings, so that cached blocks of one request serve the next."""

    def __init__(self, pair: Pair, *, abort_share: float = 0.1, fetch_share: float = 0.0) -> None:
        self.outcome = Outcome()
        self._pair = pair
        self._random = pair.faults.random
        self._abort_share = abort_share
        self._fetch_share = fetch_share  # computed by the decode worker, behind what the prefill worker has of it
        self._asked: dict[str, Asked] = {}
        self._number = 0
        beginnings = (0, 3, 8, 17, 40)
        self._beginnings = [[self._random.randrange(1 << 20) for _ in range(length)] for length in beginnings]

    async def run(
        self,
        requests: int,
        at_once: int = 16,
        enough: int | None = None,
        until: Callable[[], bool] = lambda: True,
    ) -> Outcome:
        """`requests` of them, or until `enough` faults have happened; then all is quiet and must be clean.

        On a busy machine fewer frames pass that faults could hit: some more are sent `until` what a test counts on.
        """
        pair, outcome, started = self._pair, self.outcome, time.monotonic()
        self._socket, self._reply_to = pull_socket("127.0.0.1", None)
        reader = asyncio.create_task(self._read())

        async def client() -> None:
            while not self._is_enough(requests, enough, until):
                self._number += 1
                await self._ask(f"q{self._number}")

        try:
            clients = asyncio.gather(*(client() for _ in range(at_once)), return_exceptions=True)
            crash = asyncio.create_task(pair.crashed.wait())
            await asyncio.wait((clients, crash), return_when=asyncio.FIRST_COMPLETED)
            pair.faults.quiet = True
            if not pair.crashes:
                outcome.problems += [f"a client failed: {error!r}" for error in await clients if error is not None]
                outcome.leftovers = await self.settled()
            clients.cancel()
            crash.cancel()
            outcome.problems += [f"a worker failed: {error!r}" for error in pair.crashes]
            if reader.done():
                outcome.problems.append(f"the gateway failed: {reader.exception()!r}")
        finally:
            reader.cancel()
            self._socket.close(linger=0)
        outcome.seconds = time.monotonic() - started
        return outcome

    def _is_enough(self, requests: int, enough: int | None, until: Callable[[], bool]) -> bool:
        if enough is not None and self._pair.faults.total >= enough:
            return True
        return self._number >= requests and (until() or self._number >= _MOST_TIMES * requests)

    def _prompt(self) -> list[int]:
        more = self._random.randrange(1, 60)
        return self._random.choice(self._beginnings) + [self._random.randrange(1 << 20) for _ in range(more)]

    async def submit(
        self, name: str, reply_to: str, prefill: router_pb2.Endpoint | None = None, max_tokens: int = 0
    ) -> Asked:
        """Hands the decode worker a request of `max_tokens`, or a few; `prefill` is another than the pair's."""
        peer = prefill or self._pair.endpoint
        fetches = self._random.random() < self._fetch_share
        prompt, max_tokens = self._prompt(), max_tokens or self._random.randrange(1, 9)
        if fetches:
            await self._pair.prefill.cache(prompt[: self._random.randrange(1, len(prompt) + 1)])
        asked = self._asked[name] = Asked(reference(prompt, max_tokens))
        await self._pair.submit(
            name,
            prompt,
            max_tokens,
            reply_to,
            deadline_seconds=DEADLINE_SECONDS,
            prefill=None if fetches else peer,
            source=router_pb2.PrefixSource(worker=peer, tokens=len(prompt)) if fetches else None,
        )
        return asked

    async def _ask(self, name: str) -> None:
        pair, outcome, dice = self._pair, self.outcome, self._random
        asked = await self.submit(name, self._reply_to)
        try:
            if dice.random() < self._abort_share:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(asked.ended.wait(), dice.choice((0.0, 0.003, 0.03, 0.3)))
                if not asked.ended.is_set():
                    await pair.worker.Abort(worker_pb2.AbortRequest(request_id=name), timeout=10)
                    outcome.ends["aborted"] += 1
                    return
            await asyncio.wait_for(asked.ended.wait(), _HANG_SECONDS)
        except TimeoutError:
            outcome.problems.append(f"{name} hangs: {pair.states(name + '/0')}, {len(asked.seen)} tokens")
            return
        if asked.finish != "length" or asked.seen != set(range(len(asked.expected))):
            outcome.problems.append(
                f"{name} ended {asked.finish}, {asked.error}, {len(asked.seen)}/{len(asked.expected)} tokens"
            )
        outcome.ends["ended"] += 1

    async def _read(self) -> None:
        """What a gateway does: takes tokens by their index. Each must be right, whoever sent it."""
        decoder = msgspec.msgpack.Decoder(TokenBatch)
        while True:
            for output in decoder.decode(await self._socket.recv()).outputs:
                self._take(output)

    def _take(self, output: TokenOutput) -> None:
        asked = self._asked[output.request_id]
        for index, token in enumerate(output.token_ids, output.index):
            if asked.expected[index] != token:
                if not self.outcome.wrong_tokens:
                    self.outcome.problems.append(
                        f"{output.request_id}: token {index} is {token}, right is {asked.expected[index]}"
                    )
                self.outcome.wrong_tokens += 1
            asked.seen.add(index)
        if output.finish_reason is not None:
            asked.finish, asked.error = output.finish_reason, output.error
            asked.ended.set()

    async def settled(self) -> dict[str, int]:
        """What is left once all that is late has come, or after the longest wait."""
        ends = time.monotonic() + 15
        while any((left := await self._pair.leftovers()).values()) and time.monotonic() < ends:
            await asyncio.sleep(0.05)
        return left
