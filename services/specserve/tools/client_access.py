"""How commands that are clients reach what runs: a gateway by URL, or orchestrators by address.

A gateway may want an API key, which comes from a file, for a command line is read by others; an
orchestrator may want mutual TLS. Every such command has these flags, and refuses them alike where
they would say nothing.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from specserve.config import TlsSettings
from specserve.errors import ConfigurationError
from specserve.tools.flags import add_model_flags, as_flag, config_from_flags, given_values

if TYPE_CHECKING:
    from specserve.rpc.tls import MutualTls


def add_key_flag(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Add the flag of a gateway's client."""
    parser.add_argument(
        "--api-key-from",
        metavar="FILE",
        help="file that holds the API key which the gateway wants",
    )


def add_tls_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of an orchestrator's client."""
    add_model_flags(parser, TlsSettings, "gRPC to --orchestrator-address")


def check_access(
    args: argparse.Namespace, default_url: str | None = None, *, both: bool = False
) -> None:
    """Refuse flags for one of the two ways where the other is taken.

    Args:
        default_url: the gateway that is asked when neither is named.
        both: gateway and orchestrators are asked, one beside the other.

    Raises:
        ConfigurationError: naming the flag.
    """
    address = getattr(args, "orchestrator_address", None)
    if args.url and address and not both:
        raise ConfigurationError("--url: leave it out where --orchestrator-address is given")
    asks_gateway = args.url or (default_url and not address)
    if args.api_key_from is not None and not asks_gateway:
        raise ConfigurationError("--api-key-from: goes with --url, whose gateway wants a key")
    if not address:
        for name in given_values(args, TlsSettings):
            raise ConfigurationError(
                f"{as_flag(name)}: goes with --orchestrator-address; no other gRPC is spoken"
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


def tls_of(args: argparse.Namespace) -> MutualTls | None:
    """Return how orchestrators are dialled; None speaks clear text.

    Raises:
        ConfigurationError: certificates are missing or do not fit together.
    """
    from specserve.rpc.tls import MutualTls

    return MutualTls.of(config_from_flags(args, TlsSettings))
