"""A body's penalties, biases and bans as token ids.

Knows the fields and the tokenizer; what depends on the pair is checked in `plan.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from specserve.errors import InvalidRequest, quoted
from specserve.gateway.fields import GenerationFields
from specserve.speculation.constraints import TokenConstraints

if TYPE_CHECKING:  # it brings the tokenizer library along, which a fake does not need
    from specserve.model.tokenizer import Tokenizer


def token_constraints(
    body: GenerationFields, tokenizer: Tokenizer, grammar: str = ""
) -> TokenConstraints | None:
    """Return what the body asks of single tokens; None where it asks nothing.

    Args:
        grammar: what its text is held to (`structured.py`).

    Raises:
        InvalidRequest: one of bad_words has no tokens.
    """
    constraints = TokenConstraints(
        repetition_penalty=body.repetition_penalty,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        logit_bias=tuple(body.logit_bias.items()),
        bad_words=_phrases(body.bad_words, tokenizer),
        allowed_token_ids=tuple(sorted(set(body.allowed_token_ids))),
        min_tokens=body.min_tokens,
        grammar=grammar,
    )
    return None if constraints == TokenConstraints() else constraints


def _phrases(bad_words: list[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Tokenise each word as a text begins with it, and as it stands behind a space."""
    phrases: dict[tuple[int, ...], None] = {}
    for word in bad_words:
        found = [
            tuple(tokenizer.encode(text, add_special_tokens=False))
            for text in (word, " " + word.lstrip())
        ]
        if not found[0]:
            raise InvalidRequest("bad_words", f"{quoted(word)} has no tokens; a text was wanted")
        phrases |= dict.fromkeys(phrase for phrase in found if phrase)
    return tuple(phrases)
