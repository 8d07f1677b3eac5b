"""The cascade: the suffix guess where its match is long, else the draft model, round by round.

The choice depends on committed tokens and on clocks (is the draft there, was it late), never on a
token that was drawn and not verified. Knows two proposers; knows no message.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from specserve.orchestrator.lookup import LookupProposer
from specserve.orchestrator.pool import DraftLink
from specserve.orchestrator.proposer import NOTHING_DRAFTED, Drafted, Proposer
from specserve.orchestrator.request_state import RequestState

MAX_DRAFT_LAG = 64
"""Committed tokens that the draft may lack before it is sent them beside a round that it sits out:
it then needs no long append when it is asked again."""


class Cascade:
    """The draft side of one request: suffix decoding over a draft model (a `Proposer`)."""

    max_model_len = 0

    def __init__(
        self,
        state: RequestState,
        suffix: LookupProposer,
        draft: Proposer,
        min_match_length: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._state = state
        self._suffix = suffix
        self._draft = draft
        self._min_match_length = min_match_length
        self._clock = clock

    @property
    def num_late(self) -> int:
        """Proposals of the draft that missed their round."""
        return self._draft.num_late

    @property
    def num_invalid(self) -> int:
        """Proposals of the draft that contradicted themselves."""
        return self._draft.num_invalid

    @property
    def link(self) -> DraftLink | None:
        """The draft replica in use."""
        return self._draft.link

    @property
    def is_busy(self) -> bool:
        """Whether neither can be asked now."""
        return self._draft.is_busy and self._suffix.is_busy

    @property
    def catch_up_s(self) -> float:
        """Seconds of a device that the draft's last catching up took."""
        return self._draft.catch_up_s

    @property
    def num_behind(self) -> int:
        """Committed tokens that either lacks, beyond what the draft may lag while it sits out.

        A draft that is not there, or whose context the text has outgrown, will take in nothing.
        """
        limit = self._draft.max_model_len
        takes = self.link is not None and not 0 < limit <= self._state.committed_length
        lag = self._draft.num_behind if takes else 0
        return max(lag if lag > MAX_DRAFT_LAG else 0, self._suffix.num_behind)

    @property
    def num_steps_without(self) -> int:
        """Tokens to decode ahead where neither has anything to say."""
        return self._suffix.num_steps_without

    def ready(self) -> bool:
        """Say whether either can be asked."""
        # Both are asked: the draft takes in a late reply by it.
        return self._draft.ready() | self._suffix.ready()

    def catch_up(self, traceparent: str) -> bool:
        """Let both take in the prompt beside the first round."""
        return self._draft.catch_up(traceparent) | self._suffix.catch_up(traceparent)

    async def caught_up(self, timeout_s: float) -> None:
        """Wait until both have taken in what they were given."""
        await self._draft.caught_up(timeout_s)
        await self._suffix.caught_up(timeout_s)

    async def propose(self, num_speculative_tokens: int, traceparent: str) -> Drafted:
        """Take the suffix guess if it is good or the only one, else the draft's."""
        began = self._clock()
        guess = self._suffix.guess(num_speculative_tokens)
        if guess.match_length >= self._min_match_length:
            drafted = self._suffix.as_drafted(guess, began)
            self._send_what_the_draft_lacks(traceparent)
            return drafted
        drafted = NOTHING_DRAFTED
        if self._draft.ready():
            k = self._state.plan_num_speculative_tokens(self._draft.max_model_len)
            if k > 0:
                drafted = await self._draft.propose(min(k, num_speculative_tokens), traceparent)
            else:
                self._draft.rest()
        if drafted.proposal.draft_token_ids or not guess.token_ids:
            return drafted
        # The draft is lost, late or busy, and what it may have drawn was not seen.
        return self._suffix.as_drafted(guess, began)._replace(wait_s=self._clock() - began)

    def settle(self) -> None:
        """Tell both what was committed."""
        self._draft.settle()
        self._suffix.settle()

    def rest(self) -> None:
        """Free the draft's session."""
        self._draft.rest()

    def close(self) -> None:
        """Free the draft's session, and the text."""
        self._draft.close()
        self._suffix.close()

    def _send_what_the_draft_lacks(self, traceparent: str) -> None:
        lag = self._state.committed_length - self._state.draft.cached_length
        if lag > MAX_DRAFT_LAG:
            self._draft.catch_up(traceparent)
