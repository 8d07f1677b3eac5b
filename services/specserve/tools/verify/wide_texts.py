"""Long texts of the wide pair: tokens in cells whose law, given the text, is known.

Two ways of making cells, both fixed by the text before the token: by how likely the target holds it
(its rank), which shows a filter or a draw that goes wrong, and by how much more likely than the
draft, which shows acceptance and residual, for these move probability between just such cells.
As in `long_texts.py` counts minus probabilities add up to a martingale. Knows texts and laws.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from specserve.tools.verify.long_texts import LongReport, Pool, rows_of
from specserve.tools.verify.toy_cases import PROMPT, Case, next_token_law
from specserve.tools.verify.wide_cases import WIDE_SPEC, draft_law

RANKS = (1, 2, 4, 8, 16, 32, 64, 256)
"""Cells end before these ranks of the target."""

RATIOS = (0.5, 0.8, 1.0, 1.25, 2.0, 8.0)
"""Cells end before these ratios of the target's probability to the draft's."""


class Cells(NamedTuple):
    """The cells after one text."""

    law: NDArray[np.float64]
    """[V]"""
    rank_cell: NDArray[np.int64]
    """[V]"""
    ratio_cell: NDArray[np.int64]
    """[V]"""
    rank_law: NDArray[np.float64]
    """[cells], summing to 1."""
    ratio_law: NDArray[np.float64]
    """[cells], summing to 1."""


class WideTexts:
    """The tally of one case."""

    def __init__(self, case: Case, draft_sample_top_k: int) -> None:
        self._case = case
        self._top_k = draft_sample_top_k
        self._known: dict[int, Cells] = {}
        self._num_draws = 0
        self._num_impossible = 0
        self._by_rank = Pool(1, len(RANKS) + 1)
        self._by_ratio = Pool(1, len(RATIOS) + 1)
        self._by_row = Pool(case.num_speculative_tokens + 1, len(RATIOS) + 1)

    def add(self, token_ids: Sequence[int], origins: Sequence[str]) -> None:
        """Take in one text; see LongTexts.add."""
        text = (*PROMPT, *token_ids)
        places = range(len(PROMPT), len(text))
        cells = [self._cells(text[:place]) for place in places]
        ranks = np.array([c.rank_cell[t] for c, t in zip(cells, token_ids, strict=True)])
        ratios = np.array([c.ratio_cell[t] for c, t in zip(cells, token_ids, strict=True)])
        zeros = np.zeros(len(cells), np.int64)
        self._by_rank.add_drawn(zeros, ranks, np.array([c.rank_law for c in cells]))
        ratio_laws = np.array([c.ratio_law for c in cells])
        self._by_ratio.add_drawn(zeros, ratios, ratio_laws)
        rows = rows_of(origins, self._case.num_speculative_tokens)
        self._by_row.add_drawn(rows, ratios, ratio_laws)
        self._num_draws += len(cells)
        self._num_impossible += sum(c.law[t] == 0.0 for c, t in zip(cells, token_ids, strict=True))

    def report(self) -> LongReport:
        """Judge what came so far: by rank, by ratio, by ratio and row of the round."""
        return LongReport(
            self._num_draws,
            (self._by_rank.p_value(), self._by_ratio.p_value(), self._by_row.p_value()),
            self._by_rank.total_variation(self._num_draws),
            int(self._num_impossible),
        )

    def _cells(self, text: Sequence[int]) -> Cells:
        if self._case.constraints is not None:
            return cells_after(self._case, text, self._top_k)
        newest = text[-1]  # all that the law hangs on
        if newest not in self._known:
            self._known[newest] = cells_after(self._case, text, self._top_k)
        return self._known[newest]


def cells_after(case: Case, text: Sequence[int], draft_sample_top_k: int) -> Cells:
    """Make the cells of the token after a text."""
    law = next_token_law(case, text, WIDE_SPEC)
    q = draft_law(case, text, draft_sample_top_k)
    rank = np.empty(len(law), np.int64)
    rank[np.argsort(-law, kind="stable")] = np.arange(len(law))
    ratio = np.full(len(law), np.inf)
    np.divide(law, q, out=ratio, where=q > 0.0)
    rank_cell = np.searchsorted(RANKS, rank, side="right")
    ratio_cell = np.searchsorted(RATIOS, ratio, side="right")
    return Cells(
        law,
        rank_cell,
        ratio_cell,
        _sums(rank_cell, law, len(RANKS) + 1),
        _sums(ratio_cell, law, len(RATIOS) + 1),
    )


def _sums(
    cells: NDArray[np.int64], law: NDArray[np.float64], num_cells: int
) -> NDArray[np.float64]:
    sums = np.zeros(num_cells)
    np.add.at(sums, cells, law)
    return sums
