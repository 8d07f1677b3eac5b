"""How a single token is shown in log-probabilities.

Knows the id -> bytes table; knows no request. A token may be part of a character, so its bytes
need not be text by themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from specserve.gateway.answers import (
    ChatLogprobs,
    ChatTokenLogprob,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TopLogprob,
)
from specserve.gateway.blocks import Block, TokenLogprobs
from specserve.gateway.detokenizer import IncrementalText
from specserve.model.token_table import TokenTable

if TYPE_CHECKING:
    from specserve.gateway.prompt_view import PromptView

MIN_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


class TokenTexts:
    """Writes log-probabilities with the tokens' texts."""

    def __init__(self, table: TokenTable) -> None:
        self._table = table

    def bytes_of(self, token_id: int) -> bytes:
        """Return the token's bytes; padding ids beyond the table have none."""
        known = 0 <= token_id < self._table.vocab_size
        return self._table.token_bytes[token_id] if known else b""

    def text_bytes(self, token_ids: Sequence[int], *, skip_special: bool) -> bytes:
        """Return the bytes of tokens that are read one after the other."""
        return b"".join(self._shown(token_id, skip_special) for token_id in token_ids)

    def completion_logprobs(
        self, block: Block, position: IncrementalText, skip_special: bool
    ) -> CompletionLogprobs:
        """Write a block's log-probabilities as `/v1/completions` has them.

        Args:
            position: the choice's own; moves on by the block's tokens.
            skip_special: special tokens are no part of the text.
        """
        tokens: list[str] = []
        offsets: list[int] = []
        tops: list[dict[str, float] | None] = []
        for token_id, entry in zip(block.token_ids, block.logprobs, strict=False):
            offsets.append(position.num_chars)
            position.append(self._shown(token_id, skip_special))
            tokens.append(self._key(token_id))
            if entry.top:
                tops.append(self._tops(token_id, entry, len(entry.top)))
        return CompletionLogprobs(
            tokens=tokens,
            token_logprobs=[_finite(entry.logprob) for entry in block.logprobs],
            top_logprobs=tops,
            text_offset=offsets,
        )

    def echoed_logprobs(
        self,
        prompt: PromptView,
        entries: Sequence[TokenLogprobs],
        num_top: int,
        position: IncrementalText,
        skip_special: bool,
    ) -> CompletionLogprobs:
        """Write an echoed prompt's log-probabilities as `/v1/completions` has them.

        Args:
            entries: of the tokens from the second one on.
            num_top: most likely tokens told beside each.
            position: the choice's own; moves on to the end of the prompt's text.
        """
        offsets = []
        for token_id in prompt.token_ids:
            offsets.append(position.num_chars)
            position.append(self._shown(token_id, skip_special))
        # Where the tokens do not read exactly as the client's text they end where it ends.
        shift = len(prompt.text) - position.num_chars
        position.num_chars += shift
        tops: list[dict[str, float] | None] = [
            self._tops(token_id, entry, num_top)
            for token_id, entry in zip(prompt.token_ids[1:], entries, strict=False)
        ]
        return CompletionLogprobs(
            tokens=[self._key(token_id) for token_id in prompt.token_ids],
            token_logprobs=[None, *(_finite(entry.logprob) for entry in entries)],
            top_logprobs=[None, *tops] if num_top else [],
            text_offset=[max(0, offset + shift) for offset in offsets],
        )

    def prompt_logprobs(
        self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs], num_top: int
    ) -> PromptLogprobs:
        """Write a prompt's log-probabilities as the field `prompt_logprobs` has them."""
        told: PromptLogprobs = [None]
        for token_id, entry in zip(token_ids[1:], entries, strict=False):
            ranks = {top_id: rank for rank, (top_id, _) in enumerate(entry.top, 1)}
            pairs = [(token_id, entry.logprob), *entry.top[:num_top]]
            told.append(
                {
                    str(shown_id): PromptLogprob(
                        logprob=_finite(value),
                        rank=ranks.get(shown_id),
                        decoded_token=self.bytes_of(shown_id).decode(errors="replace"),
                    )
                    for shown_id, value in pairs
                }
            )
        return told

    def chat_logprobs(self, block: Block) -> ChatLogprobs:
        """Write a block's log-probabilities as `/v1/chat/completions` has them."""
        return ChatLogprobs(
            content=[
                self._chat_token(token_id, entry)
                for token_id, entry in zip(block.token_ids, block.logprobs, strict=False)
            ]
        )

    def _chat_token(self, token_id: int, entry: TokenLogprobs) -> ChatTokenLogprob:
        data = self.bytes_of(token_id)
        return ChatTokenLogprob(
            token=data.decode(errors="replace"),
            logprob=_finite(entry.logprob),
            bytes=list(data),
            top_logprobs=[self._top(top_id, value) for top_id, value in entry.top],
        )

    def _top(self, token_id: int, logprob: float) -> TopLogprob:
        data = self.bytes_of(token_id)
        return TopLogprob(
            token=data.decode(errors="replace"), logprob=_finite(logprob), bytes=list(data)
        )

    def _shown(self, token_id: int, skip_special: bool) -> bytes:
        hidden = skip_special and token_id in self._table.special_token_ids
        return b"" if hidden else self.bytes_of(token_id)

    def _tops(self, token_id: int, entry: TokenLogprobs, num_top: int) -> dict[str, float]:
        # The text's own token is always among them, as clients look it up there.
        pairs = [*entry.top[:num_top], (token_id, entry.logprob)]
        return {self._key(top_id): _finite(value) for top_id, value in pairs}

    def _key(self, token_id: int) -> str:
        data = self.bytes_of(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            # OpenAI's way; two halves of characters must not fall onto one key.
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _finite(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)
