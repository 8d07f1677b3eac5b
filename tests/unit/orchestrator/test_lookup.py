"""A guess is made from all that is committed, or not at all; a long prompt holds nobody up."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from specserve.orchestrator.lookup import PIECE, LookupProposer
from specserve.orchestrator.request_state import RequestState
from specserve.speculation.digest import TokenChain
from specserve.speculation.guess import Guess
from specserve.speculation.types import AcceptanceRule, Proposal, SamplingParams, Verification


def make_state(
    prompt: Sequence[int], rule: AcceptanceRule = AcceptanceRule.STANDARD
) -> RequestState:
    """Start a request."""
    return RequestState(
        request_id="r",
        session_id="s",
        sampling=SamplingParams(rule, 0, 0),
        prompt_length=len(prompt),
        max_tokens=1000,
        max_model_len=10**6,
        num_speculative_tokens=4,
        chain=TokenChain(prompt),
    )


class Echo:
    """Guesses the newest tokens again; keeps what it took in, and in what pieces."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.pieces: list[int] = []

    def append(self, token_ids: Sequence[int]) -> None:
        self.tokens += token_ids
        self.pieces.append(len(token_ids))

    def guess(self, num_speculative_tokens: int) -> Guess:
        token_ids = tuple(self.tokens[-num_speculative_tokens:])
        return Guess(token_ids, (1.0,) * len(token_ids), 1)


def lookup_of(state: RequestState) -> tuple[LookupProposer, Echo]:
    echo = Echo()
    return LookupProposer("suffix", state, echo), echo


async def test_a_long_prompt_is_taken_in_piece_by_piece_beside_other_work() -> None:
    """The event loop turns between pieces, and nothing is guessed before all are in."""
    state = make_state(range(5 * PIECE + 1))
    lookup, echo = lookup_of(state)
    assert lookup.catch_up("")
    turns = 0
    while not lookup.ready():
        assert lookup.guess(2).token_ids == ()
        await asyncio.sleep(0)
        turns += 1
        assert turns < 20
    assert turns >= 6
    assert max(echo.pieces) == PIECE
    assert echo.tokens == state.chain.tokens
    assert (await lookup.propose(2, "")).proposal.draft_token_ids == (5 * PIECE - 1, 5 * PIECE)


async def test_each_guess_sees_every_committed_token_once() -> None:
    """Rounds of any size, the reading of the prompt among them."""
    state = make_state([1, 2, 3])
    lookup, echo = lookup_of(state)
    lookup.catch_up("")
    for number in range(30):
        drafted = tuple(range(number % 4))
        state.commit(Proposal(drafted, None), Verification(len(drafted), 90 + number))
        lookup.settle()
        await asyncio.sleep(0)
        if lookup.ready():
            assert lookup.guess(1).token_ids == (90 + number,)
            assert echo.tokens == state.chain.tokens
    assert echo.tokens == state.chain.tokens


async def test_where_nobody_asks_nothing_is_read() -> None:
    """K = 0 round after round costs the event loop no prompt; a guess then reads one piece."""
    state = make_state(range(PIECE - 10))
    lookup, echo = lookup_of(state)
    for number in range(10):
        assert lookup.ready()
        state.commit(Proposal((), None), Verification(0, 1000 + number))
        lookup.settle()
    assert echo.pieces == []
    assert lookup.num_behind == 0
    assert lookup.guess(1).token_ids == (1009,)
    assert echo.pieces == [PIECE]


async def test_what_is_too_long_for_a_guess_is_caught_up_with_first() -> None:
    """One token more than a piece: no guess, and nothing read in its place."""
    lookup, echo = lookup_of(make_state(range(PIECE + 1)))
    assert lookup.ready()
    assert lookup.num_behind == PIECE + 1
    assert lookup.guess(2).token_ids == ()
    assert echo.pieces == []
    assert lookup.catch_up("")
    assert lookup.catch_up("")
    await lookup.caught_up(timeout_s=10)
    assert echo.pieces == [PIECE, 1]
    assert lookup.num_behind == 0
    assert lookup.guess(1).token_ids == (PIECE,)


async def test_closing_stops_the_reading() -> None:
    state = make_state(range(5 * PIECE))
    lookup, echo = lookup_of(state)
    lookup.catch_up("")
    await asyncio.sleep(0)
    lookup.close()
    lookup.close()
    for _ in range(10):
        await asyncio.sleep(0)
    assert len(echo.tokens) < 5 * PIECE


@pytest.mark.parametrize("rule", list(AcceptanceRule))
async def test_q_is_one_hot_where_the_rule_needs_it(rule: AcceptanceRule) -> None:
    lookup, _ = lookup_of(make_state([7, 8], rule))
    drafted = await lookup.propose(2, "")
    assert drafted.proposal.draft_token_ids == (7, 8)
    assert drafted.proposer == "suffix"
    if rule is AcceptanceRule.STANDARD:
        assert drafted.token_probs == (1.0, 1.0)
        assert drafted.proposal.draft_probs is not None
        assert drafted.proposal.draft_probs.token_ids.tolist() == [[7], [8]]
    else:
        assert drafted.token_probs is None
        assert drafted.proposal.draft_probs is None
