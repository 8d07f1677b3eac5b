"""Whether rounds may speculate where a record of verification is required."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specserve.config import OrchestratorConfig, SpeculativeConfig
from specserve.errors import ConfigurationError
from specserve.model.environment import code_versions
from specserve.orchestrator.verified_gate import RECHECK_S, VERIFIED, VerifiedGate
from specserve.rpc.v1.common_pb2 import GetModelResponse
from specserve.rpc.verified_records import Evidence, VerifiedRecord, pair_keys, write_record
from specserve.speculation.types import AcceptanceRule

STANDARD = AcceptanceRule.STANDARD
ENOUGH = Evidence(bias=0.005, num_parity_tokens=384, num_prefix_texts=500)


def model(replica_id: str, weights: str) -> GetModelResponse:
    return GetModelResponse(replica_id=replica_id, weights_fingerprint=weights, dtype="float32")


TARGET, DRAFT = model("target", "aa"), model("draft", "bb")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def gate(folder: Path, clock: Clock | None = None, **speculative: object) -> VerifiedGate:
    config = OrchestratorConfig(
        speculative=SpeculativeConfig.model_validate({"model": "x", **speculative}),
        require_verified=True,
        verified_dir=str(folder),
    )
    return VerifiedGate(config, clock or Clock())


def keep(
    folder: Path,
    draft: GetModelResponse | None = DRAFT,
    *,
    method: str = "draft_model",
    passed: bool = True,
    k: int = 4,
    evidence: Evidence = ENOUGH,
) -> Path:
    (key,) = pair_keys(TARGET, draft, code_versions(), method, [STANDARD])
    return write_record(folder, VerifiedRecord(key, passed, k, evidence, "2026-01-01", {}))


def test_nothing_is_refused_where_no_record_is_required(tmp_path: Path) -> None:
    """The default: no folder is looked into."""
    free = VerifiedGate(OrchestratorConfig(verified_dir=str(tmp_path)))

    assert free.refusal(STANDARD, "draft_model", TARGET, DRAFT) == VERIFIED
    assert free.refusals("draft_model", TARGET, DRAFT) == {}


def test_only_the_rule_and_the_pair_of_a_passing_record_may(tmp_path: Path) -> None:
    """Another rule, another draft, another method: each wants a record of its own."""
    keep(tmp_path)
    closed = gate(tmp_path)

    assert closed.refusal(STANDARD, "draft_model", TARGET, DRAFT) == VERIFIED
    assert "no record" in closed.refusal(AcceptanceRule.GREEDY, "draft_model", TARGET, DRAFT)
    other = model("other", "cc")
    assert "no record" in closed.refusal(STANDARD, "draft_model", TARGET, other)
    assert "no record" in closed.refusal(STANDARD, "cascade", TARGET, DRAFT)
    assert [bool(why) for why in closed.refusals("draft_model", TARGET, DRAFT).values()] == [
        rule is not STANDARD for rule in AcceptanceRule
    ]


def test_a_record_of_a_failure_never_counts(tmp_path: Path) -> None:
    """It says that the pair was tried and is wrong."""
    keep(tmp_path, passed=False)

    assert "failed" in gate(tmp_path).refusal(STANDARD, "draft_model", TARGET, DRAFT)


def test_a_longer_k_than_was_tried_is_not_covered(tmp_path: Path) -> None:
    """Four draft tokens a round were verified, eight are configured."""
    keep(tmp_path, k=4)

    refusal = gate(tmp_path, num_speculative_tokens=8).refusal(
        STANDARD, "draft_model", TARGET, DRAFT
    )

    assert "up to 4" in refusal


@pytest.mark.parametrize(
    ("little", "said"),
    [
        ({"bias": 0.3}, "bias of 0.3"),
        ({"num_parity_tokens": 8}, "8 tokens"),
        ({"num_prefix_texts": 20}, "20 texts"),
    ],
)
def test_a_pass_on_little_evidence_is_not_enough(
    tmp_path: Path, little: dict[str, Any], said: str
) -> None:
    """`specserve verify --bias 0.3` passes nearly always; it is told what was wanted."""
    keep(tmp_path, evidence=replace(ENOUGH, **little))

    refusal = gate(tmp_path).refusal(STANDARD, "draft_model", TARGET, DRAFT)

    assert said in refusal
    assert "wanted" in refusal


@pytest.mark.parametrize(
    "setting", ["draft_confidence_threshold=0.5", "draft_sample_top_k=8", "num_cached_outcomes=24"]
)
def test_a_draft_that_was_set_otherwise_wants_a_record_of_its_own(
    tmp_path: Path, setting: str
) -> None:
    """An outcome cache, for one, draws its guesses by other code."""
    keep(tmp_path)
    other = model("draft", "bb")
    other.settings.append(setting)

    assert "no record" in gate(tmp_path).refusal(STANDARD, "draft_model", TARGET, other)


def test_a_cascade_without_its_draft_needs_the_record_of_what_is_left(tmp_path: Path) -> None:
    """Suffix guesses alone; while a draft model alone drafts nothing without its draft."""
    closed = gate(tmp_path)
    assert "no record" in closed.refusal(STANDARD, "cascade", TARGET, None)
    assert closed.refusal(STANDARD, "draft_model", TARGET, None) == VERIFIED

    keep(tmp_path, None, method="suffix")

    assert gate(tmp_path).refusal(STANDARD, "cascade", TARGET, None) == VERIFIED


def test_a_record_that_appears_or_goes_counts_without_a_restart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Within RECHECK_S; each change is logged once."""
    clock = Clock()
    closed = gate(tmp_path, clock)
    refused = closed.refusal(STANDARD, "draft_model", TARGET, DRAFT)
    path = keep(tmp_path)
    assert closed.refusal(STANDARD, "draft_model", TARGET, DRAFT) == refused

    clock.now += RECHECK_S
    assert closed.refusal(STANDARD, "draft_model", TARGET, DRAFT) == VERIFIED
    path.unlink()
    clock.now += RECHECK_S
    assert closed.refusal(STANDARD, "draft_model", TARGET, DRAFT) == refused

    said = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert ["target-only" in text for text in said] == [True, False, True]
    assert path.name in said[0]


def test_a_file_that_is_no_record_stops_the_start_and_is_no_pass_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Both times the file is named in the log or the error."""
    clock = Clock()
    path = keep(tmp_path)
    closed = gate(tmp_path, clock)
    path.write_text(path.read_text()[:-20])

    with pytest.raises(ConfigurationError, match=path.name):
        gate(tmp_path)

    refusal = closed.refusal(STANDARD, "draft_model", TARGET, DRAFT)
    assert path.name in refusal
    assert str(tmp_path) not in refusal
    assert any(str(path) in record.getMessage() for record in caplog.records)


def test_synthetic_acceptance_cannot_be_verified(tmp_path: Path) -> None:
    """It is no rule of the target's law."""
    with pytest.raises(ConfigurationError, match="synthetic"):
        gate(
            tmp_path,
            rejection_sample_method="synthetic",
            synthetic_acceptance_rates=(0.5,) * 4,
        )
