"""The small enumerable pair and the ways of sampling that it is tried with.

The toy's logits are a pure function of its context, so the law of the next token after any text is
known exactly. Knows the toy, the transforms and the client's jobs; knows no statistics.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specserve.config import SpeculativeMethod
from specserve.model.toy import ToySpec, toy_logits
from specserve.speculation.constraints import ConstraintState, TokenConstraints
from specserve.speculation.digest import TokenChain
from specserve.speculation.row_edits import RowEdits, edit_row
from specserve.speculation.transforms import transform
from specserve.speculation.types import AcceptanceRule, SamplingParams
from specserve.tools.generation_client import Job
from specserve.tools.local import PairSpec

TARGET = "toy:vocab_size=4,seed=5,order=2,sharpness=0.8"
"""The next token hangs on two: a wrong one deeper in the cache shows too."""

DRAFT = f"{TARGET},noise=0.8,noise_seed=3"
SPEC = ToySpec.parse(TARGET)
PROMPT = (1, 3, 2, 1, 2, 3, 3, 1, 1, 2)
"""Tokens follow one another in more than one way, so that lookups have something to guess."""

NUM_SPECULATIVE_TOKENS = 3


@dataclass(frozen=True, slots=True)
class Case:
    """One way of sampling."""

    name: str
    rule: AcceptanceRule
    num_speculative_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    method: SpeculativeMethod = "draft_model"
    constraints: TokenConstraints | None = None

    def sampling(self, seed: int) -> SamplingParams:
        """Return the parameters of one request."""
        return SamplingParams(
            rule=self.rule,
            seed=seed,
            choice=0,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            constraints=self.constraints,
        )

    def job(self, name: str, seed: int, num_tokens: int) -> Job:
        """Return the request of one text."""
        return Job(
            name,
            PROMPT,
            self.sampling(seed),
            num_tokens,
            self.num_speculative_tokens,
            ignore_eos=True,
            method=self.method,
        )

    @property
    def speculates(self) -> bool:
        """Whether rounds have draft tokens."""
        return self.num_speculative_tokens > 0


CONSTRAINTS = TokenConstraints(
    prompt_length=len(PROMPT),
    repetition_penalty=1.3,
    presence_penalty=0.4,
    frequency_penalty=0.5,
    logit_bias=((2, 0.5),),
    bad_words=((1, 3),),
)
"""Each changes inside a block, or with what was committed just before it."""

CASES = (
    Case("target-only", AcceptanceRule.STANDARD, 0),
    Case("standard K=1", AcceptanceRule.STANDARD, 1),
    Case("standard K=3", AcceptanceRule.STANDARD, 3),
    Case("standard K=3, T=0.7, top-p 0.9", AcceptanceRule.STANDARD, 3, 0.7, 0, 0.9),
    Case("standard K=3, top-k 2", AcceptanceRule.STANDARD, 3, 1.0, 2),
    Case("coupled K=3", AcceptanceRule.COUPLED, 3),
    Case("standard K=3, penalties and bans", AcceptanceRule.STANDARD, 3, constraints=CONSTRAINTS),
    Case("standard K=3, ngram", AcceptanceRule.STANDARD, 3, method="ngram"),
    Case("standard K=3, suffix", AcceptanceRule.STANDARD, 3, method="suffix"),
    Case("standard K=3, cascade", AcceptanceRule.STANDARD, 3, method="cascade"),
)

BIAS_CASE = "standard K=3"
"""The case that is drawn often enough for the declared bias."""


def toy_pair(settings: Mapping[str, float]) -> PairSpec:
    """Describe the pair's processes; `settings` are those of the draft that it speaks for."""
    return pair_of(
        TARGET,
        DRAFT,
        {
            **settings,
            "num_speculative_tokens": NUM_SPECULATIVE_TOKENS,
            # A match of two tokens is long in such texts: the cascade then uses both.
            "cascade_min_match_length": 2,
        },
    )


def pair_of(target: str, draft: str, speculative: Mapping[str, float]) -> PairSpec:
    """Describe the processes of two toys."""
    return PairSpec(
        target=target,
        draft=draft,
        num_gateways=0,
        speculative_config=json.dumps(speculative),
        # A busy machine must not turn rounds into ones without a draft.
        orchestrator_flags=("--draft-timeout-s=5", "--draft-catch-up-timeout-s=5"),
    )


def next_token_law(case: Case, text: Sequence[int], spec: ToySpec = SPEC) -> NDArray[np.float64]:
    """Return the target's probabilities after a text (the prompt included), by tokens' ids.

    Returns:
        [V], summing to 1.
    """
    logits = toy_logits(spec, text)
    if case.constraints is not None:
        state = ConstraintState(case.constraints)
        state.follow(TokenChain(text), len(text))
        logits = edit_row(logits, state.edits() or RowEdits())
    step = transform(logits, case.sampling(seed=0))
    law = np.zeros(spec.vocab_size)
    law[step.token_ids] = step.probs
    return law


def laws_along(case: Case, output: Sequence[int]) -> NDArray[np.float64]:
    """Return the probabilities before each token of an output; [len(output), V]."""
    text = (*PROMPT, *output)
    if case.constraints is None:
        table: dict[tuple[int, ...], NDArray[np.float64]] = {}
        ends = [text[: len(PROMPT) + i][-SPEC.order :] for i in range(len(output))]
        for end in set(ends):
            table[end] = next_token_law(case, end)
        return np.array([table[end] for end in ends])
    state, rows = ConstraintState(case.constraints), []
    chain, params = TokenChain(text), case.sampling(seed=0)
    for length in range(len(PROMPT), len(text)):
        state.follow(chain, length)
        logits = edit_row(toy_logits(SPEC, text[:length]), state.edits() or RowEdits())
        step = transform(logits, params)
        law = np.zeros(SPEC.vocab_size)
        law[step.token_ids] = step.probs
        rows.append(law)
    return np.array(rows)
