"""How many log-probabilities a body asks for, of its output and of its prompts.

Knows the fields and sizes; knows no log-probability.
"""

from __future__ import annotations

from collections.abc import Iterable

from specserve.errors import InvalidRequest
from specserve.gateway.requests import ChatRequest, CompletionRequest

MAX_PROMPT_ENTRIES = 1_000_000
"""Log-probabilities of prompts' tokens in one answer, all choices together: 80 MB of JSON, and some
200 MB of values where no two of its choices have their prompt in common."""


def wanted_logprobs(body: CompletionRequest | ChatRequest) -> int:
    """Return how many of the most likely tokens are told per output token; -1 tells nothing."""
    if isinstance(body, ChatRequest):
        return body.top_logprobs if body.logprobs else -1
    return -1 if body.logprobs is None else body.logprobs


def wanted_prompt_logprobs(body: CompletionRequest | ChatRequest) -> dict[str, int]:
    """Return how many are told per token of a prompt, by the field that asks for them."""
    echoed = body.logprobs if isinstance(body, CompletionRequest) and body.echo else None
    wanted = {"prompt_logprobs": body.prompt_logprobs, "logprobs": echoed}
    return {field: num_top for field, num_top in wanted.items() if num_top is not None}


def check_prompt_entries(
    body: CompletionRequest | ChatRequest, prompt_lengths: Iterable[int]
) -> None:
    """Refuse an answer with too many log-probabilities of prompts.

    Args:
        prompt_lengths: tokens of each prompt.

    Raises:
        InvalidRequest: the field that asks for most of them is named.
    """
    wanted = wanted_prompt_logprobs(body)
    # A completion tells them in each of its choices, a chat once.
    num_tokens = sum(prompt_lengths) * (1 if isinstance(body, ChatRequest) else body.n)
    num_entries = sum(num_tokens * (num_top + 1) for num_top in wanted.values())
    if num_entries > MAX_PROMPT_ENTRIES:
        raise InvalidRequest(
            max(wanted, key=lambda field: wanted[field]),
            f"{num_tokens} tokens of prompts, in all choices, would have {num_entries} "
            f"log-probabilities; at most {MAX_PROMPT_ENTRIES} were wanted",
        )
