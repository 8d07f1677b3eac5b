"""Command-line flags made from the configuration models, so that the two cannot drift.

A field `num_kv_blocks` is the flag `--num-kv-blocks`; its help is the string under the field; its
value stays text until the model validates it. Knows no command.
"""

from __future__ import annotations

import argparse
import types
import typing
from collections.abc import Collection, Sequence
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from specserve.config_parsing import build, did_you_mean, field_docs
from specserve.errors import ConfigurationError, quoted

ModelT = TypeVar("ModelT", bound=BaseModel)


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Adds a flag's default to its help, where the help does not tell it itself."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        default = action.default
        # 0 is a default worth telling, so that False is told from it.
        is_none = default is None or default is False or default in (argparse.SUPPRESS, [])
        if is_none or "(default: " in text:
            return text
        return f"{text} {_default_text(default)}"


class Parser(argparse.ArgumentParser):
    """An argument parser whose complaints are exceptions that name the nearest right flag."""

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(
            prog=prog,
            description=description,
            allow_abbrev=False,
            formatter_class=_HelpFormatter,
        )

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Parse all arguments.

        Raises:
            ConfigurationError: an unknown flag, a missing value, or one word too many.
        """
        namespace, rest = self.parse_known_args(arguments)
        for word in rest:
            if word.startswith("-"):
                flag = word.partition("=")[0]
                known = [option for option in self._option_string_actions if option != "-h"]
                raise ConfigurationError(f"unknown flag {quoted(flag)}{did_you_mean(flag, known)}")
        if rest:
            raise ConfigurationError(f"unexpected argument {quoted(rest[0])}")
        return namespace

    def error(self, message: str) -> NoReturn:
        """Raise instead of leaving the process, so that every complaint is written one way."""
        raise ConfigurationError(message)


def add_model_flags(
    parser: argparse.ArgumentParser,
    model: type[BaseModel],
    title: str,
    *,
    leave_out: Collection[str] = (),
    prefix: str = "",
) -> None:
    """Add one flag per field of `model`; fields left out have no flag.

    Args:
        prefix: put before each name, so that two models can share a parser.
    """
    group = parser.add_argument_group(title)
    docs = field_docs(model)
    for name, field in model.model_fields.items():
        if name in leave_out:
            continue
        flag = _flag(prefix, name)
        default = field.default
        text = docs.get(name, "").replace("%", "%%")
        if default is not None and default is not PydanticUndefined:
            text = f"{text} {_default_text(default)}"
        dest = _destination(prefix, name)
        if field.annotation is bool:
            group.add_argument(
                flag, dest=dest, action=argparse.BooleanOptionalAction, default=None, help=text
            )
        else:
            choices = _choices(field.annotation)
            metavar = "{" + ",".join(choices) + "}" if choices else name.split("_")[-1].upper()
            group.add_argument(flag, dest=dest, metavar=metavar, default=None, help=text)


def given_values(
    namespace: argparse.Namespace, model: type[BaseModel], *, prefix: str = ""
) -> dict[str, Any]:
    """Return the fields of `model` whose flag was given; the rest keep the model's defaults."""
    values: dict[str, Any] = {}
    for name in model.model_fields:
        value = getattr(namespace, _destination(prefix, name), None)
        if value is not None:
            values[name] = value
    return values


def config_from_flags(
    namespace: argparse.Namespace, model: type[ModelT], /, *, prefix: str = "", **fixed: object
) -> ModelT:
    """Build `model` from its flags, plus fields that the command fixes itself.

    Raises:
        ConfigurationError: a value is wrong; the message names the flag.
    """
    values = {**given_values(namespace, model, prefix=prefix), **fixed}
    return build(model, values, spell=lambda name: _flag(prefix, name), from_text=True)


def flags_given(namespace: argparse.Namespace, model: type[BaseModel]) -> tuple[str, ...]:
    """Write the given flags of `model` out again, for a process that takes the same."""
    words: list[str] = []
    for name, value in given_values(namespace, model).items():
        if isinstance(value, bool):
            words.append(_flag("" if value else "no-", name))
        else:
            words.append(f"{_flag('', name)}={value}")
    return tuple(words)


def as_flag(name: str) -> str:
    """Return the flag that sets a field or a namespace's value."""
    return _flag("", name)


def _default_text(default: object) -> str:
    """Write a default as a user would give it, for argparse to format."""
    words = default if isinstance(default, list | tuple) else [default]
    text = " ".join(f"{word:g}" if isinstance(word, float) else str(word) for word in words)
    return f"(default: {text})".replace("%", "%%")


def _flag(prefix: str, name: str) -> str:
    return f"--{prefix}{name}".replace("_", "-")


def _destination(prefix: str, name: str) -> str:
    return f"{prefix}{name}".replace("-", "_")


def _choices(annotation: Any) -> tuple[str, ...]:
    if typing.get_origin(annotation) is typing.Literal:
        return tuple(str(value) for value in typing.get_args(annotation))
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        for part in typing.get_args(annotation):
            if choices := _choices(part):
                return choices
    return ()
