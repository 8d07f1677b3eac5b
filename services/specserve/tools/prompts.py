"""Prompt files, and prompts as token ids. Knows JSON lines and a tokenizer; knows no service."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from specserve.errors import ConfigurationError

if TYPE_CHECKING:
    from specserve.model.tokenizer import Tokenizer

SHIPPED = Path(__file__).with_name("demo_prompts.json")
"""Six prompts: chat, code, maths, summary, translation, question on a text."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of a benchmark."""

    prompt_id: str
    category: str
    text: str
    """The first user turn."""


def read_prompts(path: Path | None, limit: int | None = None) -> list[Prompt]:
    """Read prompts from JSON lines with `turns` or `prompt`; None reads the shipped ones.

    With a limit the prompts are taken round-robin over the categories, so that few still mean all.

    Raises:
        ConfigurationError: the file is missing, or a line is no prompt; the line is named.
    """
    if path is None:
        shipped = json.loads(SHIPPED.read_text(encoding="utf-8"))
        return [Prompt(item["kind"], item["kind"], item["prompt"]) for item in shipped][:limit]
    source = path
    try:
        lines = source.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--prompts: {source}: {error}") from error
    prompts = [
        _read_line(source, number, line) for number, line in enumerate(lines, 1) if line.strip()
    ]
    return prompts if limit is None else _spread(prompts, limit)


def _read_line(source: Path, number: int, line: str) -> Prompt:
    try:
        value = json.loads(line)
        text = value["turns"][0] if "turns" in value else value["prompt"]
        prompt_id = str(value.get("question_id", value.get("id", number)))
        return Prompt(prompt_id, str(value.get("category", "all")), str(text))
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise ConfigurationError(
            f"{source} line {number}: an object with `turns` or `prompt` was wanted ({error})"
        ) from error


def _spread(prompts: list[Prompt], limit: int) -> list[Prompt]:
    by_category: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_category.setdefault(prompt.category, []).append(prompt)
    chosen: list[Prompt] = []
    depth = 0
    while len(chosen) < min(limit, len(prompts)):
        for group in by_category.values():
            if depth < len(group) and len(chosen) < limit:
                chosen.append(group[depth])
        depth += 1
    return chosen


def to_token_ids(tokenizer: Tokenizer, prompt: Prompt) -> tuple[int, ...]:
    """Turn a prompt into the ids of a one-turn chat."""
    return tuple(tokenizer.apply_chat_template([{"role": "user", "content": prompt.text}]))
