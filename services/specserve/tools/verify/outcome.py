"""What a whole verification came to, rule by rule, and its records.

Knows the parts' reports and the records' keys; runs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from specserve.config import DRAFT_MODEL_METHODS
from specserve.rpc import codec
from specserve.rpc.v1.generation_pb2 import GetPairResponse
from specserve.rpc.verified_records import (
    Evidence,
    PairKey,
    VerifiedRecord,
    pair_keys,
    write_record,
)
from specserve.speculation.types import AcceptanceRule
from specserve.tools.terminal import table
from specserve.tools.verify.distribution import DistributionReport
from specserve.tools.verify.parity import ParityReport
from specserve.tools.verify.prefixes import PrefixesReport

MATHS = frozenset({"specserve", "sources", "numpy", "torch", "python", "planted_fault"})
"""Versions that the enumerable pair must share with the pair that it speaks for."""


@dataclass(frozen=True, slots=True)
class Verification:
    """All parts of one verification of one pair."""

    pair: GetPairResponse
    parity: ParityReport
    prefixes: PrefixesReport
    distribution: DistributionReport

    def passed(self, rule: AcceptanceRule) -> bool:
        """Every part that speaks about a rule holds."""
        return (
            self.parity.passed_rule(rule)
            and self.prefixes.passed_rule(rule)
            and self.distribution.passed_rule(rule)
        )

    def keys(self) -> list[PairKey]:
        """Return what the verification is about, one key a rule."""
        method = codec.unpack_method(self.pair.speculative_method)
        if method is None:
            return []
        draft = self.pair.draft if method in DRAFT_MODEL_METHODS else None
        return pair_keys(self.pair.target, draft, self.pair.versions, method, tuple(AcceptanceRule))

    def other_versions(self) -> list[str]:
        """Name what the enumerable pair ran on and this pair, or a part of it, does not."""
        tried = _maths_of(self.distribution.versions)
        served = [self.pair.target.versions, self.pair.versions]
        if self.pair.HasField("draft"):
            served.append(self.pair.draft.versions)
        return sorted({name for versions in served for name in tried ^ _maths_of(versions)})

    def num_speculative_tokens(self, rule: AcceptanceRule) -> int:
        """Most draft tokens of a rule's rounds: those that came, of those configured."""
        longest = max(self.parity.longest_block(rule), self.prefixes.longest_block(rule))
        return min(self.pair.num_speculative_tokens, longest)

    @property
    def evidence(self) -> Evidence:
        """How hard it looked."""
        return Evidence(self.distribution.bias, self.parity.num_tokens, self.prefixes.num_texts)

    def write(self, folder: Path) -> list[Path]:
        """Write one record a rule, passed or not, in place of what was there.

        Raises:
            ConfigurationError: the folder cannot be written.
        """
        made_at = datetime.now(UTC).isoformat(timespec="seconds")
        parts = {
            "parity": self.parity.record(),
            "prefixes": self.prefixes.record(),
            "distribution": self.distribution.record(),
        }
        return [
            write_record(
                folder,
                VerifiedRecord(
                    key,
                    self.passed(key.rule),
                    self.num_speculative_tokens(key.rule),
                    self.evidence,
                    made_at,
                    parts,
                ),
            )
            for key in self.keys()
        ]

    def table(self) -> str:
        """Lay the verdicts out for people."""
        header = ("rule", "parity", "prefixes", "distribution", "")
        rows = [
            (
                rule.value,
                _word(self.parity.passed_rule(rule), rule, _PARITY),
                _word(self.prefixes.passed_rule(rule), rule, _SAMPLING),
                _word(self.distribution.passed_rule(rule), rule, _SAMPLING),
                "verified" if self.passed(rule) else "FAILED",
            )
            for rule in AcceptanceRule
        ]
        return table(header, rows)


_PARITY = (AcceptanceRule.GREEDY, AcceptanceRule.COUPLED)
_SAMPLING = (AcceptanceRule.STANDARD, AcceptanceRule.COUPLED)


def _word(passed: bool, rule: AcceptanceRule, spoken_of: Sequence[AcceptanceRule]) -> str:
    if rule not in spoken_of:
        return "-"
    return "ok" if passed else "FAILED"


def _maths_of(versions: Sequence[str]) -> frozenset[str]:
    return frozenset(name for name in versions if name.partition("=")[0] in MATHS)
