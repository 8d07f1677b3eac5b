"""Deliberate faults of a device process: those of the maths, and those of what lies around it.

See `speculation/planted_faults.py`. Knows the functions that it replaces.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import replace as with_fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from specserve.model import engine, ranking, small_standard, target_rows
from specserve.model.messages import Role
from specserve.model.runner import SequenceSlice
from specserve.model.sampler_ops import residual_draws
from specserve.model.session import KvSession
from specserve.speculation import planted_faults
from specserve.speculation.planted_faults import Fault, replace, wanted_fault
from specserve.speculation.row_edits import RowEdits

logger = logging.getLogger(__name__)


def plant_wanted(role: Role) -> None:
    """Plant what the environment of this process asks for, almost always nothing.

    Raises:
        ConfigurationError: it asks without the switch, or for an unknown fault.
    """
    fault = wanted_fault(os.environ)
    if fault is None:
        return
    logger.error("PLANTED FAULT %s: this process answers wrong on purpose", fault)
    planted_faults.plant(fault)
    match fault:
        case Fault.RESIDUAL_FROM_P:
            replace(small_standard, "_subtract_drafts", _leave_drafts)
        case Fault.WIDE_RESIDUAL_FROM_P:
            replace(target_rows, "residual_draws", _draws_from_p)
        case Fault.TOP_P_OF_HALF:
            replace(ranking, "kept_weights", _half_of_kept_weights)
        case Fault.LATE_PENALTIES:
            replace(KvSession, "row_edits", _row_edits_one_late)
        case Fault.STALE_KV if role == "target":
            replace(KvSession, "truncate", _truncate_and_remember)
            replace(engine, "_slice", _slice_with_stale_token)
        case _:
            pass


_kept_weights = ranking.kept_weights  # what stood there before
_subtract_drafts = small_standard._subtract_drafts
_row_edits = KvSession.row_edits
_truncate = KvSession.truncate
_slice = engine._slice


def _leave_drafts(probs: NDArray[np.float64], rows: Any) -> list[float | None]:
    return _subtract_drafts(probs.copy(), rows)


def _draws_from_p(
    logits: torch.Tensor,
    largest: NDArray[np.floating],
    temperatures: NDArray[np.float64],
    draft_token_ids: NDArray[np.int64],
    q_rows: NDArray[np.int64],
    q_token_ids: NDArray[np.int64],
    q: NDArray[np.float64],
    uniforms: NDArray[np.float64],
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    none = np.zeros_like(q)
    return residual_draws(
        logits, largest, temperatures, draft_token_ids, q_rows, q_token_ids, none, uniforms
    )


def _half_of_kept_weights(
    logits: torch.Tensor,
    largest: NDArray[np.floating],
    temperatures: NDArray[np.float64],
    min_ps: NDArray[np.float64],
) -> NDArray[np.float64]:
    return _kept_weights(logits, largest, temperatures, min_ps) / 2


def _row_edits_one_late(
    session: KvSession, length: int, then: Sequence[int] = ()
) -> RowEdits | None:
    constraints = session.opening.sampling.constraints
    first = 0 if constraints is None else constraints.prompt_length
    return _row_edits(session, max(length - 1, first), then)


_stale: dict[str, tuple[int, int]] = {}
"""Session -> (position, the rejected token that stays there)."""


def _truncate_and_remember(session: KvSession, length: int) -> None:
    if 0 < length < session.cached_length:
        (rejected,) = session.chain.slice(length, length + 1)
        _stale[session.session_id] = (length, rejected)
    _truncate(session, length)


def _slice_with_stale_token(item: Any) -> SequenceSlice:
    part = _slice(item)
    position, rejected = _stale.pop(item.call.session.session_id, (-1, -1))
    if position != part.start_position:
        return part
    return with_fields(part, token_ids=(rejected, *part.token_ids[1:]))
