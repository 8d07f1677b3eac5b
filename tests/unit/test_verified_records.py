"""Records of verification: their keys, their files, and what is no record."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from specserve.errors import ConfigurationError
from specserve.rpc import verified_records
from specserve.rpc.v1.common_pb2 import GetModelResponse
from specserve.rpc.verified_records import (
    Evidence,
    PairKey,
    VerifiedRecord,
    pair_keys,
    read_all,
    read_record,
    write_record,
)
from specserve.speculation.types import AcceptanceRule

VERSIONS = ("numpy=2", "specserve=0.1.0")


def model(weights: str = "aa", **fields: object) -> GetModelResponse:
    values: dict[str, object] = {
        "weights_fingerprint": weights,
        "dtype": "bfloat16",
        "hardware": "a processor",
        "backend": "compiled",
        "versions": VERSIONS,
        **fields,
    }
    return GetModelResponse(**values)  # type: ignore[arg-type]


def key(**fields: object) -> PairKey:
    (made,) = pair_keys(model(), model("bb"), VERSIONS, "draft_model", [AcceptanceRule.STANDARD])
    return dataclasses.replace(made, **fields)  # type: ignore[arg-type]


def record(made: PairKey, *, passed: bool = True, k: int = 4) -> VerifiedRecord:
    evidence = Evidence(bias=0.005, num_parity_tokens=384, num_prefix_texts=500)
    parts = {"parity": {"p": 0.25}}
    return VerifiedRecord(made, passed, k, evidence, "2026-01-01T00:00:00+00:00", parts)


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    """Key, verdict and parts come back; the folder holds one file a key and nothing else."""
    written = record(key())

    path = write_record(tmp_path / "new", written)

    assert read_record(path) == written
    assert [entry.name for entry in path.parent.iterdir()] == [written.key.file_name]


def test_a_later_record_of_the_same_key_takes_the_place_of_the_first(tmp_path: Path) -> None:
    """A failure after a pass is what stands."""
    write_record(tmp_path, record(key()))
    path = write_record(tmp_path, record(key(), passed=False))

    assert [found.passed for found in read_all(tmp_path)] == [False]
    assert path.name == key().file_name


@pytest.mark.parametrize(
    "changed",
    [
        {"weights_fingerprint": "cc"},
        {"dtype": "float32"},
        {"hardware": "another processor"},
        {"backend": "torch"},
        {"versions": ("numpy=3", "specserve=0.1.0")},
        {"settings": ("num_cached_outcomes=24",)},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_every_part_of_the_key_makes_another_key(changed: dict[str, object]) -> None:
    """On target and draft; the rule, the method, the orchestrator and a missing draft too."""
    standard = [AcceptanceRule.STANDARD]
    drafts = (
        {"weights_fingerprint": "bb", **changed}
        if "weights_fingerprint" not in changed
        else {"weights_fingerprint": "dd"}
    )
    others = [
        pair_keys(
            model(**{"weights": "aa", **_renamed(changed)}),
            model("bb"),
            VERSIONS,
            "draft_model",
            standard,
        ),
        pair_keys(model(), model(**_renamed(drafts)), VERSIONS, "draft_model", standard),
        pair_keys(model(), model("bb"), VERSIONS, "cascade", standard),
        pair_keys(model(), model("bb"), ("numpy=3",), "draft_model", standard),
        pair_keys(model(), None, VERSIONS, "draft_model", standard),
        pair_keys(model(), model("bb"), VERSIONS, "draft_model", [AcceptanceRule.COUPLED]),
    ]

    names = {made.file_name for (made,) in others} | {key().file_name}

    assert len(names) == len(others) + 1


def _renamed(fields: dict[str, object]) -> dict[str, object]:
    return {"weights" if k == "weights_fingerprint" else k: v for k, v in fields.items()}


def _edited(path: Path, **fields: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.mark.parametrize("damage", ["cut", "empty", "edited", "renamed", "other json"])
def test_what_is_no_whole_record_is_an_error_that_names_the_file(
    tmp_path: Path, damage: str
) -> None:
    """A file that was cut short, edited or moved never passes."""
    path = write_record(tmp_path, record(key(), passed=False))
    text = path.read_text()
    match damage:
        case "cut":
            path.write_text(text[: len(text) // 2])
        case "empty":
            path.write_text("")
        case "edited":
            _edited(path, passed=True)
        case "renamed":
            path = path.rename(tmp_path / f"{'0' * 32}.json")
        case "other json":
            path.write_text("[1, 2]")

    for read in (lambda: read_record(path), lambda: read_all(tmp_path)):
        with pytest.raises(ConfigurationError, match=path.name):
            read()


def test_a_record_of_another_release_is_passed_over(tmp_path: Path) -> None:
    """It is whole, and no reason not to start; nor does it say anything of this release."""
    path = write_record(tmp_path, record(key()))
    values = {**json.loads(path.read_text()), "format": 1}
    del values["digest"]
    path.write_text(json.dumps({**values, "digest": verified_records._digest(values)}))

    assert read_all(tmp_path) == []
    with pytest.raises(ConfigurationError, match="format 1"):
        read_record(path)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """A file in the folder's place."""
    (tmp_path / "taken").write_text("")

    with pytest.raises(ConfigurationError, match="taken"):
        write_record(tmp_path / "taken", record(key()))


def test_no_folder_holds_no_record(tmp_path: Path) -> None:
    """Before the first verification there is nothing to complain about."""
    assert read_all(tmp_path / "none") == []
