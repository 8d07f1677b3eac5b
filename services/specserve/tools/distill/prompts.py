"""Reads prompts and corpora that a user brings: JSON Lines or plain text, as token ids.

Knows files and a tokenizer; knows no model.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from specserve.errors import ConfigurationError, ModelUnavailable


@dataclass(frozen=True, slots=True)
class GivenText:
    """One record of a file."""

    text: str
    """A user's words, or a piece of a corpus."""
    kind: str
    """The record's `category` or `kind`; empty when it has none."""
    system: str = ""
    """What a conversation says before the user's first words; empty when it says nothing."""


def read_given(path: Path, keys: tuple[str, ...]) -> list[GivenText]:
    """Read a file: JSON Lines if its name ends in `.jsonl`, else one record a line.

    Args:
        keys: the key of a JSON object that holds its text, tried in this order; of a list (turns of
            a conversation) the user's first words count, and what the system says before them.

    Raises:
        ModelUnavailable: the file is missing.
        ConfigurationError: a line is not what was promised; the message names it.
    """
    try:
        # JSON may hold what else ends a line, such as U+2028.
        lines = path.read_text("utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelUnavailable(f"{path}: {error}") from error
    is_json = path.suffix == ".jsonl"
    found = [
        _record(line, keys, f"{path}:{number}") if is_json else GivenText(line.strip(), "")
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not found:
        raise ConfigurationError(f"{path} holds no text")
    return found


def _record(line: str, keys: tuple[str, ...], where: str) -> GivenText:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ConfigurationError(f"{where} is not JSON: {error}") from error
    if isinstance(record, str):
        return GivenText(record, "")
    if not isinstance(record, dict):
        raise ConfigurationError(f"{where}: an object or a string is wanted")
    for key in keys:
        text, system = _first_turn(record.get(key))
        if text.strip():
            kind = str(record.get("category") or record.get("kind") or "")
            return GivenText(text, kind, system)
    raise ConfigurationError(f"{where} has text under none of the keys {', '.join(keys)}")


def _first_turn(value: object) -> tuple[str, str]:
    """Return the user's first words, and those of the system before them; "" is none."""
    system = ""
    for entry in value if isinstance(value, list) else [value]:
        if not isinstance(entry, dict):
            return (entry if isinstance(entry, str) else ""), system
        role, text = entry.get("role", "user"), _content(entry.get("content"))
        if role == "user":
            return text, system
        if role in _SYSTEM_ROLES:
            system = f"{system}\n\n{text}" if system else text
    return "", system


def _content(content: object) -> str:
    """Return the text of a message, which may come in parts."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    texts = [part.get("text") for part in parts if isinstance(part, dict)]
    return "".join(text for text in texts if isinstance(text, str))


def cut_corpus(
    tokenizer: PreTrainedTokenizerBase, pieces: list[GivenText], num_tokens: int
) -> list[tuple[int, ...]]:
    """Tokenise a corpus and cut it into stretches of at most `num_tokens`, none shorter than 8.

    Lines of one plain file follow one another; what is split is split between tokens.
    """
    stop = tokenizer.eos_token_id
    found = []
    for piece in pieces:
        ids = list(tokenizer.encode(piece.text, add_special_tokens=False))
        if isinstance(stop, int):
            ids.append(stop)
        found += [tuple(ids[i : i + num_tokens]) for i in range(0, len(ids), num_tokens)]
    kept = [ids for ids in found if len(ids) >= _SHORTEST]
    if not kept:
        raise ConfigurationError("the corpus holds no stretch of 8 tokens")
    return kept


_SHORTEST = 8
_SYSTEM_ROLES = ("system", "developer")
