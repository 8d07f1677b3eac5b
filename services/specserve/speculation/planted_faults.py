"""Deliberate faults of the maths, for tests of the tests: `specserve verify` must find each.

A fault replaces functions of a process at its start, so that the code that serves has no branch for
it. No request can plant one: only the environment of a process, and only beside a second variable
whose value says what it does. Knows the functions that it replaces.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum

import numpy as np
from numpy.typing import ArrayLike, NDArray

from specserve.errors import ConfigurationError, quoted
from specserve.speculation import acceptance, randomness, scoring
from specserve.speculation.acceptance import Uniforms
from specserve.speculation.philox import philox4x32, philox4x32_blocks
from specserve.speculation.randomness import Purpose
from specserve.speculation.transforms import Distribution
from specserve.speculation.types import Proposal, SparseProbs

VARIABLE = "SPECSERVE_PLANT_FAULT"
"""Names the fault."""

SWITCH = "SPECSERVE_I_WANT_WRONG_TEXT"
"""Without this variable, of the value below, a process that is asked for a fault does not start."""

SWITCH_VALUE = "yes, this process may answer wrong on purpose"


class Fault(StrEnum):
    """What can be planted."""

    ACCEPT_ON_EQUALITY = "accept-on-equality"
    """`u * q <= p`, and u = 0 injected where p = 0: chance alone would show it in 2^53 draws."""
    ZERO_UNIFORMS = "zero-uniforms"
    """The injection of the fault above alone: harmless, so that no test may find it."""
    RESIDUAL_FROM_P = "residual-from-p"
    """The recovered token is drawn from p in place of (p - q)+."""
    WIDE_RESIDUAL_FROM_P = "wide-residual-from-p"
    """The same where a whole vocabulary is sampled from, which is other code."""
    TOP_P_OF_HALF = "top-p-of-half"
    """Top-p counts half of what a whole vocabulary weighs."""
    Q_OF_OTHER_ROW = "q-of-other-row"
    """The accept test takes q from the next row of the block."""
    SHARED_STREAMS = "shared-streams"
    """Draft, accept and replace draws come from one stream."""
    STALE_KV = "stale-kv"
    """The target keeps a rejected token where the recovered one belongs."""
    LATE_PENALTIES = "late-penalties"
    """Penalties and bans do not see the newest token yet."""


def wanted_fault(environ: Mapping[str, str]) -> Fault | None:
    """Read which fault an environment asks for; None almost always.

    Raises:
        ConfigurationError: there is no such fault, or the switch beside it is not thrown.
    """
    name = environ.get(VARIABLE)
    if not name:
        return None
    try:
        fault = Fault(name)
    except ValueError:
        raise ConfigurationError(
            f"{VARIABLE}: found {quoted(name)}, wanted one of {', '.join(Fault)}"
        ) from None
    if environ.get(SWITCH) != SWITCH_VALUE:
        raise ConfigurationError(
            f"{VARIABLE} asks for wrong text on purpose. This is for tests of `specserve verify`; "
            f"a process that is meant to needs {SWITCH}={quoted(SWITCH_VALUE)} too. Unset it"
        )
    return fault


def plant(fault: Fault) -> None:
    """Break this process's maths; a device has more to break (`model/planted_faults.py`)."""
    match fault:
        case Fault.ACCEPT_ON_EQUALITY:
            replace(acceptance, "_count_accepted", _count_accepted_on_equality)
        case Fault.ZERO_UNIFORMS:
            replace(acceptance, "_count_accepted", _count_accepted_with_zeros)
        case Fault.RESIDUAL_FROM_P:
            replace(scoring, "residual", _residual_from_p)
        case Fault.Q_OF_OTHER_ROW:
            replace(acceptance, "_draft_token_probs", _probs_of_other_rows)
        case Fault.SHARED_STREAMS:
            replace(randomness, "philox4x32", _one_stream)
            replace(randomness, "philox4x32_blocks", _one_stream_of_blocks)
        case _:
            pass  # a device's


def replace(owner: object, name: str, fault: object) -> object:
    """Put a function in another's place; returns the one that was there.

    Raises:
        AttributeError: there is none: the code has moved on, and the fault must follow.
    """
    before: object = getattr(owner, name)
    setattr(owner, name, fault)
    return before


def _count_accepted_on_equality(
    token_probs: Sequence[float], target_probs: Sequence[float], uniforms: Uniforms
) -> int:
    for row, (p, q) in enumerate(zip(target_probs, token_probs, strict=True)):
        if not _uniform_or_zero(uniforms, row, p) * q <= p:
            return row
    return len(target_probs)


def _count_accepted_with_zeros(
    token_probs: Sequence[float], target_probs: Sequence[float], uniforms: Uniforms
) -> int:
    for row, (p, q) in enumerate(zip(target_probs, token_probs, strict=True)):
        if not _uniform_or_zero(uniforms, row, p) * q < p:
            return row
    return len(target_probs)


def _uniform_or_zero(uniforms: Uniforms, row: int, p: float) -> float:
    return 0.0 if p == 0.0 else float(uniforms[row])


def _residual_from_p(
    target: Distribution, q_token_ids: NDArray[np.int32], q: NDArray[np.float64]
) -> NDArray[np.float64]:
    return target.probs


_draft_token_probs = acceptance._draft_token_probs  # what stood there before


def _probs_of_other_rows(proposal: Proposal) -> list[float]:
    probs = proposal.draft_probs
    if probs is not None and len(probs.token_ids) == len(proposal.draft_token_ids):
        probs = SparseProbs(np.roll(probs.token_ids, -1, 0), np.roll(probs.weights, -1, 0))
    return _draft_token_probs(Proposal(proposal.draft_token_ids, probs))


def _one_stream(
    counter: tuple[int, int, int, int], key: tuple[int, int]
) -> tuple[int, int, int, int]:
    return philox4x32((*counter[:3], min(counter[3], int(Purpose.DRAFT))), key)


def _one_stream_of_blocks(
    c0: ArrayLike, c1: ArrayLike, c2: ArrayLike, c3: ArrayLike, seed: ArrayLike
) -> NDArray[np.uint64]:
    return philox4x32_blocks(c0, c1, c2, np.minimum(c3, int(Purpose.DRAFT)), seed)
