"""The model engine of one replica: sessions in, one ragged forward an iteration, replies out.

Joins the scheduler, a runner and the sampler. Knows no pipe, no process and no network; the clock
comes in, so that tests turn it by hand.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from specserve.config import EngineConfig
from specserve.errors import InvalidRequest, NonFiniteLogits
from specserve.grammar.compiler import GrammarCompiler
from specserve.model.batch_record import BatchRecord
from specserve.model.calls import CallState
from specserve.model.context_ids import ContextIds
from specserve.model.draft_calls import ProposeState
from specserve.model.engine_base import EngineBase
from specserve.model.forward_times import ForwardTimes
from specserve.model.grammar_gate import grammars_of
from specserve.model.greedy_guess import can_guess, guess_tokens
from specserve.model.kv_cache import BlockPool, BlockTable
from specserve.model.messages import (
    Call,
    EngineLoad,
    EngineOutput,
    ModelInfo,
    ProposeCall,
    Reply,
    Role,
)
from specserve.model.outcome_drafter import OutcomeDrafter, draw_tokens
from specserve.model.outcome_plan import AheadForward
from specserve.model.queue_time import QueueTime
from specserve.model.runner import NO_IDS, GuessCall, Runner, SequenceSlice
from specserve.model.sampler import score_rows
from specserve.model.sampler_ops import as_ids
from specserve.model.scheduler import PlannedSlice, Scheduler, skip_cached
from specserve.model.session import KvSession
from specserve.model.target_calls import DecodeState, TargetState, VerifyState

_Answer = Callable[[], Reply | None]
"""Builds a call's reply, None while it goes on; raises NonFiniteLogits or InvalidRequest."""

_BLOCKED_S = 0.5


class Engine(EngineBase):
    """Serve Propose (role draft) or Verify (role target) calls with a model."""

    def __init__(
        self,
        runner: Runner,
        config: EngineConfig,
        *,
        role: Role,
        draft_sample_top_k: int = 64,
        draft_confidence_threshold: float = 0.0,
        num_cached_outcomes: int = 0,
        grammars: GrammarCompiler | None = None,
        record: BatchRecord | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        info = runner.info
        self._runner = runner
        self._record = record or BatchRecord()
        self._info = info
        self._draft_sample_top_k = draft_sample_top_k
        self._confidence_threshold = draft_confidence_threshold
        self._pool = BlockPool(
            info.num_blocks,
            info.block_size,
            fingerprint=f"{info.weights_fingerprint} {info.dtype}",
            enable_prefix_caching=config.enable_prefix_caching,
        )
        self._max_num_seqs = config.max_num_seqs
        self._max_num_batched_tokens = config.max_num_batched_tokens
        super().__init__(
            role=role,
            clock=clock,
            new_blocks=lambda opening: BlockTable(self._pool, opening.tenant_salt),
            vocab_size=info.vocab_size,
            max_length=min(info.max_model_len, info.num_blocks * info.block_size),
            grammars=grammars or grammars_of(config),
        )
        if role == "draft" and runner.guess is not None:
            # Compiled now, and not while the first call waits.
            ids = runner.logit_token_ids
            num_columns = info.vocab_size if ids is None else len(ids)
            runner.guess(torch.zeros(1, num_columns), 0, (0,), 2, 0.0, ids, NO_IDS)
        self._is_in_head: NDArray[np.bool_] | None = None
        """[V], where a cut head takes the ids of a session's text, too."""
        if role == "draft" and runner.takes_context_ids and runner.logit_token_ids is not None:
            self._is_in_head = np.zeros(info.vocab_size, np.bool_)
            self._is_in_head[as_ids(runner.logit_token_ids)] = True
        self._times = ForwardTimes()
        self._queue_time = QueueTime()
        self._busy_s = 0.0
        self._ahead = (
            OutcomeDrafter(
                runner,
                self._pool,
                self._times,
                self._sessions,
                num_outcomes=num_cached_outcomes,
                draft_sample_top_k=draft_sample_top_k,
                confidence_threshold=draft_confidence_threshold,
                max_num_rows=min(config.max_num_seqs, config.max_num_batched_tokens),
                max_length=self._max_length,
                record=self._record,
                clock=clock,
            )
            if num_cached_outcomes and role == "draft"
            else None
        )
        self._scheduler = Scheduler(
            self._pool,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            copy_block=runner.copy_block,
            preempt=self._preempt,
            times=self._times,
            reclaim=self._reclaim,
        )

    @property
    def info(self) -> ModelInfo:
        """What was loaded."""
        return self._info

    @property
    def load(self) -> EngineLoad:
        """How busy the engine is."""
        ahead = self._ahead
        calls = self._calls()
        waiting = [call.arrived_at for call in calls if not call.is_started]
        oldest = min(waiting, default=None)
        return EngineLoad(
            num_free_blocks=self._pool.num_free + (0 if ahead is None else ahead.num_blocks),
            num_blocks=self._pool.num_blocks,
            num_sessions=len(self._sessions),
            num_waiting=len(waiting),
            num_iterations=self._num_iterations,
            outcomes=None if ahead is None else ahead.counts,
            queue_s=self._queue_time.seconds(oldest, self._clock()) if calls else 0.0,
            least_priority=min(
                (s.opening.priority for s in self._sessions if s.blocks and s.blocks.blocks),
                default=0,
            ),
            busy_s=self._busy_s,
        )

    def wait_s(self) -> float | None:
        """Return how long `step` may wait: None without work, 0 with, more while holding."""
        if self._outbox:
            return 0.0
        calls = self._calls()
        if not calls:
            return None if self._ahead is None else self._ahead.wait_s()
        now = self._clock()
        if now < self._blocked_until:
            return self._blocked_until - now
        return self._scheduler.hold_s(calls, self._sessions, now)

    def step(self) -> EngineOutput | None:
        """Run one iteration: answers that need no forward at once, else plan, forward, sample."""
        if self.wait_s() != 0.0:
            return None
        if self._outbox:
            return self._flush()
        calls = self._calls()
        if not calls and self._ahead is not None:
            self._ahead.run()
            self._num_iterations += 1
            return None
        plan = self._scheduler.plan(calls, self._sessions)
        if plan:
            self._run(plan)
        for call in self._calls():
            # The prefix cache can complete an append without any forward.
            if call.num_remaining == 0:
                self._emit(call, call.finish())
        if not plan and not self._outbox:
            # Every call waits for blocks. A message can change that; looking again now and then
            # shows the server that the device is not hung.
            self._blocked_until = self._clock() + _BLOCKED_S
        self._num_iterations += 1
        return self._flush() if self._outbox else None

    def _begin(self, session: KvSession, call: Call, now: float) -> None:
        state = self._new_state(session, call, now)
        session.in_flight = state
        self._publish(state)
        skip_cached(state)
        if state.num_remaining == 0:
            self._emit(state, state.finish())
        else:
            session.call_tokens = state.num_remaining

    def _new_state(self, session: KvSession, call: Call, now: float) -> CallState:
        max_length = self._max_length
        committed_length = call.keep_length + len(call.append_token_ids)
        if isinstance(call, ProposeCall):
            self._note_context(session, call)
            branch = None if self._ahead is None else self._ahead.take(session, call, now)
            num_tokens = min(call.num_speculative_tokens, max_length - committed_length)
            if num_tokens <= 0:
                return CallState(session, call, _feed(session, call, wants_row=False), now)
            if branch is not None:
                state = ProposeState(session, call, (), now, num_tokens, self._confidence_threshold)
                state.resume(branch.drafted, branch.forward_s)
                return state
            feed = _feed(session, call, wants_row=True)
            return ProposeState(session, call, feed, now, num_tokens, self._confidence_threshold)
        if call.append_only:
            return CallState(session, call, _feed(session, call, wants_row=False), now)
        feed = _feed(session, call, wants_row=True)
        if call.draft_token_ids:
            return VerifyState(session, call, feed, now, self._info.vocab_size)
        return DecodeState(session, call, feed, now, max_length)

    def _note_context(self, session: KvSession, call: ProposeCall) -> None:
        """Let a session's rows have columns for the ids of its text."""
        if self._is_in_head is None:
            return
        if session.context_ids is None or call.keep_length == 0:
            session.context_ids = ContextIds(self._is_in_head)
        session.context_ids.follow(session.chain, call.keep_length, call.append_token_ids)

    def _run(self, plan: Sequence[PlannedSlice]) -> None:
        started_at = self._clock()
        num_tokens = sum(item.num_tokens for item in plan)
        for item in plan:
            if item.call.note_start(started_at):
                self._queue_time.note(started_at - item.call.arrived_at)
        riding = self._riding(plan, num_tokens)
        extra = [] if riding is None else riding.slices()
        computed = [item.call.session.session_id for item in plan]
        if riding is not None:
            computed += riding.session_ids
        self._record.begin(computed)
        batch = [_slice(item) for item in plan] + extra
        logits = self._runner.forward(batch)
        for item in plan:
            item.call.advance(item.num_tokens)
            self._publish(item.call)
        wanted = [item.call for item in plan if item.num_rows]
        answers = (
            self._draw(wanted, logits, self._runner.columns(batch), riding, started_at)
            if self._role == "draft"
            else self._score(wanted, logits)
        )
        forward_s = self._clock() - started_at
        self._busy_s += forward_s
        self._times.note(num_tokens + len(extra), forward_s)
        for item in plan:
            item.call.note_forward(forward_s, len(plan), num_tokens)
        for call, answer in zip(wanted, answers, strict=True):
            try:
                reply = answer()
            except (NonFiniteLogits, InvalidRequest) as error:
                self._fail(call, error)
            else:
                if reply is not None:
                    self._emit(call, reply)
        self._record.end()

    def _riding(self, plan: Sequence[PlannedSlice], num_tokens: int) -> AheadForward | None:
        """Choose rows to draft ahead in the forward of a plan."""
        if self._ahead is None or plan[0].call.runs_alone:
            return None
        room = min(self._max_num_seqs - len(plan), self._max_num_batched_tokens - num_tokens)
        return self._ahead.riding(num_tokens, len(plan), room)

    def _draw(
        self,
        calls: Sequence[CallState],
        logits: torch.Tensor,
        token_ids: torch.Tensor | None,
        riding: AheadForward | None,
        started_at: float,
    ) -> list[_Answer]:
        """Draw the next token of every proposing session, and of the branches that ride along."""
        drafting = [call for call in calls if isinstance(call, ProposeState)]
        guess = self._runner.guess
        if guess is not None and len(drafting) == 1 and self._ahead is None:
            call = drafting[0]
            if can_guess(call) and self._is_alone(started_at):
                return [partial(self._guess, guess, call, logits, token_ids)]
        rows = [call.draft_row() for call in drafting]
        if riding is not None:
            rows += riding.draft_rows()
        tokens, tops = draw_tokens(
            logits,
            token_ids,
            rows,
            self._draft_sample_top_k,
            keep_tops=self._ahead is not None,
            with_confidence=self._confidence_threshold > 0,
        )
        if riding is not None and self._ahead is not None:
            forward_s = self._clock() - started_at
            self._ahead.take_drawn(riding, tokens[len(drafting) :], tops, forward_s)
        return [partial(call.drawn, token) for call, token in zip(drafting, tokens, strict=False)]

    def _is_alone(self, now: float) -> bool:
        """Whether no call of another session can be made to wait."""
        return sum(session.is_active(now) for session in self._sessions) == 1

    def _guess(
        self,
        guess: GuessCall,
        call: ProposeState,
        logits: torch.Tensor,
        token_ids: torch.Tensor | None,
    ) -> Reply | None:
        """Draw as many tokens as one call of the runner gives, at least one."""
        started_at, threshold = self._clock(), self._confidence_threshold
        copy_block = self._runner.copy_block
        drafted = guess_tokens(guess, copy_block, self._pool, call, logits, token_ids, threshold)
        if not drafted:
            drafted, _ = draw_tokens(
                logits,
                token_ids,
                [call.draft_row()],
                self._draft_sample_top_k,
                keep_tops=False,
                with_confidence=threshold > 0,
            )
        num_forwards = len(drafted) - 1
        if num_forwards:
            forward_s = self._clock() - started_at
            self._busy_s += forward_s
            self._times.note(1, forward_s / num_forwards)
            self._num_iterations += num_forwards
            call.note_forward(forward_s, 1, 1)
        return call.drawn_all(drafted)

    def _score(self, calls: Sequence[CallState], logits: torch.Tensor) -> list[_Answer]:
        """Score the rows of every verifying or decoding session."""
        scoring = [call for call in calls if isinstance(call, TargetState)]
        if not scoring:
            return []
        rows = [row for call in scoring for row in call.target_rows()]
        scores, now, end = score_rows(logits, rows), self._clock(), 0
        answers: list[_Answer] = []
        for call in scoring:
            start, end = end, end + call.num_rows
            answers.append(partial(call.scored, scores[start:end], now))
        return answers

    def _emit(self, state: CallState, reply: Reply) -> None:
        super()._emit(state, reply)
        if self._ahead is not None and isinstance(state, ProposeState) and not state.call.alone:
            self._ahead.look_ahead(state)

    def _reclaim(self) -> bool:
        return self._ahead is not None and self._ahead.reclaim()

    def _publish(self, call: CallState) -> None:
        session = call.session
        if session.blocks is not None:
            kept_length = min(call.committed_length, session.cached_length)
            session.blocks.publish(session.chain, kept_length)


def _slice(item: PlannedSlice) -> SequenceSlice:
    blocks = item.call.session.blocks
    return SequenceSlice(
        item.call.peek(item.num_tokens),
        item.start,
        [] if blocks is None else blocks.blocks,
        item.num_rows,
        item.call.session.more_ids if item.num_rows else NO_IDS,
    )


def _feed(session: KvSession, call: Call, *, wants_row: bool) -> Sequence[int]:
    """Return the committed tokens to compute, after which all of them are held.

    Where a row is wanted the newest committed token is computed in any case: a call that appends
    nothing new steps back by one token.
    """
    feed = call.append_token_ids[session.cached_length - call.keep_length :]
    if feed or not wants_row:
        return feed
    newest = session.chain.slice(session.cached_length - 1, session.cached_length)
    session.truncate(session.cached_length - 1)
    return newest
