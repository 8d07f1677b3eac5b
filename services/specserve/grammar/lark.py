"""What clients write, as one Lark grammar: a JSON schema, a regular expression, choices.

Pure text to text; knows sizes, reads no grammar. What it makes may still be wrong: the compiler
says so.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from specserve.errors import InvalidRequest

MAX_SCHEMA_CHARACTERS = 65_536
"""Of a JSON schema and of a grammar."""
MAX_REGEX_CHARACTERS = 8192
MAX_CHOICES = 1024

Schema = Mapping[str, object] | str
"""A JSON schema, or its text."""

_OPTIONS = "x-guidance"
"""Where the library reads a schema's options."""


def json_grammar(
    field: str,
    schema: Schema,
    *,
    any_whitespace: bool = True,
    whitespace_pattern: str | None = None,
) -> str:
    """Return the grammar of the JSON texts that a schema describes.

    Args:
        field: where the schema stands, for errors.
        any_whitespace: between tokens of JSON; else there is none.
        whitespace_pattern: a regular expression of the whitespace; None takes JSON's.

    Raises:
        InvalidRequest: it is no object, or too large.
    """
    if isinstance(schema, str):
        _check_size(field, schema, MAX_SCHEMA_CHARACTERS)
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(field, f"not valid JSON: {error}") from None
    if not isinstance(schema, Mapping):
        raise InvalidRequest(field, "an object was wanted: a JSON schema")
    options: dict[str, object] = {}
    if not any_whitespace:
        options["whitespace_flexible"] = False
    if whitespace_pattern is not None:
        _check_size(field, whitespace_pattern, MAX_REGEX_CHARACTERS)
        options["whitespace_pattern"] = whitespace_pattern
    # The options are ours to give: a schema's own would be the library's, not JSON Schema's.
    schema = {key: value for key, value in schema.items() if key != _OPTIONS}
    try:
        text = json.dumps({**schema, _OPTIONS: options} if options else schema, allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(field, f"not valid JSON: {error}") from None
    _check_size(field, text, MAX_SCHEMA_CHARACTERS)
    return f"start: %json {text}"


def regex_grammar(field: str, pattern: str) -> str:
    """Return the grammar of the texts that a regular expression matches from end to end.

    Raises:
        InvalidRequest: it is too long.
    """
    _check_size(field, pattern, MAX_REGEX_CHARACTERS)
    return f"start: /{_slashes_escaped(pattern)}/"


def choice_grammar(field: str, choices: Sequence[str]) -> str:
    """Return the grammar of a few texts.

    Raises:
        InvalidRequest: there is none, or too many.
    """
    if not choices or len(choices) > MAX_CHOICES:
        raise InvalidRequest(field, f"{len(choices)} texts, 1 to {MAX_CHOICES} were wanted")
    text = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
    _check_size(field, text, MAX_SCHEMA_CHARACTERS)
    return f"start: {text}"


def lark_grammar(field: str, text: str) -> str:
    """Return a client's own grammar.

    Raises:
        InvalidRequest: it is empty, too long, or gives the library options.
    """
    _check_size(field, text, MAX_SCHEMA_CHARACTERS)
    if not text.strip():
        raise InvalidRequest(field, "empty; a Lark grammar was wanted")
    if "%llguidance" in text:
        raise InvalidRequest(field, "%llguidance: options cannot be given here")
    return text


def _slashes_escaped(pattern: str) -> str:
    """Write a pattern between slashes and on one line."""
    parts: list[str] = []
    is_escaped = False
    for character in pattern:
        if character == "/" and not is_escaped:
            parts.append("\\/")
        elif character in _LINE_BREAKS:
            parts.append(_LINE_BREAKS[character][is_escaped:])
        else:
            parts.append(character)
        is_escaped = character == "\\" and not is_escaped
    return "".join(parts)


_LINE_BREAKS = {"\n": "\\n", "\r": "\\r"}


def _check_size(field: str, text: str, most: int) -> None:
    if len(text) > most:
        raise InvalidRequest(field, f"{len(text)} characters, at most {most} were wanted")
