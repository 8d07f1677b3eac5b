"""Records of `specserve verify`: what was verified, by which key, and whether it held.

One JSON file a key, written as a whole or not at all, with a digest over its content: a file that
was cut short or edited is an error that names it, never a pass. (The digest finds accidents, not an
attacker: who can write the folder can write a record.) Knows files and GetModel; verifies nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specserve.errors import ConfigurationError
from specserve.rpc.v1.common_pb2 import GetModelResponse
from specserve.speculation.types import AcceptanceRule

DEFAULT_FOLDER = Path("~/.cache/specserve/verified")
FORMAT = 2
_NAME_LENGTH = 32

MAX_BIAS = 0.01
MIN_PARITY_TOKENS = 256
MIN_PREFIX_TEXTS = 200
"""Least evidence that speculation is switched on for."""


@dataclass(frozen=True, slots=True)
class ReplicaKey:
    """What one replica's numbers depend on."""

    weights_fingerprint: str
    dtype: str
    hardware: str
    backend: str
    versions: tuple[str, ...]
    """Each "name=version", sorted."""
    settings: tuple[str, ...] = ()
    """Of a draft: each "name=value" that its guesses depend on, sorted."""

    @staticmethod
    def of(model: GetModelResponse) -> ReplicaKey:
        """Read a replica's own words."""
        return ReplicaKey(
            model.weights_fingerprint,
            model.dtype,
            model.hardware,
            model.backend,
            tuple(model.versions),
            tuple(model.settings),
        )


@dataclass(frozen=True, slots=True)
class PairKey:
    """What a verification is about: it says nothing of any other key."""

    target: ReplicaKey
    draft: ReplicaKey | None
    """None for a method that asks no draft."""
    orchestrator_versions: tuple[str, ...]
    """Of the process that accepts."""
    method: str
    """The proposer, as in `--speculative-config`."""
    rule: AcceptanceRule

    @property
    def file_name(self) -> str:
        """Name of the key's record."""
        return f"{_digest(asdict(self))[:_NAME_LENGTH]}.json"


@dataclass(frozen=True, slots=True)
class Evidence:
    """How hard a verification looked: a pass is worth no more than that."""

    bias: float
    """Smallest bias of a probability that the enumerable pair was drawn often enough to show."""
    num_parity_tokens: int
    """Compared, in the mode with the fewest."""
    num_prefix_texts: int
    """Drawn, in the case with the fewest."""

    def shortfall(self) -> str:
        """Say what is too little to speculate on; empty when nothing is."""
        if self.bias > MAX_BIAS:
            return f"for a bias of {self.bias:.3g}, {MAX_BIAS:g} or less was wanted"
        if self.num_parity_tokens < MIN_PARITY_TOKENS:
            return f"on {self.num_parity_tokens} tokens, {MIN_PARITY_TOKENS} or more were wanted"
        if self.num_prefix_texts < MIN_PREFIX_TEXTS:
            return f"on {self.num_prefix_texts} texts, {MIN_PREFIX_TEXTS} or more were wanted"
        return ""


@dataclass(frozen=True, slots=True)
class VerifiedRecord:
    """The outcome of one verification of one key."""

    key: PairKey
    passed: bool
    num_speculative_tokens: int
    """Most draft tokens a round that were tried: a longer K is not covered."""
    evidence: Evidence
    made_at: str
    """UTC, ISO 8601."""
    parts: Mapping[str, Any]
    """The reports of the parts that were run, as JSON values."""


def folder_of(given: str | None) -> Path:
    """Return the folder of records that a setting means."""
    return (Path(given) if given else DEFAULT_FOLDER).expanduser()


def write_record(folder: Path, record: VerifiedRecord) -> Path:
    """Write a record in place of an older one of its key; a reader sees one of the two, whole.

    Raises:
        ConfigurationError: the folder cannot be written.
    """
    path = folder / record.key.file_name
    body = _body(record)
    text = json.dumps({**body, "digest": _digest(body)}, indent=2) + "\n"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", dir=folder, prefix=".", suffix=".tmp", delete=False, encoding="utf-8"
        ) as file:
            try:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
                # Those who serve may be other users than the one who verified.
                os.chmod(file.name, 0o644)
                os.replace(file.name, path)
            except BaseException:
                os.unlink(file.name)
                raise
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be written ({error.strerror})") from error
    return path


def read_record(path: Path) -> VerifiedRecord:
    """Read a record.

    Raises:
        FileNotFoundError: there is none.
        ConfigurationError: it cannot be read, is not whole, was changed, or has another's name.
    """
    values = _whole(path)
    if values.get("format") != FORMAT:
        raise _broken(path, f"format {values.get('format')!r}, {FORMAT} was wanted")
    return _record(path, values)


def read_all(folder: Path) -> list[VerifiedRecord]:
    """Read every record of a folder, those of other releases apart; none where there is no folder.

    Raises:
        ConfigurationError: one of them is broken; the file is named.
    """
    found = [(path, _whole(path)) for path in sorted(folder.glob("*.json"))]
    # What another release wrote fits nothing here: its sources were others.
    return [_record(path, values) for path, values in found if values.get("format") == FORMAT]


def _whole(path: Path) -> dict[str, Any]:
    """Read what was written as it was written, whatever its format."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise
    except (OSError, UnicodeDecodeError) as error:
        raise _broken(path, str(error)) from error
    try:
        values: dict[str, Any] = json.loads(text)
        digest = values.pop("digest")
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise _broken(path, "it is cut short, or no record at all") from error
    if digest != _digest(values):
        raise _broken(path, "its content is not what was written")
    return values


def _record(path: Path, values: dict[str, Any]) -> VerifiedRecord:
    key = _key(values["key"])
    if key.file_name != path.name:
        raise _broken(path, f"it is the record {key.file_name} under another name")
    return VerifiedRecord(
        key,
        values["passed"] is True,
        int(values["num_speculative_tokens"]),
        Evidence(**values["evidence"]),
        str(values["made_at"]),
        values["parts"],
    )


def pair_keys(
    target: GetModelResponse,
    draft: GetModelResponse | None,
    orchestrator_versions: Iterable[str],
    method: str,
    rules: Iterable[AcceptanceRule],
) -> list[PairKey]:
    """Make the keys of one pair, rule by rule."""
    draft_key = None if draft is None else ReplicaKey.of(draft)
    versions = tuple(orchestrator_versions)
    return [PairKey(ReplicaKey.of(target), draft_key, versions, method, rule) for rule in rules]


def _body(record: VerifiedRecord) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "passed": record.passed,
        "key": asdict(record.key),
        "num_speculative_tokens": record.num_speculative_tokens,
        "evidence": asdict(record.evidence),
        "made_at": record.made_at,
        "parts": dict(record.parts),
    }


def _key(values: Mapping[str, Any]) -> PairKey:
    draft = values["draft"]
    return PairKey(
        _replica(values["target"]),
        None if draft is None else _replica(draft),
        tuple(values["orchestrator_versions"]),
        values["method"],
        AcceptanceRule(values["rule"]),
    )


def _replica(values: Mapping[str, Any]) -> ReplicaKey:
    lists = {name: tuple(values[name]) for name in ("versions", "settings")}
    return ReplicaKey(**{**values, **lists})


def _digest(values: object) -> str:
    # Through JSON, so that what was read back (tuples as lists) has the digest of what was written.
    canonical = json.dumps(values, sort_keys=True, separators=(",", ":"), allow_nan=True)
    return hashlib.sha256(canonical.encode()).hexdigest()


def _broken(path: Path, why: str) -> ConfigurationError:
    return ConfigurationError(f"{path}: not a usable verification record: {why}")
