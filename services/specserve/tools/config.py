"""`specserve config`: checks a file of settings, and renders what Ray Serve is given.

The same file is what `specserve serve --config` serves; so a machine and a cluster cannot drift.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import yaml

from specserve.errors import ConfigurationError
from specserve.serve_config import serve_config
from specserve.tools.config_file import load_serve_args
from specserve.tools.terminal import say

HEADER = "# Rendered from {name} by `specserve config render`. Edit that file, not this one.\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `specserve config`."""
    parser.add_argument(
        "action",
        choices=("check", "render"),
        help="check: say whether the file is right; render: print the Serve config made of it",
    )
    parser.add_argument("--config", metavar="FILE", required=True, help="YAML file of settings")
    parser.add_argument("--output", metavar="FILE", help="where to render to (default: print)")


def run(args: argparse.Namespace) -> int:
    """Check or render."""
    if args.action == "check":
        if args.output is not None:
            raise ConfigurationError("--output: check renders nothing; leave it out")
        serve_config(load_serve_args(args.config))
        say(f"{args.config}: right")
        return 0
    text = render(args.config)
    if args.output is None:
        say(text.rstrip("\n"))
        return 0
    try:
        Path(args.output).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(
            f"--output: cannot write {args.output}: {error.strerror}"
        ) from error
    return 0


def render(path: str) -> str:
    """Return the Serve config file made of a file of settings.

    Raises:
        ConfigurationError: the file is wrong.
    """
    config = serve_config(load_serve_args(path))
    return HEADER.format(name=Path(path).name) + yaml.dump(
        config, Dumper=_Dumper, sort_keys=False, width=100
    )


class _Dumper(yaml.SafeDumper):
    """Writes everything out where it stands, without anchors."""

    def ignore_aliases(self, data: object) -> bool:
        return True
