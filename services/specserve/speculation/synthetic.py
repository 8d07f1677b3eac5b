"""Acceptance by configured rates, for benchmarks only. NOT lossless: the text means nothing.

Draft and target do all the work of the request's own rule; only the decision is replaced, so that
a benchmark can ask what a draft of such acceptance would be worth. The draws are those of the
accept test, keyed as always: a run repeats. Knows rates and uniforms; knows no probability.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specserve.errors import InvalidProposal
from specserve.speculation.acceptance import Uniforms
from specserve.speculation.types import Proposal, TargetScores, Verification

_NUM_HALVINGS = 60


@dataclass(frozen=True, slots=True)
class SyntheticAcceptance:
    """How many draft tokens a benchmark accepts."""

    rates: tuple[float, ...]
    """[K] probability that the first i + 1 draft tokens are all accepted; never rising."""

    @staticmethod
    def of(
        rates: Sequence[float], acceptance_length: float | None, num_speculative_tokens: int
    ) -> SyntheticAcceptance:
        """Take rates as they are, or those of a draft that gives this mean acceptance length.

        Args:
            rates: [K]; empty where a length is given.
            acceptance_length: committed tokens a round of K draft tokens, 1..K + 1: each position
                is then accepted with one and the same probability once those before it were.
            num_speculative_tokens: K.
        """
        if acceptance_length is None:
            return SyntheticAcceptance(tuple(rates))
        low, high = 0.0, 1.0
        for _ in range(_NUM_HALVINGS):
            middle = (low + high) / 2
            if sum(_powers(middle, num_speculative_tokens)) < acceptance_length - 1:
                low = middle
            else:
                high = middle
        return SyntheticAcceptance(_powers(high, num_speculative_tokens))

    @property
    def conditional_rates(self) -> tuple[float, ...]:
        """[K] probability that a position is accepted once all before it were."""
        before = (1.0, *self.rates[:-1])
        return tuple(
            rate / reached if reached else 0.0
            for rate, reached in zip(self.rates, before, strict=True)
        )


def _powers(rate: float, count: int) -> tuple[float, ...]:
    return tuple(rate ** (i + 1) for i in range(count))


def accept_synthetic(
    proposal: Proposal,
    scores: TargetScores,
    uniforms: Uniforms,
    synthetic: SyntheticAcceptance,
    vocab_size: int,
) -> Verification:
    """Accept a prefix of the draft by the configured rates, whatever the target thinks of it.

    Args:
        proposal: K draft tokens.
        scores: [K] probabilities, not looked at, and [K + 1] replacements.
        uniforms: at least [K] in [0, 1), purpose ACCEPT.
        vocab_size: an id beyond it is no token, and is never accepted.

    Raises:
        InvalidProposal: shapes disagree, or there are more draft tokens than rates.
    """
    drafted, rates = proposal.draft_token_ids, synthetic.conditional_rates
    if len(scores.replacement_token_ids) != len(drafted) + 1 or len(drafted) > len(rates):
        raise InvalidProposal(
            f"{len(drafted)} draft tokens, {len(scores.replacement_token_ids)} replacements and "
            f"{len(rates)} synthetic rates do not fit together"
        )
    num_accepted = next(
        (
            row
            for row, token_id in enumerate(drafted)
            if not (0 <= token_id < vocab_size and uniforms[row] < rates[row])
        ),
        len(drafted),
    )
    return Verification(num_accepted, scores.replacement_token_ids[num_accepted])
