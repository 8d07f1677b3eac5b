"""While a grammar is compiled the engine goes on; the calls that need it come through in order."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from specserve.errors import DeadlineExpired, InvalidRequest, SessionNotFound
from specserve.grammar.compiler import Grammar, GrammarCompiler
from specserve.grammar.lark import regex_grammar
from specserve.model.grammar_gate import GrammarGate
from specserve.model.messages import CallFailed, Cancel, Release, Reply, VerifyReply
from specserve.model.toy import ToySpec
from specserve.model.toy_tokenizer import ToyTokenizer
from specserve.speculation.constraints import TokenConstraints
from specserve.speculation.types import SamplingParams
from support.engines import CALL_IDS, GREEDY, Caller, run, toy_engine

MODEL = "toy:vocab_size=16,eos_bias=-1000"


class SlowCompiler(GrammarCompiler):
    """Compiles when the test lets it."""

    def __init__(self) -> None:
        super().__init__(ToyTokenizer(ToySpec.parse(MODEL)).token_table)
        self.may_go_on = threading.Event()
        self.has_begun = threading.Event()
        self.threads: list[threading.Thread] = []
        """Those that asked it to compile or to look up, one entry each time."""

    def compile(self, text: str, tenant_salt: bytes = b"") -> Grammar:
        """Wait, then compile."""
        self.threads.append(threading.current_thread())
        self.has_begun.set()
        assert self.may_go_on.wait(10)
        return super().compile(text, tenant_salt)


@pytest.fixture
def grammars() -> Iterator[SlowCompiler]:
    """Return a compiler that nothing waits for at the end."""
    compiler = SlowCompiler()
    yield compiler
    compiler.may_go_on.set()


def gate_of(grammars: GrammarCompiler) -> GrammarGate:
    """Put a target behind a gate."""
    return GrammarGate(toy_engine("target", MODEL, grammars=grammars), grammars)


def held_to(regex: str) -> SamplingParams:
    """Ask for a regular expression, behind a prompt of two tokens."""
    grammar = regex_grammar("regex", regex)
    constraints = TokenConstraints(prompt_length=2, grammar=grammar, eos_token_ids=(0,))
    return replace(GREEDY, constraints=constraints)


def until_answered(gate: GrammarGate, num_replies: int) -> list[Reply]:
    """Step until so many replies have come."""
    replies: list[Reply] = []
    while len(replies) < num_replies:
        output = gate.step()
        replies += [] if output is None else output.replies
    return replies


def test_others_are_served_while_a_grammar_is_compiled(grammars: SlowCompiler) -> None:
    """A constrained call waits, a plain one does not; then its calls come in their order."""
    gate = gate_of(grammars)
    sampling = held_to("[bc]d[bc]+")
    held, plain = Caller("held", [1, 2], sampling), Caller("plain", [1, 2])
    call = held.verify(())
    again = replace(call, call_id=next(CALL_IDS))
    gate.submit(call)
    assert grammars.has_begun.wait(10)
    for _ in range(3):
        (reply,) = run(gate, plain.verify(()))
        assert isinstance(reply, VerifyReply)
        plain.heard(reply, 0)
        plain.committed.append(reply.replacement_token_ids)
    gate.submit(again)
    wait_s = gate.wait_s()
    assert wait_s is not None
    assert 0 < wait_s < 0.1
    grammars.may_go_on.set()

    replies = until_answered(gate, 2)

    assert [reply.call_id for reply in replies] == [call.call_id, again.call_id]
    first = replies[0]
    assert isinstance(first, VerifyReply)
    assert first.replacement_token_ids[0] in (3, 4)  # b or c
    assert gate.wait_s() is None
    # The same grammar again is there at once.
    (reply,) = run(gate, Caller("other", [1, 2], sampling).verify(()))
    assert isinstance(reply, VerifyReply)


def test_a_waiting_call_can_be_cancelled_and_its_session_released(grammars: SlowCompiler) -> None:
    """Each is answered once, and the grammar's end finds nothing to do."""
    gate = gate_of(grammars)
    calls = [Caller(name, [1, 2], held_to("b+")).verify(()) for name in ("a", "b")]
    for call in calls:
        gate.submit(call)
    gate.submit(Cancel(calls[0].call_id))
    gate.submit(Release("b"))

    replies = until_answered(gate, 2)

    errors = {r.call_id: type(r.error) for r in replies if isinstance(r, CallFailed)}
    assert errors == {calls[0].call_id: DeadlineExpired, calls[1].call_id: SessionNotFound}
    grammars.may_go_on.set()
    while gate.wait_s() is not None:
        assert gate.step() is None
    assert gate.load.num_sessions == 0


def test_a_grammar_that_is_none_fails_its_call_alone(grammars: SlowCompiler) -> None:
    """In the library's words."""
    grammars.may_go_on.set()
    gate = gate_of(grammars)
    gate.submit(Caller("a", [1, 2], held_to("(b")).verify(()))

    (reply,) = until_answered(gate, 1)

    assert isinstance(reply, CallFailed)
    assert isinstance(reply.error, InvalidRequest)
    assert "unclosed group" in str(reply.error)
    (reply,) = run(gate, Caller("b", [1, 2]).verify(()))
    assert isinstance(reply, VerifyReply)


def test_sessions_that_wait_for_one_grammar_wait_for_one_thread(grammars: SlowCompiler) -> None:
    """All are answered when it ends; another grammar has a thread of its own."""
    gate = gate_of(grammars)
    callers = [Caller(f"s{n}", [1, 2], held_to("[bc]d[bc]+")) for n in range(6)]
    calls = [caller.verify(()) for caller in [*callers, Caller("other", [1, 2], held_to("b+"))]]
    for call in calls:
        gate.submit(call)
    gate.submit(Cancel(calls[1].call_id))
    gate.submit(Release("s2"))
    grammars.may_go_on.set()

    replies = until_answered(gate, len(calls))

    failed = {r.call_id: type(r.error) for r in replies if isinstance(r, CallFailed)}
    assert failed == {calls[1].call_id: DeadlineExpired, calls[2].call_id: SessionNotFound}
    assert {reply.call_id for reply in replies} == {call.call_id for call in calls}
    assert len({*grammars.threads} - {threading.current_thread()}) == 2


def test_every_call_that_waited_hears_why_a_grammar_is_none(grammars: SlowCompiler) -> None:
    """The engine does not try it again: it would stand still for each of them."""
    gate = gate_of(grammars)
    calls = [Caller(f"s{n}", [1, 2], held_to("(b")).verify(()) for n in range(3)]
    for call in calls:
        gate.submit(call)
    grammars.may_go_on.set()

    replies = until_answered(gate, 3)

    assert {reply.call_id for reply in replies} == {call.call_id for call in calls}
    for reply in replies:
        assert isinstance(reply, CallFailed)
        assert isinstance(reply.error, InvalidRequest)
        assert "unclosed group" in str(reply.error)
    assert len(grammars.threads) == 1
    assert gate.wait_s() is None


def test_a_compiler_that_breaks_ends_its_calls_and_not_the_engine() -> None:
    """Whatever it raises: the calls fail, and others are served."""

    class Broken(SlowCompiler):
        def compile(self, text: str, tenant_salt: bytes = b"") -> Grammar:
            raise MemoryError

    gate = gate_of(Broken())
    gate.submit(Caller("a", [1, 2], held_to("b+")).verify(()))

    (reply,) = until_answered(gate, 1)

    assert isinstance(reply, CallFailed)
    assert isinstance(reply.error, InvalidRequest)
    assert "MemoryError" in str(reply.error)
    (reply,) = run(gate, Caller("b", [1, 2]).verify(()))
    assert isinstance(reply, VerifyReply)
