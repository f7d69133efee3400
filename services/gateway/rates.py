"""How much a tenant may ask for in a minute: requests, and tokens of prompts and answers.

An allowance of a minute can be used at once; what was used comes back evenly. A request is let in while tokens are
left, and pays as they are known, the prompt's first and the answer's as they come: so the last one may go beyond, and
the next waits for it. Each gateway grants its share of the limits; nothing is asked of other machines.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from services.api_keys import Tenant
from services.gateway.errors import ApiError, rate_limited

REQUESTS, TOKENS = LIMITED = ("requests_per_minute", "tokens_per_minute")


class Rates:
    """What tenants have used lately. `gateways`: how many share the limits now. Times are monotonic seconds."""

    def __init__(self, gateways: Callable[[], int]) -> None:
        self._gateways = gateways
        self._used: dict[tuple[str, str], tuple[float, float]] = {}  # by tenant and limit: so much, at that time

    def admit(self, tenant: Tenant, now: float) -> tuple[str, ApiError] | None:
        """Counts a request; or what limit it is beyond, and the answer that says when to come back."""
        for what in (TOKENS, REQUESTS):
            limit = self._limit(tenant, what)
            if limit and (beyond := self._in_use(tenant, what, now) + 1 - limit) > 0:
                wait = max(1, math.ceil(beyond * 60.0 / limit))
                return what, rate_limited(
                    f"This API key may use {getattr(tenant, what)} {what.replace('_', ' ')}", wait
                )
        self._use(tenant, REQUESTS, 1, now)
        return None

    def charge(self, tenant: Tenant, tokens: int, now: float) -> None:
        """Tokens of a request that was let in."""
        self._use(tenant, TOKENS, tokens, now)

    def _limit(self, tenant: Tenant, what: str) -> float:
        """This gateway's share; 0: none."""
        limit: int = getattr(tenant, what)
        return max(1.0, limit / max(1, self._gateways())) if limit else 0.0

    def _in_use(self, tenant: Tenant, what: str, now: float) -> float:
        used, at = self._used.get((tenant.id, what), (0.0, now))
        return max(0.0, used - (now - at) * self._limit(tenant, what) / 60.0)

    def _use(self, tenant: Tenant, what: str, amount: int, now: float) -> None:
        if self._limit(tenant, what):
            self._used[tenant.id, what] = self._in_use(tenant, what, now) + amount, now
