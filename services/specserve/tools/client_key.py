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
        help="file that holds the API key which the gateway at --url wants",
    )


def key_headers(args: argparse.Namespace) -> dict[str, str]:
    """Return the headers that requests carry.

    Raises:
        ConfigurationError: the file cannot be read or holds no key, or nothing is asked at a URL.
    """
    if args.api_key_from is None:
        return {}
    if args.url is None:
        raise ConfigurationError("--api-key-from: goes with --url, whose gateway wants a key")
    try:
        key = Path(args.api_key_from).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no UTF-8 text"
        raise ConfigurationError(f"--api-key-from: {args.api_key_from}: {reason}") from error
    if len(key.split()) != 1 or not key.isascii():
        raise ConfigurationError(f"--api-key-from: {args.api_key_from} holds no key")
    return {"authorization": f"Bearer {key}"}
