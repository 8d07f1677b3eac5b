"""What `--help` tells of every command: each flag has a word, and its default is shown."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import pytest

from specserve import cli
from specserve.tools.flags import Parser


def actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield every flag and argument, those of commands below too."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from actions(below)
        else:
            yield action


def shown(parser: Parser, action: argparse.Action) -> str:
    """Return an action's help as it is printed."""
    return parser._get_formatter()._expand_help(action)


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_flag_has_help(command: str) -> None:
    parser = cli.parser_of(command)

    silent = [action.dest for action in actions(parser) if not (action.help or "").strip()]

    assert silent == []


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_default_is_shown(command: str) -> None:
    """A flag that does something when it is not given says what; None, False and [] do nothing."""
    parser = cli.parser_of(command)

    hidden = {
        action.dest: action.default
        for action in actions(parser)
        if not _does_nothing(action.default)
        and not any(text in shown(parser, action) for text in _spellings(action.default))
    }

    assert hidden == {}


def _does_nothing(default: object) -> bool:
    return default is None or default is False or default in (argparse.SUPPRESS, [])


def _spellings(default: object) -> tuple[str, str]:
    """Write a default as Python does, and as a user would."""
    words = default if isinstance(default, list | tuple) else [default]
    short = " ".join(f"{word:g}" if isinstance(word, float) else str(word) for word in words)
    return f"(default: {default})", f"(default: {short})"
