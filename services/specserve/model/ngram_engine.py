"""The draft engine without a model: sessions of tokens, guesses by prompt lookup.

Keeps the same session rules and answers as the model engine. Holds no KV, so nothing runs out.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from specserve.model.calls import CallState
from specserve.model.engine_base import EngineBase
from specserve.model.messages import (
    Call,
    EngineLoad,
    EngineOutput,
    ModelInfo,
    ProposeCall,
    ProposeReply,
)
from specserve.model.proposers import Proposer, one_hot
from specserve.model.session import KvSession
from specserve.speculation.types import AcceptanceRule

_VOCAB_SIZE = 1 << 31
"""Any id the wire can carry: a proposer copies ids, it never looks them up."""

_MAX_MODEL_LEN = 1 << 24


class NgramEngine(EngineBase):
    """Serve Propose calls from a proposer that looks at the tokens alone."""

    def __init__(
        self,
        proposer: Proposer,
        *,
        name: str = "ngram",
        max_model_len: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._proposer = proposer
        self._info = ModelInfo(
            model_id=name,
            revision="",
            weights_fingerprint="",
            vocab_size=0,
            max_model_len=max_model_len or _MAX_MODEL_LEN,
            dtype="",
            device="cpu",
            num_blocks=0,
            block_size=0,
            weights_bytes=0,
            kv_cache_bytes=0,
        )
        super().__init__(
            role="draft",
            clock=clock,
            new_blocks=lambda _: None,
            vocab_size=_VOCAB_SIZE,
            max_length=self._info.max_model_len,
        )

    @property
    def info(self) -> ModelInfo:
        """What was loaded: no model, so no vocabulary (0) and no blocks."""
        return self._info

    @property
    def load(self) -> EngineLoad:
        """How busy the engine is: it never is."""
        return EngineLoad(0, 0, len(self._sessions), 0, self._num_iterations)

    def step(self) -> EngineOutput | None:
        """Hand over the answers; they were made on arrival."""
        if not self._outbox:
            return None
        self._num_iterations += 1
        return self._flush()

    def _begin(self, session: KvSession, call: Call, now: float) -> None:
        """Append, guess and answer at once.

        As with a model the last guessed token is not held: cached_length = N + K - 1.
        """
        feed = call.append_token_ids[session.cached_length - call.keep_length :]
        state = CallState(session, call, feed, now)
        session.in_flight = state
        state.note_start(now)
        state.advance(len(feed))
        wanted = call.num_speculative_tokens if isinstance(call, ProposeCall) else 0
        wanted = min(wanted, self._max_length - state.committed_length)
        guess = self._proposer.propose(session.chain.tokens, wanted) if wanted > 0 else []
        session.chain.append(guess[:-1])
        state.note_forward(self._clock() - now, 1, len(feed))
        is_standard = session.opening.sampling.rule is AcceptanceRule.STANDARD
        reply = ProposeReply(
            call_id=call.call_id,
            session_id=call.session_id,
            step=call.step,
            cached_length=session.cached_length,
            prefix_cached_tokens=0,
            draft_token_ids=tuple(guess),
            draft_probs=one_hot(guess) if guess and is_standard else None,
            timing=state.timing(),
        )
        self._emit(state, reply)
