"""`specserve doctor --running`: what its figures make of recorded rounds, and what it is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from specserve import cli
from specserve.errors import ConfigurationError, ModelUnavailable, PeerUnavailable
from specserve.gateway.api_keys import KeyRing, make_key
from specserve.rpc.request_view import RequestView, view_of
from specserve.rpc.v1 import common_pb2, generation_pb2, requests_pb2
from specserve.rpc.v1.generation_pb2 import GetStatusResponse, ReplicaStatus
from specserve.rpc.v1.requests_pb2 import CallRecord, RequestRecord, RoundRecord
from specserve.tools.doctor.figures import Basis, figures_of
from specserve.tools.doctor.gateway_facts import read_facts
from specserve.tools.doctor.prediction import formula, predict
from specserve.tools.doctor.running import examine
from specserve.tools.doctor.status import Status
from specserve.tools.doctor.verdict import judge, named, what_would_pay
from unit.gateway.fakes import FakeBackend, make_client

K = 4
STEP_S = 0.010
"""One token of the target, its way there and back included 11 ms."""


def call(service: str, wall_s: float, forward_s: float, queue_s: float = 0.0, **fields: Any) -> Any:
    rows = K + 1 if service == "target" else 1
    timing = common_pb2.CallTiming(
        queue_s=queue_s, forward_s=forward_s, batch_size=1, rows=fields.pop("rows", rows)
    )
    return CallRecord(
        service=service, replica_id=f"{service}-1", wall_s=wall_s, timing=timing, **fields
    )


def drafted(
    accepted: int = 3,
    draft_s: float = 0.001,
    verify_s: float = STEP_S,
    way_s: float = 0.0005,
    draft_queue_s: float = 0.0,
    verify_queue_s: float = 0.0,
    commit_s: float = 0.0002,
    lost_s: float = 0.0,
) -> RoundRecord:
    """Make a round of K draft tokens: 4 x draft_s, then one verification."""
    proposing_s = K * draft_s + draft_queue_s + way_s
    verifying_s = verify_s + verify_queue_s + way_s
    calls = [
        call("draft", proposing_s, K * draft_s, draft_queue_s),
        call("target", verifying_s, verify_s, verify_queue_s),
    ]
    if lost_s:
        calls.insert(1, call("target", lost_s, 0.0, error="PeerUnavailable"))
    return RoundRecord(
        wall_s=proposing_s + verifying_s + commit_s + lost_s,
        num_speculative_tokens=K,
        reason="static",
        proposer=generation_pb2.SPECULATIVE_METHOD_DRAFT_MODEL,
        num_draft_tokens=K,
        num_accepted_tokens=accepted,
        num_emitted_tokens=accepted + 1,
        calls=calls,
    )


def plain(reason: str = "speculation_off", count: int = 1, token_s: float = STEP_S) -> RoundRecord:
    """Make a call of decode-ahead."""
    forward_s = count * token_s
    return RoundRecord(
        wall_s=forward_s + 0.001,
        reason=reason,
        num_emitted_tokens=count,
        calls=[call("target", forward_s + 0.001, forward_s, rows=1)],
    )


def request(*rounds: RoundRecord, k: int = K, name: str = "cmpl-a-0") -> RequestView:
    """Make a request of a first round and these, one after the other."""
    record = RequestRecord(
        request_id=name,
        state=requests_pb2.REQUEST_STATE_FINISHED,
        num_speculative_tokens=k,
        method=generation_pb2.SPECULATIVE_METHOD_DRAFT_MODEL if k else 0,
    )
    began_s = 0.0
    for one in (plain("first_round"), *rounds):
        one.began_s = began_s
        began_s += one.wall_s
        record.rounds.append(one)
    record.record.num_draft_tokens = sum(one.num_draft_tokens for one in rounds)
    record.num_rounds = len(record.rounds)
    record.total_s = began_s
    return view_of(record)


WITHOUT = request(*[plain() for _ in range(20)], k=0, name="cmpl-off-0")


@pytest.mark.parametrize(
    ("cause", "rounds"),
    [
        ("acceptance", [drafted(accepted=0)] * 20),
        ("draft", [drafted(draft_s=0.02)] * 20),
        ("draft queue", [drafted(draft_queue_s=0.08)] * 20),
        ("transport", [drafted(way_s=0.04)] * 20),
        ("verify", [drafted(verify_s=0.09)] * 20),
        ("verify queue", [drafted(verify_queue_s=0.08)] * 20),
        ("orchestrator", [drafted(commit_s=0.08)] * 20),
        ("lost calls", [*[drafted()] * 18, drafted(lost_s=2.0), drafted()]),
        ("rounds without a draft", [*[drafted()] * 5, *[plain("draft_lost")] * 60]),
    ],
)
def test_the_cause_of_a_slow_pair_is_named(cause: str, rounds: list[RoundRecord]) -> None:
    """One thing goes wrong in a pair that is 2.5 times as fast as target-only: it is named first.

    The problem is a problem where the pair has become slower than target-only.
    """
    views = [WITHOUT, request(*rounds)]
    figures = figures_of(views)
    assert figures is not None
    prediction = predict(views, figures)
    speed = next(check for check in judge(figures, prediction) if check.name == "speed")

    assert named(figures)[0].name == cause
    assert named(figures)[0].speedup > 1
    assert any(line.startswith(cause) for line in what_would_pay(figures, prediction))
    if figures.speedup < 1:
        assert speed.status is Status.PROBLEM
        assert f"mostly {cause}" in speed.found


def test_a_good_pair_is_as_fast_as_predicted() -> None:
    """Stages add up to the wall time; formula, cost model and measurement agree within a tenth."""
    views = [WITHOUT, request(*[drafted()] * 20)]
    figures = figures_of(views)
    assert figures is not None
    prediction = predict(views, figures)

    assert figures.target_only.basis is Basis.REQUESTS
    assert (figures.k, figures.tokens_per_round, figures.acceptance) == (4, 4, 0.75)
    assert figures.token_s == pytest.approx((4 * 0.001 + STEP_S + 0.001 + 0.0002) / 4)
    assert figures.speedup == pytest.approx(0.011 / figures.token_s)
    assert figures.draft_cost == pytest.approx(0.1)
    assert prediction.k == K
    assert prediction.by_k[0] == 1
    assert prediction.at_k == pytest.approx(figures.speedup, rel=0.1)
    assert [check.status for check in judge(figures, prediction)] == [Status.OK, Status.OK]


def test_the_cost_model_would_draft_less_where_guesses_are_poor_and_dear() -> None:
    """Its best K is another than the present one, and that is what would pay first."""
    rounds = [drafted(accepted=int(i % 5 == 0), draft_s=0.004) for i in range(40)]
    views = [WITHOUT, request(*rounds)]
    figures = figures_of(views)
    assert figures is not None
    prediction = predict(views, figures)

    assert prediction.best_k < K
    assert what_would_pay(figures, prediction)[0].startswith("no speculation: 1.00 x")


def test_high_acceptance_beside_low_speed_is_a_symptom_of_its_own() -> None:
    views = [WITHOUT, request(*[drafted(accepted=4, draft_s=0.02)] * 20)]
    figures = figures_of(views)
    assert figures is not None
    found = judge(figures, predict(views, figures))[1]

    assert (found.name, found.status) == ("acceptance and speed", Status.PROBLEM)
    assert found.found.startswith("100% of the draft tokens looked at are accepted, and it is slow")


def test_target_only_is_taken_from_the_best_there_is() -> None:
    own = request(*[drafted()] * 8, *[plain("catch_up", token_s=0.02)] * 4)
    alone = request(*[drafted()] * 8)
    found = [figures_of(views) for views in ([WITHOUT, own], [own], [alone])]
    assert [one and one.target_only.basis for one in found] == list(Basis)
    few = figures_of([request(drafted())])
    assert few is not None
    assert "too few" in judge(few, predict([request(drafted())], few))[0].found
    assert figures_of([WITHOUT]) is None


@pytest.mark.parametrize(
    ("acceptance", "k", "cost", "speedup"),
    [(1.0, 4, 0.0, 5.0), (0.0, 4, 0.25, 0.5), (0.5, 1, 0.5, 1.0), (0.8, 4, 0.1, 2.401142857)],
)
def test_the_formula(acceptance: float, k: float, cost: float, speedup: float) -> None:
    """(1 - a^(K + 1)) / ((1 - a)(1 + cK)), its limit at a = 1 included."""
    assert formula(acceptance, k, cost) == pytest.approx(speedup)


async def report(backend: FakeBackend, **config: Any) -> dict[str, tuple[Status, str]]:
    async with make_client(backend, **config) as client:
        found = await examine(client, 0)
    return {check.name: (check.status, check.found) for check in found.checks}


async def test_what_a_gateway_tells_is_judged() -> None:
    """Replicas that are gone, calls that wait, speculation that is off, rounds without a draft."""
    backend = FakeBackend()
    view = RequestRecord(
        request_id="cmpl-a-0",
        state=requests_pb2.REQUEST_STATE_FINISHED,
        rounds=[plain("first_round"), plain("draft_lost")],
    )
    load = common_pb2.Load(num_blocks=100, num_free_blocks=2, num_waiting=7)
    backend.records = [view]
    backend.statuses = [
        GetStatusResponse(
            speculation_mode=generation_pb2.SPECULATION_MODE_OFF,
            replicas=[
                ReplicaStatus(role="target", replica_id="t", state="connected", load=load),
                ReplicaStatus(role="draft", replica_id="d", state="connecting"),
            ],
        )
    ]
    found = await report(backend)

    assert found["gateway"] == (Status.OK, "target fake-target, draft fake-draft, K = 4")
    assert found["targets"][0] is Status.NOTE
    assert "7 calls wait, KV in use at most 98%" in found["targets"][1]
    assert found["drafts"] == (Status.PROBLEM, "none of 1 connected")
    assert found["switch"] == (Status.NOTE, "speculation is off")
    assert found["speed"][0] is Status.PROBLEM
    assert "draft_lost 1" in found["speed"][1]
    assert "specserve verify --url http://gateway --suite prefixes" in found["law"][1]
    assert found["symptoms"][0] is Status.NOTE


async def test_what_is_switched_off_is_said() -> None:
    found = await report(FakeBackend(), console=False, show_recent_requests=False)

    assert found["pool"][1].startswith("the console is off")
    assert "--no-show-recent-requests" in found["speed"][1]
    assert {status for status, _ in found.values()} == {Status.OK, Status.NOTE}


async def test_a_pair_that_is_not_ready_is_a_problem() -> None:
    backend = FakeBackend()
    backend.pair_error = ModelUnavailable("the draft is being loaded")
    found = await report(backend)

    assert found["gateway"][0] is Status.PROBLEM
    assert "not ready" in found["gateway"][1]


async def test_a_key_is_asked_for_by_its_flag(tmp_path: Path) -> None:
    text, key = make_key("alice")
    (tmp_path / "keys").write_text(KeyRing([key]).text())
    async with make_client(FakeBackend(), api_key_file=str(tmp_path / "keys")) as client:
        with pytest.raises(ConfigurationError, match="--api-key-from: .* an API key was wanted"):
            await read_facts(client)
        client.headers["authorization"] = f"Bearer {text}"
        assert (await read_facts(client)).requests == ()


async def test_another_server_is_told_apart() -> None:
    page = httpx.MockTransport(lambda _: httpx.Response(200, text="<html>"))
    async with httpx.AsyncClient(transport=page, base_url="http://elsewhere") as client:
        with pytest.raises(PeerUnavailable, match="is no specserve"):
            await read_facts(client)


@pytest.mark.parametrize(
    ("words", "code", "complaint"),
    [
        (["--running", "http://127.0.0.1:9"], 1, "http://127.0.0.1:9"),
        (["--running", "127.0.0.1:9"], 2, "--running"),
        (["--running", "http://127.0.0.1:9", "--dtype", "float32"], 2, "--dtype"),
        (["--running", "http://127.0.0.1:9", "--port", "1"], 2, "--port"),
        (["--running", "http://127.0.0.1:9", "toy:"], 2, "TARGET"),
        (["--running", "http://127.0.0.1:9", "--probe", "0"], 2, "--probe"),
        (["--running", "http://127.0.0.1:9", "--api-key-from", "/no/such"], 2, "--api-key-from"),
        (["--probe"], 2, "--probe: goes with --running"),
    ],
)
def test_what_cannot_be_is_said(
    words: list[str], code: int, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["doctor", *words]) == code
    assert complaint in capsys.readouterr().err


async def test_report_as_json_and_as_lines() -> None:
    """Shares add up to 1, and every figure of the JSON is a number."""
    backend = FakeBackend()
    async with make_client(backend) as client:
        backend.records = [
            RequestRecord(
                request_id="cmpl-a-0",
                state=requests_pb2.REQUEST_STATE_FINISHED,
                record=generation_pb2.SpeculationRecord(num_draft_tokens=8 * K),
                rounds=[plain("first_round"), *[drafted()] * 8],
            )
        ]
        found = await examine(client, 0)
    told = json.loads(json.dumps(found.as_json()))
    stages = told["speed"]["stages"]
    lines = "\n".join(found.lines())

    assert sum(stage["share"] for stage in stages.values()) == pytest.approx(1)
    assert told["speed"]["num_rounds"] == 8
    assert told["speed"]["target_only_basis"] == Basis.VERIFICATION.value
    assert "draft: forwards" in lines
    assert "predicted: " in lines
