"""Which proposer a request gets, and the past outputs that suffix decoding looks into.

The only place where all proposers are named. Knows no round.
"""

from __future__ import annotations

import asyncio
from contextlib import closing

from specserve.config import OrchestratorConfig, SpeculativeConfig
from specserve.config_parsing import check_speculative
from specserve.orchestrator.cascade import Cascade
from specserve.orchestrator.draft_session import DraftSession
from specserve.orchestrator.lookup import LookupProposer
from specserve.orchestrator.pool import Pool
from specserve.orchestrator.proposer import Proposer
from specserve.orchestrator.request_state import RequestState
from specserve.rpc.v1 import common_pb2, draft_pb2
from specserve.speculation.ngram import NgramGuesser
from specserve.speculation.past_outputs import DrawKey, PastOutputs
from specserve.speculation.suffix import SuffixGuesser, SuffixParams
from specserve.speculation.types import AcceptanceRule

DraftPool = Pool[draft_pb2.ProposeCall, draft_pb2.ProposeReply]


class Proposers:
    """Makes the proposer of each request of one orchestrator."""

    def __init__(self, config: OrchestratorConfig, drafts: DraftPool | None) -> None:
        """Prepare for a deployment.

        Raises:
            ConfigurationError: settings of the methods contradict one another.
        """
        speculative = config.speculative or SpeculativeConfig()
        check_speculative(speculative)
        self._config = speculative
        self._draft_timeout_s = config.draft_timeout_s
        self._drafts = drafts
        self._suffix = SuffixParams(
            speculative.suffix_decoding_max_tree_depth,
            speculative.suffix_decoding_max_spec_factor,
            speculative.suffix_decoding_min_token_prob,
        )
        self.past = PastOutputs(
            speculative.suffix_decoding_max_cached_requests,
            speculative.suffix_decoding_max_cached_tokens,
            speculative.suffix_decoding_max_tree_depth,
        )
        """Outputs of finished requests; empty unless the configuration asks for them."""
        self._adding = asyncio.Lock()

    def make(
        self, state: RequestState, opening: common_pb2.SessionOpening, tenant_salt: bytes
    ) -> Proposer | None:
        """Make a request's proposer; None when it is decoded target-only."""
        if state.num_speculative_tokens == 0:
            return None
        match state.method:
            case "ngram":
                return self._ngram(state)
            case "suffix":
                return self._suffix_of(state, tenant_salt)
            case "draft_model":
                return self._draft(state, opening)
            case "cascade":
                draft, suffix = self._draft(state, opening), self._suffix_of(state, tenant_salt)
                if draft is None:
                    return suffix
                return Cascade(state, suffix, draft, self._config.cascade_min_match_length)
            case None:
                return None

    async def finished(self, state: RequestState, tenant_salt: bytes, num_cut_tokens: int) -> None:
        """Keep a finished request's output for its tenant's next ones.

        Args:
            num_cut_tokens: committed tokens at the end that were trimmed and belong to no output.
        """
        end = state.committed_length - num_cut_tokens
        output = state.chain.slice(state.prompt_length, end)
        async with self._adding:
            with closing(self.past.add(tenant_salt, _draw_key(state), output)) as pieces:
                for _ in pieces:
                    await asyncio.sleep(0)

    def _draft(
        self, state: RequestState, opening: common_pb2.SessionOpening
    ) -> DraftSession | None:
        if self._drafts is None:
            return None
        return DraftSession(state, self._drafts, opening, timeout_s=self._draft_timeout_s)

    def _ngram(self, state: RequestState) -> LookupProposer:
        guesser = NgramGuesser(self._config.prompt_lookup_min, self._config.prompt_lookup_max)
        return LookupProposer("ngram", state, guesser)

    def _suffix_of(self, state: RequestState, tenant_salt: bytes) -> LookupProposer:
        # What this request's own uniforms once made must not be proposed to them.
        is_standard = state.sampling.rule is AcceptanceRule.STANDARD
        but_not = _draw_key(state) if is_standard else None
        guesser = SuffixGuesser(self._suffix, lambda: self.past.of(tenant_salt, but_not))
        return LookupProposer("suffix", state, guesser)


def _draw_key(state: RequestState) -> DrawKey:
    return state.sampling.seed, state.sampling.choice
