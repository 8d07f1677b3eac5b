"""TargetService: frames in, scores out. Knows the target's messages; accepts nothing itself."""

from __future__ import annotations

import os
from typing import Any

import grpc
import numpy as np

from specserve import telemetry
from specserve.config import MAX_NUM_SPECULATIVE_TOKENS
from specserve.errors import InvalidProposal, InvalidRequest, SpecServeError
from specserve.model.messages import Reply, TokenLogprobs, VerifyCall, VerifyReply
from specserve.model.tokenizer import Tokenizer
from specserve.rpc import codec, status
from specserve.rpc.model_response import model_response
from specserve.rpc.replica import ReplicaServer
from specserve.rpc.v1 import common_pb2, target_pb2, target_pb2_grpc
from specserve.speculation.types import AcceptanceRule

MAX_DECODE_STEPS = 256
"""Tokens decoded ahead by one call."""


class TargetWire:
    """VerifyCall and VerifyReply as protobuf."""

    span_name = telemetry.SPAN_TARGET_CALL

    def unpack_call(self, message: target_pb2.VerifyCall, call_id: int) -> VerifyCall:
        """Read a call.

        Raises:
            InvalidRequest: a field is wrong; it is named.
            InvalidProposal: the draft's numbers do not fit together.
        """
        session = message.session
        draft_token_ids = codec.unpack_ids(message.draft_token_ids, "draft_token_ids")
        if len(draft_token_ids) > MAX_NUM_SPECULATIVE_TOKENS:
            raise InvalidRequest(
                "draft_token_ids",
                f"{len(draft_token_ids)} tokens, at most {MAX_NUM_SPECULATIVE_TOKENS}",
            )
        if message.num_decode_steps > MAX_DECODE_STEPS:
            raise InvalidRequest(
                "num_decode_steps", f"{message.num_decode_steps}, at most {MAX_DECODE_STEPS}"
            )
        if draft_token_ids and (message.num_decode_steps > 1 or message.append_only):
            raise InvalidProposal("draft tokens go with neither decode-ahead nor append_only")
        opening = codec.unpack_opening(session)
        probs = codec.unpack_probs(
            message.support_size,
            message.support_token_ids,
            message.support_weights,
            len(draft_token_ids),
        )
        if (
            draft_token_ids
            and probs is None
            and opening is not None
            and opening.sampling.rule is AcceptanceRule.STANDARD
        ):
            raise InvalidProposal("the standard rule needs q of every draft token; none came")
        return VerifyCall(
            call_id=call_id,
            session_id=session.session_id,
            epoch=session.epoch,
            step=session.step,
            keep_length=session.keep_length,
            keep_digest=session.keep_digest,
            append_token_ids=codec.unpack_ids(session.append_token_ids, "append_token_ids"),
            opening=opening,
            draft_token_ids=draft_token_ids,
            draft_probs=probs,
            num_decode_steps=max(1, message.num_decode_steps),
            append_only=message.append_only,
            alone=session.alone,
        )

    def pack_reply(self, reply: Reply, call_id: int) -> target_pb2.VerifyReply:
        """Write a reply."""
        if not isinstance(reply, VerifyReply):
            raise TypeError(f"a target device answered {type(reply).__name__}")
        return target_pb2.VerifyReply(
            call_id=call_id,
            session_id=reply.session_id,
            step=reply.step,
            cached_length=reply.cached_length,
            target_probs=np.asarray(reply.target_probs, dtype="<f8").tobytes(),
            replacement_token_ids=codec.pack_ids(reply.replacement_token_ids),
            logprobs=None if reply.logprobs is None else _pack_logprobs(reply.logprobs),
            more_follows=reply.more_follows,
            timing=codec.pack_timing(reply.timing, reply.prefix_cached_tokens),
        )

    def pack_failure(
        self, call_id: int, session_id: str, step: int, error: SpecServeError
    ) -> target_pb2.VerifyReply:
        """Write the failure of one call."""
        return target_pb2.VerifyReply(
            call_id=call_id, session_id=session_id, step=step, error=status.to_call_error(error)
        )

    def make_frame(self, **fields: Any) -> target_pb2.VerifyReplyFrame:
        """Make a reply frame."""
        return target_pb2.VerifyReplyFrame(**fields)


def _pack_logprobs(logprobs: TokenLogprobs) -> target_pb2.RowLogprobs:
    return target_pb2.RowLogprobs(
        draft=np.asarray(logprobs.draft, dtype="<f4").tobytes(),
        replacement=np.asarray(logprobs.replacement, dtype="<f4").tobytes(),
        num_top=logprobs.top.shape[1] if logprobs.top.ndim == 2 else 0,
        top_token_ids=np.asarray(logprobs.top_token_ids, dtype="<i4").tobytes(),
        top=np.asarray(logprobs.top, dtype="<f4").tobytes(),
    )


class TargetServicer(target_pb2_grpc.TargetServiceServicer):
    """The gRPC face of one target replica."""

    def __init__(self, replica: ReplicaServer, tokenizer: Tokenizer) -> None:
        self._replica = replica
        self._tokenizer = tokenizer

    async def Verify(  # noqa: N802 - the contract's name
        self, request_iterator: Any, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        """Serve one orchestrator's stream of frames."""
        await self._replica.serve(request_iterator, context)

    async def GetModel(  # noqa: N802 - the contract's name
        self, request: common_pb2.GetModelRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> common_pb2.GetModelResponse:
        """Say what this replica serves."""
        response = model_response(
            self._replica, self._tokenizer, request, MAX_NUM_SPECULATIVE_TOKENS
        )
        response.pid = os.getpid()
        return response
