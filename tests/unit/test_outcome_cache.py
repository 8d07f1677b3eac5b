"""What a draft has drafted ahead is one session's, whoever else asks for the same tokens."""

from __future__ import annotations

from specserve.model.engine import Engine
from specserve.model.messages import OutcomeCounts, ProposeReply
from support.engines import Caller, run, toy_engine

K = 4
PROMPT = [1, 2, 3, 4, 5]


def counts(engine: Engine) -> OutcomeCounts:
    found = engine.load.outcomes
    assert found is not None
    return found


def propose(engine: Engine, caller: Caller) -> ProposeReply:
    (reply,) = run(engine, caller.propose(K))
    assert isinstance(reply, ProposeReply)
    return reply


def test_another_tenant_s_outcome_is_no_hit() -> None:
    """Red's next round is drafted already. Blue, and red in another session, who come to the very
    tokens of that round, wait for every token; red's own next call finds them all."""
    engine = toy_engine("draft", num_cached_outcomes=6)
    red = Caller("red", PROMPT, tenant_salt=b"red")
    guess = propose(engine, red)
    red.heard(guess, K)
    red.committed.append([*guess.draft_token_ids, *_next(PROMPT, guess)])
    committed = red.committed.slice(0, len(red.committed))
    drafted_ahead = counts(engine).num_branch_tokens
    assert drafted_ahead > 0

    for name, salt in (("blue", b"blue"), ("another", b"red")):
        other = Caller(name, committed, tenant_salt=salt)
        before = counts(engine)
        reply = propose(engine, other)
        after = counts(engine)
        assert len(reply.draft_token_ids) == K
        assert (after.num_hits, after.num_hidden_tokens) == (
            before.num_hits,
            before.num_hidden_tokens,
        )
        if salt == b"blue":
            assert reply.prefix_cached_tokens == 0

    before = counts(engine)
    mine = propose(engine, red)
    assert mine.draft_token_ids == reply.draft_token_ids
    assert counts(engine).num_hits == before.num_hits + 1
    assert counts(engine).num_hidden_tokens > before.num_hidden_tokens


def _next(prompt: list[int], guess: ProposeReply) -> list[int]:
    """Return what the draft itself would say next: the likeliest bonus token."""
    other = Caller("alone", [*prompt, *guess.draft_token_ids])
    reply = propose(toy_engine("draft"), other)
    return [reply.draft_token_ids[0]]
