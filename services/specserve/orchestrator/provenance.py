"""Where a committed block came from, for whoever asks for every token's origin. Values only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from specserve.orchestrator.round_note import revision_of
from specserve.rpc.v1 import common_pb2, generation_pb2


class Provenance(NamedTuple):
    """Round, replicas and probabilities of one committed block."""

    round: int
    """Number of the round, from 1."""
    first_position: int
    """Tokens of this round that were committed before, by decode-ahead."""
    draft: common_pb2.GetModelResponse | None
    """Who drafted; None where no draft service did."""
    target: common_pb2.GetModelResponse | None
    """Who verified."""
    target_probs: Sequence[float]
    """[K] p of each draft token."""
    draft_probs: Sequence[float] | None
    """[K] q of each draft token; None where the rule needs none."""

    def message(self, num_tokens: int) -> generation_pb2.BlockProvenance:
        """Write it for the block's emitted tokens."""
        draft, target = self.draft, self.target
        return generation_pb2.BlockProvenance(
            round=self.round,
            first_position=self.first_position,
            num_tokens=num_tokens,
            draft_replica_id="" if draft is None else draft.replica_id,
            draft_revision="" if draft is None else revision_of(draft),
            target_replica_id="" if target is None else target.replica_id,
            target_probs=np.asarray(self.target_probs, "<f8").tobytes(),
            draft_probs=np.asarray(self.draft_probs or (), "<f8").tobytes(),
        )
