"""The round: plan, propose, verify, accept, commit. Read this first.

Knows the order of things; the sessions know the messages, `speculation/acceptance.py` the rule.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import NamedTuple

from specserve.errors import PeerUnavailable, no_token
from specserve.orchestrator.proposer import NOTHING_DRAFTED, Drafted, Proposer, ProposerName
from specserve.orchestrator.provenance import Provenance
from specserve.orchestrator.record import Record, TokenOrigin, origins_of
from specserve.orchestrator.request_length import RequestLength
from specserve.orchestrator.request_state import RequestState
from specserve.orchestrator.target_call import Scored
from specserve.orchestrator.target_session import TargetSession
from specserve.orchestrator.trimming import Emission, Trimmer
from specserve.rpc.v1 import target_pb2
from specserve.speculation.acceptance import accept
from specserve.speculation.randomness import Purpose, RoundUniforms
from specserve.speculation.synthetic import SyntheticAcceptance, accept_synthetic
from specserve.speculation.types import AcceptanceRule, Verification


class Committed(NamedTuple):
    """One committed block, trimmed."""

    token_ids: tuple[int, ...]
    emission: Emission
    origins: tuple[TokenOrigin, ...]
    num_draft_tokens: int
    proposer: ProposerName | None
    num_accepted: int
    logprobs: target_pb2.RowLogprobs | None
    provenance: Provenance | None = None


class Decoder:
    """Decodes one request over a proposer (or none) and a target session."""

    def __init__(
        self,
        state: RequestState,
        target: TargetSession,
        proposer: Proposer | None,
        trimmer: Trimmer,
        length: RequestLength,
        *,
        vocab_size: int,
        synthetic: SyntheticAcceptance | None = None,
    ) -> None:
        """Prepare; `synthetic` replaces the request's rule (benchmarks only)."""
        self.record = Record()
        self._state = state
        self._target = target
        self._proposer = proposer
        self._trimmer = trimmer
        self._length = length
        self._vocab_size = vocab_size
        self._synthetic = synthetic

    async def decode(self) -> AsyncGenerator[Committed, None]:
        """Yield committed blocks until the request is finished.

        Closing the iterator leaves the proposer and the target session to `close`.

        Raises:
            SpecServeError: the request cannot go on; NonFiniteLogits, and InvalidRequest where its
                constraints leave no token.
        """
        finished = False
        while not finished:
            traceparent = self._state.trace.begin_round()
            drafted = await self._propose(traceparent)
            proposal, num_steps = drafted.proposal, self._length.choice.num_steps
            scored = await self._target.verify(
                proposal, 1 if proposal.draft_token_ids else num_steps, traceparent
            )
            while True:
                committed = self._commit(drafted, scored)
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
        """Free both sides. Idempotent."""
        self._length.close()
        self._target.close()
        if self._proposer is not None:
            self._proposer.close()

    async def _propose(self, traceparent: str) -> Drafted:
        await self._length.caught_up()
        k = self._length.plan(traceparent).num_speculative_tokens
        if self._proposer is None or k == 0:
            return NOTHING_DRAFTED
        drafted = await self._proposer.propose(k, traceparent)
        self._length.proposed(drafted)
        return drafted

    def _commit(self, drafted: Drafted, scored: Scored) -> Committed:
        state, proposal = self._state, drafted.proposal
        verdict = self._decide(drafted, scored)
        if verdict.next_token_id < 0:
            accepted = proposal.draft_token_ids[: verdict.num_accepted]
            if not self._trimmer.ends_within(accepted):
                raise no_token(state.request_id, verdict.num_accepted, verdict.next_token_id)
            # No target without drafts would have computed that row: any id does, and is cut off.
            verdict = verdict._replace(next_token_id=accepted[-1])
        token_ids = state.commit(proposal, verdict)
        self._length.scored(scored, verdict.num_accepted)
        self._target.settle()
        if self._proposer is not None:
            self._proposer.settle()
        emission = self._trimmer.take(token_ids)
        origins = origins_of(len(proposal.draft_token_ids), verdict)[: emission.num_tokens]
        choice = self._length.choice
        provenance = self._provenance(drafted, scored)
        self.record.add(len(proposal.draft_token_ids), origins, drafted.proposer)
        self.record.add_choice(choice.num_speculative_tokens, choice.reason)
        self.record.draft_s += drafted.wait_s
        self.record.verify_s += scored.wait_s
        state.trace.note_commit(
            choice,
            drafted.proposer,
            len(proposal.draft_token_ids),
            verdict.num_accepted,
            emission.num_tokens,
            (state.committed_length, state.draft.cached_length, state.target.cached_length),
            provenance.target_probs,
            provenance.draft_probs,
        )
        return Committed(
            token_ids[: emission.num_tokens],
            emission,
            origins,
            len(proposal.draft_token_ids),
            drafted.proposer,
            verdict.num_accepted,
            scored.logprobs,
            provenance,
        )

    def _provenance(self, drafted: Drafted, scored: Scored) -> Provenance:
        trace, draft, target = self._state.trace, None, self._target.link
        if drafted.proposer == "draft_model" and self._proposer is not None:
            draft = self._proposer.link
        return Provenance(
            trace.num_rounds,
            trace.num_emitted_in_round,
            None if draft is None else draft.model,
            None if target is None else target.model,
            scored.scores.target_probs,
            drafted.token_probs,
        )

    def _decide(self, drafted: Drafted, scored: Scored) -> Verification:
        state, proposal = self._state, drafted.proposal
        num_draft_tokens, rule = len(proposal.draft_token_ids), state.sampling.rule
        draws = (
            RoundUniforms(
                state.sampling.seed,
                state.sampling.choice,
                state.committed_length,
                num_draft_tokens,
                Purpose.ACCEPT,
            )
            if num_draft_tokens and (self._synthetic or rule is AcceptanceRule.STANDARD)
            else ()
        )
        if self._synthetic is not None:
            return accept_synthetic(
                proposal, scored.scores, draws, self._synthetic, self._vocab_size
            )
        return accept(proposal, scored.scores, draws, rule, drafted.token_probs)
