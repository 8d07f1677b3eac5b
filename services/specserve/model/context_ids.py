"""The ids of a session's own text that a cut head lacks: its rows get columns for them, too.

A draft's head is cut to what is frequent everywhere. Names and numbers are not, but those of a text
come again in it. Exact: q is whatever the draft samples from, and which columns a row has follows
from committed tokens alone. Knows ids; knows no model and no session.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from specserve.model.runner import NO_IDS, SequenceSlice
from specserve.speculation.digest import TokenChain

MAX_CONTEXT_IDS = 1024
"""Of one session, those that stood in its text last: each costs its rows one product."""


class ContextIds:
    """One session's."""

    def __init__(self, is_in_head: NDArray[np.bool_]) -> None:
        """Begin without text.

        Args:
            is_in_head: [V] of each id whether the head has it anyway.
        """
        self._is_in_head = is_in_head
        self._known: dict[int, None] = {}
        self._length = 0
        self._ids = NO_IDS

    @property
    def ids(self) -> NDArray[np.int64]:
        """[E] ascending; the same array until there are others."""
        return self._ids

    def follow(self, chain: TokenChain, keep_length: int, append_token_ids: Sequence[int]) -> None:
        """Take in each committed token once: the draft's own that were accepted are kept ones.

        Args:
            chain: of the session, which holds what is kept.
        """
        start = self._length
        if start < keep_length:
            self._add(chain.slice(start, keep_length))
        self._add(append_token_ids[max(0, start - keep_length) :])
        self._length = max(start, keep_length + len(append_token_ids))

    def _add(self, token_ids: Sequence[int]) -> None:
        has_changed = False
        for token_id in token_ids:
            if self._is_in_head[token_id]:
                continue
            has_changed |= token_id not in self._known
            self._known.pop(token_id, None)
            self._known[token_id] = None
        while len(self._known) > MAX_CONTEXT_IDS:
            del self._known[next(iter(self._known))]
        if has_changed:
            self._ids = np.array(sorted(self._known), np.int64)


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns of one forward's logits: the head's, and those of its sequences' texts."""

    token_ids: torch.Tensor
    """[V'] int64 ascending."""
    context_ids: NDArray[np.int64]
    """[E] ascending: those that the head lacks, of all sequences together."""
    head_places: torch.Tensor
    """[V' - E] where the head's columns lie."""
    context_places: torch.Tensor
    """[E] where the others lie."""

    def join(
        self, head: torch.Tensor, context: torch.Tensor, batch: Sequence[SequenceSlice]
    ) -> torch.Tensor:
        """Put the parts of [R] rows in order; to a row other sequences' ids are banned.

        Args:
            head: [R, V' - E]
            context: [R, E]
        """
        logits = head.new_empty((len(head), len(self.token_ids)))
        logits.index_copy_(1, self.head_places, head)
        logits.index_copy_(1, self.context_places, context)
        wanted = [part for part in batch if part.num_logit_rows]
        if len(wanted) > 1:
            end = 0
            for part in wanted:
                start, end = end, end + part.num_logit_rows
                others = np.isin(self.context_ids, part.context_ids, invert=True)
                places = self.context_places[torch.from_numpy(others).to(logits.device)]
                logits[start:end, places] = -torch.inf
        return logits


class HeadColumns:
    """A cut head's ids, and the columns of each forward over it."""

    def __init__(self, token_ids: torch.Tensor) -> None:
        """Args:
        token_ids: [V'] int64 ascending, those of the head.
        """
        self._head_ids = token_ids.cpu().numpy()
        self._device = token_ids.device
        self._columns = self._of(NO_IDS)

    def of(self, batch: Sequence[SequenceSlice]) -> Columns:
        """Return the columns of a batch's rows."""
        given = [part.context_ids for part in batch if part.num_logit_rows]
        ids = given[0] if len(given) == 1 else np.unique(np.concatenate([NO_IDS, *given]))
        last = self._columns.context_ids
        # A lone session's are the same array until it has others.
        if ids is not last and not np.array_equal(ids, last):
            self._columns = self._of(ids)
        return self._columns

    def _of(self, context_ids: NDArray[np.int64]) -> Columns:
        places = self._head_ids.searchsorted(context_ids) + np.arange(len(context_ids))
        is_context = np.zeros(len(self._head_ids) + len(context_ids), np.bool_)
        is_context[places] = True
        token_ids = np.empty(len(is_context), np.int64)
        token_ids[places], token_ids[~is_context] = context_ids, self._head_ids
        return Columns(
            torch.from_numpy(token_ids).to(self._device),
            context_ids,
            torch.from_numpy(np.flatnonzero(~is_context)).to(self._device),
            torch.from_numpy(places).to(self._device),
        )
