"""Gateways and routers that take time: each is one core, which does what comes in its order.

Without this placements take none, and any number of requests passes at once. Costs are sums that real processes were
measured to take. What a router is told it knows at once here, however far behind it is; only its time is taken. Tokens
of an answer reach the gateway a few at a time, as fast as those of the answers that ended before.
"""

from collections.abc import Callable
from dataclasses import dataclass

from planner.simulator.clock import Clock

_TOGETHER = 10  # tokens of an answer that a gateway handles at once
_FIRST_PACE = 5e-3  # seconds a token, until an answer has ended


@dataclass(frozen=True)
class ControlCosts:
    """How many gateways share the requests, and seconds of a core for each thing that is done."""

    gateways: int
    gateway_request: float  # read, tokenised, hashed, sent on
    gateway_token: float  # of an answer, made text and sent
    router_request: float  # placed by this router and released, calls included
    router_booking: float  # placed and released by another router
    router_token: float  # of prompt or answer: that some worker keeps its KV, and later that it is gone


class Core:
    """One process on one core."""

    def __init__(self) -> None:
        self.busy = 0.0  # seconds of work that came
        self._free_at = 0.0

    def take(self, now: float, seconds: float) -> float:
        """When so much work that comes now is done."""
        self.busy += seconds
        self._free_at = max(self._free_at, now) + seconds
        return self._free_at


class ControlPlane:
    """Requests go to gateways in turn, and from each of them to routers in turn. All times are the clock's."""

    def __init__(self, costs: ControlCosts, routers: int, clock: Clock) -> None:
        self.gateways = [Core() for _ in range(costs.gateways)]
        self.routers = [Core() for _ in range(routers)]
        self._costs, self._clock = costs, clock
        self._pace = _FIRST_PACE

    def router(self, number: int) -> int:
        """The router that places request `number`."""
        turn, gateway = divmod(number, len(self.gateways))
        return (turn + gateway) % len(self.routers)

    def ask(self, number: int, placed: Callable[[], None]) -> None:
        """The request has come: the gateway reads it, then a router has decided."""

        def decide() -> None:
            for at, router in enumerate(self.routers):
                if at != self.router(number):
                    router.take(self._clock.now, self._costs.router_booking)
            router = self.routers[self.router(number)]
            self._clock.at(router.take(self._clock.now, self._costs.router_request), placed)

        self._clock.at(self._gateway(number).take(self._clock.now, self._costs.gateway_request), decide)

    def first_token(self, number: int, tokens: int) -> float:
        """The first of an answer's tokens comes. When the client has it."""
        if tokens > 1:
            self._clock.after(self._pace, self._more, number, tokens - 1)
        return self._gateway(number).take(self._clock.now, self._costs.gateway_token)

    def last_token(self, number: int, seconds_a_token: float) -> float:
        """Likewise. The answer's tokens came at this pace."""
        self._pace = seconds_a_token or self._pace
        return self._gateway(number).take(self._clock.now, 0.0)

    def kept(self, tokens: int) -> None:
        """A worker told all routers that it keeps KV of so many tokens."""
        for router in self.routers:
            router.take(self._clock.now, self._costs.router_token * tokens)

    def _more(self, number: int, tokens: int) -> None:
        count = min(_TOGETHER, tokens)
        self._gateway(number).take(self._clock.now, self._costs.gateway_token * count)
        if tokens > count:
            self._clock.after(count * self._pace, self._more, number, tokens - count)

    def _gateway(self, number: int) -> Core:
        return self.gateways[number % len(self.gateways)]
