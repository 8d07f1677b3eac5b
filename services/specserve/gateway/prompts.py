"""Prompts to token ids, without holding the event loop up.

Knows the tokenizer and the body's messages; knows no vocabulary limits and no context length.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from specserve.errors import InvalidRequest
from specserve.gateway.off_loop import in_thread_if
from specserve.gateway.requests import ChatRequest, CompletionRequest

if TYPE_CHECKING:  # it brings the tokenizer library along, which a fake does not need
    from specserve.model.tokenizer import Tokenizer

_TEMPLATE_ROLES = {"developer": "system"}
"""Chat templates know the older name."""


async def completion_prompts(
    body: CompletionRequest, tokenizer: Tokenizer, thread_chars: int
) -> list[list[int]]:
    """Return the token ids of every prompt, in order.

    Texts that are together longer than `thread_chars` are tokenised in a worker thread.
    """
    texts = [prompt for prompt in body.prompt if isinstance(prompt, str)]

    def encode() -> list[list[int]]:
        return [
            tokenizer.encode(prompt, add_special_tokens=True) if isinstance(prompt, str) else prompt
            for prompt in body.prompt
        ]

    return await in_thread_if(sum(map(len, texts)) > thread_chars, encode)


async def text_prompt(
    text: str, tokenizer: Tokenizer, thread_chars: int, *, special: bool
) -> list[int]:
    """Return the token ids of one text, with the tokens that a text begins with or without."""
    return await in_thread_if(
        len(text) > thread_chars, lambda: tokenizer.encode(text, add_special_tokens=special)
    )


async def chat_prompt(body: ChatRequest, tokenizer: Tokenizer, thread_chars: int) -> list[int]:
    """Return the token ids of the chat, up to where the assistant speaks.

    Raises:
        InvalidRequest: the model's template refuses the messages.
    """
    messages = [
        {"role": _TEMPLATE_ROLES.get(message.role, message.role), "content": message.content}
        | ({"name": message.name} if message.name is not None else {})
        for message in body.messages
    ]

    def encode() -> list[int]:
        try:
            return tokenizer.apply_chat_template(messages)
        except InvalidRequest:
            raise
        except Exception as error:  # noqa: BLE001
            # Templates are programs of the model's makers; what they raise is about the messages.
            # Its text may quote them, so only its class is told.
            raise InvalidRequest(
                "messages", f"the model's chat template refuses them ({type(error).__name__})"
            ) from None

    num_chars = sum(len(message["content"]) for message in messages)
    return await in_thread_if(num_chars > thread_chars, encode)
