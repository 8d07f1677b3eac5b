"""What a request's constraints do to one row of logits, as few numbers: the numpy reference.

The one order, for every row of draft and target, with speculation on and off (vLLM's, whose names
the options carry):

1. `logit_bias` is added;
2. `repetition_penalty` divides a positive logit and multiplies another, of every token that stands
   in the prompt or in the output before this row;
3. `frequency_penalty`, times how often the output before this row holds the token, is taken off;
4. `presence_penalty` is taken off where the output before this row holds it at all;
5. banned tokens get -inf: by `bad_words`, by `min_tokens`, by not being among `allowed_token_ids`.

Temperature, min-p, top-k and top-p follow (`transforms.py`). Every step is computed in float64 and
rounded to float32; what would overflow stays at the largest finite number. NaN and +inf are left as
they are, so that an unusable row stays one. Knows one row; knows no history and no tensor library.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

LARGEST = float(np.finfo(np.float32).max)

NO_IDS: NDArray[np.int64] = np.zeros(0, np.int64)
NO_BIASES: NDArray[np.float64] = np.zeros(0, np.float64)
ALL = slice(None)


@dataclass(frozen=True, slots=True, eq=False)
class RowEdits:
    """The edits of one row; ids may lie beyond the row, those have no effect."""

    bias_token_ids: NDArray[np.int64] = field(default_factory=lambda: NO_IDS)
    """[n] distinct ids."""
    biases: NDArray[np.float64] = field(default_factory=lambda: NO_BIASES)
    """[n] what is added to their logits."""
    seen_token_ids: NDArray[np.int64] = field(default_factory=lambda: NO_IDS)
    """[m] distinct ids that stand in the prompt or in the output before this row; the prompt's
    need not be named where repetition_penalty is 1."""
    num_outputs: NDArray[np.int64] = field(default_factory=lambda: NO_IDS)
    """[m] how often each stands in the output."""
    repetition_penalty: float = 1.0
    """> 0; 1 changes nothing."""
    frequency_penalty: float = 0.0
    """Per occurrence in the output."""
    presence_penalty: float = 0.0
    """Once, for occurring in the output."""
    banned_token_ids: NDArray[np.int64] = field(default_factory=lambda: NO_IDS)
    """[b]"""
    allowed_token_ids: NDArray[np.int64] | None = None
    """[a] distinct; every other id is banned. None allows all."""


def is_unusable(values: NDArray[np.floating]) -> NDArray[np.bool_]:
    """Return where NaN or +inf stands: edits leave these as they are."""
    return ~(values < np.inf)


def biased(values: NDArray[np.floating], biases: NDArray[np.float64]) -> NDArray[np.float32]:
    """Add biases to the logits of some tokens, elementwise."""
    return _rounded(values, values.astype(np.float64) + biases)


def penalised(
    values: NDArray[np.floating],
    num_outputs: NDArray[np.int64],
    repetition_penalty: float | NDArray[np.float64],
    frequency_penalty: float | NDArray[np.float64],
    presence_penalty: float | NDArray[np.float64],
) -> NDArray[np.float32]:
    """Penalise the logits of some tokens that were seen, elementwise.

    Args:
        num_outputs: how often the output holds each; 0 for a token of the prompt only.
    """
    edited = values.astype(np.float32)
    if _any(repetition_penalty != 1.0):
        wide = edited.astype(np.float64)
        with np.errstate(over="ignore"):  # a penalty of 1e-300: infinite, and rounded below
            scaled = np.where(wide > 0.0, wide / repetition_penalty, wide * repetition_penalty)
        edited = _rounded(values, scaled)
    if _any(frequency_penalty != 0.0):
        edited = _rounded(values, edited.astype(np.float64) - frequency_penalty * num_outputs)
    if _any(presence_penalty != 0.0):
        edited = _rounded(values, edited.astype(np.float64) - presence_penalty * (num_outputs > 0))
    return edited


def banned(values: NDArray[np.floating]) -> NDArray[np.float32]:
    """Ban some tokens."""
    return np.where(is_unusable(values), values, -np.inf).astype(np.float32)


def edit_row(
    logits: NDArray[np.floating],
    edits: RowEdits,
    logit_token_ids: NDArray[np.int64] | None = None,
) -> NDArray[np.float32]:
    """Return an edited copy of one row.

    Args:
        logits: [V'].
        logit_token_ids: [V'] ascending ids of the columns when the head was cut.
    """
    row = logits.astype(np.float32)
    ids = np.arange(row.size) if logit_token_ids is None else logit_token_ids
    columns, inside = columns_of(edits.bias_token_ids, row.size, logit_token_ids)
    row[columns] = biased(row[columns], edits.biases[inside])
    columns, inside = columns_of(edits.seen_token_ids, row.size, logit_token_ids)
    row[columns] = penalised(
        row[columns],
        edits.num_outputs[inside],
        edits.repetition_penalty,
        edits.frequency_penalty,
        edits.presence_penalty,
    )
    columns, _ = columns_of(edits.banned_token_ids, row.size, logit_token_ids)
    row[columns] = banned(row[columns])
    if edits.allowed_token_ids is not None:
        others = ~np.isin(ids, edits.allowed_token_ids)
        row[others] = banned(row[others])
    return row


def columns_of(
    token_ids: NDArray[np.int64], size: int, logit_token_ids: NDArray[np.int64] | None
) -> tuple[NDArray[np.int64], NDArray[np.bool_] | slice]:
    """Find the columns of token ids in rows of `size` columns.

    Args:
        logit_token_ids: [size] ascending ids of the columns when the head was cut.

    Returns:
        Columns of the ids that have one, and which of the ids these are.
    """
    if logit_token_ids is None:
        # Read as unsigned, a negative id is larger than any size.
        if not token_ids.size or token_ids.view(np.uint64).max() < size:
            return token_ids, ALL
        inside = (token_ids >= 0) & (token_ids < size)
        return token_ids[inside], inside
    columns = np.minimum(logit_token_ids.searchsorted(token_ids), size - 1)
    inside = logit_token_ids[columns] == token_ids
    return columns[inside], inside


def _rounded(before: NDArray[np.floating], values: NDArray[np.float64]) -> NDArray[np.float32]:
    """Round to float32 without overflow; -inf stays, and so does what was unusable before."""
    # Clipped first where the cast could overflow: a maximum is cheaper than a guarded cast.
    if values.size and not -LARGEST <= values.min() <= values.max() <= LARGEST:
        values = np.where(np.isfinite(before), np.clip(values, -LARGEST, LARGEST), before)
    return values.astype(np.float32)


def _any(flags: bool | NDArray[np.bool_]) -> bool:
    return flags if isinstance(flags, bool) else bool(flags.any())
