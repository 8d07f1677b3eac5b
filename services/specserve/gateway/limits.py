"""What each tenant has used of its limits: token buckets for rates, a count for what runs.

A bucket holds a minute's worth and fills evenly. Knows tenants, numbers and a clock; knows no HTTP.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from specserve.errors import InvalidRequest
from specserve.gateway.errors import LimitExceeded
from specserve.gateway.tenants import Tenant

MAX_TENANTS = 4096
"""Tenants remembered; beyond, the one that was idle for longest is forgotten, and begins anew."""

SESSION_RETRY_S = 1.0
"""When to try again after too many sessions: nobody knows when one of them ends."""


@dataclass(slots=True)
class Bucket:
    """What may still be taken of one rate; below 0 after more was used than was taken."""

    capacity: int
    level: float
    at: float

    def fill(self, now: float) -> None:
        """Add what has come since the last look."""
        rate = self.capacity / 60
        self.level = min(float(self.capacity), self.level + (now - self.at) * rate)
        self.at = now

    def wait_s(self, amount: float) -> float:
        """Return how long until so much is there; 0 when it is."""
        return max(0.0, (amount - self.level) * 60 / self.capacity)


@dataclass(slots=True)
class _Usage:
    requests: Bucket | None
    tokens: Bucket | None
    num_sessions: int = 0

    def take_request(self) -> None:
        """Count a request.

        Raises:
            LimitExceeded: none may come at present.
        """
        if self.requests is None:
            return
        if (wait_s := self.requests.wait_s(1)) > 0:
            raise LimitExceeded("requests_per_minute", self.requests.capacity, wait_s)
        self.requests.level -= 1


class Limiter:
    """Lets requests in within their tenants' limits."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._usage: OrderedDict[str, _Usage] = OrderedDict()

    @contextmanager
    def admitted(
        self,
        tenant: Tenant,
        *,
        num_sessions: int,
        most_tokens: int,
        used_tokens: Callable[[], int],
    ) -> Iterator[None]:
        """Count a request while it runs; nothing is counted when it is refused.

        Args:
            num_sessions: choices.
            most_tokens: prompt tokens, and output tokens at most.
            used_tokens: those it really had, asked for at its end.

        Raises:
            LimitExceeded: it would exceed a limit at present, which is named.
            InvalidRequest: it has more choices than its tenant may ever have at once.
        """
        now, limits = self._clock(), tenant.limits
        usage = self._of(tenant, now)
        most_sessions = limits.max_concurrent_sessions
        if most_sessions is not None and num_sessions > most_sessions:
            # Coming again would not help, so it is not told when to.
            raise InvalidRequest(
                "n",
                f"{num_sessions} choices, prompts times n, at most {most_sessions} may run at once "
                "here (max_concurrent_sessions)",
            )
        if most_sessions is not None and usage.num_sessions + num_sessions > most_sessions:
            raise LimitExceeded("max_concurrent_sessions", most_sessions, SESSION_RETRY_S)
        taken = 0
        if usage.tokens is not None:
            taken = min(most_tokens, usage.tokens.capacity)
            if (wait_s := usage.tokens.wait_s(taken)) > 0:
                raise LimitExceeded("tokens_per_minute", usage.tokens.capacity, wait_s)
        usage.take_request()
        if usage.tokens is not None:
            usage.tokens.level -= taken
        usage.num_sessions += num_sessions
        try:
            yield
        finally:
            usage.num_sessions -= num_sessions
            if usage.tokens is not None:
                usage.tokens.fill(self._clock())
                capacity = float(usage.tokens.capacity)
                usage.tokens.level = min(capacity, usage.tokens.level + taken - used_tokens())

    def count_request(self, tenant: Tenant) -> None:
        """Count a request that decodes nothing.

        Raises:
            LimitExceeded: the tenant may send none at present.
        """
        self._of(tenant, self._clock()).take_request()

    def _of(self, tenant: Tenant, now: float) -> _Usage:
        usage = self._usage.get(tenant.name)
        if usage is None:
            limits = tenant.limits
            requests, tokens = limits.requests_per_minute, limits.tokens_per_minute
            usage = self._usage[tenant.name] = _Usage(
                None if requests is None else Bucket(requests, requests, now),
                None if tokens is None else Bucket(tokens, tokens, now),
            )
            self._forget()
        self._usage.move_to_end(tenant.name)
        for bucket in (usage.requests, usage.tokens):
            if bucket is not None:
                bucket.fill(now)
        return usage

    def _forget(self) -> None:
        if len(self._usage) > MAX_TENANTS:
            idle = next((name for name, held in self._usage.items() if not held.num_sessions), None)
            if idle is not None:
                del self._usage[idle]
