"""API keys: how they are made, kept and recognised.

A key is 256 random bits of ours. So a plain salted SHA-256 is enough: slow hashes (scrypt) make
guessing dear where a secret can be guessed, and would here only let strangers burn 50 ms of a
processor per wrong key. The file holds hashes alone, one key a line:

    NAME TENANT sha256 SALT HASH

Knows text and the file; knows no HTTP.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from specserve.errors import ConfigurationError, quoted

PREFIX = "sk-specserve-"
"""What keys begin with, so that scanners for leaked secrets recognise one."""

MAX_KEYS = 1000
"""Keys in one file; every one is compared with every request's, at a microsecond each."""

MAX_KEY_CHARACTERS = 256
"""Longer ones are nobody's, and are not hashed."""

HEADER = (
    "# API keys of specserve, hashes only; written by `specserve keys`.\n"
    "# NAME TENANT sha256 SALT HASH\n"
)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SALT_BYTES = 16
_SECRET_BYTES = 32


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One key, as the file knows it."""

    name: str
    """Whose it is, for people."""
    tenant: str
    """Keys of one tenant share caches and limits."""
    salt: bytes
    digest: bytes
    """SHA-256 of salt and key."""

    def line(self) -> str:
        """Return the file's line, without its end."""
        return f"{self.name} {self.tenant} sha256 {self.salt.hex()} {self.digest.hex()}"


def make_key(name: str, tenant: str | None = None) -> tuple[str, ApiKey]:
    """Make a key: its text, which is told once and kept nowhere, and what is kept.

    Args:
        tenant: None makes the key a tenant of its own, by its name.

    Raises:
        ConfigurationError: a name is none.
    """
    tenant = name if tenant is None else tenant
    for what, word in (("name", name), ("tenant", tenant)):
        if not _NAME.fullmatch(word):
            raise ConfigurationError(
                f"{what}: found {quoted(word)}, wanted at most 64 letters, digits, '.', '_', '-', "
                "the first a letter or digit"
            )
    text = PREFIX + secrets.token_urlsafe(_SECRET_BYTES)
    salt = secrets.token_bytes(_SALT_BYTES)
    return text, ApiKey(name, tenant, salt, _digest(salt, text.encode()))


class KeyRing:
    """All keys that are valid."""

    def __init__(self, keys: Iterable[ApiKey]) -> None:
        self.keys = tuple(keys)

    def find(self, given: bytes) -> ApiKey | None:
        """Return the key that was given, in a time that does not tell how much of one was right."""
        if len(given) > MAX_KEY_CHARACTERS:
            return None
        found: ApiKey | None = None
        for key in self.keys:
            # To the end of the list, too: where a key stands in it is nobody's affair.
            if hmac.compare_digest(_digest(key.salt, given), key.digest):
                found = key
        return found

    def text(self) -> str:
        """Return the whole file."""
        return HEADER + "".join(f"{key.line()}\n" for key in self.keys)


def load_keys(path: str) -> KeyRing:
    """Read a file of keys.

    Raises:
        ConfigurationError: it cannot be read, or a line of it is no key.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no UTF-8 text"
        raise ConfigurationError(f"--api-key-file: {path}: cannot be read ({reason})") from error
    return parse_keys(text, f"--api-key-file: {path}")


def parse_keys(text: str, what: str) -> KeyRing:
    """Read a file's text.

    Args:
        what: where it came from, put before complaints, which repeat nothing of a line.

    Raises:
        ConfigurationError: a line is no key, or a name is there twice; the line is numbered.
    """
    keys: dict[str, ApiKey] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        key = _parse_line(line)
        if key is None:
            # Perhaps a key in clear text: it must not get into a log.
            raise ConfigurationError(
                f"{what}: line {number} is no line of `specserve keys`: "
                "NAME TENANT sha256 SALT HASH was wanted"
            )
        if key.name in keys:
            raise ConfigurationError(f"{what}: line {number}: {key.name} is there twice")
        keys[key.name] = key
    if len(keys) > MAX_KEYS:
        raise ConfigurationError(f"{what}: {len(keys)} keys, at most {MAX_KEYS} were wanted")
    return KeyRing(keys.values())


def _parse_line(line: str) -> ApiKey | None:
    words = line.split()
    if len(words) != 5 or words[2] != "sha256":
        return None
    name, tenant, _, salt, digest = words
    if not (_NAME.fullmatch(name) and _NAME.fullmatch(tenant)):
        return None
    try:
        key = ApiKey(name, tenant, bytes.fromhex(salt), bytes.fromhex(digest))
    except ValueError:
        return None
    is_whole = len(key.salt) == _SALT_BYTES and len(key.digest) == hashlib.sha256().digest_size
    return key if is_whole else None


def _digest(salt: bytes, key: bytes) -> bytes:
    return hashlib.sha256(salt + key).digest()
