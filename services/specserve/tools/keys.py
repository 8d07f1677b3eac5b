"""`specserve keys`: adds, lists and revokes API keys in the file that gateways read.

A key's text is printed once, when it is made; the file holds its hash alone. Gateways take a change
up within seconds.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from specserve.config_parsing import did_you_mean
from specserve.errors import ConfigurationError, quoted
from specserve.gateway.api_keys import KeyRing, load_keys, make_key
from specserve.tools.terminal import say, table, warn


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `specserve keys`."""
    parser.add_argument(
        "action",
        choices=("add", "list", "revoke"),
        help="add: make a key and print it, once; list: names and tenants; revoke: take one out",
    )
    parser.add_argument(
        "--api-key-file", metavar="FILE", required=True, help="file of hashes; add makes it"
    )
    parser.add_argument("--name", metavar="NAME", help="whose key it is")
    parser.add_argument(
        "--tenant",
        metavar="TENANT",
        help="keys of one tenant share caches and limits (default: the key's own name)",
    )


def run(args: argparse.Namespace) -> int:
    """Add, list or revoke."""
    if args.tenant is not None and args.action != "add":
        raise ConfigurationError(f"--tenant: {args.action} takes none; leave it out")
    if args.action == "list":
        if args.name is not None:
            raise ConfigurationError("--name: list takes none; leave it out")
        rows = [(key.name, key.tenant) for key in load_keys(args.api_key_file).keys]
        say(table(("name", "tenant"), rows))
        return 0
    if args.name is None:
        raise ConfigurationError(f"--name: missing; {args.action} wants the key's name")
    path = Path(args.api_key_file)
    with _alone(path):
        if args.action == "add":
            _add(path, args.name, args.tenant)
        else:
            _revoke(path, args.name)
    return 0


def _add(path: Path, name: str, tenant: str | None) -> None:
    ring = load_keys(str(path)) if path.exists() else KeyRing(())
    if any(key.name == name for key in ring.keys):
        raise ConfigurationError(f"--name: {path} has a key {quoted(name)}; revoke it first")
    text, key = make_key(name, tenant)
    _write(path, KeyRing((*ring.keys, key)))
    warn(f"specserve keys: {name} of tenant {key.tenant} may ask from now on; shown only here:")
    say(text)


def _revoke(path: Path, name: str) -> None:
    keys = load_keys(str(path)).keys
    left = [key for key in keys if key.name != name]
    if len(left) == len(keys):
        hint = did_you_mean(name, [key.name for key in keys])
        raise ConfigurationError(f"--name: {path} has no key {quoted(name)}{hint}")
    _write(path, KeyRing(left))
    say(f"specserve keys: {name} is refused from now on")


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Let no other `specserve keys` change the file meanwhile.

    Raises:
        ConfigurationError: there is no such directory.
    """
    try:
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise ConfigurationError(f"--api-key-file: {path.parent}: {error.strerror}") from error
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        yield
    finally:
        os.close(directory)


def _write(path: Path, ring: KeyRing) -> None:
    """Put the whole file in place at once: a gateway that reads meanwhile sees old or new."""
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(ring.text())
                file.flush()
                os.fsync(handle)
            if path.exists():
                Path(name).chmod(path.stat().st_mode & 0o777)
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise ConfigurationError(
            f"--api-key-file: cannot write {path}: {error.strerror}"
        ) from error
