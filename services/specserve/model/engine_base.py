"""What every engine does with messages, whatever it computes: admit, join, cancel, release, answer.

Knows the session rules and the replies; knows no logits and no blocks' content.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from specserve.errors import (
    DeadlineExpired,
    InvalidProposal,
    Preempted,
    SessionNotFound,
    SpecServeError,
)
from specserve.grammar.compiler import GrammarCompiler
from specserve.model.calls import CallState
from specserve.model.draft_calls import ProposeState
from specserve.model.kv_cache import BlockTable
from specserve.model.messages import (
    Arrived,
    Call,
    CallFailed,
    Cancel,
    EngineLoad,
    EngineOutput,
    Message,
    ModelInfo,
    ProposeCall,
    Release,
    Reply,
    Role,
    SessionOpening,
    VerifyCall,
    VerifyReply,
)
from specserve.model.session import KvSession
from specserve.model.session_table import SessionTable


class EngineLike(Protocol):
    """What a device drives."""

    @property
    def info(self) -> ModelInfo:
        """What was loaded."""
        ...

    @property
    def load(self) -> EngineLoad:
        """How busy the engine is."""
        ...

    def submit(self, message: Message) -> None:
        """Take a message; answers come from `step`."""
        ...

    def step(self) -> EngineOutput | None:
        """Run one iteration; None when there was nothing to say."""
        ...

    def wait_s(self) -> float | None:
        """Return how long `step` may wait: None without work, 0 with, more while holding."""
        ...


class EngineBase(ABC):
    """Sessions, calls in flight and answers of one replica."""

    def __init__(
        self,
        *,
        role: Role,
        clock: Callable[[], float],
        new_blocks: Callable[[SessionOpening], BlockTable | None],
        vocab_size: int,
        max_length: int,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        self._call_type = ProposeCall if role == "draft" else VerifyCall
        self._role = role
        self._clock = clock
        self._max_length = max_length
        self._outbox: list[Reply] = []
        self._num_iterations = 0
        self._blocked_until = 0.0
        """Until then every call waits for blocks, unless a message comes."""
        self._arrived_at = math.inf
        self._sessions = SessionTable(
            new_blocks=new_blocks,
            answer=self._outbox.append,
            vocab_size=vocab_size,
            max_length=max_length,
            grammars=grammars,
        )

    @property
    @abstractmethod
    def info(self) -> ModelInfo:
        """What was loaded."""

    @property
    @abstractmethod
    def load(self) -> EngineLoad:
        """How busy the engine is."""

    @abstractmethod
    def step(self) -> EngineOutput | None:
        """Run one iteration; None when there was nothing to say."""

    @abstractmethod
    def _begin(self, session: KvSession, call: Call, now: float) -> None:
        """Put an admitted call in flight, or answer it at once."""

    def submit(self, message: Message) -> None:
        """Take a message; answers come from `step`, also for calls that are refused."""
        if isinstance(message, Arrived):
            self._arrived_at = message.at
            return
        self._blocked_until = 0.0
        now = min(self._clock(), self._arrived_at)
        if isinstance(message, Cancel):
            self._cancel(message.call_id, now)
        elif isinstance(message, Release):
            self._release(message.session_id)
        elif isinstance(message, (ProposeCall, VerifyCall)):
            try:
                if not isinstance(message, self._call_type):
                    raise InvalidProposal(
                        f"a {self._role} engine takes no {type(message).__name__}"
                    )
                session = self._sessions.admit(message, now)
                if session is not None:
                    self._begin(session, message, now)
            except SpecServeError as error:
                self._outbox.append(
                    CallFailed(message.call_id, message.session_id, message.step, error)
                )

    def wait_s(self) -> float | None:
        """Return how long `step` may wait: None without work, 0 with, more while holding."""
        return 0.0 if self._outbox else None

    def _calls(self) -> list[CallState]:
        """Return the calls in flight."""
        return [s.in_flight for s in self._sessions if s.in_flight is not None]

    def _flush(self) -> EngineOutput:
        """Take what there is to say."""
        output = EngineOutput(tuple(self._outbox), self.load)
        self._outbox.clear()
        return output

    def _emit(self, state: CallState, reply: Reply) -> None:
        """Send a reply to all who wait for it; the last one ends the call."""
        self._outbox.append(reply)
        for call_id in state.call_ids[1:]:
            self._outbox.append(replace(reply, call_id=call_id))
        state.emitted.append(reply)
        if isinstance(reply, VerifyReply) and reply.more_follows:
            return
        session = state.session
        session.in_flight = None
        session.stored_replies = tuple(state.emitted)
        session.replied_at = self._clock()

    def _fail(self, state: CallState, error: SpecServeError) -> None:
        """End a call with an error. Nothing is stored: the same step may be tried again."""
        state.session.in_flight = None
        self._answer_failed(state, state.call_ids, error)

    def _answer_failed(self, state: CallState, call_ids: list[int], error: SpecServeError) -> None:
        call = state.call
        self._outbox.extend(
            CallFailed(call_id, call.session_id, call.step, error) for call_id in call_ids
        )

    def _cancel(self, call_id: int, now: float) -> None:
        for state in self._calls():
            if call_id not in state.call_ids:
                continue
            error = DeadlineExpired(
                f"call of session {state.call.session_id}", now - state.arrived_at
            )
            if len(state.call_ids) > 1:
                # Others joined and still wait: only this one leaves.
                state.call_ids.remove(call_id)
                self._answer_failed(state, [call_id], error)
            elif state.cancel():
                if state.emitted or isinstance(state, ProposeState):
                    self._emit(state, state.finish())
                else:
                    self._fail(state, error)
            return

    def _release(self, session_id: str) -> None:
        # It shows that the device lives: where an answer was lost on its way, nothing else would.
        self._num_iterations += 1
        session = self._sessions.release(session_id)
        if session is not None and session.in_flight is not None:
            self._fail(session.in_flight, SessionNotFound(session_id))

    def _preempt(self, session: KvSession) -> None:
        """Take a session's blocks; its call in flight, or its next one, is answered Preempted."""
        state = session.in_flight
        self._sessions.preempt(session)
        if state is not None:
            self._answer_failed(state, state.call_ids, Preempted(session.session_id))
