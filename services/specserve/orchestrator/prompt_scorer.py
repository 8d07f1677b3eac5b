"""Log-probabilities of a prompt's own tokens, by the calls that verify draft tokens.

A session of its own holds the prompt's first token; those behind it are sent as draft tokens, block
by block, so that each row tells what the target gave the token that really follows. Whatever the
target decides about them, they stand. Knows a target session; knows no proposer and no output.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable

from specserve.config import MAX_NUM_SPECULATIVE_TOKENS
from specserve.errors import no_token
from specserve.orchestrator.pool import Pool
from specserve.orchestrator.request_state import RequestState
from specserve.orchestrator.responses import token_logprobs
from specserve.orchestrator.target_session import TargetSession
from specserve.rpc.v1 import generation_pb2, target_pb2
from specserve.speculation.digest import TokenChain
from specserve.speculation.types import AcceptanceRule, Proposal, SamplingParams, Verification

TargetPool = Pool[target_pb2.VerifyCall, target_pb2.VerifyReply]


async def score_prompt(
    state: RequestState,
    num_logprobs: int,
    num_received: int,
    open_session: Callable[[RequestState], TargetSession],
    block_size: int,
    traceparent: str,
) -> AsyncGenerator[list[generation_pb2.TokenLogprob], None]:
    """Yield the log-probabilities of the prompt's tokens from its second one on, in order.

    Closing the iterator frees the session.

    Args:
        num_logprobs: most likely tokens told beside each; 0 tells the prompt's own only.
        num_received: so many of them are not wanted again.
        open_session: makes the target session of a state.
        block_size: most draft tokens that every target takes.

    Raises:
        SpecServeError: no target answered, or a row is not finite.
    """
    prompt = state.chain.slice(0, state.prompt_length)
    scored = _scoring_state(state, num_logprobs, num_received + 1)
    target = open_session(scored)
    try:
        while (start := scored.committed_length) < len(prompt):
            block = tuple(prompt[start : start + block_size])
            answer = await target.verify(Proposal(block, None), 1, traceparent)
            for row, token_id in enumerate(answer.scores.replacement_token_ids[: len(block)]):
                if token_id < 0:
                    raise no_token(state.request_id, start + row, token_id)
            # The prompt's next tokens are certain: as if the target had accepted all of them.
            scored.commit(Proposal(block[:-1], None), Verification(len(block) - 1, block[-1]))
            target.settle()
            if answer.logprobs is not None:
                yield token_logprobs(answer.logprobs, len(block), len(block))
    finally:
        target.close()


def largest_block(pool: TargetPool) -> int:
    """Return how many draft tokens each known target takes in one call."""
    told = (link.model.max_num_speculative_tokens for link in pool.links.values() if link.model)
    return min(filter(None, told), default=MAX_NUM_SPECULATIVE_TOKENS)


def _scoring_state(state: RequestState, num_logprobs: int, num_known: int) -> RequestState:
    """Make the bookkeeping of a session that decodes nothing and is bound by no constraint."""
    chain = TokenChain()
    chain.append(state.chain.slice(0, num_known))
    return RequestState(
        request_id=state.request_id,
        session_id=f"{state.session_id}-prompt",
        sampling=SamplingParams(
            rule=AcceptanceRule.GREEDY,
            seed=0,
            choice=0,
            temperature=0.0,
            num_logprobs=num_logprobs,
        ),
        prompt_length=num_known,
        max_tokens=state.prompt_length,
        max_model_len=state.max_model_len,
        num_speculative_tokens=0,
        chain=chain,
        target_deaths=state.target_deaths,
    )
