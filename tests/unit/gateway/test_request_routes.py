"""What the gateway shows of recent requests, and to whom."""

from __future__ import annotations

import asyncio

import pytest

from specserve import cli
from specserve.gateway.config import GatewayConfig, TenantLimits
from specserve.gateway.server import serve_gateway
from specserve.gateway.tenants import Tenant
from specserve.rpc.v1 import common_pb2, requests_pb2
from specserve.rpc.v1.requests_pb2 import CallRecord, RequestRecord, RoundRecord
from unit.gateway.fakes import ByteTokenizer, FakeBackend, make_client

PATH = "/v1/specserve/requests"


def record(name: str) -> RequestRecord:
    """Make a request of one round: 2 ms drafting, 5 ms verifying, 3 ms between the two."""
    timing = common_pb2.CallTiming(queue_s=0.001, forward_s=0.005, batch_size=3, rows=15)
    calls = [
        CallRecord(service="draft", replica_id="draft-1", wall_s=0.002),
        CallRecord(service="target", replica_id="target-1", wall_s=0.008, timing=timing),
    ]
    round_ = RoundRecord(
        wall_s=0.013,
        num_speculative_tokens=4,
        reason="best",
        num_draft_tokens=4,
        num_accepted_tokens=1,
        num_emitted_tokens=2,
        calls=calls,
    )
    state = requests_pb2.REQUEST_STATE_FINISHED
    return RequestRecord(request_id=name, state=state, num_rounds=1, rounds=[round_])


async def test_a_request_is_answered_with_its_rounds() -> None:
    """Names for numbers, and each round's seconds shared out among its stages."""
    backend = FakeBackend()
    backend.records = [record("cmpl-a-0")]
    async with make_client(backend) as client:
        answer = await client.get(f"{PATH}/cmpl-a-0")
        unknown = await client.get(f"{PATH}/cmpl-b-0")
    (one,) = answer.json()["requests"]
    (round_,) = one["rounds"]

    assert (one["request_id"], one["state"]) == ("cmpl-a-0", "finished")
    assert (round_["first_rejection"], round_["reason"]) == (1, "best")
    assert {name: round(1e3 * seconds, 6) for name, seconds in round_["stages"].items()} == {
        "draft_queue_s": 0,
        "draft_forward_s": 0,
        "draft_transport_s": 2,
        "verify_queue_s": 1,
        "verify_forward_s": 5,
        "verify_transport_s": 2,
        "lost_s": 0,
        "commit_s": 3,
    }
    assert one["stages"] == round_["stages"]
    assert round_["calls"][1]["rows"] == 15
    assert unknown.status_code == 404
    assert unknown.json()["error"]["code"] == "request_not_found"


@pytest.mark.parametrize("limit", ["0", "-1", "201", "x", "9" * 5000])
async def test_a_wrong_limit_is_refused(limit: str) -> None:
    async with make_client(FakeBackend()) as client:
        answer = await client.get(PATH, params={"limit": limit})

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "limit"


async def test_the_latest_are_listed_and_described() -> None:
    backend = FakeBackend()
    backend.records = [record(f"cmpl-{i}-0") for i in range(5)]
    async with make_client(backend) as client:
        listed = (await client.get(PATH, params={"limit": "3"})).json()
        document = (await client.get("/openapi.json")).json()

    assert [one["request_id"] for one in listed["requests"]] == [f"cmpl-{i}-0" for i in range(3)]
    assert PATH in document["paths"]
    assert {"RequestView", "RoundView", "StageSeconds"} <= set(document["components"]["schemas"])


async def test_everybody_sees_their_own_tenants_requests() -> None:
    """Another tenant's request is as unknown as one that never was."""
    backend = FakeBackend()
    backend.records = [record("cmpl-a-0"), record("cmpl-b-0")]
    backend.records[1].tenant_salt = Tenant("b", TenantLimits()).salt
    async with make_client(backend, tenant_header="X-Tenant") as client:
        seen = {}
        for name in ("", "b", "c"):
            headers = {"X-Tenant": name} if name else {}
            listed = (await client.get(PATH, headers=headers)).json()["requests"]
            asked = [
                (await client.get(f"{PATH}/{one.request_id}", headers=headers)).status_code
                for one in backend.records
            ]
            seen[name] = ([one["request_id"] for one in listed], asked)

    assert seen == {
        "": (["cmpl-a-0"], [200, 404]),
        "b": (["cmpl-b-0"], [404, 200]),
        "c": ([], [404, 404]),
    }


async def test_a_switch_turns_it_off() -> None:
    """Where clients must not know of one another there is no such route."""
    backend = FakeBackend()
    backend.records = [record("cmpl-a-0")]
    async with make_client(backend, show_recent_requests=False) as client:
        answers = [await client.get(path) for path in (PATH, f"{PATH}/cmpl-a-0")]

    assert [answer.status_code for answer in answers] == [404, 404]


async def test_the_terminal_reads_what_the_gateway_answers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`specserve trace --url` over a real port: a list, a request, an unknown one, no route."""
    said = []
    for shown in (True, False):
        backend = FakeBackend()
        backend.records = [record("cmpl-a-0")]
        listening: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        config = GatewayConfig(port=0, show_recent_requests=shown)
        serving = asyncio.create_task(
            serve_gateway(
                config,
                backend,
                ByteTokenizer(),
                lambda host, port, done=listening: done.set_result(f"http://{host}:{port}"),
            )
        )
        url = await listening
        for words in ([], ["cmpl-a-0"], ["cmpl-b-0"]):
            code = await asyncio.to_thread(cli.main, ["trace", *words, f"--url={url}"])
            out, err = capsys.readouterr()
            said.append((code, out, err))
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)

    assert [code for code, _, _ in said] == [0, 0, 1, 1, 1, 1]
    assert "cmpl-a-0" in said[0][1]
    assert "verify: forwards" in said[1][1]
    assert "'cmpl-b-0' is not remembered" in said[2][2]
    assert "ask with --orchestrator-address" in said[4][2]
