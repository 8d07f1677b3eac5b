"""A proposer in the orchestrator's own process: guesses from the request's tokens, with no RPC.

Knows when a text is taken in and how long that may hold the event loop up; the guess itself is a
`Guesser` of `speculation/`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from specserve.orchestrator.proposer import Drafted, ProposerName
from specserve.orchestrator.request_state import RequestState
from specserve.speculation.guess import NO_GUESS, Guess, Guesser
from specserve.speculation.past_outputs import PIECE

NUM_STEPS_WITHOUT_GUESS = 2
"""Tokens decoded ahead where nothing matches: few, for the next token may match."""


class LookupProposer:
    """The draft side of one request, without a draft (a `Proposer`)."""

    num_late = 0
    num_invalid = 0
    num_steps_without = NUM_STEPS_WITHOUT_GUESS
    max_model_len = 0
    link = None
    catch_up_s = 0.0
    """It takes no device."""

    def __init__(
        self,
        name: ProposerName,
        state: RequestState,
        guesser: Guesser,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._name = name
        self._state = state
        self._guesser = guesser
        self._clock = clock
        self._taken_length = 0
        """Committed tokens that the guesser has taken in."""
        self._reading: asyncio.Task[None] | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a prompt is still being read."""
        return self._reading is not None and not self._reading.done()

    @property
    def num_behind(self) -> int:
        """Committed tokens to take in before a guess, where they are too many to do it at once."""
        return self._num_unread if self._num_unread > PIECE else 0

    def ready(self) -> bool:
        """Say whether it can be asked. Reads nothing: where nobody asks, nobody need read."""
        return not self.is_busy

    def catch_up(self, traceparent: str) -> bool:
        """Take in what is committed beside other work, piece by piece."""
        if not self.is_busy:
            self._reading = asyncio.create_task(self._read_all(), name="lookup")
        return True

    async def caught_up(self, timeout_s: float) -> None:
        """Wait until the prompt has been read."""
        if self._reading is not None:
            await asyncio.wait((self._reading,), timeout=timeout_s)

    async def propose(self, num_speculative_tokens: int, traceparent: str) -> Drafted:
        """Guess from what is committed."""
        began = self._clock()
        return self.as_drafted(self.guess(num_speculative_tokens), began)

    def guess(self, num_speculative_tokens: int) -> Guess:
        """Guess from what is committed; nothing while more than a piece is not taken in."""
        if num_speculative_tokens < 1 or self.is_busy or self.num_behind:
            return NO_GUESS
        self._read(PIECE)
        return self._guesser.guess(num_speculative_tokens)

    def as_drafted(self, guess: Guess, began: float) -> Drafted:
        """Give a guess as what a round got, begun at `began` by the clock."""
        proposal = guess.proposal(self._state.sampling.rule)
        token_probs = None if proposal.draft_probs is None else (1.0,) * len(guess.token_ids)
        return Drafted(proposal, token_probs, None, self._clock() - began, self._name)

    def settle(self) -> None:
        """Do nothing: what is committed is taken in when it is needed."""

    def rest(self) -> None:
        """Do nothing: it holds no device."""

    def close(self) -> None:
        """Stop reading a prompt that nobody waits for any more."""
        if self._reading is not None:
            self._reading.cancel()

    async def _read_all(self) -> None:
        while self._num_unread:
            await asyncio.sleep(0)
            self._read(PIECE)

    @property
    def _num_unread(self) -> int:
        return self._state.committed_length - self._taken_length

    def _read(self, limit: int) -> None:
        tokens = self._state.chain.slice(self._taken_length, self._taken_length + limit)
        self._guesser.append(tokens)
        self._taken_length += len(tokens)
