"""Requests of every sort, and the tokens that each must answer, by the toy's own table.

Knows the toy and the reference maths of `specserve.speculation`; knows no service.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache

from specserve.model.toy import ToySpec, toy_logits
from specserve.speculation.scoring import TargetRow, score_row
from specserve.speculation.types import AcceptanceRule, SamplingParams

MAX_MODEL_LEN = 4096


@dataclass(frozen=True, slots=True)
class Request:
    """One request as a client makes it."""

    prompt: tuple[int, ...]
    max_tokens: int
    seed: int | None = None
    """None with a temperature: no token is promised, only their number."""
    temperature: float = 0.0
    n: int = 1
    stream: bool = True
    leave_after: int | None = None
    """Tokens after which the client is gone; None stays to the end."""
    num_speculative_tokens: int | None = None
    """None takes the configured K."""

    def body(self) -> dict[str, object]:
        """Write it as a completion request."""
        fields: dict[str, object] = {
            "prompt": list(self.prompt),
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "n": self.n,
            "stream": self.stream,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        if self.seed is not None:
            fields["seed"] = self.seed
        if self.num_speculative_tokens is not None:
            fields["num_speculative_tokens"] = self.num_speculative_tokens
        return fields

    @property
    def is_exact(self) -> bool:
        """Whether its tokens are promised, not only their law."""
        return self.temperature == 0.0 or self.seed is not None


class Truth:
    """What a target alone answers, computed in this process."""

    def __init__(self, target: str) -> None:
        spec = ToySpec.parse(target)
        self._order = spec.order
        self._row = cache(lambda context: toy_logits(spec, context))

    def tokens(self, request: Request, choice: int) -> list[int]:
        """Return the right tokens of one choice of an exact request."""
        rule = AcceptanceRule.GREEDY if request.temperature == 0 else AcceptanceRule.COUPLED
        params = SamplingParams(rule, request.seed or 0, choice, temperature=request.temperature)
        tokens = list(request.prompt)
        for _ in range(request.max_tokens):
            logits, length = self._row(tuple(tokens[-self._order :])), len(tokens)
            score = score_row(logits, TargetRow(params, length, length, 0, None))
            tokens.append(score.replacement_token_id)
        return tokens[len(request.prompt) :]


def make_request(chance: random.Random, vocab_size: int) -> Request:
    """Draw one request of the mixed load."""

    def prompt(shortest: int, longest: int) -> tuple[int, ...]:
        length = chance.randint(shortest, longest)
        return tuple(chance.randrange(1, vocab_size) for _ in range(length))

    kind = chance.random()
    seed = chance.getrandbits(32)
    if kind < 0.30:
        return Request(prompt(1, 40), chance.randint(4, 48))
    if kind < 0.52:
        return Request(prompt(1, 40), chance.randint(4, 48), seed, 1.0)
    if kind < 0.62:
        tokens = chance.randint(16, 64)
        return Request(prompt(1, 40), tokens, leave_after=chance.randint(0, tokens - 1))
    if kind < 0.72:
        n = chance.randint(2, 3)
        return Request(prompt(1, 40), chance.randint(4, 24), seed, 0.8, n, chance.random() < 0.5)
    if kind < 0.82:
        return Request(prompt(300, 900), chance.randint(4, 24), seed, chance.choice((0.0, 1.0)))
    if kind < 0.90:
        return Request(prompt(1, 40), chance.randint(4, 48), num_speculative_tokens=0)
    if kind < 0.95:
        return Request(prompt(1, 40), chance.randint(4, 32), temperature=1.0)
    return Request(prompt(1, 40), chance.randint(80, 200), seed, chance.choice((0.0, 1.0)))
