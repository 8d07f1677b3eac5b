"""`require_verified`: target-only until a passing record fits, over real gRPC."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from helpers.pair import DRAFT, TARGET, Pair, greedy_tokens, make_draft, make_request, running_pair
from helpers.waiting import eventually
from specserve.orchestrator import verified_gate
from specserve.rpc.v1.generation_pb2 import GetPairRequest, GetPairResponse
from specserve.rpc.verified_records import Evidence, VerifiedRecord, pair_keys, write_record
from specserve.speculation.types import AcceptanceRule

pytestmark = pytest.mark.slow

NUM_TOKENS = 24
OTHER_DRAFT = f"{DRAFT},noise_seed=2"


@pytest.fixture(autouse=True)
def _look_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A record's file is looked at with every round."""
    monkeypatch.setattr(verified_gate, "RECHECK_S", 0.0)


EVIDENCE = Evidence(bias=0.005, num_parity_tokens=384, num_prefix_texts=500)


async def describe(pair: Pair) -> GetPairResponse:
    response: GetPairResponse = await pair.stub.GetPair(GetPairRequest())
    return response


async def keep_record(
    pair: Pair, folder: Path, rules: Sequence[AcceptanceRule], *, passed: bool = True
) -> None:
    """Write what `specserve verify` would write for the pair as it is."""
    served = await describe(pair)
    for key in pair_keys(served.target, served.draft, served.versions, "draft_model", rules):
        write_record(folder, VerifiedRecord(key, passed, 4, EVIDENCE, "2026-01-01", {}))


async def drafted(pair: Pair, *, rule: str = "greedy", for_verification: bool = False) -> int:
    """Decode; give the draft tokens. Greedy text is the target's in any case."""
    request = make_request(rule=rule, max_tokens=NUM_TOKENS)
    request.for_verification = for_verification
    generated = await pair.generate(request)
    if rule == "greedy":
        assert generated.token_ids == greedy_tokens(TARGET, [5, 6, 7], NUM_TOKENS)
    assert generated.record is not None
    return generated.record.num_draft_tokens


async def speculates(pair: Pair, **how: object) -> bool:
    """Say whether requests are drafted for; on a busy machine a draft may miss a short one."""
    for _ in range(50):
        if await drafted(pair, **how) > 0:  # type: ignore[arg-type]
            return True
    return False


def sample(pair: Pair, name: str, **labels: str) -> float | None:
    return pair.orchestrator.registry.get_sample_value(f"specserve_orchestrator_{name}", labels)


async def test_it_serves_target_only_and_says_so_until_a_record_fits(tmp_path: Path) -> None:
    """GetPair, metrics and the rounds' reason tell; a record of a failure changes nothing, one that
    passed changes its own rule, without a restart.
    """
    async with running_pair(require_verified=True, verified_dir=str(tmp_path)) as pair:
        assert await drafted(pair) == 0
        served = await describe(pair)
        assert served.ready
        assert not served.speculation_enabled
        assert "no record" in served.reason
        assert sample(pair, "speculation_enabled") == 0
        assert sample(pair, "verified", rule="greedy") == 0
        assert (sample(pair, "num_rounds_by_reason_total", reason="unverified") or 0) > 0

        await keep_record(pair, tmp_path, [AcceptanceRule.GREEDY], passed=False)
        assert await drafted(pair) == 0
        assert "failed" in (await describe(pair)).reason

        await keep_record(pair, tmp_path, [AcceptanceRule.GREEDY])
        assert await speculates(pair)
        assert await drafted(pair, rule="standard") == 0
        served = await describe(pair)
        assert served.speculation_enabled
        assert "in part" in served.reason
        assert sample(pair, "verified", rule="greedy") == 1
        assert sample(pair, "verified", rule="standard") == 0

        await keep_record(pair, tmp_path, tuple(AcceptanceRule))
        assert (await describe(pair)).reason == ""


async def test_a_verification_itself_speculates(tmp_path: Path) -> None:
    """Else no running pair could ever come by its record; the request's own flag says so."""
    async with running_pair(require_verified=True, verified_dir=str(tmp_path)) as pair:
        assert await speculates(pair, for_verification=True)
        assert await drafted(pair) == 0


async def test_another_draft_needs_its_own_record(tmp_path: Path) -> None:
    """A draft with other weights takes the place of the verified one: target-only, until its own
    record appears.
    """
    async with running_pair(require_verified=True, verified_dir=str(tmp_path)) as pair:
        await keep_record(pair, tmp_path, tuple(AcceptanceRule))
        assert await speculates(pair)
        other = await make_draft(OTHER_DRAFT)
        pair.owned.append(other)

        pair.orchestrator.update_peers((pair.target.address,), (other.address,))
        drafts = pair.orchestrator.pair.drafts
        assert drafts is not None
        await eventually(lambda: [link.address for link in drafts.usable()] == [other.address])
        assert await drafted(pair) == 0
        assert "no record" in (await describe(pair)).reason

        await keep_record(pair, tmp_path, tuple(AcceptanceRule))
        assert await speculates(pair)
