"""A prompt as its answers show it: echoed as text, or scored token by token.

Knows prompts' texts and ids; knows no request that is running and no shape of answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specserve.gateway.detokenizer import IncrementalText
from specserve.gateway.requests import CompletionRequest, Prompt
from specserve.gateway.token_text import TokenTexts


@dataclass(frozen=True, slots=True)
class PromptView:
    """One prompt of a body."""

    token_ids: tuple[int, ...]
    """What the target reads."""
    text: str = ""
    """Echoed before the text of each of its choices; empty without `echo`."""
    unfinished: bytes = b""
    """Bytes of a character that the echoed prompt begins and the output may complete."""


def plain_views(prompts: Sequence[Sequence[int]]) -> tuple[PromptView, ...]:
    """Return prompts of which no text is shown."""
    return tuple(PromptView(tuple(token_ids)) for token_ids in prompts)


def prompt_views(
    body: CompletionRequest, prompts: Sequence[Sequence[int]], texts: TokenTexts
) -> tuple[PromptView, ...]:
    """Return the prompts of a body; with `echo` as they are to be read."""
    if not body.echo:
        return plain_views(prompts)
    return tuple(
        _echoed(given, tuple(token_ids), texts, skip_special=body.skip_special_tokens)
        for given, token_ids in zip(body.prompt, prompts, strict=True)
    )


def _echoed(
    given: Prompt, token_ids: tuple[int, ...], texts: TokenTexts, *, skip_special: bool
) -> PromptView:
    if isinstance(given, str):
        # A tokenizer need not give back every space: the client's own text is the prompt.
        return PromptView(token_ids, given)
    text = IncrementalText()
    shown = text.append(texts.text_bytes(token_ids, skip_special=skip_special))
    return PromptView(token_ids, shown, text.unfinished)
