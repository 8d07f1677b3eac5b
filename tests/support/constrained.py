"""Constrained decoding the slow way: every row recounts its whole history, token by token.

Written apart from the services: plain loops over plain numbers, from the field's own definitions.
Shares with them only the toy's table and the keyed noise.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from specserve.grammar.lark import regex_grammar
from specserve.model.toy import ToySpec, toy_logits
from specserve.speculation.constraints import TokenConstraints
from specserve.speculation.randomness import exponential_noise


@dataclass(frozen=True)
class Wanted:
    """What a request asks, in the fields' own terms."""

    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    bad_words: Sequence[Sequence[int]] = ()
    allowed_token_ids: Sequence[int] = ()
    min_tokens: int = 0
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = True
    eos_token_ids: Sequence[int] = (0,)
    regex: str = ""
    """The text matches it; two more of `letters` end any that can be ended."""
    letters: str = ""
    token_bytes: Sequence[bytes] = ()
    """What each id stands for; wanted with a regex."""

    def constraints(self, prompt_length: int) -> TokenConstraints:
        """Say the same as the services do."""
        return TokenConstraints(
            prompt_length=prompt_length,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=tuple(self.logit_bias.items()),
            bad_words=tuple(tuple(word) for word in self.bad_words),
            allowed_token_ids=tuple(self.allowed_token_ids),
            min_tokens=self.min_tokens,
            end_token_ids=tuple(sorted({*self.eos_token_ids, *self.stop_token_ids})),
            grammar=regex_grammar("regex", self.regex) if self.regex else "",
            eos_token_ids=tuple(self.eos_token_ids) if self.regex else (),
        )

    def fits(self, output: Sequence[int], token: int) -> bool:
        """Say whether some text of the regex goes on so, by trying completions."""
        if not self.regex or any(eos in output for eos in self.eos_token_ids):
            return True
        text = b"".join(self.token_bytes[i] for i in output)
        if token in self.eos_token_ids:
            return is_match(self.regex, text)
        more = self.token_bytes[token]
        return bool(more) and begins_a_match(self.regex, self.letters, text + more)


@cache
def begins_a_match(regex: str, letters: str, text: bytes) -> bool:
    """Say whether a match begins with `text`: all texts of up to two more letters are tried."""
    # The text may end within a letter: its other bytes are tried too.
    tails = {letter.encode()[cut:] for letter in letters for cut in range(len(letter.encode()))}
    return any(
        is_match(regex, text + tail + "".join(suffix).encode())
        for tail in sorted({b"", *tails}, key=len)
        for length in range(3)
        for suffix in itertools.product(letters, repeat=length)
    )


def is_match(regex: str, text: bytes) -> bool:
    """Say whether a text is whole letters, and matches from end to end."""
    try:
        return re.fullmatch(regex, text.decode()) is not None
    except UnicodeDecodeError:
        return False


def slow_row(
    logits: Sequence[float], prompt: Sequence[int], output: Sequence[int], wanted: Wanted
) -> list[float]:
    """Edit one row for the token after prompt + output."""
    row = [float(np.float32(x)) for x in logits]
    for token, x in enumerate(row):
        x = float(np.float32(x + wanted.logit_bias.get(token, 0.0)))
        if token in prompt or token in output:
            scaled = x / wanted.repetition_penalty if x > 0 else x * wanted.repetition_penalty
            x = float(np.float32(scaled))
        x = float(np.float32(x - wanted.frequency_penalty * list(output).count(token)))
        x = float(np.float32(x - (wanted.presence_penalty if token in output else 0.0)))
        if wanted.allowed_token_ids and token not in wanted.allowed_token_ids:
            x = -np.inf
        ends = (*wanted.eos_token_ids, *wanted.stop_token_ids)
        if len(output) < wanted.min_tokens and token in ends:
            x = -np.inf
        for word in wanted.bad_words:
            text = [*output, token]
            if len(text) >= len(word) and text[len(text) - len(word) :] == list(word):
                x = -np.inf
        if not wanted.fits(output, token):
            x = -np.inf
        row[token] = x
    return row


def slow_decode(
    model: str,
    prompt: Sequence[int],
    wanted: Wanted,
    max_tokens: int,
    seed: int | None = None,
    temperature: float = 1.0,
) -> list[int]:
    """Decode target-only: greedily, or with a seed by the coupled rule's noise (choice 0)."""
    spec = ToySpec.parse(model)
    output: list[int] = []
    for _ in range(max_tokens):
        row = np.array(slow_row(toy_logits(spec, [*prompt, *output]), prompt, output, wanted))
        if seed is None:
            token = int(row.argmax())
        else:
            noise = exponential_noise(seed, 0, len(prompt) + len(output), np.arange(len(row)))
            token = int((row / temperature - np.log(noise)).argmax())
        output.append(token)
        ends = {*wanted.stop_token_ids} | (set() if wanted.ignore_eos else {*wanted.eos_token_ids})
        if token in ends:
            break
    return output
