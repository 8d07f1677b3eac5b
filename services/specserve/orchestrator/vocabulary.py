"""The pair check: draft and target must map every token id to the same bytes.

Knows token tables and GetModel; knows no request.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from specserve.errors import ModelMismatch, SpecServeError, VocabularyMismatch
from specserve.model.token_table import TokenTable
from specserve.orchestrator.pool import model_of
from specserve.rpc import codec
from specserve.rpc.garbled import TolerantChannel, require_readable
from specserve.rpc.link import FrameLink
from specserve.rpc.v1 import common_pb2

logger = logging.getLogger(__name__)

TABLE_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The target's vocabulary, as trimming and request checks need it."""

    fingerprint: str
    table: TokenTable
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TargetIdentity:
    """What must be equal for two replicas to give the same tokens."""

    weights_fingerprint: str
    dtype: str
    vocab_fingerprint: str

    @staticmethod
    def of(model: common_pb2.GetModelResponse) -> TargetIdentity:
        """Read a replica's identity."""
        return TargetIdentity(model.weights_fingerprint, model.dtype, model.vocab_fingerprint)

    @property
    def key(self) -> str:
        """All of it as one word."""
        return f"{self.weights_fingerprint}/{self.dtype}/{self.vocab_fingerprint}"

    def __str__(self) -> str:
        return f"weights {self.weights_fingerprint[:12]} in {self.dtype}"


def check_same_model(begun_by: str, identity: str) -> None:
    """Refuse to go on with another model's text.

    Raises:
        ModelMismatch: it was begun by another.
    """
    if begun_by != identity:
        raise ModelMismatch("the target pool", identity, begun_by)


async def fetch_vocabulary(link: FrameLink[Any, Any]) -> Vocabulary:
    """Ask a replica for its id -> bytes table.

    Raises:
        grpc.aio.AioRpcError: the replica did not answer.
        PeerUnavailable: its answer cannot be read.
    """
    async with link.open_channel() as channel:
        response = await link.kind.make_stub(TolerantChannel(channel)).GetModel(
            common_pb2.GetModelRequest(include_token_table=True), timeout=TABLE_TIMEOUT_S
        )
    require_readable(response, link.kind.pool, model_of(link).replica_id)
    return Vocabulary(
        response.vocab_fingerprint,
        TokenTable.from_bytes(response.token_table),
        codec.unpack_ids(response.eos_token_ids, "eos_token_ids"),
    )


def compare(target: TokenTable, draft: TokenTable) -> None:
    """Refuse a pair whose vocabularies differ.

    Raises:
        VocabularyMismatch: names the first id that differs.
    """
    difference = target.first_difference(draft)
    if difference is not None:
        raise VocabularyMismatch(*difference)


async def check_pair(vocabulary: Vocabulary, draft: FrameLink[Any, Any]) -> SpecServeError | None:
    """Say why a draft may not serve this target; None when it may."""
    model = draft.model
    if model is None or not model.vocab_fingerprint:
        return None  # a proposer without a model speaks whatever ids it is given
    if model.vocab_fingerprint == vocabulary.fingerprint:
        return None
    try:
        compare(vocabulary.table, (await fetch_vocabulary(draft)).table)
    except VocabularyMismatch as error:
        return error
    return None
