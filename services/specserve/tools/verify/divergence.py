"""The first difference of two texts that should be equal, and how near a tie it was.

In floating point a forward of another shape may differ in its last bits, so that two candidates of
nearly the same score change places. A margin says how near: by the target's own log-probabilities
and, under the coupled rule, the noise of that position. Knows tokens and log-probabilities.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specserve.speculation.randomness import exponential_noise
from specserve.speculation.types import AcceptanceRule
from specserve.tools.generation_client import Generated, Job, TextClient


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first difference of one prompt's texts."""

    prompt_id: str
    position: int
    """Output position of the first difference."""
    margin: float
    """Between the scores of the off-run's token and the on-run's, by the target; inf if unknown."""
    top_two_margin: float
    """Score of the best candidate minus the second best, there; inf if unknown."""

    def as_json(self) -> dict[str, object]:
        """Return the fields for a record; what is unknown is null."""
        return {
            "prompt": self.prompt_id,
            "position": self.position,
            "margin": self.margin if math.isfinite(self.margin) else None,
            "top_two_margin": self.top_two_margin if math.isfinite(self.top_two_margin) else None,
        }

    def __str__(self) -> str:
        return (
            f"prompt {self.prompt_id} differs first at {self.position}, margin {self.margin:.2e}, "
            f"top-2 margin {self.top_two_margin:.2e}"
        )


def first_difference(on: Sequence[int], off: Sequence[int]) -> int | None:
    """Return where two texts first differ: in a token, or in that one of them has ended."""
    for position, (ours, theirs) in enumerate(zip(on, off, strict=False)):
        if ours != theirs:
            return position
    return None if len(on) == len(off) else min(len(on), len(off))


async def told_divergences(
    client: TextClient,
    names: Sequence[str],
    jobs: Sequence[Job],
    on: Sequence[Generated],
    off: Sequence[Generated],
) -> list[Divergence]:
    """Account for every difference of two runs that carried no log-probabilities.

    The target is asked for its candidates behind what the two have in common, without any draft.
    """
    found = []
    for name, job, ours, theirs in zip(names, jobs, on, off, strict=True):
        position = first_difference(ours.token_ids, theirs.token_ids)
        if position is None:
            continue
        common = (*job.prompt_token_ids, *theirs.token_ids[:position])
        told = await client.candidates(common, f"{job.request_id}-margin")
        found.append(divergence(name, job, position, ours.token_ids, theirs.token_ids, told))
    return found


def divergence(
    prompt_id: str,
    job: Job,
    position: int,
    on: Sequence[int],
    off: Sequence[int],
    candidates: dict[int, float],
) -> Divergence:
    """Account for a difference.

    Args:
        job: of the on-run; its rule, key and temperature score the candidates.
        candidates: the target's own at that position, by the off-run; empty if they are not known.
    """
    if not candidates or position >= min(len(on), len(off)):
        return Divergence(prompt_id, position, math.inf, math.inf)
    theirs, ours = off[position], on[position]
    scores = _scores(job, position, candidates)
    best = sorted(scores.values(), reverse=True)
    top_two = best[0] - best[1] if len(best) > 1 else math.inf
    are_known = theirs in scores and ours in scores
    margin = abs(scores[theirs] - scores[ours]) if are_known else math.inf
    return Divergence(prompt_id, position, margin, top_two)


def _scores(job: Job, position: int, logprobs: dict[int, float]) -> dict[int, float]:
    """Return what the rule compares: log-probabilities, with temperature and noise if coupled."""
    sampling = job.sampling
    if sampling.rule is not AcceptanceRule.COUPLED:
        return logprobs
    ids = np.array(list(logprobs))
    place = len(job.prompt_token_ids) + position
    noise = np.log(exponential_noise(sampling.seed, sampling.choice, place, ids))
    return {
        token_id: logprobs[token_id] / sampling.temperature - float(log_e)
        for token_id, log_e in zip(ids.tolist(), noise, strict=True)
    }
