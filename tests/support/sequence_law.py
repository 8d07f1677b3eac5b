"""The exact law of a toy's next tokens under every option, the slow way: plain loops and numbers.

Shares with the services the toy's table alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from specserve.model.toy import ToySpec, toy_logits
from support.constrained import Wanted, slow_row

ENDED = -1
"""Stands in the place of a token that comes after the end."""


@dataclass(frozen=True)
class Held(Wanted):
    """A request whose text is one of a few."""

    texts: Sequence[str] = ()

    def fits(self, output: Sequence[int], token: int) -> bool:
        """Say whether one of the texts goes on so; EOS where one is whole."""
        text = b"".join(self.token_bytes[i] for i in output).decode()
        if token in self.eos_token_ids:
            return text in self.texts
        return any(
            whole.startswith(text + self.token_bytes[token].decode()) for whole in self.texts
        )


@dataclass(frozen=True)
class Sampling:
    """How a row of logits becomes a distribution, and what ends a text besides its tokens."""

    wanted: Wanted = field(default_factory=Wanted)
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    stop: Sequence[bytes] = ()
    token_bytes: Sequence[bytes] = ()

    def probs(self, spec: ToySpec, prompt: Sequence[int], output: Sequence[int]) -> list[float]:
        """Return the distribution of the token after prompt + output, [V]."""
        row = slow_row(toy_logits(spec, [*prompt, *output]), prompt, output, self.wanted)
        largest = max(row)
        weights = [float(np.exp((x - largest) / self.temperature)) for x in row]
        order = sorted(range(len(row)), key=lambda token: (-row[token], token))
        kept = [token for token in order if weights[token] >= self.min_p * max(weights)]
        kept = kept[: self.top_k] if self.top_k else kept
        total, mass, nucleus = sum(weights[token] for token in kept), 0.0, []
        for token in kept:
            if mass >= self.top_p * total:
                break
            nucleus.append(token)
            mass += weights[token]
        return [weights[token] / mass if token in nucleus else 0.0 for token in range(len(row))]

    def is_ended(self, output: Sequence[int]) -> bool:
        """Say whether the text ends with its last token."""
        wanted = self.wanted
        eos = () if wanted.ignore_eos else wanted.eos_token_ids
        text = b"".join(self.token_bytes[i] for i in output if i not in wanted.eos_token_ids)
        late = len(output) > wanted.min_tokens and any(stop in text for stop in self.stop)
        return bool(output) and (output[-1] in (*wanted.stop_token_ids, *eos) or late)


def token_laws(
    spec: ToySpec, prompt: Sequence[int], sampling: Sampling, num_tokens: int
) -> list[dict[int, float]]:
    """Enumerate the law of the token at each of the first places, {token or ENDED: p}."""
    prefixes: dict[tuple[int, ...], float] = {(): 1.0}
    laws = []
    for _ in range(num_tokens):
        law: dict[int, float] = {}
        longer: dict[tuple[int, ...], float] = {}
        for prefix, weight in prefixes.items():
            if prefix[-1:] == (ENDED,) or sampling.is_ended(prefix):
                following = {ENDED: 1.0}
            else:
                probs = sampling.probs(spec, prompt, prefix)
                following = {token: p for token, p in enumerate(probs) if p > 0}
            for token, p in following.items():
                law[token] = law.get(token, 0.0) + weight * p
                text = (*prefix, token)
                longer[text] = longer.get(text, 0.0) + weight * p
        prefixes = longer
        laws.append(law)
    return laws
