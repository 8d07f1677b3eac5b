"""The wide enumerable pair: a vocabulary that takes the sampler's way for real models.

The small pair's rows are matrices of numpy; those of a real vocabulary are tensors, whose rankings,
residuals and noise are other code. What comes next hangs on one token, so laws can be kept. Knows
toys and cases; knows no statistics.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from specserve.model.toy import ToySpec, toy_logits
from specserve.speculation.constraints import TokenConstraints
from specserve.speculation.transforms import transform
from specserve.speculation.types import AcceptanceRule
from specserve.tools.local import PairSpec
from specserve.tools.verify.toy_cases import PROMPT, Case, pair_of

WIDE_TARGET = "toy:vocab_size=1024,seed=11,order=1,sharpness=2.5"
WIDE_DRAFT = f"{WIDE_TARGET},noise=0.8,noise_seed=3"
WIDE_SPEC, WIDE_DRAFT_SPEC = ToySpec.parse(WIDE_TARGET), ToySpec.parse(WIDE_DRAFT)

_STANDARD, _COUPLED = AcceptanceRule.STANDARD, AcceptanceRule.COUPLED
_CONSTRAINTS = TokenConstraints(
    prompt_length=len(PROMPT), presence_penalty=0.4, frequency_penalty=0.5, logit_bias=((2, 2.5),)
)


def wide_cases(k: int) -> tuple[Case, ...]:
    """Return the ways of sampling, with K draft tokens a round.

    Filters are such that some rows keep a few tokens, some more than are looked at first.
    """
    return (
        Case("wide target-only", _STANDARD, 0),
        Case(f"wide standard K={k}", _STANDARD, k),
        Case(f"wide standard K={k}, T=0.7", _STANDARD, k, 0.7),
        Case(f"wide standard K={k}, T=0.8, top-p 0.9", _STANDARD, k, 0.8, top_p=0.9),
        Case(f"wide standard K={k}, T=1.5, top-p 0.95", _STANDARD, k, 1.5, top_p=0.95),
        Case(f"wide standard K={k}, top-k 50, top-p 0.95", _STANDARD, k, 1.0, 50, 0.95),
        Case(f"wide standard K={k}, min-p 0.02", _STANDARD, k, min_p=0.02),
        Case(f"wide standard K={k}, penalties", _STANDARD, k, constraints=_CONSTRAINTS),
        Case(f"wide coupled K={k}", _COUPLED, k),
        Case(f"wide coupled K={k}, top-p 0.9", _COUPLED, k, top_p=0.9),
    )


def wide_pair(k: int, settings: Mapping[str, float]) -> PairSpec:
    """Describe the pair's processes; `settings` are those of the draft that it speaks for.

    Without its threshold: a toy is sure of little, and would hardly draft.
    """
    own = {"draft_confidence_threshold": 0.0, "num_speculative_tokens": k}
    return pair_of(WIDE_TARGET, WIDE_DRAFT, {**settings, **own})


def draft_law(case: Case, text: Sequence[int], draft_sample_top_k: int) -> NDArray[np.float64]:
    """Return what the draft draws from after a text, constraints apart.

    Returns:
        [V], summing to 1; 0 beyond its own top-k.
    """
    step = transform(toy_logits(WIDE_DRAFT_SPEC, text), case.sampling(seed=0))
    kept = np.argsort(-step.probs, kind="stable")[:draft_sample_top_k]
    law = np.zeros(WIDE_DRAFT_SPEC.vocab_size)
    law[step.token_ids[kept]] = step.probs[kept] / step.probs[kept].sum()
    return law
