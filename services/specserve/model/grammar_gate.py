"""An engine behind a gate: calls whose grammar is not compiled yet wait for it, others do not.

A thread compiles (and, the first time, loads the vocabulary), while the engine goes on: one thread
a grammar, however many sessions wait for it. Knows which calls name one; knows no logits and no
grammar's content.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from specserve.config import EngineConfig
from specserve.errors import DeadlineExpired, InvalidRequest, SessionNotFound, SpecServeError
from specserve.grammar.compiler import GrammarCompiler
from specserve.model.engine_base import EngineLike
from specserve.model.messages import (
    Call,
    CallFailed,
    Cancel,
    EngineLoad,
    EngineOutput,
    Message,
    ModelInfo,
    ProposeCall,
    Release,
    VerifyCall,
)
from specserve.model.tokenizer import load_tokenizer

logger = logging.getLogger(__name__)

_Key = tuple[str, bytes]
"""Text of a grammar, and the salt of the tenant who asks."""

_LOOK_S = 0.002
"""While a thread compiles, the device looks so often whether it has done."""


def grammars_of(config: EngineConfig) -> GrammarCompiler:
    """Return what compiles grammars over an engine's vocabulary, which is loaded when asked for."""
    return GrammarCompiler(lambda: load_tokenizer(config).token_table())


class _Compiling:
    """A grammar that a thread compiles."""

    def __init__(self, grammars: GrammarCompiler, key: _Key) -> None:
        self.error: SpecServeError | None = None
        """Why it could not be compiled; to be read when it is over."""
        self._thread = threading.Thread(target=self._run, args=(grammars, key), daemon=True)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        """Whether the thread has ended."""
        return not self._thread.is_alive()

    def _run(self, grammars: GrammarCompiler, key: _Key) -> None:
        try:
            grammars.compile(*key)
        except SpecServeError as error:
            self.error = error
        except BaseException as error:  # a library's panic is no Exception
            logger.exception("compiling a grammar failed")
            # Never left to the engine to find again: it would end of it.
            self.error = InvalidRequest("grammar", f"not to be compiled ({type(error).__name__})")


class _Held:
    """The calls of one session that wait, in order, and what they wait for."""

    def __init__(self, calls: list[Call], compiling: _Compiling, since: float) -> None:
        self.calls = calls
        self.compiling = compiling
        self.since = since


class GrammarGate:
    """An `EngineLike` around another."""

    def __init__(
        self,
        engine: EngineLike,
        grammars: GrammarCompiler,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Wrap an engine that compiles with the same `grammars`."""
        self._engine = engine
        self._grammars = grammars
        self._clock = clock
        self._held: dict[str, _Held] = {}  # {session: its calls}
        self._compiling: dict[_Key, _Compiling] = {}
        self._outbox: list[CallFailed] = []

    @property
    def info(self) -> ModelInfo:
        """What was loaded."""
        return self._engine.info

    @property
    def load(self) -> EngineLoad:
        """How busy the engine is."""
        return self._engine.load

    def submit(self, message: Message) -> None:
        """Take a message; a call may wait here, and those of its session behind it."""
        if isinstance(message, (ProposeCall, VerifyCall)):
            if self._holds(message):
                return
        elif isinstance(message, Cancel):
            if self._cancels(message.call_id):
                return
        elif isinstance(message, Release):
            held = self._held.pop(message.session_id, None)
            for call in [] if held is None else held.calls:
                self._fail(call, SessionNotFound(call.session_id))
        self._engine.submit(message)

    def step(self) -> EngineOutput | None:
        """Run one iteration of the engine, with the calls that need wait no longer."""
        for key in [key for key, compiling in self._compiling.items() if compiling.is_over]:
            self._let_go(self._compiling.pop(key))
        if self._outbox:
            output = EngineOutput(tuple(self._outbox), self._engine.load)
            self._outbox.clear()
            return output
        return self._engine.step()

    def wait_s(self) -> float | None:
        """Return how long `step` may wait: None without work, 0 with, more while holding."""
        if self._outbox:
            return 0.0
        wait_s = self._engine.wait_s()
        if not self._held:
            return wait_s
        if any(compiling.is_over for compiling in self._compiling.values()):
            return 0.0
        return _LOOK_S if wait_s is None else min(wait_s, _LOOK_S)

    def _holds(self, call: Call) -> bool:
        held = self._held.get(call.session_id)
        if held is not None:
            held.calls.append(call)
            return True
        constraints = None if call.opening is None else call.opening.sampling.constraints
        if call.opening is None or constraints is None or not constraints.grammar:
            return False
        key = (constraints.grammar, call.opening.tenant_salt)
        if self._grammars.has(*key):
            return False
        if key not in self._compiling:
            self._compiling[key] = _Compiling(self._grammars, key)
        self._held[call.session_id] = _Held([call], self._compiling[key], self._clock())
        return True

    def _let_go(self, compiling: _Compiling) -> None:
        """Give the engine the calls that waited, or each of them the error."""
        sessions = [s for s, held in self._held.items() if held.compiling is compiling]
        for call in [call for session in sessions for call in self._held.pop(session).calls]:
            if compiling.error is None:
                self._engine.submit(call)
            else:
                self._fail(call, compiling.error)

    def _cancels(self, call_id: int) -> bool:
        for held in self._held.values():
            for call in held.calls:
                if call.call_id == call_id:
                    held.calls.remove(call)
                    waited_s = self._clock() - held.since
                    self._fail(
                        call, DeadlineExpired(f"call of session {call.session_id}", waited_s)
                    )
                    return True
        return False

    def _fail(self, call: Call, error: SpecServeError) -> None:
        self._outbox.append(CallFailed(call.call_id, call.session_id, call.step, error))
