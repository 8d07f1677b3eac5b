"""How a single token is shown in log-probabilities.

Knows the id -> bytes table; knows no request. A token may be part of a character, so its bytes
need not be text by themselves.
"""

from __future__ import annotations

from specserve.gateway.answers import (
    ChatLogprobs,
    ChatTokenLogprob,
    CompletionLogprobs,
    TopLogprob,
)
from specserve.gateway.blocks import Block, TokenLogprobs
from specserve.gateway.detokenizer import IncrementalText
from specserve.model.token_table import TokenTable

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

    def completion_logprobs(
        self, block: Block, position: IncrementalText, skip_special: bool
    ) -> CompletionLogprobs:
        """Write a block's log-probabilities as `/v1/completions` has them.

        Args:
            position: the choice's own; moves on by the block's tokens.
            skip_special: special tokens are no part of the text.
        """
        tokens, offsets, tops = [], [], []
        for token_id, entry in zip(block.token_ids, block.logprobs, strict=False):
            offsets.append(position.num_chars)
            if not (skip_special and token_id in self._table.special_token_ids):
                position.append(self.bytes_of(token_id))
            tokens.append(self._key(token_id))
            if entry.top:
                # The emitted token is always among them, as clients look it up there.
                pairs = [*entry.top, (token_id, entry.logprob)]
                tops.append({self._key(top_id): _finite(value) for top_id, value in pairs})
        return CompletionLogprobs(
            tokens=tokens,
            token_logprobs=[_finite(entry.logprob) for entry in block.logprobs],
            top_logprobs=tops,
            text_offset=offsets,
        )

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

    def _key(self, token_id: int) -> str:
        data = self.bytes_of(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            # OpenAI's way; two halves of characters must not fall onto one key.
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _finite(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)
