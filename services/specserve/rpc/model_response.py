"""The answer to GetModel: what a replica serves, from its device and its tokenizer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from specserve.rpc import codec
from specserve.rpc.replica import ReplicaServer
from specserve.rpc.v1 import common_pb2


def model_response(
    replica: ReplicaServer,
    vocabulary: Any,
    request: common_pb2.GetModelRequest,
    max_k: int,
    settings: Iterable[str] = (),
) -> common_pb2.GetModelResponse:
    """Say what a replica serves. `vocabulary` is None for a proposer without a model."""
    info = replica.device.info
    response = common_pb2.GetModelResponse(
        protocol_version=codec.PROTOCOL_VERSION,
        model_id=info.model_id,
        revision=info.revision,
        weights_fingerprint=info.weights_fingerprint,
        vocab_size=info.vocab_size,
        max_model_len=info.max_model_len,
        dtype=info.dtype,
        device=info.device,
        replica_id=replica.replica_id,
        num_blocks=info.num_blocks,
        block_size=info.block_size,
        weights_bytes=info.weights_bytes,
        kv_cache_bytes=info.kv_cache_bytes,
        max_num_speculative_tokens=max_k,
        draining=replica.draining,
        load=codec.pack_load(replica.load),
        hardware=info.hardware,
        backend=info.backend,
        versions=info.versions,
        settings=sorted(settings),
    )
    if vocabulary is not None:
        table = vocabulary.token_table()
        response.vocab_fingerprint = table.fingerprint
        response.eos_token_ids = codec.pack_ids(vocabulary.eos_token_ids)
        if request.include_token_table:
            response.token_table = table.to_bytes()
    return response
