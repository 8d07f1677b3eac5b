"""Counters count what was emitted, once, under the right name."""

from __future__ import annotations

import pytest

from specserve.orchestrator.record import ProposerCounts, Record, TokenOrigin, origins_of
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
        record.add(4, origins_of(4, Verification(accepted, 9)), "draft_model")
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
    record.add(0, (PLAIN,), None)
    record.add(3, (ACCEPTED, RECOVERED), "ngram")
    assert (record.num_plain_steps, record.num_plain_tokens) == (1, 1)
    assert (record.num_spec_steps, record.num_draft_tokens) == (1, 3)
    assert record.per_step_drafted == [3]


def test_trimmed_round_counts_emitted_tokens_only() -> None:
    """A stop inside a block: the tokens after it were verified, but never emitted."""
    record = Record()
    record.add(4, origins_of(4, Verification(4, 9))[:2], "suffix")
    assert record.num_draft_tokens == 4
    assert record.num_accepted_draft_tokens == 2
    assert record.num_bonus_tokens == 0
    assert record.accepted_per_position == [1, 1]


def test_records_share_nothing() -> None:
    """Two requests have lists of their own."""
    one, two = Record(), Record()
    one.add(1, (ACCEPTED, BONUS), "suffix")
    assert two == Record()


def test_each_proposers_tokens_are_counted_apart_and_add_up() -> None:
    """A cascade's rounds: who made which step, and per proposer what came of it."""
    record = Record()
    record.add(4, origins_of(4, Verification(3, 9)), "draft_model")
    record.add(0, (PLAIN,), None)
    record.add(2, origins_of(2, Verification(2, 9)), "suffix")
    record.add(0, (PLAIN,), "suffix")  # asked, and nothing came
    record.add(5, origins_of(5, Verification(5, 9))[:4], "suffix")
    assert record.per_step_proposer == ["draft_model", "suffix", "suffix"]
    assert record.proposers == {
        "draft_model": ProposerCounts(1, 4, 3),
        "suffix": ProposerCounts(2, 7, 6),
    }
    assert record.num_plain_steps == 2
    counts = record.proposers.values()
    assert record.num_spec_steps == sum(one.num_spec_steps for one in counts)
    assert record.num_draft_tokens == sum(one.num_draft_tokens for one in counts)
    assert record.num_accepted_draft_tokens == sum(one.num_accepted_draft_tokens for one in counts)
