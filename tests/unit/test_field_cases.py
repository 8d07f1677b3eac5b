"""Every field case of docs/field-cases.md has a test that carries its id, or a stated reason."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "field-cases.md"
SECTIONS = {
    "mixed-batch",
    "kv-rollback",
    "cancel-leak",
    "vocab-tokenizer",
    "service-failure",
    "ray-serve",
    "grpc",
    "event-loop",
    "greedy-equivalence",
    "seed-rng",
    "distribution",
    "nan-numerics",
    "stop-eos",
    "logprobs",
    "usage",
    "streaming",
    "context-length",
    "inputs",
    "openai-compat",
    "structured-output",
    "kuberay",
    "security",
    "metrics",
    "otel",
}
MIN_REASON_LENGTH = 20
"""Characters; "no" or "later" is no reason."""


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the document."""

    case_id: str
    kind: str
    text: str
    reason: str
    """Why there is no test; empty where one is wanted."""


def _cases() -> list[Case]:
    rows = re.findall(
        r"^\| (B\d{3}) \| ([\w-]+) \| (.+?) \|(?: (.*?))? ?\|$",
        DOCUMENT.read_text(encoding="utf-8"),
        flags=re.MULTILINE,
    )
    return [Case(*row) for row in rows]


@cache
def _ids_in_tests() -> frozenset[str]:
    """Return the ids that test files carry, this one left out."""
    return frozenset(
        case_id
        for path in (ROOT / "tests").rglob("test_*.py")
        if path.name != Path(__file__).name
        # Names of functions carry an id too: test_b115_..., test_..._B115.
        for case_id in re.findall(r"(?<![A-Za-z0-9])B\d{3}(?!\d)", _upper(path))
    )


def _upper(path: Path) -> str:
    return re.sub(r"_b(?=\d{3}(?!\d))", "_B", path.read_text(encoding="utf-8"))


def test_document_is_read_whole() -> None:
    """A row that is not in the form of the others would go unchecked."""
    cases = _cases()
    mentioned = re.findall(r"^\|\s*(B\d+)", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE)

    assert [case.case_id for case in cases] == mentioned
    assert len(set(mentioned)) == len(mentioned)
    assert {case.kind for case in cases} == SECTIONS
    assert all(case.text for case in cases)


@pytest.mark.parametrize("case", _cases(), ids=lambda case: case.case_id)
def test_case_has_a_test_or_a_reason(case: Case) -> None:
    """A case is a test that carries its id, or one line that says why not; never both."""
    covered = case.case_id in _ids_in_tests()

    if covered:
        assert not case.reason, f"{case.case_id} has a test; its reason is out of date"
    else:
        assert len(case.reason) >= MIN_REASON_LENGTH, (
            f"{case.case_id} has neither a test nor a reason: {case.text}"
        )


@pytest.mark.parametrize("kind", sorted(SECTIONS))
def test_at_most_one_case_in_ten_of_a_kind_goes_without_a_test(kind: str) -> None:
    """Reasons are for the few cases that cannot happen here."""
    cases = [case for case in _cases() if case.kind == kind]
    reasons = [case.case_id for case in cases if case.reason]

    assert cases
    assert len(reasons) * 10 <= len(cases), f"{reasons} of {len(cases)}"
