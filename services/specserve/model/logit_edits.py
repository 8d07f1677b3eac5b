"""Constraints of a ragged batch, written into its logits and taken out again.

Only the tokens that a row's edits name are read and written, all rows together; a row with
`allowed_token_ids` is filled once. The arithmetic is `speculation/row_edits.py`. Afterwards the
logits are bit for bit what the model gave. Knows logits; knows no session and no rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from specserve.model.sampler_ops import as_array
from specserve.speculation.row_edits import RowEdits, banned, biased, columns_of, penalised
from specserve.speculation.scoring import DraftRow, TargetRow

Row = TypeVar("Row", DraftRow, TargetRow)

T = TypeVar("T", bound=np.generic)

_Place = tuple[int | NDArray[np.int64], NDArray[np.int64]]
"""Row and column of each of some logits; one row for them all is a number."""


def has_edits(rows: Sequence[DraftRow] | Sequence[TargetRow]) -> bool:
    """Return whether any row is edited."""
    for row in rows:  # noqa: SIM110 - every iteration pays for it, and any() costs twice as much
        if row.edits is not None:
            return True
    return False


@contextmanager
def edited(
    logits: torch.Tensor, rows: Sequence[Row], ids: NDArray[np.int64] | None = None
) -> Iterator[list[Row]]:
    """Edit the rows of `logits` within the block; give the rows without their edits.

    Args:
        logits: [R', V'] float32, row i for rows[i]; more rows may follow.
        ids: [V'] ascending ids of the columns when the head was cut.
    """
    numbers = [i for i, row in enumerate(rows) if row.edits is not None]
    edits = [row.edits for row in rows if row.edits is not None]
    page = _Page(logits)
    try:
        _edit(page, numbers, edits, ids)
        yield [row if row.edits is None else replace(row, edits=None) for row in rows]
    finally:
        page.restore()


def _edit(
    page: _Page, numbers: list[int], edits: list[RowEdits], ids: NDArray[np.int64] | None
) -> None:
    def places(
        token_ids: list[NDArray[np.int64]],
    ) -> tuple[_Place, NDArray[np.bool_] | slice, list[int]]:
        sizes = [part.size for part in token_ids]
        columns, inside = columns_of(_joined(token_ids), page.num_columns, ids)
        return (_rows_of(numbers, sizes, inside), columns), inside, sizes

    if any(e.bias_token_ids.size for e in edits):
        place, inside, _ = places([e.bias_token_ids for e in edits])
        biases = _joined([e.biases for e in edits])[inside]
        page.change(place, lambda values: biased(values, biases))
    if any(e.seen_token_ids.size for e in edits):
        place, inside, sizes = places([e.seen_token_ids for e in edits])
        repetition, frequency, presence = (
            _penalties_of(penalties, sizes, inside)
            for penalties in (
                [e.repetition_penalty for e in edits],
                [e.frequency_penalty for e in edits],
                [e.presence_penalty for e in edits],
            )
        )
        counts = _joined([e.num_outputs for e in edits])[inside]
        page.change(
            place, lambda values: penalised(values, counts, repetition, frequency, presence)
        )
    if any(e.banned_token_ids.size for e in edits):
        place, _, _ = places([e.banned_token_ids for e in edits])
        page.change(place, banned)
    for number, e in zip(numbers, edits, strict=True):
        if e.allowed_token_ids is not None:
            page.keep_only(number, _allowed_columns(e.allowed_token_ids, page.num_columns, ids))


def _allowed_columns(
    allowed: NDArray[np.int64], num_columns: int, ids: NDArray[np.int64] | None
) -> NDArray[np.int64]:
    if ids is None or allowed.size < num_columns // 8:
        return columns_of(allowed, num_columns, ids)[0]
    # A grammar may allow most of the vocabulary: one pass costs less than a search for each.
    return np.flatnonzero(np.isin(ids, allowed, assume_unique=True))


def _joined(parts: list[NDArray[T]]) -> NDArray[T]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _rows_of(
    numbers: list[int], sizes: list[int], inside: NDArray[np.bool_] | slice
) -> int | NDArray[np.int64]:
    """Return the row of each token that is inside; one row for them all is a number."""
    return numbers[0] if len(numbers) == 1 else np.repeat(np.array(numbers), sizes)[inside]


def _penalties_of(
    penalties: list[float], sizes: list[int], inside: NDArray[np.bool_] | slice
) -> float | NDArray[np.float64]:
    """Return the penalty of each token that is inside; one row's is a number."""
    if len(penalties) == 1:
        return penalties[0]
    return np.repeat(np.array(penalties, np.float64), sizes)[inside]


class _Page:
    """Logits that are written to and restored."""

    def __init__(self, logits: torch.Tensor) -> None:
        self.num_columns = logits.shape[1]
        self._logits = logits
        self._on_cpu = logits.device.type == "cpu"
        self._array = as_array(logits) if self._on_cpu else np.zeros((0, 0), np.float32)
        self._before: list[tuple[_Place, NDArray[np.floating]]] = []
        self._rows_before: list[tuple[int, NDArray[np.floating] | torch.Tensor]] = []

    def change(
        self, place: _Place, edit: Callable[[NDArray[np.floating]], NDArray[np.float32]]
    ) -> None:
        """Replace some logits by what `edit` makes of them."""
        before: NDArray[np.floating] = (
            self._array[place] if self._on_cpu else as_array(self._logits[self._index(place)])
        )
        self._before.append((place, before))
        self._put(place, edit(before))

    def keep_only(self, number: int, columns: NDArray[np.int64]) -> None:
        """Ban all columns of a row but some; an unusable row stays one."""
        if self._on_cpu:
            row = self._array[number]
            if row.max() < np.inf:  # not for NaN
                before = row.copy()
                self._rows_before.append((number, before))
                row.fill(-np.inf)
                row[columns] = before[columns]
            return
        with torch.inference_mode():
            on_device = self._logits[number]
            self._rows_before.append((number, on_device.clone()))
            kept = torch.from_numpy(columns).to(on_device.device)
            banned_row = torch.where(on_device < torch.inf, -torch.inf, on_device)
            banned_row[kept] = on_device[kept]
            on_device.copy_(banned_row)

    def restore(self) -> None:
        """Put everything back."""
        for number, row in reversed(self._rows_before):
            if isinstance(row, torch.Tensor):
                with torch.inference_mode():
                    self._logits[number].copy_(row)
            else:
                self._array[number] = row
        for place, values in reversed(self._before):
            self._put(place, values)

    def _put(self, place: _Place, values: NDArray[np.floating]) -> None:
        if self._on_cpu:
            self._array[place] = values
        else:
            with torch.inference_mode():
                on_device = torch.from_numpy(values).to(self._logits.device)
                self._logits[self._index(place)] = on_device

    def _index(self, place: _Place) -> tuple[int | torch.Tensor, torch.Tensor]:
        device = self._logits.device
        rows, columns = place
        where = rows if isinstance(rows, int) else torch.from_numpy(rows).to(device)
        return where, torch.from_numpy(columns).to(device)
