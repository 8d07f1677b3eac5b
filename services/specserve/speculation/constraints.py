"""What a request asks of single tokens, and what that means at a position: penalties and bans.

A grammar is one more ban: it is asked through a `TokenMatcher`, which moves as the state does.

The state of row i of a verify block is that of committed + draft[:i]. It follows a session's tokens
and is cut back by length with them, so a rejected token leaves nothing behind; one token costs the
same however long the text is. Knows token ids; knows no logits (`row_edits.py` does), no model.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specserve.errors import InvalidRequest
from specserve.speculation.digest import TokenChain
from specserve.speculation.row_edits import NO_IDS, RowEdits
from specserve.speculation.seen_tokens import SeenTokens
from specserve.speculation.token_matcher import TokenMatcher


@dataclass(frozen=True, slots=True)
class TokenConstraints:
    """A request's penalties, biases and bans; fixed for the session's life."""

    prompt_length: int = 0
    """How many of the session's first tokens are prompt; all others are output."""
    repetition_penalty: float = 1.0
    """> 0; counts prompt and output."""
    presence_penalty: float = 0.0
    """Counts output."""
    frequency_penalty: float = 0.0
    """Counts output."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit); ids are distinct."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Phrases of token ids that the output never completes; none is empty."""
    allowed_token_ids: tuple[int, ...] = ()
    """The only ids that may be emitted; empty allows all."""
    min_tokens: int = 0
    """`end_token_ids` are banned until the output holds so many tokens."""
    end_token_ids: tuple[int, ...] = ()
    """EOS ids and the request's stop_token_ids."""
    grammar: str = ""
    """Lark text of the language that the output is held to; empty allows any (see `grammar/`)."""
    eos_token_ids: tuple[int, ...] = ()
    """EOS ids: allowed where the grammar accepts, and nowhere else."""

    @property
    def is_neutral(self) -> bool:
        """Whether nothing is ever edited."""
        return not (
            self.has_penalties
            or self.logit_bias
            or self.bad_words
            or self.allowed_token_ids
            or self.grammar
            or (self.min_tokens > 0 and self.end_token_ids)
        )

    @property
    def has_penalties(self) -> bool:
        """Whether any of the penalties changes a logit."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


class ConstraintState:
    """The constraints after some tokens of one session."""

    def __init__(self, constraints: TokenConstraints, matcher: TokenMatcher | None = None) -> None:
        """Start before any token.

        Args:
            matcher: of the grammar, at its start; it is this state's own from now on.

        Raises:
            InvalidRequest: there is a grammar, and nothing to match it with.
        """
        if constraints.grammar and matcher is None:
            raise InvalidRequest("grammar", "nothing here reads it")
        self.constraints = constraints
        self._matcher = matcher
        self._num_prompt = -1
        """Prompt tokens taken in; -1 before any."""
        self._output = array("i")
        self._seen = SeenTokens()
        self._bias_ids = np.array([i for i, _ in constraints.logit_bias], np.int64)
        self._biases = np.array([value for _, value in constraints.logit_bias], np.float64)
        allowed = constraints.allowed_token_ids
        self._allowed = np.unique(np.array(allowed, np.int64)) if allowed else None
        words = [word[0] for word in constraints.bad_words if len(word) == 1]
        self._banned = np.unique(np.array(words, np.int64))
        self._banned_early = np.unique(np.array([*words, *constraints.end_token_ids], np.int64))
        # By the token before the last: most positions then look at no phrase at all.
        self._phrases: dict[int, list[tuple[array[int], int]]] = {}
        for word in constraints.bad_words:
            if len(word) > 1:
                self._phrases.setdefault(word[-2], []).append((array("i", word[:-1]), word[-1]))

    def __len__(self) -> int:
        return max(0, self._num_prompt) + len(self._output)

    def truncate(self, length: int) -> None:
        """Forget all but the first `length` tokens; those beyond are undone one by one."""
        if length < self._num_prompt:
            self._num_prompt = -1
            self._clear_output()
            return
        if len(self) <= length:
            return
        while len(self) > length:
            self._pop()
        if self._matcher is not None:
            self._matcher.truncate(len(self._output))

    def follow(self, chain: TokenChain, length: int) -> None:
        """Move to the first `length` tokens of a session.

        Args:
            chain: the session's tokens; those already taken in and not cut since are the same.
        """
        num_prompt = min(self.constraints.prompt_length, length)
        if self._num_prompt != num_prompt:
            self._clear_output()
            self._num_prompt = num_prompt
            counts = self.constraints.repetition_penalty != 1.0
            self._seen = SeenTokens(chain.slice(0, num_prompt) if counts else ())
        self.truncate(length)
        for token_id in chain.slice(len(self), length):
            self.push(token_id)

    def push(self, token_id: int) -> None:
        """Take one more output token in."""
        self._output.append(token_id)
        if self.constraints.has_penalties:
            self._seen.push(token_id)
        if self._matcher is not None:
            self._matcher.push(token_id)

    def edits(self) -> RowEdits | None:
        """Return what happens to the row that predicts the next token; None for nothing."""
        constraints = self.constraints
        banned = self._banned_now()
        seen_ids, num_outputs = self._seen.table() if constraints.has_penalties else (NO_IDS,) * 2
        allowed = self._allowed_now()
        if not (self._bias_ids.size or seen_ids.size or banned.size) and allowed is None:
            return None
        return RowEdits(
            self._bias_ids,
            self._biases,
            seen_ids,
            num_outputs,
            constraints.repetition_penalty,
            constraints.frequency_penalty,
            constraints.presence_penalty,
            banned,
            allowed,
        )

    def edits_after(self, token_ids: Sequence[int]) -> RowEdits | None:
        """Return what happens to the row behind some more tokens, which are not taken in."""
        length = len(self)
        for token_id in token_ids:
            self.push(token_id)
        edits = self.edits()
        self.truncate(length)
        return edits

    def _banned_now(self) -> NDArray[np.int64]:
        output = self._output
        early = len(output) < self.constraints.min_tokens
        banned = self._banned_early if early else self._banned
        if not output or not self._phrases:
            return banned
        completed = [
            last
            for start, last in self._phrases.get(output[-1], ())
            if len(output) >= len(start) and output[len(output) - len(start) :] == start
        ]
        return np.concatenate((banned, np.array(completed, np.int64))) if completed else banned

    def _allowed_now(self) -> NDArray[np.int64] | None:
        """Return the only ids that both the request's list and its grammar allow; None for all."""
        matching = None if self._matcher is None else self._matcher.allowed_token_ids()
        if matching is None or self._allowed is None:
            return self._allowed if matching is None else matching
        return np.intersect1d(self._allowed, matching, assume_unique=True)

    def _clear_output(self) -> None:
        self._output = array("i")
        if self._matcher is not None:
            self._matcher.truncate(0)

    def _pop(self) -> None:
        token_id = self._output.pop()
        if self.constraints.has_penalties:
            self._seen.pop(token_id)
