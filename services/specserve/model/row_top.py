"""The most likely tokens of each row of a forward, kept for later. Knows logits; knows no rule."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from specserve.model.sampler_ops import as_array, as_ids


class RowTops:
    """Head of every row of a forward; it leaves the device when it is first looked at."""

    def __init__(
        self, logits: torch.Tensor, count: int, logit_token_ids: torch.Tensor | None
    ) -> None:
        """Take the `count` highest logits of each row of [R, V'].

        Args:
            logit_token_ids: [V'] ids of the columns when the head was cut.
        """
        self._top = logits.topk(min(count, logits.shape[1]), dim=1)
        self._token_ids = logit_token_ids
        self._rows: tuple[NDArray[np.int64], NDArray[np.floating]] | None = None

    @property
    def num_rows(self) -> int:
        """Rows of the forward: R."""
        return len(self._top.values)

    def row(self, index: int) -> tuple[NDArray[np.int64], NDArray[np.floating]]:
        """Return one row's token ids and logits, [k] each, likeliest first."""
        if self._rows is None:
            columns = self._top.indices
            if self._token_ids is not None:
                columns = self._token_ids[columns]
            self._rows = as_ids(columns), as_array(self._top.values)
        ids, values = self._rows
        return ids[index], values[index]
