"""What a whole verification comes to: rule by rule, and whether a record may be kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from specserve.rpc import codec
from specserve.rpc.v1.generation_pb2 import GetPairResponse
from specserve.rpc.verified_records import Evidence, read_all
from specserve.speculation.types import AcceptanceRule
from specserve.tools.verify.distribution import CaseReport, DistributionReport
from specserve.tools.verify.long_texts import LongReport
from specserve.tools.verify.outcome import Verification
from specserve.tools.verify.parity import ModeReport, ParityReport
from specserve.tools.verify.prefixes import (
    MODES,
    PrefixCase,
    PrefixesReport,
    PrefixReport,
)
from specserve.tools.verify.short_texts import ShortReport
from specserve.tools.verify.toy_cases import CASES

VERSIONS = ("numpy=2", "sources=abc", "specserve=0.1.0", "torch=2", "transformers=5")


def served(*versions: str) -> GetPairResponse:
    """Describe a pair whose three processes run the same code."""
    pair = GetPairResponse(
        num_speculative_tokens=4,
        speculative_method=codec.pack_method("draft_model"),
        versions=versions or VERSIONS,
    )
    for model, weights in ((pair.target, "aa"), (pair.draft, "bb")):
        model.weights_fingerprint, model.dtype = weights, "float32"
        model.versions.extend(versions or VERSIONS)
    return pair


def parity(broken: AcceptanceRule | None = None, longest: int = 4) -> ParityReport:
    modes = (
        ModeReport(rule.value, rule, 6, 384, 0 if rule is broken else 40, 0, 20, longest, ())
        for rule in (AcceptanceRule.GREEDY, AcceptanceRule.COUPLED)
    )
    return ParityReport("float32", "draft_model", tuple(modes))


def prefixes(longest: int = 4) -> PrefixesReport:
    reports = (
        PrefixReport(PrefixCase("one", (1,), mode), ShortReport(400, (), 0), 40, 20, longest)
        for mode in MODES
    )
    return PrefixesReport("declared", 1e-4, tuple(reports))


def law(broken: AcceptanceRule | None = None) -> DistributionReport:
    """One report a case, whose long texts have an impossible token under the broken rule."""
    cases = tuple(
        CaseReport(
            case,
            LongReport(100, (0.5, 0.5, 0.5), 0.0, int(case.rule is broken)),
            ShortReport(100, (), 0),
            60 * case.speculates,
            30 * case.speculates,
        )
        for case in CASES
    )
    return DistributionReport("declared", 0.005, cases, VERSIONS)


def outcome(
    *,
    parity_of: ParityReport | None = None,
    prefixes_of: PrefixesReport | None = None,
    law_of: DistributionReport | None = None,
) -> Verification:
    return Verification(served(), parity_of or parity(), prefixes_of or prefixes(), law_of or law())


def test_all_parts_make_every_rule_pass() -> None:
    """Nothing is said against any rule."""
    assert all(outcome().passed(rule) for rule in AcceptanceRule)
    assert "FAILED" not in outcome().table()


@pytest.mark.parametrize("rule", [AcceptanceRule.GREEDY, AcceptanceRule.COUPLED])
def test_broken_parity_fails_its_rule_alone(rule: AcceptanceRule) -> None:
    """A mode that drafted nothing proves nothing; the standard rule has no parity."""
    broken = outcome(parity_of=parity(rule))

    assert [r for r in AcceptanceRule if not broken.passed(r)] == [rule]
    assert "FAILED" in broken.table()


@pytest.mark.parametrize("rule", [AcceptanceRule.STANDARD, AcceptanceRule.COUPLED])
def test_a_broken_law_fails_its_rule_alone(rule: AcceptanceRule) -> None:
    """One impossible token is enough."""
    broken = outcome(law_of=law(rule))

    assert [r for r in AcceptanceRule if not broken.passed(r)] == [rule]


def test_a_record_a_rule_is_written_also_of_a_failure(tmp_path: Path) -> None:
    """With K, all parts, and the verdict of its own rule."""
    outcome(parity_of=parity(AcceptanceRule.GREEDY)).write(tmp_path)

    found = {record.key.rule: record for record in read_all(tmp_path)}
    assert {rule: record.passed for rule, record in found.items()} == {
        rule: rule is not AcceptanceRule.GREEDY for rule in AcceptanceRule
    }
    assert {record.num_speculative_tokens for record in found.values()} == {4}
    assert {record.evidence for record in found.values()} == {Evidence(0.005, 384, 400)}
    assert all(record.key.draft is not None for record in found.values())


def test_a_k_that_no_round_came_to_is_not_covered(tmp_path: Path) -> None:
    """Four are configured; an unsure draft never guessed more. Each rule has rounds of its own."""
    outcome(parity_of=parity(longest=2), prefixes_of=prefixes(longest=3)).write(tmp_path)

    assert {record.key.rule: record.num_speculative_tokens for record in read_all(tmp_path)} == {
        AcceptanceRule.GREEDY: 2,
        AcceptanceRule.STANDARD: 3,
        AcceptanceRule.COUPLED: 3,
    }


def test_code_that_the_enumerable_pair_did_not_run_is_named() -> None:
    """On any of the three processes; a library that only a forward uses is that key's affair."""
    assert outcome().other_versions() == []
    other = Verification(
        served("numpy=3", *VERSIONS[1:4], "transformers=6"),
        parity(),
        PrefixesReport("", 1e-4, ()),
        law(),
    )

    assert other.other_versions() == ["numpy=2", "numpy=3"]
