"""Acceptance by configured rates: how often, by which draws, and what is refused."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from specserve.config_parsing import parse_speculative_config
from specserve.errors import ConfigurationError, InvalidProposal
from specserve.orchestrator.synthetic import synthetic_acceptance
from specserve.speculation.randomness import Purpose, RoundUniforms
from specserve.speculation.synthetic import SyntheticAcceptance, accept_synthetic
from specserve.speculation.types import Proposal, TargetScores

VOCAB_SIZE = 32


def round_of(draft: tuple[int, ...]) -> tuple[Proposal, TargetScores]:
    """A round whose target would never accept: p is 0 everywhere."""
    scores = TargetScores((0.0,) * len(draft), tuple(range(20, 21 + len(draft))))
    return Proposal(draft, None), scores


@pytest.mark.slow
@pytest.mark.parametrize("rates", [(0.9, 0.6, 0.6, 0.1), (1.0, 1.0, 0.5, 0.0), (0.0, 0.0, 0.0)])
def test_positions_are_accepted_at_the_configured_rates(rates: tuple[float, ...]) -> None:
    """Entry i is the share of rounds whose first i + 1 draft tokens are accepted, whatever p is.

    20,000 keyed rounds: a share is off by 0.02 with odds below 1e-7 a position.
    """
    synthetic = SyntheticAcceptance(rates)
    num_rounds = 20_000
    reached = np.zeros(len(rates))
    for length in range(num_rounds):
        proposal, scores = round_of(tuple(range(len(rates))))
        draws = RoundUniforms(11, 0, length, len(rates), Purpose.ACCEPT)
        verdict = accept_synthetic(proposal, scores, draws, synthetic, VOCAB_SIZE)
        reached[: verdict.num_accepted] += 1

    assert np.abs(reached / num_rounds - rates).max() < 0.02


def test_a_round_repeats_and_ends_with_the_target_s_token() -> None:
    """The same key decides alike; the token after the accepted ones is the target's of that row."""
    synthetic = SyntheticAcceptance((0.5, 0.25, 0.1))
    seen = set()
    for length in range(50):
        proposal, scores = round_of((1, 2, 3))
        draws = RoundUniforms(7, 1, length, 3, Purpose.ACCEPT)
        verdict = accept_synthetic(proposal, scores, draws, synthetic, VOCAB_SIZE)
        again = accept_synthetic(proposal, scores, draws, synthetic, VOCAB_SIZE)
        seen.add(verdict.num_accepted)

        assert verdict == again
        assert verdict.next_token_id == 20 + verdict.num_accepted

    assert len(seen) > 1


def test_an_id_that_is_no_token_is_never_accepted() -> None:
    """A rate of 1 accepts every token there is, and nothing else; u = 0 passes no rate of 0."""
    sure = SyntheticAcceptance((1.0, 1.0, 1.0))
    draws = [0.0, 0.0, 0.0]
    for position, wrong in itertools.product(range(3), (-1, VOCAB_SIZE)):
        drafted = [1, 2, 3]
        drafted[position] = wrong
        proposal, scores = round_of(tuple(drafted))

        verdict = accept_synthetic(proposal, scores, draws, sure, VOCAB_SIZE)

        assert verdict.num_accepted == position
    proposal, scores = round_of((1,))
    never = SyntheticAcceptance((0.0, 0.0, 0.0))
    assert accept_synthetic(proposal, scores, draws, never, VOCAB_SIZE).num_accepted == 0


@pytest.mark.parametrize("length", [1.0, 1.7, 3.36, 4.9, 5.0])
def test_a_length_is_what_a_full_round_commits_on_average(length: float) -> None:
    """The rates of a mean acceptance length add up to it, each position as likely as the other."""
    synthetic = SyntheticAcceptance.of((), length, 4)

    assert 1 + sum(synthetic.rates) == pytest.approx(length)
    assert np.ptp(synthetic.conditional_rates) < 1e-9


def test_shapes_that_do_not_fit_are_refused() -> None:
    """More draft tokens than rates, or replacements for another number of rows."""
    proposal, scores = round_of((1, 2))
    with pytest.raises(InvalidProposal, match="1 synthetic rates"):
        accept_synthetic(proposal, scores, [0.0, 0.0], SyntheticAcceptance((0.5,)), VOCAB_SIZE)
    _, longer = round_of((1, 2, 3))
    with pytest.raises(InvalidProposal, match="4 replacements"):
        accept_synthetic(proposal, longer, [0.0, 0.0], SyntheticAcceptance((0.5, 0.5)), VOCAB_SIZE)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ('"rejection_sample_method": "synthetic"', "needs one of"),
        (
            (
                '"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2, '
                '"synthetic_acceptance_rates": [0.9, 0.5, 0.2, 0.1]'
            ),
            "needs one of",
        ),
        ('"synthetic_acceptance_length": 2', "go with rejection_sample_method synthetic only"),
        ('"synthetic_acceptance_rates": [1]', "go with rejection_sample_method synthetic only"),
        (
            '"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.9, 0.5]',
            "wanted 4 numbers",
        ),
        (
            (
                '"rejection_sample_method": "synthetic", '
                '"synthetic_acceptance_rates": [0.9, 0.5, 0.6, 0.1]'
            ),
            "never rise",
        ),
        (
            '"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 5.5',
            "at most num_speculative_tokens + 1 = 5",
        ),
    ],
)
def test_rates_that_mean_nothing_are_refused(keys: str, message: str) -> None:
    """Both ways of saying them at once, neither, or numbers that are no such rates."""
    with pytest.raises(ConfigurationError, match="synthetic") as caught:
        parse_speculative_config("{" + keys + "}")

    assert message in str(caught.value)


def test_the_target_decides_unless_the_configuration_says_synthetic() -> None:
    """No other method has rates."""
    plain = parse_speculative_config('{"rejection_sample_method": "standard"}')
    asked = parse_speculative_config(
        '{"rejection_sample_method": "synthetic", "num_speculative_tokens": 2, '
        '"synthetic_acceptance_rates": [0.9, 0.5]}'
    )

    assert synthetic_acceptance(plain) is None
    assert synthetic_acceptance(None) is None
    assert synthetic_acceptance(asked) == SyntheticAcceptance((0.9, 0.5))
