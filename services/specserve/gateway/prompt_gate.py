"""Prompts' log-probabilities as they come, and the choices that wait for them.

A prompt is scored once, for its first choice; the others begin to be shown when it is known. Knows
blocks and the plan; knows no shape of answer.
"""

from __future__ import annotations

from collections.abc import Sequence

from specserve.errors import PeerUnavailable
from specserve.gateway.blocks import Block, TokenLogprobs
from specserve.gateway.plan import GenerationPlan


class PromptGate:
    """Lets blocks pass once their prompt's log-probabilities are complete."""

    def __init__(self, plan: GenerationPlan) -> None:
        self._plan = plan
        self._logprobs: list[list[TokenLogprobs]] = [[] for _ in plan.prompts]
        self._held: list[list[Block]] = [[] for _ in plan.prompts]

    def take(self, block: Block) -> list[Block]:
        """Take a block; return those that may be shown now, in the order they came.

        Raises:
            PeerUnavailable: the prompt's first choice goes on without them.
        """
        if not self._plan.scores_prompts:
            return [block]
        prompt = block.index // self._plan.n
        self._logprobs[prompt] += block.prompt_logprobs
        held = self._held[prompt]
        held.append(block)
        if len(self._logprobs[prompt]) + 1 >= len(self._plan.prompts[prompt].token_ids):
            self._held[prompt] = []
            return held
        if block.index % self._plan.n == 0 and (block.token_ids or block.finish_reason):
            raise PeerUnavailable("orchestrator", "it tells no log-probabilities of prompts")
        return []

    def logprobs(self, prompt: int) -> Sequence[TokenLogprobs]:
        """Return those of a prompt, from its second token on."""
        return self._logprobs[prompt]
