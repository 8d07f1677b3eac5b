"""Counters count what was emitted, once, under the right name."""

from __future__ import annotations

import pytest

from specserve.orchestrator.record import Record, TokenOrigin, origins_of
from specserve.speculation.types import Verification

ACCEPTED, RECOVERED = TokenOrigin.ACCEPTED, TokenOrigin.RECOVERED
BONUS, PLAIN = TokenOrigin.BONUS, TokenOrigin.PLAIN


@pytest.mark.parametrize(
    ("num_draft_tokens", "num_accepted", "expected"),
    [
        (0, 0, (PLAIN,)),
        (4, 0, (RECOVERED,)),
        (4, 2, (ACCEPTED, ACCEPTED, RECOVERED)),
        (4, 4, (ACCEPTED, ACCEPTED, ACCEPTED, ACCEPTED, BONUS)),
        (1, 1, (ACCEPTED, BONUS)),
    ],
)
def test_origin_of_each_token(
    num_draft_tokens: int, num_accepted: int, expected: tuple[TokenOrigin, ...]
) -> None:
    """num_accepted + 1 names: accepted ones, then what ended the round."""
    assert origins_of(num_draft_tokens, Verification(num_accepted, 9)) == expected


def test_known_accept_pattern_is_counted_exactly_B136() -> None:
    """K = 4 for 10 steps: drafted 40, accepted the sum of the pattern, emitted accepted + 10."""
    pattern = [4, 0, 2, 1, 4, 3, 0, 0, 4, 2]
    record = Record()
    for accepted in pattern:
        record.add(4, origins_of(4, Verification(accepted, 9)))
    assert record.num_spec_steps == 10
    assert record.num_draft_tokens == 40
    assert record.num_accepted_draft_tokens == sum(pattern)
    assert record.num_bonus_tokens == pattern.count(4)
    assert record.num_recovered_tokens == 10 - pattern.count(4)
    assert record.num_plain_steps == record.num_plain_tokens == 0
    assert record.accepted_per_position == [
        sum(accepted > position for accepted in pattern) for position in range(4)
    ]
    assert record.per_step_drafted == [4] * 10
    assert record.per_step_accepted == pattern


def test_plain_rounds_are_in_neither_rate() -> None:
    """Rounds without draft tokens are counted apart."""
    record = Record()
    record.add(0, (PLAIN,))
    record.add(3, (ACCEPTED, RECOVERED))
    assert (record.num_plain_steps, record.num_plain_tokens) == (1, 1)
    assert (record.num_spec_steps, record.num_draft_tokens) == (1, 3)
    assert record.per_step_drafted == [3]


def test_trimmed_round_counts_emitted_tokens_only() -> None:
    """A stop inside a block: the tokens after it were verified, but never emitted."""
    record = Record()
    record.add(4, origins_of(4, Verification(4, 9))[:2])
    assert record.num_draft_tokens == 4
    assert record.num_accepted_draft_tokens == 2
    assert record.num_bonus_tokens == 0
    assert record.accepted_per_position == [1, 1]


def test_records_share_nothing() -> None:
    """Two requests have lists of their own."""
    one, two = Record(), Record()
    one.add(1, (ACCEPTED, BONUS))
    assert two == Record()
