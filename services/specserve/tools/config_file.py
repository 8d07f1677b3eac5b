"""A file of settings, read strictly: the arguments of the whole application as YAML.

Knows files and YAML; what the settings mean is `serve_args.py`'s affair.
"""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from specserve.config_parsing import build
from specserve.errors import ConfigurationError, quoted
from specserve.serve_args import ServeArgs, check_serve_args


class _StrictLoader(yaml.SafeLoader):
    """YAML of plain values; a key given twice is an error, where YAML's loader takes the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            name = str(getattr(key, "value", ""))
            if name in seen:
                raise yaml.constructor.ConstructorError(
                    problem=f"key {quoted(name)} is given twice", problem_mark=key.start_mark
                )
            seen.add(name)
        return super().construct_mapping(node, deep)


def load_serve_args(path: str) -> ServeArgs:
    """Read the application's arguments from a YAML file.

    Raises:
        ConfigurationError: naming the file, the key, what was found and what was wanted.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no UTF-8 text"
        raise ConfigurationError(f"{path}: cannot be read ({reason})") from error
    return parse_serve_args(text, path)


def parse_serve_args(text: str, what: str) -> ServeArgs:
    """Read the application's arguments from YAML text.

    Args:
        what: where the text came from, put before complaints.

    Raises:
        ConfigurationError: no YAML mapping, an unknown or repeated key, or a wrong value.
    """
    try:
        values = yaml.load(text, _StrictLoader)  # noqa: S506 - derives from SafeLoader
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{what}: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise ConfigurationError(f"{what}: found {quoted(values)}, wanted a mapping of settings")
    args = build(ServeArgs, {str(key): value for key, value in values.items()}, what)
    check_serve_args(args, what)
    return args
