"""Iteration-level scheduling: order, budget, fairness, and when to hold a batch."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from specserve.model.engine import Engine
from specserve.model.messages import CallFailed, EngineOutput, Release, VerifyReply
from specserve.model.runner import SequenceSlice
from specserve.model.toy_runner import ToyRunner
from support.engines import GREEDY, Caller, Clock, run, toy_engine

PROMPT = [3, 1, 4, 1, 5]


def opened(engine: Engine, *callers: Caller) -> None:
    """Open sessions, one after the other."""
    for caller in callers:
        (reply,) = run(engine, caller.verify())
        assert isinstance(reply, VerifyReply)
        caller.heard(reply)
        caller.committed.append(reply.replacement_token_ids)


def watched(engine: Engine) -> list[list[tuple[int, int]]]:
    """Record (tokens, rows) of every slice of every forward."""
    forwards: list[list[tuple[int, int]]] = []
    runner = engine._runner
    assert isinstance(runner, ToyRunner)
    forward = runner.forward

    def recording(batch: list[SequenceSlice]):
        forwards.append([(len(item.token_ids), item.num_logit_rows) for item in batch])
        return forward(batch)

    runner.forward = recording  # type: ignore[method-assign, assignment]
    return forwards


def test_prefill_runs_in_chunks_under_the_token_budget():
    engine = toy_engine(max_num_batched_tokens=65)
    forwards = watched(engine)
    run(engine, Caller("a", PROMPT * 40).verify())
    assert forwards == [[(65, 0)], [(65, 0)], [(65, 0)], [(5, 1)]]


def test_the_wanted_rows_are_never_split():
    engine = toy_engine(max_num_batched_tokens=65)
    forwards = watched(engine)
    (reply,) = run(engine, Caller("a", PROMPT * 13).verify([1, 2, 3]))
    assert isinstance(reply, VerifyReply)
    assert forwards == [[(64, 0)], [(4, 4)]]


def test_ready_calls_come_before_prefill_and_share_its_forward():
    engine = toy_engine(max_num_batched_tokens=65, enable_prefix_caching=False)
    callers = [Caller(str(i), PROMPT) for i in range(3)]
    opened(engine, *callers)
    forwards = watched(engine)
    replies = run(
        engine, *(c.verify([1] * 4) for c in callers), Caller("long", PROMPT * 20).verify()
    )
    assert forwards[0] == [(5, 5)] * 3 + [(50, 0)]
    assert [reply.session_id for reply in replies] == ["0", "1", "2", "long"]


def test_an_older_prefill_moves_though_ready_calls_fill_the_budget():
    engine = toy_engine(max_num_batched_tokens=65, enable_prefix_caching=False)
    callers = [Caller(str(i), PROMPT) for i in range(20)]
    clock = engine._clock
    assert isinstance(clock, Clock)
    opened(engine, *callers)
    forwards = watched(engine)
    engine.submit(Caller("long", PROMPT * 20).verify())
    clock.now += 1
    for caller in callers:
        engine.submit(caller.verify([1] * 4))
    engine.step()
    assert forwards[0] == [(5, 5)] * 9 + [(20, 0)]


def test_a_call_that_runs_alone_shares_no_forward_and_is_served_in_its_turn():
    """Neither with older nor with younger calls, ready or not; and once a token of it is out, what
    is left of it is in company again."""
    engine = toy_engine(max_num_batched_tokens=65, enable_prefix_caching=False)
    old, suspect, young = (Caller(name, PROMPT) for name in ("old", "suspect", "young"))
    clock = engine._clock
    assert isinstance(clock, Clock)
    opened(engine, old, young)
    forwards = watched(engine)
    for message in (
        old.verify([1]),
        replace(suspect.verify(num_decode_steps=3), alone=True),
        young.verify([1, 2]),
    ):
        engine.submit(message)
        clock.now += 1
    run(engine)
    assert forwards == [[(2, 2), (3, 3)], [(5, 1)], [(1, 1)], [(1, 1)]]


def test_suspects_are_computed_one_by_one():
    engine = toy_engine(max_num_batched_tokens=65, enable_prefix_caching=False)
    forwards = watched(engine)
    run(engine, *(replace(Caller(str(n), PROMPT * 15).verify(), alone=True) for n in range(3)))
    assert forwards == [[(65, 0)], [(10, 1)]] * 3


def test_a_suspect_without_blocks_stops_nobody():
    """It is the first in its turn and the last when blocks are short: the others go on."""
    engine = toy_engine(num_kv_blocks=4, max_model_len=16, enable_prefix_caching=False)
    holder = Caller("holder", PROMPT * 2)
    opened(engine, holder)
    suspect = replace(Caller("suspect", PROMPT * 2).verify(), alone=True)
    engine.submit(suspect)
    replies = run(engine, holder.verify())
    assert [reply.session_id for reply in replies] == ["holder"]


def test_at_most_max_num_seqs_sessions_share_a_forward_and_the_oldest_go_first():
    engine = toy_engine(max_num_seqs=2)
    callers = [Caller(str(i), PROMPT) for i in range(5)]
    opened(engine, *callers)
    forwards = watched(engine)
    replies = run(engine, *(caller.verify() for caller in callers))
    assert [len(forward) for forward in forwards] == [2, 2, 1]
    assert [reply.session_id for reply in replies] == ["0", "1", "2", "3", "4"]


def test_priority_comes_before_age_in_line():
    engine = toy_engine(max_num_seqs=1)
    low, high = Caller("low", PROMPT), Caller("high", PROMPT, priority=1)
    opened(engine, low, high)
    replies = run(engine, low.verify(), high.verify())
    assert [reply.session_id for reply in replies] == ["high", "low"]


def test_a_prompt_that_ranks_first_gets_the_only_seat():
    """Whoever decodes ahead always has a row ready, and would always come before it."""
    engine = toy_engine(max_num_seqs=1, max_num_batched_tokens=65)
    low, high = Caller("low", PROMPT), Caller("high", PROMPT * 40, priority=1)
    opened(engine, low)
    replies = run(engine, low.verify(num_decode_steps=40), high.verify())
    assert [reply.session_id for reply in replies].index("high") <= 4


def test_a_seat_that_is_kept_for_a_prompt_without_blocks_is_not_lost():
    """The one that holds them goes on, and gives them back."""
    engine = toy_engine(
        max_num_seqs=1, max_num_batched_tokens=65, num_kv_blocks=30, enable_prefix_caching=False
    )
    low, high = Caller("low", PROMPT * 12), Caller("high", PROMPT * 20, priority=1)
    opened(engine, low)
    replies = run(engine, low.verify(num_decode_steps=8), high.verify())
    assert {reply.session_id for reply in replies} == {"low", "high"}


def test_decode_ahead_does_not_keep_others_out():
    """Each decoded token is a round of its own: seats go round."""
    engine = toy_engine(max_num_seqs=1)
    clock = engine._clock
    assert isinstance(clock, Clock)
    ahead, other = Caller("ahead", PROMPT), Caller("other", PROMPT)
    opened(engine, ahead, other)
    engine.submit(ahead.verify(num_decode_steps=8))
    order: list[str] = []
    engine.submit(other.verify(num_decode_steps=8))
    while engine.wait_s() == 0.0:
        clock.now += 0.001
        output = engine.step()
        assert output is not None
        order.extend(reply.session_id for reply in output.replies)
    assert order == ["ahead", "other"] * 8


# The hold rule


class TimedRunner(ToyRunner):
    """A toy whose forwards take time on a hand-turned clock."""

    clock: Clock
    step_s: float

    def forward(self, batch):
        self.clock.now += self.step_s
        return super().forward(batch)


def timed_engine(step_s: float, **config: int) -> tuple[Engine, Clock]:
    clock = Clock()
    engine = toy_engine(clock=clock, enable_prefix_caching=False, **config)
    runner = engine._runner
    assert isinstance(runner, ToyRunner)
    runner.__class__ = TimedRunner
    assert isinstance(runner, TimedRunner)
    runner.clock, runner.step_s = clock, step_s
    return engine, clock


def rhythm(engine: Engine, clock: Clock, callers: list[Caller], gaps: list[float]) -> None:
    """Let every session play rounds at its own gap, so that the engine learns both times."""
    opened(engine, *callers)
    for caller, gap in zip(callers, gaps, strict=True):
        for _ in range(60):
            clock.now += gap
            (reply,) = run_forced(engine, clock, caller)
            caller.heard(reply)


def run_forced(engine: Engine, clock: Clock, caller: Caller) -> list[VerifyReply]:
    engine.submit(caller.verify([1] * 4))
    output: EngineOutput | None = None
    while output is None:
        clock.now += engine.wait_s() or 0.0
        output = engine.step()
    return [reply for reply in output.replies if isinstance(reply, VerifyReply)]


def answered(step_s: float, num_sessions: int = 4) -> tuple[Engine, Clock, list[Caller]]:
    """All sessions were just answered, and call again in about 2 ms."""
    engine, clock = timed_engine(step_s)
    callers = [Caller(str(i), [i, 2, 3], GREEDY) for i in range(num_sessions)]
    rhythm(engine, clock, callers, [0.002] * len(callers))
    for session in engine._sessions:
        session.replied_at = clock.now
    return engine, clock, callers


def prepared(step_s: float, num_late: int = 3) -> tuple[Engine, Clock, list[Caller]]:
    """One session calls; the others were just answered and call again in about 2 ms."""
    engine, clock, callers = answered(step_s, num_late + 1)
    engine.submit(callers[0].verify([1] * 4))
    return engine, clock, callers


def test_a_batch_is_held_for_calls_that_are_about_to_come():
    """m = 1 ready, e = 3 expected within w = 2 ms, T = 20 ms: 3 * 18 > 1 * 2."""
    engine, clock, callers = prepared(step_s=0.020)
    wait = engine.wait_s()
    assert wait is not None
    assert 0.0019 < wait < 0.004
    assert engine.step() is None
    clock.now += 0.001
    for caller in callers[1:]:
        engine.submit(caller.verify([1] * 4))
    assert engine.wait_s() == 0.0, "nobody else is expected"
    output = engine.step()
    assert output is not None
    assert {reply.session_id for reply in output.replies} == {"0", "1", "2", "3"}


def test_a_hold_ends_after_the_chosen_time_and_is_never_extended():
    engine, clock, _ = prepared(step_s=0.020)
    wait = engine.wait_s()
    assert wait
    clock.now += wait / 2
    for session in engine._sessions:
        if session.in_flight is None:
            session.replied_at = clock.now  # as if they were expected later now
    assert engine.wait_s() == pytest.approx(wait / 2)
    clock.now += wait
    assert engine.wait_s() == 0.0
    output = engine.step()
    assert output is not None
    assert len(output.replies) == 1


def test_a_batch_is_not_held_when_waiting_costs_more_than_it_saves():
    """One expected and many here, or a forward as short as the wait."""
    engine, _, callers = prepared(step_s=0.003, num_late=3)
    for caller in callers[1:3]:
        engine.submit(caller.verify([1] * 4))
    assert engine.wait_s() == 0.0
    engine, _, _ = prepared(step_s=0.0015)
    assert engine.wait_s() == 0.0


def by_turns(step_s: Callable[[int], float]) -> float | None:
    """One call is here, three are due in 14 ms: how long it is held."""
    engine, _, callers = answered(step_s=0.020)
    for session in engine._sessions:
        session.gaps_s.extend([0.014] * 8)
    for num_tokens in (1, 2, 4, 8, 16, 32):
        for _ in range(40):
            engine._times.note(num_tokens, step_s(num_tokens))
    engine.submit(callers[0].verify([1] * 4))
    return engine.wait_s()


def test_two_groups_that_take_turns_come_into_step_where_that_is_faster():
    """A round by turns takes two forwards of 21 ms, in step one and 15 ms: 3 * 6 at once would not
    pay for 15, another round does."""
    assert by_turns(lambda _: 0.021) == pytest.approx(0.0154)


def test_two_groups_go_on_taking_turns_where_forwards_take_as_long_as_their_rows_are_many():
    assert by_turns(lambda num_tokens: 0.0042 * num_tokens) == 0.0


def test_a_forward_of_no_time_is_never_held():
    engine, _, _ = prepared(step_s=0.0)
    assert engine.wait_s() == 0.0


def test_a_prompt_is_held_for_calls_that_are_about_to_come():
    """It would take a forward to itself, and the three others would wait for that."""
    engine, clock, callers = answered(step_s=0.020)
    engine.submit(Caller("new", PROMPT * 5).verify())
    assert engine.wait_s() == pytest.approx(0.002, rel=0.2)
    clock.now += 0.002
    for caller in callers[1:]:
        engine.submit(caller.verify([1] * 4))
    clock.now += engine.wait_s() or 0.0
    output = engine.step()
    assert output is not None
    assert {reply.session_id for reply in output.replies} == {"new", "1", "2", "3"}


def test_a_prompt_that_is_being_read_is_not_held_between_its_chunks():
    engine, clock = timed_engine(0.020, max_num_batched_tokens=65)
    opened(engine, *(Caller(str(i), [i, 2, 3], GREEDY) for i in range(4)))
    engine.submit(Caller("new", PROMPT * 40).verify())
    assert engine.step() is None, "a chunk of several"
    for session in engine._sessions:
        session.gaps_s.append(0.002)
        session.replied_at = clock.now
    assert engine.wait_s() == 0.0


def test_calls_that_come_on_the_beat_are_not_missed_by_a_hair():
    """Every gap was 2 ms to the microsecond; the next one is 2.05 ms."""
    engine, clock, callers = prepared(step_s=0.020)
    for session in engine._sessions:
        session.gaps_s.extend([0.002] * 8)
    clock.now += 0.00205
    assert engine.wait_s(), "it is still held"
    for caller in callers[1:]:
        engine.submit(caller.verify([1] * 4))
    output = engine.step()
    assert output is not None
    assert len(output.replies) == 4


def test_a_call_of_a_size_that_never_ran_is_held_by_the_time_of_the_nearest():
    """Forwards of four rows of five tokens were measured, none of one row of two."""
    engine, _, callers = answered(step_s=0.020)
    engine.submit(callers[0].verify([1]))
    assert engine.wait_s() == pytest.approx(0.002, rel=0.2)


def test_sessions_that_fell_silent_are_not_waited_for():
    engine, clock, _ = prepared(step_s=0.020)
    clock.now += 0.5
    assert engine.wait_s() == 0.0


def test_a_call_that_was_preempted_in_this_plan_takes_no_cached_blocks():
    """Its session is gone: blocks of the prefix cache that it took then nobody would give back."""
    engine = toy_engine(block_size=4, num_kv_blocks=8)
    first, older = Caller("first", [7] * 8), Caller("older", PROMPT)
    opened(engine, first)
    engine.submit(Release("first"))
    opened(engine, older)
    # What it still has to compute when it is preempted reads like what is cached.
    younger = Caller("younger", [7] * 32)
    replies = run(engine, older.verify([1] * 20), younger.verify())

    failed = [reply.session_id for reply in replies if isinstance(reply, CallFailed)]
    assert failed == ["younger"]
    engine.submit(Release("older"))
    assert engine.load.num_sessions == 0
    assert engine.load.num_free_blocks == engine.load.num_blocks
