"""The round: what is committed of what a target answered."""

from __future__ import annotations

from typing import Any, cast

import pytest

from specserve.errors import InvalidRequest
from specserve.orchestrator.decode import Committed, Decoder
from specserve.orchestrator.proposer import Drafted
from specserve.orchestrator.request_state import RequestState
from specserve.orchestrator.target_call import Scored
from specserve.orchestrator.trimming import FinishReason, Trimmer
from specserve.rpc.v1 import common_pb2
from specserve.speculation.digest import TokenChain
from specserve.speculation.length_choice import Choice, Reason
from specserve.speculation.types import AcceptanceRule, Proposal, SamplingParams, TargetScores

LETTERS = tuple(bytes((byte,)) for byte in range(128))
NO_TOKEN = -2


class Guess:
    """A proposer that guesses these tokens, and the choice to ask it."""

    link = None

    def __init__(self, text: bytes) -> None:
        self.choice = Choice(len(text), Reason.STATIC)
        self._drafted = Drafted(Proposal(tuple(text), None), None, None, 0.0, "suffix")

    async def caught_up(self) -> None:
        """Hold nobody up."""

    def plan(self, traceparent: str) -> Choice:
        return self.choice

    def proposed(self, drafted: Drafted) -> None:
        """Take no note."""

    def scored(self, scored: Scored, num_accepted: int) -> None:
        """Take no note."""

    async def propose(self, num_speculative_tokens: int, traceparent: str) -> Drafted:
        return self._drafted

    def settle(self) -> None:
        """Hold nothing."""


class AgreeingTarget:
    """Accepts every draft token; behind them its constraints leave none."""

    link = None

    async def verify(self, proposal: Proposal, num_decode_steps: int, traceparent: str) -> Scored:
        tokens = proposal.draft_token_ids
        scores = TargetScores((1.0,) * len(tokens), (*tokens, NO_TOKEN))
        return Scored(scores, None, common_pb2.CallTiming(), False, 0.0, 0)

    def settle(self) -> None:
        """Hold nothing."""


async def round_of(guess: bytes) -> Committed:
    """Decode one round of a text that ends with "}"."""
    sampling = SamplingParams(AcceptanceRule.GREEDY, 0, 0, temperature=0.0)
    state = RequestState("r", "s", sampling, 3, 100, 1000, len(guess), TokenChain((1, 2, 3)))
    trimmer = Trimmer(LETTERS, frozenset(), frozenset(), (b"}",), 100)
    proposer = cast(Any, Guess(guess))
    target = cast(Any, AgreeingTarget())
    decoder = Decoder(state, target, proposer, trimmer, proposer, vocab_size=len(LETTERS))
    return await anext(decoder.decode())


@pytest.mark.parametrize("guess", [b"x}y", b"x}"])
async def test_what_stands_behind_the_end_of_a_text_fails_nothing(guess: bytes) -> None:
    """Without a draft that row would not have been computed."""
    committed = await round_of(guess)
    assert committed.token_ids == tuple(b"x}")
    assert committed.emission.text == b"x"
    assert committed.emission.finish_reason is FinishReason.STOP
    assert len(committed.origins) == 2


async def test_a_row_without_a_token_inside_a_text_fails_it() -> None:
    with pytest.raises(InvalidRequest, match="leaves no token"):
        await round_of(b"xy")


def test_looking_ahead_takes_nothing() -> None:
    trimmer = Trimmer(LETTERS, frozenset(), frozenset(), (b"ab",), 3)
    assert trimmer.ends_within(b"xab")
    assert trimmer.ends_within(b"xyz")
    assert not trimmer.ends_within(b"xa")
    assert trimmer.take(b"xab").text == b"x"
