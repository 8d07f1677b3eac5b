"""A lone greedy call's guess in one go, where the runner can: no batch has to be made up anew.

What it gives equals what one forward after another gives (`outcome_drafter.draw_tokens`); only a
message that comes meanwhile is read later. Knows a call, its blocks and a runner.
"""

from __future__ import annotations

import torch

from specserve.model.draft_calls import DraftedToken, ProposeState
from specserve.model.kv_cache import BlockPool, CopyBlock
from specserve.model.runner import GuessCall
from specserve.speculation.scoring import DraftDraw
from specserve.speculation.transforms import is_greedy


def can_guess(call: ProposeState) -> bool:
    """Whether the call's next tokens are each the most likely one of a row that nobody edits."""
    sampling = call.session.opening.sampling
    return (
        not call.drafted
        and not call.is_cancelled
        and sampling.constraints is None
        and is_greedy(sampling)
    )


def guess_tokens(
    guess: GuessCall,
    copy_block: CopyBlock,
    pool: BlockPool,
    call: ProposeState,
    logits: torch.Tensor,
    token_ids: torch.Tensor | None,
    confidence_threshold: float,
) -> list[DraftedToken]:
    """Guess a call's tokens from the [1, V'] logits of its last forward.

    Args:
        token_ids: [V'] of their columns; None where they are the same.

    Returns:
        The tokens, all but the last of them fed. Empty where blocks are short, or the row holds
        what is no number.
    """
    session, num_tokens = call.session, call.num_left
    start = session.cached_length
    end, blocks = start + num_tokens - 1, session.blocks
    if blocks is None or blocks.num_missing(start, end) > pool.num_free:
        return []
    blocks.prepare_write(start, end, copy_block)
    guessed = guess(
        logits,
        start,
        blocks.blocks,
        num_tokens,
        confidence_threshold,
        token_ids,
        session.more_ids,
    )
    # Those of tokens that were not guessed go back.
    blocks.truncate(start + max(0, len(guessed.token_ids) - 1))
    return [
        DraftedToken(DraftDraw(token_id), None, 0, confidence)
        for token_id, confidence in zip(guessed.token_ids, guessed.confidences, strict=True)
    ]
