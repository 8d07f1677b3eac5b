"""The round: plan, propose, verify, accept, commit. Read this first.

Knows the order of things; the sessions know the messages, `speculation/acceptance.py` the rule.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass

from opentelemetry import trace

from specserve import telemetry
from specserve.config import OrchestratorConfig
from specserve.errors import PeerUnavailable
from specserve.orchestrator.draft_session import NOTHING_DRAFTED, Drafted, DraftSession
from specserve.orchestrator.record import Record, TokenOrigin, origins_of
from specserve.orchestrator.request_state import RequestState
from specserve.orchestrator.target_session import Scored, TargetSession
from specserve.orchestrator.trimming import Emission, Trimmer
from specserve.rpc.v1 import target_pb2
from specserve.speculation.acceptance import accept
from specserve.speculation.randomness import Purpose, RoundUniforms
from specserve.speculation.types import AcceptanceRule, Proposal, Verification

NUM_STEPS_WITHOUT_DRAFT = 4
"""Tokens decoded ahead while a draft is late or lost: few, so that it is soon asked again."""


@dataclass(frozen=True, slots=True)
class Committed:
    """One committed block, trimmed."""

    token_ids: tuple[int, ...]
    emission: Emission
    origins: tuple[TokenOrigin, ...]
    num_accepted: int
    logprobs: target_pb2.RowLogprobs | None


class Decoder:
    """Decodes one request over a draft session (or none) and a target session."""

    def __init__(
        self,
        state: RequestState,
        target: TargetSession,
        draft: DraftSession | None,
        trimmer: Trimmer,
        config: OrchestratorConfig,
        span: trace.Span,
    ) -> None:
        self.record = Record()
        self._state = state
        self._target = target
        self._draft = draft
        self._trimmer = trimmer
        self._config = config
        self._span = span
        self._tracer = trace.get_tracer("specserve.orchestrator")

    async def decode(self) -> AsyncGenerator[Committed, None]:
        """Yield committed blocks until the request is finished.

        Closing the iterator leaves both sessions to `close`.
        """
        finished = False
        first = True
        while not finished:
            drafted, num_steps = NOTHING_DRAFTED, self._num_plain_steps()
            span = self._start_round()
            traceparent = telemetry.to_traceparent(span)
            try:
                if not first:
                    drafted = await self._propose(traceparent)
                elif self._catch_up(traceparent):
                    # Prompt prefill and the first token; the draft appends the prompt beside it.
                    num_steps = 1
                proposal = drafted.proposal
                scored = await self._target.verify(
                    proposal, 1 if proposal.draft_token_ids else num_steps, traceparent
                )
            except BaseException:
                span.end()
                raise
            first = False
            while True:
                committed = self._commit(drafted, scored)
                self._end_round(span, proposal, committed)
                finished = committed.emission.finish_reason is not None
                if finished and scored.more_follows:
                    self._target.give_up_decode_ahead()
                yield committed
                if finished or not scored.more_follows:
                    break
                drafted = NOTHING_DRAFTED
                try:
                    scored = await self._target.next_token()
                except PeerUnavailable:
                    break

    def close(self) -> None:
        """Free both sessions. Idempotent."""
        self._target.close()
        if self._draft is not None:
            self._draft.close()

    def _num_plain_steps(self) -> int:
        state = self._state
        wanted = self._config.num_decode_steps
        if self._draft is not None and state.num_speculative_tokens > 0:
            wanted = min(wanted, NUM_STEPS_WITHOUT_DRAFT)
        return max(1, min(wanted, state.num_remaining_tokens))

    def _catch_up(self, traceparent: str) -> bool:
        """Let the draft append what is committed, without waiting for it; False without one."""
        draft, state = self._draft, self._state
        # With two tokens left the first round leaves one, and one needs no draft.
        if draft is None or state.num_remaining_tokens < 3 or draft.busy or not draft.attach():
            return False
        if draft.max_model_len and state.committed_length >= draft.max_model_len:
            return False
        draft.start(0, traceparent, self._config.draft_timeout_s)
        return True

    async def _propose(self, traceparent: str) -> Drafted:
        draft, state = self._draft, self._state
        if draft is None or draft.busy or not draft.attach():
            return NOTHING_DRAFTED
        k = state.plan_num_speculative_tokens(draft.max_model_len)
        if k == 0:
            return NOTHING_DRAFTED
        draft.start(k, traceparent, self._config.draft_timeout_s)
        return await draft.collect(self._config.draft_timeout_s)

    def _commit(self, drafted: Drafted, scored: Scored) -> Committed:
        state, proposal = self._state, drafted.proposal
        verdict = self._decide(drafted, scored)
        token_ids = state.commit(proposal, verdict)
        self._target.settle()
        if self._draft is not None:
            self._draft.settle()
        emission = self._trimmer.take(token_ids)
        origins = origins_of(len(proposal.draft_token_ids), verdict)[: emission.num_tokens]
        self.record.add(len(proposal.draft_token_ids), origins)
        self.record.draft_s += drafted.wait_s
        self.record.verify_s += scored.wait_s
        return Committed(
            token_ids[: emission.num_tokens],
            emission,
            origins,
            verdict.num_accepted,
            scored.logprobs,
        )

    def _decide(self, drafted: Drafted, scored: Scored) -> Verification:
        state, proposal = self._state, drafted.proposal
        num_draft_tokens = len(proposal.draft_token_ids)
        draws = (
            RoundUniforms(
                state.sampling.seed,
                state.sampling.choice,
                state.committed_length,
                num_draft_tokens,
                Purpose.ACCEPT,
            )
            if num_draft_tokens and state.sampling.rule is AcceptanceRule.STANDARD
            else ()
        )
        return accept(proposal, scored.scores, draws, state.sampling.rule, drafted.token_probs)

    def _start_round(self) -> trace.Span:
        if not self._span.is_recording():
            return trace.INVALID_SPAN
        return self._tracer.start_span(
            telemetry.SPAN_ROUND, context=trace.set_span_in_context(self._span)
        )

    def _end_round(self, span: trace.Span, proposal: Proposal, committed: Committed) -> None:
        if span.is_recording():
            state = self._state
            span.set_attributes(
                {
                    telemetry.ATTRIBUTE_NUM_SPECULATIVE_TOKENS: state.num_speculative_tokens,
                    telemetry.ATTRIBUTE_NUM_DRAFT_TOKENS: len(proposal.draft_token_ids),
                    telemetry.ATTRIBUTE_NUM_ACCEPTED_TOKENS: committed.num_accepted,
                    telemetry.ATTRIBUTE_COMMITTED_LENGTH: state.committed_length,
                    telemetry.ATTRIBUTE_TARGET_CACHED_LENGTH: state.target.cached_length,
                    telemetry.ATTRIBUTE_DRAFT_CACHED_LENGTH: state.draft.cached_length,
                }
            )
            span.end()
