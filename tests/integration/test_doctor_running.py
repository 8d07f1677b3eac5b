"""`specserve doctor --running` on pairs that run: one well, one wrong and one slow on purpose."""

from __future__ import annotations

import pytest

from helpers.pair import running_pair
from integration.test_sampling_options import served
from specserve.model import engine, planted_faults
from specserve.model.session import KvSession
from specserve.model.toy import ToySpec
from specserve.model.toy_tokenizer import ToyTokenizer
from specserve.speculation.planted_faults import SWITCH, SWITCH_VALUE, VARIABLE, Fault
from specserve.tools.doctor.report import Report
from specserve.tools.doctor.running import examine
from specserve.tools.doctor.status import Status

TARGET = "toy:vocab_size=256,seed=7,order=8,eos_bias=-1000"
DRAFT = f"{TARGET},noise=0.4,noise_seed=1"
SYMPTOMS = (
    "greedy, on and off",
    "seeded, on and off",
    "nothing after the end",
    "streams together and alone",
    "top-p with a seed, twice",
)

pytestmark = pytest.mark.slow


def statuses(report: Report) -> dict[str, Status]:
    return {check.name: check.status for check in report.checks}


async def test_a_wrong_pair_is_told_from_a_right_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each symptom is tried and none found; then a target that keeps a rejected token is found out.

    Its greedy and seeded texts differ from target-only's; they end where they should all the same.
    """
    tokenizer = ToyTokenizer(ToySpec.parse(TARGET))
    async with running_pair(TARGET, DRAFT) as pair, served(pair, tokenizer) as client:
        well = await examine(client, 1)
        # What the fault replaces comes back with the test's end.
        monkeypatch.setattr(KvSession, "truncate", KvSession.truncate)
        monkeypatch.setattr(engine, "_slice", engine._slice)
        monkeypatch.setenv(VARIABLE, Fault.STALE_KV)
        monkeypatch.setenv(SWITCH, SWITCH_VALUE)
        planted_faults.plant_wanted("target")
        wrong = await examine(client, 1)

    found = statuses(well)
    assert [found[name] for name in SYMPTOMS] == [Status.OK] * len(SYMPTOMS)
    assert found["law"] is Status.NOTE
    assert well.figures is not None
    assert well.figures.num_requests == 2
    assert well.figures.stages.total_s > 0
    assert well.prediction is not None
    found = statuses(wrong)
    assert found["greedy, on and off"] is found["seeded, on and off"] is Status.PROBLEM
    assert found["nothing after the end"] is Status.OK
    assert not wrong.is_well


async def test_a_slow_draft_is_named() -> None:
    """Four draft tokens of 30 ms beside verifications of next to nothing: the draft is the cause.

    Traffic's own rounds tell it; the doctor sends nothing.
    """
    tokenizer = ToyTokenizer(ToySpec.parse(TARGET))
    async with (
        running_pair(TARGET, f"{DRAFT},step_ms=30") as pair,
        served(pair, tokenizer) as client,
    ):
        body = {"prompt": [5, 6, 7], "max_tokens": 20, "temperature": 0}
        assert (await client.post("/v1/completions", json=body)).status_code == 200
        await pair.until_idle()
        report = await examine(client, 0)
    speed = next(check for check in report.checks if check.name == "speed")

    assert speed.status is Status.PROBLEM
    assert "slower than without; mostly draft" in speed.found
    assert any(line.startswith("draft: ") for line in report.pays)
