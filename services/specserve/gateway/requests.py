"""The bodies of both endpoints, and reading them.

Knows JSON and field names; knows no tokens and no pair. A null is an absent field. Every field
that is not honoured is refused by name, unless it says what would happen anyway.
"""

from __future__ import annotations

import difflib
from functools import partial
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, FailFast, Field, PlainValidator, ValidationError
from pydantic_core import from_json

from specserve.errors import QUOTED_CHARACTERS, InvalidRequest, quoted
from specserve.gateway.fields import MAX_INT, Body, GenerationFields
from specserve.gateway.off_loop import LONG_BODY_BYTES, in_thread_if

Prompt = str | list[int]
"""Text, or token ids that are not yet checked against the vocabulary."""


PromptText = Annotated[str, Field(min_length=1)]
PromptIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]


def _is_id_list(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


def _read_prompts(value: object) -> list[Prompt]:
    """Tell the four forms of a prompt apart; [0] is one prompt of one token, not an empty one."""
    if isinstance(value, str) or (value and _is_id_list(value)):
        value = [value]
    if not isinstance(value, list):
        raise ValueError("a string, strings, token ids or lists of token ids were wanted")
    if not value:
        raise ValueError("empty; at least one token was wanted")
    if not (all(isinstance(item, str) for item in value) or all(map(_is_id_list, value))):
        raise ValueError("strings or lists of token ids were wanted, all of one kind")
    for number, item in enumerate(value):
        if not item:
            raise ValueError(f"prompt {number} is empty; at least one token was wanted")
    return value


class CompletionRequest(GenerationFields):
    """The body of `/v1/completions`."""

    prompt: Annotated[
        list[Prompt],
        PlainValidator(
            _read_prompts,
            json_schema_input_type=PromptText | list[PromptText] | PromptIds | list[PromptIds],
        ),
    ]
    """Text, texts, token ids, or lists of token ids."""
    max_tokens: int | None = Field(None, ge=0, le=MAX_INT)
    """Most output tokens per choice; 0 only together with `echo`."""
    logprobs: int | None = Field(None, ge=0)
    """Top log-probabilities per token; 0 asks for the emitted token's only."""
    echo: bool = False
    """Put the prompt before the text of each choice, and before its `logprobs` if asked for."""


class TextPart(Body):
    """A part of a message; only text is taken."""

    type: Literal["text"]
    """Nothing but text is taken."""
    text: str
    """The part's text."""


def _read_content(value: object) -> str:
    """Join the parts of a message; the first wrong one is told, not all of a million."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("a string or a list of text parts was wanted")
    for number, part in enumerate(value):
        if not isinstance(part, dict) or part.get("type") != "text":
            raise ValueError(f"part {number} is no text part; only text is supported")
        if not isinstance(part.get("text"), str) or len(part) > len(TextPart.model_fields):
            raise ValueError(f"part {number} wants a type and a text, and nothing else")
    return "".join(part["text"] for part in value)


class ChatMessage(Body):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    """Who speaks; a developer is the template's system."""
    content: Annotated[
        str, PlainValidator(_read_content, json_schema_input_type=str | list[TextPart])
    ]
    """Text, or text parts; their texts joined."""
    name: str | None = None
    """Handed to the model's template, which may use it."""


class ChatRequest(GenerationFields):
    """The body of `/v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], FailFast()] = Field(min_length=1)
    """The chat so far; the assistant speaks next."""
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_INT)
    """Newer name of `max_tokens`."""
    logprobs: bool = False
    """Answer the log-probability of every emitted token."""
    top_logprobs: int = Field(0, ge=0)
    """Top log-probabilities per token; needs `logprobs`."""


NEUTRAL: dict[str, tuple[object, ...]] = {
    "audio": (),
    "best_of": (1,),
    "add_generation_prompt": (True,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "prompt_cache_key": (),
    "reasoning_effort": (),
    "safety_identifier": (),
    "spaces_between_special_tokens": (True,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": (),
    "web_search_options": (),
}
"""Known fields that are not honoured yet, with the values that change nothing: clients send those
as a matter of course. Anything else gets a 400."""

_VERBATIM = ("response_format", "structured_outputs", "guided_json")
"""Fields with a JSON schema in them, where a null may be a value."""

R = TypeVar("R", bound=BaseModel)


def parse_body(raw: bytes, kind: type[R]) -> R:
    """Read a body.

    Raises:
        InvalidRequest: it is no JSON object, or a field is wrong; the first such is named.
    """
    try:
        fields = from_json(raw, allow_inf_nan=True)
    except ValueError as error:
        # The parser's own text gives line and column, and quotes nothing.
        raise InvalidRequest("", f"the body is not valid JSON: {error}") from None
    if not isinstance(fields, dict):
        raise InvalidRequest("", "the body is not a JSON object")
    fields = {
        name: value if name in _VERBATIM else _without_nulls(value)
        for name, value in fields.items()
        if value is not None
    }
    for name in [name for name in fields if name not in kind.model_fields]:
        _check_unhonoured(name, fields.pop(name), kind)
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise _first_fault(error) from None


async def parsed_body(raw: bytes, kind: type[R]) -> R:
    """Read a body as `parse_body` does, a long one off the event loop."""
    return await in_thread_if(len(raw) > LONG_BODY_BYTES, partial(parse_body, raw, kind))


def _without_nulls(value: object) -> object:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return [_without_nulls(item) for item in value]
    return value


def _check_unhonoured(name: str, value: object, kind: type[BaseModel]) -> None:
    if not name:
        raise InvalidRequest("", "the body is wrong: a field of it has no name")
    shown = _cut(name)
    if name in NEUTRAL:
        # True == 1, but a flag is no number here.
        neutral = [
            item for item in NEUTRAL[name] if isinstance(item, bool) == isinstance(value, bool)
        ]
        if value in neutral:
            return
        raise InvalidRequest(shown, "this field is not supported yet")
    near = difflib.get_close_matches(shown, kind.model_fields, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise InvalidRequest(shown, f"unknown field{hint}")


def _first_fault(error: ValidationError) -> InvalidRequest:
    fault = error.errors(include_url=False, include_context=False)[0]
    path = ""
    for step in fault["loc"]:
        if isinstance(step, int):
            path += f"[{step}]"
        else:
            path += f".{step}" if path else step
    message = fault["msg"].removeprefix("Value error, ")
    if message == fault["msg"] and isinstance(fault["input"], str | int | float):
        # Our own messages tell the value where it helps.
        message = f"{quoted(fault['input'])}: {message}"
    return InvalidRequest(_cut(path), message)


def _cut(name: str) -> str:
    """Shorten a field's name: an unknown one may be as long as the body."""
    return name if len(name) <= QUOTED_CHARACTERS else f"{name[:QUOTED_CHARACTERS]}…"
