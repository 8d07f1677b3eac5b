"""The cascade's choice: by the match where it is long, by the draft's presence where it is not."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from specserve.orchestrator.cascade import MAX_DRAFT_LAG, Cascade
from specserve.orchestrator.lookup import LookupProposer
from specserve.orchestrator.proposer import EMPTY_PROPOSAL, Drafted
from specserve.orchestrator.request_state import RequestState
from specserve.speculation.digest import TokenChain
from specserve.speculation.guess import NO_GUESS, Guess
from specserve.speculation.types import AcceptanceRule, Proposal, SamplingParams

MIN_MATCH_LENGTH = 5
LONG = Guess((1, 2, 3), (1.0, 0.9, 0.8), MIN_MATCH_LENGTH)
SHORT = Guess((4,), (0.5,), MIN_MATCH_LENGTH - 1)


class Fixed:
    """Always guesses the same."""

    def __init__(self, guess: Guess) -> None:
        self._guess = guess

    def append(self, token_ids: Sequence[int]) -> None:
        """Take nothing in."""

    def guess(self, num_speculative_tokens: int) -> Guess:
        return self._guess


class FakeDraft:
    """A draft that is there or not, late or not; keeps what it was asked."""

    num_invalid = 0
    num_steps_without = 4

    def __init__(
        self, *, is_ready: bool = True, is_late: bool = False, max_model_len: int = 0
    ) -> None:
        self.num_late = 0
        self.max_model_len = max_model_len
        self.asked: list[int] = []
        self.num_catch_ups = self.num_settled = self.num_closed = self.num_rests = 0
        self.link = object() if is_ready else None
        self.num_behind = 0
        self._is_ready = is_ready
        self._is_late = is_late

    def ready(self) -> bool:
        return self._is_ready

    def catch_up(self, traceparent: str) -> bool:
        self.num_catch_ups += 1
        return self._is_ready

    async def propose(self, num_speculative_tokens: int, traceparent: str) -> Drafted:
        self.asked.append(num_speculative_tokens)
        self.num_late += self._is_late
        drafted = EMPTY_PROPOSAL if self._is_late else Proposal((7,) * num_speculative_tokens, None)
        return Drafted(drafted, None, None, 0.25, "draft_model")

    def settle(self) -> None:
        self.num_settled += 1

    def rest(self) -> None:
        self.num_rests += 1

    def close(self) -> None:
        self.num_closed += 1


def cascade_of(
    guess: Guess, draft: FakeDraft, num_committed: int = 20
) -> tuple[Cascade, RequestState]:
    """Make a cascade over a suffix guess that is always this one."""
    state = RequestState(
        request_id="r",
        session_id="s",
        sampling=SamplingParams(AcceptanceRule.GREEDY, 0, 0, temperature=0.0),
        prompt_length=num_committed,
        max_tokens=1000,
        max_model_len=10**6,
        num_speculative_tokens=4,
        chain=TokenChain(range(num_committed)),
    )
    lookup = LookupProposer("suffix", state, Fixed(guess))
    return Cascade(state, lookup, draft, MIN_MATCH_LENGTH), state


async def test_a_long_match_is_taken_and_the_draft_not_asked() -> None:
    draft = FakeDraft()
    cascade, _ = cascade_of(LONG, draft)
    drafted = await cascade.propose(4, "")
    assert drafted.proposer == "suffix"
    assert drafted.proposal.draft_token_ids == (1, 2, 3)
    assert draft.asked == []


@pytest.mark.parametrize("guess", [SHORT, NO_GUESS])
async def test_a_short_match_gives_way_to_the_draft(guess: Guess) -> None:
    draft = FakeDraft()
    cascade, _ = cascade_of(guess, draft)
    drafted = await cascade.propose(4, "")
    assert (drafted.proposer, draft.asked) == ("draft_model", [4])
    assert drafted.proposal.draft_token_ids == (7,) * 4


@pytest.mark.parametrize("draft", [FakeDraft(is_ready=False), FakeDraft(is_late=True)])
async def test_a_short_match_is_better_than_a_lost_or_late_draft(draft: FakeDraft) -> None:
    cascade, _ = cascade_of(SHORT, draft)
    assert cascade.ready()
    drafted = await cascade.propose(4, "")
    assert (drafted.proposer, drafted.proposal.draft_token_ids) == ("suffix", (4,))
    assert cascade.num_late == len(draft.asked)


async def test_without_either_nothing_is_drafted() -> None:
    cascade, _ = cascade_of(NO_GUESS, FakeDraft(is_ready=False))
    drafted = await cascade.propose(4, "")
    assert drafted.proposal.draft_token_ids == ()


async def test_the_drafts_own_limit_binds_the_draft_only() -> None:
    """20 of 22 tokens: the draft may make two; a suffix guess knows no such limit."""
    draft = FakeDraft(max_model_len=22)
    cascade, _ = cascade_of(SHORT, draft)
    assert cascade.max_model_len == 0
    await cascade.propose(4, "")
    assert draft.asked == [2]
    full = FakeDraft(max_model_len=20)
    cascade, _ = cascade_of(SHORT, full)
    assert (await cascade.propose(4, "")).proposer == "suffix"
    assert (full.asked, full.num_rests) == ([], 1)


def test_what_a_draft_cannot_take_in_is_no_lag() -> None:
    """One that is lost, or whose context the text has outgrown, keeps nobody waiting."""
    draft = FakeDraft(max_model_len=500)
    cascade, _ = cascade_of(LONG, draft, num_committed=200)
    draft.num_behind = 200
    assert cascade.num_behind == 200
    draft.max_model_len = 200
    assert cascade.num_behind == 0
    lost = FakeDraft(is_ready=False)
    cascade, _ = cascade_of(LONG, lost, num_committed=200)
    lost.num_behind = 200
    assert cascade.num_behind == 0


async def test_a_draft_that_lacks_much_is_sent_it_beside_a_suffix_round() -> None:
    draft = FakeDraft()
    cascade, state = cascade_of(LONG, draft, num_committed=200)
    state.draft.cached_length = 200 - MAX_DRAFT_LAG
    await cascade.propose(4, "")
    assert draft.num_catch_ups == 0
    state.draft.cached_length -= 1
    await cascade.propose(4, "")
    assert draft.num_catch_ups == 1


async def test_both_are_told_and_closed() -> None:
    draft = FakeDraft()
    cascade, _ = cascade_of(LONG, draft)
    assert cascade.catch_up("")
    cascade.settle()
    cascade.close()
    assert (draft.num_catch_ups, draft.num_settled, draft.num_closed) == (1, 1, 1)
