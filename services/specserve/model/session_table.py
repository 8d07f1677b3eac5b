"""The session rules: which calls are let in, joined, answered again or refused.

Knows epochs, steps and kept lengths; knows no logits, no forward and no batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial

from specserve.config import MAX_NUM_SPECULATIVE_TOKENS
from specserve.errors import (
    CacheMismatch,
    CapacityExhausted,
    InvalidProposal,
    InvalidRequest,
    Preempted,
    SessionNotFound,
    StaleStep,
)
from specserve.grammar.compiler import GrammarCompiler
from specserve.model.kv_cache import BlockTable
from specserve.model.messages import (
    Call,
    CallFailed,
    ProposeCall,
    Reply,
    SessionOpening,
    VerifyCall,
)
from specserve.model.session import KvSession
from specserve.speculation.acceptance import row_weight_sums
from specserve.speculation.token_matcher import TokenMatcher
from specserve.speculation.types import AcceptanceRule, SparseProbs


class SessionTable:
    """The sessions of one engine and the rules by which calls enter (design, invariant 9)."""

    def __init__(
        self,
        *,
        new_blocks: Callable[[SessionOpening], BlockTable | None],
        answer: Callable[[Reply], None],
        vocab_size: int,
        max_length: int,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        """Build an empty table.

        Args:
            new_blocks: makes the empty block table of a new session.
            answer: sends a reply.
            vocab_size: appended ids must lie below it.
            max_length: most tokens a session may ever hold.
            grammars: reads the grammars of constrained sessions; None refuses those.
        """
        self._new_blocks = new_blocks
        self._answer = answer
        self._vocab_size = vocab_size
        self._max_length = max_length
        self._grammars = grammars
        self._sessions: dict[str, KvSession] = {}
        self._num_opened = 0

    def __iter__(self) -> Iterator[KvSession]:
        return iter(self._sessions.values())

    def __len__(self) -> int:
        return sum(not session.preempted for session in self._sessions.values())

    def get(self, session_id: str) -> KvSession | None:
        """Return a session, if held."""
        return self._sessions.get(session_id)

    def admit(self, call: Call, now: float) -> KvSession | None:
        """Let a call in and roll its session back to what the call keeps.

        What lies beyond `keep_length` is invisible, but where it equals the tokens to append it is
        what computing them again would give, so it stays: `cached_length` afterwards is keep_length
        plus the appended tokens that were held already (a lost reply costs no second prefill).

        Returns:
            The session, ready for the call; None when the call was answered here (it joined the
            same step in flight, or got the stored reply).

        Raises:
            SpecServeError: the call is refused; its session is as it was, but for an older call in
                flight, which a newer step ends.
        """
        session = self._sessions.get(call.session_id)
        if session is None:
            if call.opening is None:
                raise SessionNotFound(call.session_id)
            return self._open(call, call.opening, now)
        if self._is_repeat(session, call):
            return None
        session.note_arrival(now)
        if session.preempted:
            del self._sessions[call.session_id]
            if call.opening is None or call.keep_length > 0:
                raise Preempted(call.session_id)
            return self._open(call, call.opening, now)
        opening = call.opening or session.opening
        self._check(call, opening)
        self._check_kept(session, call)
        if opening.tenant_salt != session.opening.tenant_salt:
            # Blocks must not cross tenants, not even under one session id.
            session.truncate(0)
            session.blocks = self._new_blocks(opening)
            if call.keep_length > 0:
                raise CacheMismatch(0, call.keep_length)
        if call.opening is not None:
            session.new_matcher = self._matchers(opening)
        session.opening = opening
        session.truncate(call.keep_length + self._num_held(session, call))
        return session

    def preempt(self, session: KvSession) -> list[int]:
        """Take a session's blocks away; return the ids of the calls this fails."""
        failed = list(session.in_flight.call_ids) if session.in_flight is not None else []
        session.in_flight = None
        session.truncate(0)
        if failed:
            del self._sessions[session.session_id]
        else:
            session.preempted = True
            session.replied_at = None
        return failed

    def release(self, session_id: str) -> KvSession | None:
        """Forget a session and free what it holds; a second time is harmless."""
        session = self._sessions.pop(session_id, None)
        if session is not None:
            session.truncate(0)
        return session

    def _open(self, call: Call, opening: SessionOpening, now: float) -> KvSession:
        if call.keep_length > 0:
            raise CacheMismatch(0, call.keep_length)
        self._check(call, opening)
        session = KvSession(
            session_id=call.session_id,
            opening=opening,
            epoch=call.epoch,
            since=now - opening.age_s,
            serial=self._num_opened,
            blocks=self._new_blocks(opening),
            last_step=call.step,
            new_matcher=self._matchers(opening),
        )
        self._num_opened += 1
        self._sessions[call.session_id] = session
        return session

    def _matchers(self, opening: SessionOpening) -> Callable[[], TokenMatcher] | None:
        """Return what makes matchers of an opening's grammar.

        Raises:
            InvalidRequest: it is none, or nothing here reads grammars.
        """
        constraints = opening.sampling.constraints
        if constraints is None or not constraints.grammar:
            return None
        if self._grammars is None:
            raise InvalidRequest("grammar", "this engine reads none")
        grammar = self._grammars.compile(constraints.grammar, opening.tenant_salt)
        return partial(grammar.matcher, constraints.eos_token_ids)

    def _is_repeat(self, session: KvSession, call: Call) -> bool:
        """Order a call against the last one; join or replay it when it is the same."""
        if call.epoch < session.epoch or (
            call.epoch == session.epoch and call.step < session.last_step
        ):
            raise StaleStep(call.epoch, call.step, session.epoch, session.last_step)
        if call.epoch == session.epoch and call.step == session.last_step:
            if session.in_flight is not None:
                session.in_flight.call_ids.append(call.call_id)
                self._resend(session.in_flight.emitted, call.call_id)
                return True
            if session.stored_replies:
                self._resend(session.stored_replies, call.call_id)
                return True
            # The step failed before: it may be tried again.
        if session.in_flight is not None:
            older = session.in_flight
            session.in_flight = None
            error = StaleStep(session.epoch, session.last_step, call.epoch, call.step)
            for call_id in older.call_ids:
                self._answer(CallFailed(call_id, session.session_id, session.last_step, error))
        session.epoch, session.last_step = call.epoch, call.step
        session.stored_replies = ()
        return False

    def _resend(self, replies: Iterable[Reply], call_id: int) -> None:
        for reply in replies:
            self._answer(replace(reply, call_id=call_id))

    def _check(self, call: Call, opening: SessionOpening) -> None:
        """Refuse what can never be served."""
        appended = call.append_token_ids
        if appended and (min(appended) < 0 or max(appended) >= self._vocab_size):
            raise InvalidProposal(f"append_token_ids: an id outside [0, {self._vocab_size})")
        committed_length = call.keep_length + len(call.append_token_ids)
        if call.keep_length < 0 or committed_length == 0:
            raise InvalidProposal("a call needs at least one committed token")
        length = committed_length
        if isinstance(call, VerifyCall):
            num_draft_tokens = len(call.draft_token_ids)
            length += num_draft_tokens
            if num_draft_tokens > MAX_NUM_SPECULATIVE_TOKENS:
                raise InvalidProposal(
                    f"{num_draft_tokens} draft tokens, at most {MAX_NUM_SPECULATIVE_TOKENS}"
                )
            if num_draft_tokens and opening.sampling.rule is AcceptanceRule.STANDARD:
                if call.draft_probs is None:
                    raise InvalidProposal("draft_probs: missing, the standard rule needs them")
                _check_probs(call.draft_probs, num_draft_tokens)
        elif isinstance(call, ProposeCall) and call.num_speculative_tokens < 0:
            raise InvalidProposal(f"num_speculative_tokens: {call.num_speculative_tokens}")
        if length > self._max_length:
            raise CapacityExhausted("tokens of one session", length, self._max_length)

    def _num_held(self, session: KvSession, call: Call) -> int:
        """Count the leading appended tokens that the cache already holds after keep_length."""
        end = call.keep_length + len(call.append_token_ids)
        held = session.chain.slice(call.keep_length, end)
        for index, (ours, theirs) in enumerate(zip(held, call.append_token_ids, strict=False)):
            if ours != theirs:
                return index
        return len(held)

    def _check_kept(self, session: KvSession, call: Call) -> None:
        """Compare the kept tokens by digest."""
        matching_length = session.chain.matching_length(call.keep_length, call.keep_digest)
        if matching_length < call.keep_length:
            raise CacheMismatch(matching_length, call.keep_length)


def _check_probs(probs: SparseProbs, num_draft_tokens: int) -> None:
    """Refuse a q that is none, before it shares a batch with others."""
    if len(probs.weights) != num_draft_tokens:
        raise InvalidProposal(
            f"draft_probs: {len(probs.weights)} rows for {num_draft_tokens} draft tokens"
        )
    row_weight_sums(probs)
