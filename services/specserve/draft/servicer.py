"""DraftService: frames in, proposals out. Knows the draft's messages; knows no acceptance."""

from __future__ import annotations

import os
from typing import Any

import grpc

from specserve import telemetry
from specserve.config import MAX_NUM_SPECULATIVE_TOKENS, SpeculativeConfig
from specserve.errors import InvalidRequest, SpecServeError
from specserve.model.messages import ProposeCall, ProposeReply, Reply
from specserve.model.tokenizer import Tokenizer
from specserve.rpc import codec, status
from specserve.rpc.model_response import model_response
from specserve.rpc.replica import ReplicaServer
from specserve.rpc.v1 import common_pb2, draft_pb2, draft_pb2_grpc

GUESS_SETTINGS = ("draft_confidence_threshold", "draft_sample_top_k", "num_cached_outcomes")
"""What guesses depend on besides the weights."""


class DraftWire:
    """ProposeCall and ProposeReply as protobuf."""

    span_name = telemetry.SPAN_DRAFT_CALL

    def unpack_call(self, message: draft_pb2.ProposeCall, call_id: int) -> ProposeCall:
        """Read a call.

        Raises:
            InvalidRequest: a field is wrong; it is named.
        """
        if message.num_speculative_tokens > MAX_NUM_SPECULATIVE_TOKENS:
            raise InvalidRequest(
                "num_speculative_tokens",
                f"{message.num_speculative_tokens}, at most {MAX_NUM_SPECULATIVE_TOKENS}",
            )
        session = message.session
        return ProposeCall(
            call_id=call_id,
            session_id=session.session_id,
            epoch=session.epoch,
            step=session.step,
            keep_length=session.keep_length,
            keep_digest=session.keep_digest,
            append_token_ids=codec.unpack_ids(session.append_token_ids, "append_token_ids"),
            opening=codec.unpack_opening(session),
            num_speculative_tokens=message.num_speculative_tokens,
            alone=session.alone,
        )

    def pack_reply(self, reply: Reply, call_id: int) -> draft_pb2.ProposeReply:
        """Write a reply."""
        if not isinstance(reply, ProposeReply):
            raise TypeError(f"a draft device answered {type(reply).__name__}")
        size, ids, weights = codec.pack_probs(reply.draft_probs)
        return draft_pb2.ProposeReply(
            call_id=call_id,
            session_id=reply.session_id,
            step=reply.step,
            cached_length=reply.cached_length,
            draft_token_ids=codec.pack_ids(reply.draft_token_ids),
            support_size=size,
            support_token_ids=ids,
            support_weights=weights,
            timing=codec.pack_timing(reply.timing, reply.prefix_cached_tokens),
        )

    def pack_failure(
        self, call_id: int, session_id: str, step: int, error: SpecServeError
    ) -> draft_pb2.ProposeReply:
        """Write the failure of one call."""
        return draft_pb2.ProposeReply(
            call_id=call_id, session_id=session_id, step=step, error=status.to_call_error(error)
        )

    def make_frame(self, **fields: Any) -> draft_pb2.ProposeReplyFrame:
        """Make a reply frame."""
        return draft_pb2.ProposeReplyFrame(**fields)


class DraftServicer(draft_pb2_grpc.DraftServiceServicer):
    """The gRPC face of one draft replica."""

    def __init__(
        self, replica: ReplicaServer, tokenizer: Tokenizer, speculative: SpeculativeConfig
    ) -> None:
        self._replica = replica
        self._tokenizer = tokenizer
        self._settings = [f"{name}={getattr(speculative, name)}" for name in GUESS_SETTINGS]

    async def Propose(  # noqa: N802 - the contract's name
        self, request_iterator: Any, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        """Serve one orchestrator's stream of frames."""
        await self._replica.serve(request_iterator, context)

    async def GetModel(  # noqa: N802 - the contract's name
        self, request: common_pb2.GetModelRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> common_pb2.GetModelResponse:
        """Say what this replica serves."""
        response = model_response(
            self._replica,
            self._tokenizer,
            request,
            MAX_NUM_SPECULATIVE_TOKENS,
            self._settings,
        )
        response.pid = os.getpid()
        return response
