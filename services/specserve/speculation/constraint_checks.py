"""Token constraints against a vocabulary and a request's limits: what can be wrong with them.

Gateways ask it before another process sees the request, orchestrators once more. Knows ids and
numbers; knows no text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from specserve.errors import InvalidRequest, quoted
from specserve.speculation.constraints import TokenConstraints


def complete_constraints(
    constraints: TokenConstraints | None,
    *,
    vocab_size: int,
    eos_token_ids: Sequence[int],
    stop_token_ids: Sequence[int],
    prompt_length: int,
    max_tokens: int,
) -> TokenConstraints | None:
    """Fill in where the output starts and which ids may end it; None when nothing is edited.

    Args:
        max_tokens: most output tokens of the request.

    Raises:
        InvalidRequest: an id is out of the vocabulary, min_tokens too large, or nothing could ever
            be emitted.
    """
    if constraints is None:
        return None
    ends = {*eos_token_ids, *stop_token_ids}
    check_ids("logit_bias", [token_id for token_id, _ in constraints.logit_bias], vocab_size)
    for word in constraints.bad_words:
        check_ids("bad_words", word, vocab_size)
    check_ids("allowed_token_ids", constraints.allowed_token_ids, vocab_size)
    if constraints.min_tokens > max_tokens:
        raise InvalidRequest(
            "min_tokens",
            f"{constraints.min_tokens}, at most max_tokens was wanted, here {max_tokens}",
        )
    left = set(constraints.allowed_token_ids)
    left -= {word[0] for word in constraints.bad_words if len(word) == 1}
    left -= ends if constraints.min_tokens > 0 else set()
    if constraints.allowed_token_ids and not left:
        raise InvalidRequest(
            "allowed_token_ids",
            f"{quoted(list(constraints.allowed_token_ids))}: bad_words and min_tokens ban all of "
            "them; at least one that is left was wanted",
        )
    if constraints.grammar and not eos_token_ids:
        raise InvalidRequest("grammar", "the model has no end-of-text token to end it with")
    complete = replace(
        constraints,
        prompt_length=prompt_length,
        end_token_ids=tuple(sorted(ends)),
        eos_token_ids=tuple(sorted(eos_token_ids)) if constraints.grammar else (),
    )
    return None if complete.is_neutral else complete


def check_ids(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Refuse ids that are no tokens.

    Raises:
        InvalidRequest: the first of them is named.
    """
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        wrong = next(t for t in token_ids if not 0 <= t < vocab_size)
        raise InvalidRequest(
            field,
            f"token id {quoted(wrong)} is out of vocabulary; 0 to {vocab_size - 1} was wanted",
        )
