"""Every token's origin, round, replicas and probabilities, as an orchestrator tells them.

Values in, values out; an orchestrator of an older build says nothing, and then nothing is known.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specserve.gateway.answers import TokenProvenance
from specserve.gateway.blocks import Round, TokenOrigin
from specserve.rpc.codec import unpack_array, unpack_methods
from specserve.rpc.v1.generation_pb2 import BlockProvenance


def provenance_of(
    blocks: Sequence[BlockProvenance], origins: Sequence[TokenOrigin], rounds: Sequence[Round]
) -> tuple[TokenProvenance, ...]:
    """Say where each token of some blocks came from.

    Args:
        origins: of the blocks' tokens, in order.
        rounds: what was drafted for each block.
    """
    found: list[TokenProvenance] = []
    for block, drafted in zip(blocks, rounds, strict=False):
        p = unpack_array(block.target_probs, np.float64, "target_probs").tolist()
        q = unpack_array(block.draft_probs, np.float64, "draft_probs").tolist()
        proposer = next(iter(unpack_methods([drafted.proposer])), None)
        for row in range(block.num_tokens):
            if len(found) == len(origins):
                break
            # The bonus token, and a plain one, stand where nothing was drafted.
            found.append(
                TokenProvenance(
                    origin=origins[len(found)],
                    round=block.round,
                    position=block.first_position + row,
                    proposer=proposer,
                    draft_replica=block.draft_replica_id or None,
                    draft_revision=block.draft_revision or None,
                    target_replica=block.target_replica_id,
                    p=p[row] if row < len(p) else None,
                    q=q[row] if row < len(q) else None,
                )
            )
    return tuple(found)
