"""Each tenant gets what its limits allow, is told which one stopped it, and disturbs no other."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from typing import Any

import pytest

from specserve.errors import InvalidRequest
from specserve.gateway.config import GatewayConfig, TenantLimits
from specserve.gateway.errors import LimitExceeded
from specserve.gateway.limits import MAX_TENANTS, Limiter
from specserve.gateway.tenants import Tenant, resolve_tenant
from unit.gateway.fakes import FakeBackend, make_client

COMPLETIONS = "/v1/completions"
HEADER = "X-Specserve-Tenant"


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Setup:
    """A limiter under a clock that the test moves."""

    def __init__(self, **limits: int) -> None:
        self.clock = Clock()
        self.limiter = Limiter(self.clock)
        self.tenant = Tenant("a", TenantLimits(**limits))

    def run(self, *, sessions: int = 1, most: int = 0, used: int = 0, tenant: str = "a") -> None:
        """Let a request in and end it."""
        with self.enter(ExitStack(), sessions=sessions, most=most, used=used, tenant=tenant):
            pass

    def enter(
        self,
        stack: ExitStack,
        *,
        sessions: int = 1,
        most: int = 0,
        used: int = 0,
        tenant: str = "a",
    ) -> ExitStack:
        """Let a request in until the stack is closed."""
        stack.enter_context(
            self.limiter.admitted(
                Tenant(tenant, self.tenant.limits),
                num_sessions=sessions,
                most_tokens=most,
                used_tokens=lambda: used,
            )
        )
        return stack

    def refused(self, **request: Any) -> LimitExceeded:
        """Be refused; returns why."""
        with pytest.raises(LimitExceeded) as caught:
            self.run(**request)
        return caught.value


def test_requests_come_in_bursts_of_a_minutes_worth_and_evenly_after_it() -> None:
    """The error says which limit it was and when the next one fits; then it does."""
    setup = Setup(requests_per_minute=6)
    for _ in range(6):
        setup.run()
    error = setup.refused()
    assert (error.limit, error.value) == ("requests_per_minute", 6)
    assert error.retry_after_s == pytest.approx(10)
    setup.clock.now += error.retry_after_s
    setup.run()
    setup.refused()
    setup.run(tenant="b")
    setup.clock.now += 3600
    for _ in range(6):
        setup.run()
    setup.refused()


def test_tokens_are_taken_for_the_longest_answer_and_the_rest_is_given_back() -> None:
    setup = Setup(tokens_per_minute=600)
    setup.run(most=500, used=100)
    setup.run(most=500, used=500)
    error = setup.refused(most=300)
    assert (error.limit, error.retry_after_s) == ("tokens_per_minute", pytest.approx(30))
    setup.clock.now += 30
    setup.run(most=300, used=300)


def test_request_larger_than_the_minute_waits_for_a_full_bucket_and_pays_for_all() -> None:
    """It is not refused for ever; what it used beyond the bucket is missing afterwards."""
    setup = Setup(tokens_per_minute=600)
    setup.run(most=10_000, used=900)
    assert setup.refused(most=1).retry_after_s == pytest.approx(30.1)
    setup.clock.now += 60
    setup.run(most=300, used=0)


def test_sessions_count_while_they_run_however_they_end() -> None:
    """B074 for limits: an error or a client that went away gives its sessions back."""
    setup = Setup(max_concurrent_sessions=4)
    with setup.enter(ExitStack(), sessions=3):
        assert setup.refused(sessions=2).limit == "max_concurrent_sessions"
        setup.run(sessions=1)
        setup.run(sessions=4, tenant="b")
    with pytest.raises(asyncio.CancelledError), setup.enter(ExitStack(), sessions=4):
        raise asyncio.CancelledError
    setup.run(sessions=4)


def test_refused_request_uses_nothing_up() -> None:
    """Not even of the limits that would have let it in."""
    setup = Setup(requests_per_minute=3, tokens_per_minute=100, max_concurrent_sessions=1)
    with setup.enter(ExitStack()):
        for _ in range(5):
            assert setup.refused().limit == "max_concurrent_sessions"
    setup.run(most=80, used=80)
    for _ in range(5):
        assert setup.refused(most=90).limit == "tokens_per_minute"
    setup.run(most=10, used=10)
    assert setup.refused(most=1).limit == "requests_per_minute"


def test_memory_does_not_grow_with_names() -> None:
    """The tenant idle for longest is forgotten; one whose session runs is not."""
    setup = Setup(max_concurrent_sessions=1)
    with setup.enter(ExitStack(), tenant="busy"):
        for number in range(MAX_TENANTS + 50):
            setup.run(tenant=f"t{number}")
        setup.refused(tenant="busy")


def test_tenant_is_what_the_configured_header_says_and_has_its_limits_and_caches() -> None:
    own = TenantLimits(requests_per_minute=3)
    config = GatewayConfig(tenant_header=HEADER, tenant_limits={"a": own})
    tenant = resolve_tenant({HEADER: "a"}, config)
    assert (tenant.name, tenant.limits) == ("a", own)
    other = resolve_tenant({HEADER: "b"}, config)
    assert (other.limits, len({tenant.salt, other.salt, b""})) == (config.limits, 3)
    assert resolve_tenant({}, config).salt == b""
    assert resolve_tenant({HEADER: "a"}, GatewayConfig()).name == ""
    for wrong in ("a b", "-a", "x" * 129, "é"):
        with pytest.raises(InvalidRequest, match=HEADER):
            resolve_tenant({HEADER: wrong}, config)


async def test_limit_is_a_429_that_names_it_and_says_when_to_come_back() -> None:
    """B166: shed load is no 5xx, and is counted by itself. The tenant's salt goes along."""
    limits = TenantLimits(requests_per_minute=1)
    backend = FakeBackend()
    async with make_client(backend, tenant_header=HEADER, limits=limits) as client:
        first = await client.post(COMPLETIONS, json={"prompt": "hi"}, headers={HEADER: "a"})
        second = await client.post(COMPLETIONS, json={"prompt": "hi"}, headers={HEADER: "a"})
        other = await client.post(COMPLETIONS, json={"prompt": "hi"}, headers={HEADER: "b"})
        metrics = (await client.get("/metrics")).text
    assert [first.status_code, second.status_code, other.status_code] == [200, 429, 200]
    error = second.json()["error"]
    assert "requests_per_minute" in error["message"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert 1 <= int(second.headers["retry-after"]) <= 60
    assert 'error="LimitExceeded"} 1.0' in metrics
    salts = [request.tenant_salt for request in backend.requests]
    assert len(salts) == len(set(salts)) == 2
    assert b"" not in salts


async def test_priority_is_vllms_and_a_tenant_has_its_most_urgent() -> None:
    """A smaller number is served sooner: the contract has it the other way round."""
    backend = FakeBackend()
    async with make_client(backend, limits=TenantLimits(best_priority=-2)) as client:
        for priority in (-2, 0, 7):
            body = {"prompt": "hi", "priority": priority}
            assert (await client.post(COMPLETIONS, json=body)).status_code == 200
        refused = await client.post(COMPLETIONS, json={"prompt": "hi", "priority": -3})
    assert [request.priority for request in backend.requests] == [2, 0, -7]
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "priority"


async def test_more_choices_than_may_ever_run_at_once_are_a_400_that_names_n() -> None:
    """No Retry-After: it would come back for ever."""
    setup = Setup(max_concurrent_sessions=4)
    with pytest.raises(InvalidRequest, match="5 choices"):
        setup.run(sessions=5)
    limits = TenantLimits(max_concurrent_sessions=1, requests_per_minute=1)
    async with make_client(FakeBackend(), limits=limits) as client:
        refused = await client.post(COMPLETIONS, json={"prompt": "hi", "n": 2})
        taken = await client.post(COMPLETIONS, json={"prompt": "hi"})

    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, "n")
    assert "at most 1" in error["message"]
    assert "max_concurrent_sessions" in error["message"]
    assert "retry-after" not in refused.headers
    assert taken.status_code == 200


@pytest.mark.parametrize(
    ("path", "body"), [("/tokenize", {"prompt": "hi"}), ("/detokenize", {"tokens": [1]})]
)
async def test_tokenising_counts_as_a_request_and_as_nothing_else(
    path: str, body: dict[str, Any]
) -> None:
    """Of its own tenant; a minute's tokens that are spent, and sessions that run, are no matter."""
    limits = TenantLimits(requests_per_minute=2, tokens_per_minute=1, max_concurrent_sessions=1)
    async with make_client(FakeBackend(), tenant_header=HEADER, limits=limits) as client:
        answers = [
            await client.post(COMPLETIONS, json={"prompt": "hi"}, headers={HEADER: "a"}),
            await client.post(path, json=body, headers={HEADER: "a"}),
            await client.post(path, json=body, headers={HEADER: "a"}),
            await client.post(path, json=body, headers={HEADER: "b"}),
        ]

    assert [answer.status_code for answer in answers] == [200, 200, 429, 200]
    assert "requests_per_minute" in answers[2].json()["error"]["message"]
    assert 1 <= int(answers[2].headers["retry-after"]) <= 60
