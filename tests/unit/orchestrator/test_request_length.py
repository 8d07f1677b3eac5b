"""A request's rounds: when its proposer is asked, caught up, or left alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from specserve.config import OrchestratorConfig, SpeculativeConfig
from specserve.orchestrator.length_control import LengthControl
from specserve.orchestrator.request_length import RequestLength
from specserve.orchestrator.request_state import RequestState
from specserve.orchestrator.target_session import TargetSession
from specserve.speculation.digest import TokenChain
from specserve.speculation.length_choice import Reason, SpeculationMode
from specserve.speculation.length_controller import LEAST_STEPS
from specserve.speculation.types import AcceptanceRule, SamplingParams, Verification

K = 4
PROMPT_LENGTH = 500
NOTHING = cast(Any, SimpleNamespace(draft_token_ids=()))


class FakeProposer:
    """A draft that the test moves."""

    num_late = num_invalid = 0
    num_steps_without = 4
    catch_up_s = 0.0
    max_model_len = 0
    link = None

    def __init__(self, state: RequestState) -> None:
        self.is_there, self.is_busy = True, False
        self.num_catch_ups = self.num_rests = 0
        self._state = state

    @property
    def num_behind(self) -> int:
        return self._state.committed_length - self._state.draft.cached_length

    def ready(self) -> bool:
        return self.is_there and not self.is_busy

    def catch_up(self, traceparent: str) -> bool:
        self.num_catch_ups += self.is_there
        self.is_busy = self.is_there
        return self.is_there

    def rest(self) -> None:
        self.num_rests += 1

    def read(self, length: int) -> None:
        """Answer what was under way."""
        self.is_busy = False
        self._state.draft.cached_length = length

    def lose(self) -> None:
        """Die with all that it held."""
        self.is_there = self.is_busy = False
        self._state.draft.reopen()


class Setup:
    """One request on a clock that the test moves."""

    def __init__(self, *, mode: SpeculationMode = SpeculationMode.ON, **config: object) -> None:
        self.now = 0.0
        speculative = SpeculativeConfig(model="draft", num_speculative_tokens=K, **config)
        self.control = LengthControl(
            OrchestratorConfig(speculative=speculative, num_decode_steps=64), lambda: self.now
        )
        self.control.switch(mode)
        sampling = SamplingParams(AcceptanceRule.GREEDY, 0, 0, temperature=0.0)
        chain = TokenChain(range(PROMPT_LENGTH))
        self.state = RequestState(
            "r", "s", sampling, PROMPT_LENGTH, 1000, 10_000, K, chain, method="draft_model"
        )
        self.proposer = FakeProposer(self.state)
        target = cast(TargetSession, SimpleNamespace(link=None))
        self.length = RequestLength(self.control, self.state, b"", target, cast(Any, self.proposer))

    def plan(self) -> tuple[int, Reason, int]:
        """Plan a round, and commit a token in it."""
        choice = self.length.plan("")
        self.state.commit(NOTHING, Verification(0, 7))
        return choice.num_speculative_tokens, choice.reason, choice.num_steps


def test_a_draft_is_asked_once_it_has_read_the_prompt() -> None:
    """What was committed while it read does not keep it from being asked."""
    setup = Setup()
    assert setup.plan() == (0, Reason.FIRST_ROUND, 1)
    for _ in range(20):
        assert setup.plan()[:2] == (0, Reason.CATCH_UP)
    setup.proposer.read(PROMPT_LENGTH)
    assert setup.plan()[:2] == (K, Reason.STATIC)
    assert setup.proposer.num_catch_ups == 1


def test_a_draft_that_died_while_it_read_is_caught_up_before_it_is_asked() -> None:
    """Another one holds nothing: asking it at once would wait for the whole text."""
    setup = Setup()
    setup.plan()
    setup.proposer.lose()
    assert setup.plan()[:2] == (0, Reason.DRAFT_LOST)
    setup.proposer.is_there = True
    assert setup.plan()[:2] == (0, Reason.CATCH_UP)
    assert setup.proposer.num_catch_ups == 2


def test_a_catch_up_that_came_to_nothing_is_begun_again() -> None:
    """The draft is there still and has answered with an error: it holds no more than before."""
    setup = Setup()
    setup.plan()
    setup.proposer.read(0)
    assert setup.plan()[:2] == (0, Reason.CATCH_UP)
    setup.proposer.read(PROMPT_LENGTH + 1)
    assert setup.plan()[:2] == (K, Reason.STATIC)


@pytest.mark.parametrize("how", ["off", "unverified", "context"])
def test_a_draft_that_may_not_be_asked_holds_nothing(how: str) -> None:
    """Its blocks are for those whom it can serve."""
    setup = Setup()
    setup.plan()
    setup.proposer.read(PROMPT_LENGTH)
    assert setup.plan()[0] == K
    assert setup.proposer.num_rests == 0
    if how == "off":
        setup.control.switch(SpeculationMode.OFF)
    elif how == "unverified":
        setup.control.refusal = lambda state, target, draft: "no record"
    else:
        setup.proposer.max_model_len = PROMPT_LENGTH
    k, reason, _ = setup.plan()
    assert (k, reason.value.replace("speculation_", "")) == (0, how)
    assert setup.proposer.num_rests == 1


@pytest.mark.parametrize(("standing_k", "steps"), [(None, 4), (0, LEAST_STEPS), (2, 4)])
def test_nobody_looks_often_for_a_draft_that_would_not_be_asked(
    standing_k: int | None, steps: int
) -> None:
    """Short calls cost the target's batch, and where decode-ahead stands they bring nothing."""
    setup = Setup(mode=SpeculationMode.AUTO, num_speculative_tokens_schedule="auto")
    setup.plan()
    acceptance = setup.control.acceptances["draft_model", AcceptanceRule.GREEDY]
    pool = setup.control.pool("draft_model")
    for kept in [acceptance, *pool._standings]:
        pool.standing(kept, K).k = standing_k
    setup.proposer.lose()
    assert setup.plan() == (0, Reason.DRAFT_LOST, steps)
