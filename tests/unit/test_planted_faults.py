"""Deliberate faults: asked for twice or not at all."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import specserve
from specserve.errors import ConfigurationError
from specserve.speculation import acceptance, planted_faults, randomness
from specserve.speculation.planted_faults import (
    SWITCH,
    SWITCH_VALUE,
    VARIABLE,
    Fault,
    plant,
    replace,
    wanted_fault,
)
from specserve.speculation.types import AcceptanceRule, Proposal, SparseProbs, TargetScores

SOURCES = str(Path(specserve.__file__).parents[1])


@pytest.fixture(autouse=True)
def _undo(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a test plants in this process is gone after it."""
    monkeypatch.setattr(planted_faults, "replace", monkeypatch.setattr)


def test_no_variable_means_no_fault() -> None:
    """The switch alone does nothing."""
    assert wanted_fault({}) is None
    assert wanted_fault({VARIABLE: "", SWITCH: SWITCH_VALUE}) is None


@pytest.mark.parametrize("value", [None, "1", "yes", SWITCH_VALUE.upper()])
def test_a_fault_without_the_loud_switch_is_refused(value: str | None) -> None:
    """The error names both variables."""
    environ = {VARIABLE: "stale-kv"} | ({} if value is None else {SWITCH: value})

    with pytest.raises(ConfigurationError, match=f"{VARIABLE}.*{SWITCH}"):
        wanted_fault(environ)


def test_an_unknown_fault_is_refused_with_the_known_ones() -> None:
    """Also beside the switch."""
    with pytest.raises(ConfigurationError, match="residual-from-p"):
        wanted_fault({VARIABLE: "no-such", SWITCH: SWITCH_VALUE})


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("target", "toy:"),
        ("draft", "toy:"),
        ("orchestrator", "--target-address=127.0.0.1:9", "--port=0"),
    ],
    ids=lambda words: words[0],
)
def test_a_service_that_is_asked_for_a_fault_by_accident_does_not_start(
    words: tuple[str, ...],
) -> None:
    """The error comes before anything is loaded or bound."""
    done = subprocess.run(
        [sys.executable, "-m", "specserve.cli", *words],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={"PATH": "", "PYTHONPATH": SOURCES, VARIABLE: "stale-kv"},
    )

    assert done.returncode == 2, done.stderr
    assert SWITCH in done.stderr


def test_a_function_that_is_gone_is_an_error() -> None:
    """A fault whose place has moved must not pass for one that was planted."""
    with pytest.raises(AttributeError):
        replace(acceptance, "_no_such_function", None)


def _accepted_of_impossible() -> int:
    """Walk one draft token with p = 0 and a uniform that would reject it."""
    q = SparseProbs(np.array([[2, 1]], np.int32), np.array([[0.5, 0.5]], np.float32))
    scores = TargetScores((0.0,), (1, 1))
    return acceptance.accept(Proposal((2,), q), scores, [0.5], AcceptanceRule.STANDARD).num_accepted


def test_equality_accepts_what_the_injected_zero_alone_does_not() -> None:
    """`0 * q <= 0` holds, `0 * q < 0` does not: the injection is harmless by itself."""
    assert _accepted_of_impossible() == 0
    plant(Fault.ZERO_UNIFORMS)
    assert _accepted_of_impossible() == 0
    plant(Fault.ACCEPT_ON_EQUALITY)
    assert _accepted_of_impossible() == 1


def test_shared_streams_are_one_stream() -> None:
    """The three purposes give one number; the coupled rule's noise is left alone."""
    noise = randomness.noise_words(1, 0, 5, np.arange(4)).tolist()
    purposes = [randomness.Purpose.DRAFT, randomness.Purpose.ACCEPT, randomness.Purpose.REPLACE]
    plant(Fault.SHARED_STREAMS)

    for num_rows in (3, 40):  # both ways of computing them
        drawn = [randomness.uniforms(1, 0, 5, num_rows, purpose).tolist() for purpose in purposes]
        assert drawn[0] == drawn[1] == drawn[2]
    assert randomness.noise_words(1, 0, 5, np.arange(4)).tolist() == noise
