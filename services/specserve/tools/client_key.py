"""The API key of a command that is a client: from a file, for a command line is read by others."""

from __future__ import annotations

import argparse
from pathlib import Path

from specserve.errors import ConfigurationError


def add_key_flag(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Add the flag."""
    parser.add_argument(
        "--api-key-from",
        metavar="FILE",
        help="file that holds the API key which the gateway wants",
    )


def key_headers(path: str | None) -> dict[str, str]:
    """Return the headers that requests carry; none without a file.

    Raises:
        ConfigurationError: the file cannot be read or holds no key.
    """
    if path is None:
        return {}
    try:
        key = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no UTF-8 text"
        raise ConfigurationError(f"--api-key-from: {path}: {reason}") from error
    if len(key.split()) != 1 or not key.isascii():
        raise ConfigurationError(f"--api-key-from: {path} holds no key")
    return {"authorization": f"Bearer {key}"}
