"""The law that a target tells: cut at the top k, with ties at the cut as one cell."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from specserve.tools.verify.told_law import LENGTH, REST, ToldLaw, open_step_of, step_of, told_law

CLEAR = {5: math.log(0.4), 6: math.log(0.3), 7: math.log(0.2), 8: math.log(0.05)}
TIE = {5: math.log(0.4), 6: math.log(0.3), 7: math.log(0.11), 8: math.log(0.11), 9: math.log(0.1)}


def test_the_most_likely_share_the_probability() -> None:
    """0.4, 0.3 and 0.2 of 0.9, and no tie."""
    step = step_of(CLEAR, 0.25)

    assert step.probs == {
        5: pytest.approx(0.4 / 0.9),
        6: pytest.approx(0.3 / 0.9),
        7: pytest.approx(0.2 / 0.9),
    }
    assert not step.tied


def test_a_tie_at_the_cut_is_one_cell() -> None:
    """The third may be the fourth in another forward, and the fifth too within the margin."""
    step = step_of(TIE, 0.25)

    assert step.probs == {
        5: pytest.approx(0.4 / 0.81),
        6: pytest.approx(0.3 / 0.81),
        REST: pytest.approx(0.11 / 0.81),
    }
    assert step.tied == {7, 8, 9}


def test_a_tie_may_reach_further_in() -> None:
    """All three inside and one outside within the margin: nothing can be told apart."""
    step = step_of({1: -1.0, 2: -1.1, 3: -1.15, 4: -1.2}, 0.25)

    assert step.probs == {REST: pytest.approx(1.0)}
    assert step.tied == {1, 2, 3, 4}


def test_without_a_cut_all_others_are_one_cell() -> None:
    """Their probability is what the three leave, whether it was told of them or not."""
    step = open_step_of(CLEAR)

    assert step.probs == {
        5: pytest.approx(0.4),
        6: pytest.approx(0.3),
        7: pytest.approx(0.2),
        REST: pytest.approx(0.1),
    }
    assert step.is_rest(8)
    assert step.is_rest(77)
    assert not step.is_rest(7)


class Teller:
    """Tells one row, and another after the token 6."""

    async def candidates(self, token_ids: Sequence[int], request_id: str) -> dict[int, float]:
        return TIE if token_ids[-1] == 6 else CLEAR


@pytest.fixture
async def law() -> ToldLaw:
    return await told_law(Teller(), (1, 2), 0.25, 4, "case")  # type: ignore[arg-type]


async def test_the_law_is_that_of_all_texts(law: ToldLaw) -> None:
    """It sums to 1; a text has the product of its steps; nothing follows a tie."""
    assert sum(law.probs.values()) == pytest.approx(1.0)
    assert law.probs[5, 5, 7] == pytest.approx(0.4 * 0.4 * 0.2 / 0.9**3)
    assert law.probs[6, REST, REST] == pytest.approx(0.3 / 0.9 * 0.11 / 0.81)
    tied = [key for key in law.probs if REST in key]
    assert all(set(key[key.index(REST) :]) == {REST} for key in tied)


async def test_texts_fall_into_their_cells(law: ToldLaw) -> None:
    """Whichever token of a tie comes, and whatever follows it; an excluded token has no cell."""
    assert law.cell_of((5, 6, 5, 9, 9)) == (5, 6, 5)
    assert law.cell_of((6, 8, 77, 1)) == law.cell_of((6, 7, 5, 1)) == (6, REST, REST)
    assert law.cell_of((5, 5, 8)) not in law.probs
    assert law.cell_of((8, 5, 5)) not in law.probs
    assert all(len(key) == LENGTH for key in law.probs)


async def test_without_a_cut_no_text_is_excluded() -> None:
    """What is not told apart falls into the rest, and the law sums to 1."""
    law = await told_law(Teller(), (1, 2), 0.25, 4, "case", has_cut=False)  # type: ignore[arg-type]

    assert sum(law.probs.values()) == pytest.approx(1.0)
    assert law.probs[5, REST, REST] == pytest.approx(0.4 * 0.1)
    assert law.cell_of((5, 77, 5)) == law.cell_of((5, 8, 6)) == (5, REST, REST)
    assert law.cell_of((5, 5, 7, 1)) == (5, 5, 7)
