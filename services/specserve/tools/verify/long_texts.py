"""Long texts of the enumerable pair: every token is a draw whose law, given its text, is known.

Counts minus probabilities add up to a martingale, whatever rounds, rejections and redraws made the
text: under the law its normalised square is a chi-square. Tokens are pooled three ways: all, by the
two tokens before, and by their row of the round (a place is decided before its token is drawn). So
a text of 256 tokens gives 256 draws, for the price of one request. Knows texts and laws; knows no
service.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specserve.tools.verify.chi_square import MIN_EXPECTED, p_value
from specserve.tools.verify.toy_cases import NUM_SPECULATIVE_TOKENS, PROMPT, SPEC, Case, laws_along

TEXT_LENGTH = 256
"""Tokens a text."""

V = SPEC.vocab_size


@dataclass(frozen=True, slots=True)
class LongReport:
    """What the long texts of one case showed."""

    num_draws: int
    p_values: tuple[float, float, float]
    """Of three ways to pool tokens: all, by the tokens before, by row of the round."""
    total_variation: float
    """Between the frequencies of all and the mean of their probabilities."""
    num_impossible: int
    """Tokens that came although their probability was 0."""


class Pool:
    """Counts minus probabilities, and their covariance, group by group."""

    def __init__(self, num_groups: int, num_cells: int) -> None:
        self.excess = np.zeros((num_groups, num_cells))
        self.covariance = np.zeros((num_groups, num_cells, num_cells))

    def add_drawn(
        self, groups: NDArray[np.int64], cells: NDArray[np.int64], law: NDArray[np.float64]
    ) -> None:
        """Take in draws: [n] groups, [n] the cells that came, [n, cells] what each may come as."""
        eye = np.eye(law.shape[1])
        np.add.at(self.excess, groups, eye[cells] - law)
        # diag(p) - p p^T
        np.add.at(self.covariance, groups, law[:, :, None] * (eye - law[:, None, :]))

    def total_variation(self, num_draws: int) -> float:
        """Return half the summed difference of frequencies and mean law, over all groups."""
        return float(0.5 * np.abs(self.excess.sum(axis=0)).sum() / max(1, num_draws))

    def p_value(self) -> float:
        """Test all groups at once; directions that too few draws speak about are left out."""
        statistic, dof = 0.0, 0
        for excess, covariance in zip(self.excess, self.covariance, strict=True):
            variances, axes = np.linalg.eigh(covariance)
            known = variances >= MIN_EXPECTED
            statistic += float(((excess @ axes[:, known]) ** 2 / variances[known]).sum())
            dof += int(known.sum())
        return p_value(statistic, dof)


class LongTexts:
    """The tally of one case."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._num_draws = 0
        self._num_impossible = 0
        self._all = Pool(1, V)
        self._by_context = Pool(V**SPEC.order, V)
        self._by_row = Pool(NUM_SPECULATIVE_TOKENS + 1, V)

    def add(self, token_ids: Sequence[int], origins: Sequence[str]) -> None:
        """Take in one text.

        Args:
            origins: of each token, as the orchestrator says: `accepted` or what ended its round.
        """
        tokens = np.array(token_ids)
        law = laws_along(self._case, token_ids)  # [T, V]
        self._num_draws += len(tokens)
        self._num_impossible += int((law[np.arange(len(tokens)), tokens] == 0.0).sum())
        self._all.add_drawn(np.zeros(len(tokens), np.int64), tokens, law)
        self._by_context.add_drawn(_contexts(token_ids), tokens, law)
        self._by_row.add_drawn(rows_of(origins, NUM_SPECULATIVE_TOKENS), tokens, law)

    def report(self) -> LongReport:
        """Judge what came so far."""
        return LongReport(
            self._num_draws,
            (self._all.p_value(), self._by_context.p_value(), self._by_row.p_value()),
            self._all.total_variation(self._num_draws),
            self._num_impossible,
        )


def _contexts(token_ids: Sequence[int]) -> NDArray[np.int64]:
    """Number the tokens before each token, [T]."""
    text = np.array([*PROMPT[-SPEC.order :], *token_ids])
    numbers = np.zeros(len(token_ids), np.int64)
    for back in range(SPEC.order):
        numbers = numbers * V + text[back : back + len(token_ids)]
    return numbers


def rows_of(origins: Sequence[str], k: int) -> NDArray[np.int64]:
    """Count each token's place in its round, [T]: a round goes on as long as tokens are accepted.

    A draft may stop short, so a bonus token may stand at any row.
    """
    rows, row = np.zeros(len(origins), np.int64), 0
    for place, origin in enumerate(origins):
        rows[place] = min(row, k)
        row = row + 1 if origin == "accepted" else 0
    return rows
