"""The first difference of two texts, and how near a tie it was."""

from __future__ import annotations

import math

import numpy as np
import pytest

from specserve.rpc.v1.generation_pb2 import SpeculationRecord
from specserve.speculation.randomness import exponential_noise
from specserve.speculation.types import AcceptanceRule, SamplingParams
from specserve.tools.generation_client import Generated, Job, TopLogprobs
from specserve.tools.verify.divergence import (
    Divergence,
    divergence,
    first_difference,
    told_divergences,
)

GREEDY = SamplingParams(AcceptanceRule.GREEDY, 7, 0, temperature=0.0)
COUPLED = SamplingParams(AcceptanceRule.COUPLED, 7, 0, temperature=0.5)
CANDIDATES = {4: -1.0, 9: -1.00005, 2: -3.0}


def job(sampling: SamplingParams = GREEDY) -> Job:
    return Job("request", (1, 2, 3), sampling, 8)


def generated(*token_ids: int, rows: tuple[TopLogprobs, ...] = ()) -> Generated:
    return Generated(token_ids, rows, SpeculationRecord(), (), 0.0, (), ())


@pytest.mark.parametrize(
    ("on", "off", "position"),
    [
        ((), (), None),
        ((1, 2), (1, 2), None),
        ((1, 2), (1, 3), 1),
        ((1,), (1, 2), 1),
        ((5,), (6,), 0),
    ],
)
def test_the_first_difference(
    on: tuple[int, ...], off: tuple[int, ...], position: int | None
) -> None:
    """In a token, or in that one text has ended."""
    assert first_difference(on, off) == position


def test_a_near_tie_has_the_margin_of_its_two_tokens() -> None:
    """Greedy: by log-probability. The two best need not be the two tokens."""
    tie = divergence("p", job(), 1, (8, 9), (8, 4), CANDIDATES)
    assert tie == Divergence("p", 1, pytest.approx(5e-5), pytest.approx(5e-5))

    fault = divergence("p", job(), 1, (8, 2), (8, 4), CANDIDATES)
    assert fault.margin == pytest.approx(2.0)
    assert fault.top_two_margin == pytest.approx(5e-5)


def test_under_the_coupled_rule_the_noise_counts() -> None:
    """Scores are log p / T - log E, with the position's own noise."""
    ids = np.array([4, 9, 2])
    noise = np.log(exponential_noise(7, 0, 3 + 1, ids))
    scores = np.array([-1.0, -1.00005, -3.0]) / 0.5 - noise

    found = divergence("p", job(COUPLED), 1, (8, 9), (8, 4), CANDIDATES)

    best = np.sort(scores)[::-1]
    assert found.margin == pytest.approx(abs(scores[0] - scores[1]))
    assert found.top_two_margin == pytest.approx(best[0] - best[1])


def test_what_is_not_known_is_no_near_tie() -> None:
    """A token beyond the candidates, no candidates, and a text that ended early."""
    for on, candidates in (((8, 77), CANDIDATES), ((8, 9), {}), ((8,), CANDIDATES)):
        found = divergence("p", job(), 1, on, (8, 4), candidates)
        assert math.isinf(found.margin)
        assert found.as_json()["margin"] is None


def test_candidates_hold_the_emitted_token() -> None:
    """Also one that is not among the most likely; nothing beyond the end."""
    row = TopLogprobs(-5.0, (4, 9), (-1.0, -1.5))
    told = generated(77, rows=(row,))

    assert told.candidates_at(0) == {77: -5.0, 4: -1.0, 9: -1.5}
    assert told.candidates_at(1) == {}


class OneAnswer:
    """A client that notes what it is asked and gives one answer."""

    def __init__(self, told: dict[int, float]) -> None:
        self.told = told
        self.asked: list[tuple[int, ...]] = []

    async def candidates(self, token_ids: tuple[int, ...], request_id: str) -> dict[int, float]:
        self.asked.append(token_ids)
        return self.told


async def test_a_run_without_logprobs_is_accounted_for_afterwards() -> None:
    """The target alone is asked behind the common part; equal texts cost nothing."""
    client = OneAnswer({4: -1.0, 9: -1.0001})

    found = await told_divergences(
        client,  # type: ignore[arg-type]
        ["same", "other"],
        [job(), job()],
        [generated(8, 4), generated(8, 9)],
        [generated(8, 4), generated(8, 4)],
    )

    assert [d.prompt_id for d in found] == ["other"]
    assert found[0].margin == pytest.approx(1e-4)
    assert client.asked == [(1, 2, 3, 8)]
