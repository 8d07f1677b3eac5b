"""A scripted pair: a draft and a target that speak the whole contract and do what is written down.

Both know a toy's law and the keys of every rule, by the public reference functions, so a draft can
be right or wrong on purpose and a target answers as a real one would, until its script has it fail.
A script is a value: which tokens are right, what goes wrong, and when. Holds no model and no KV.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import grpc
import numpy as np

from specserve.errors import NonFiniteLogits
from specserve.model.toy import ToySpec, toy_logits
from specserve.model.toy_tokenizer import ToyTokenizer
from specserve.rpc import codec, status
from specserve.rpc.channel import SERVER_OPTIONS
from specserve.rpc.v1 import (
    common_pb2,
    draft_pb2,
    draft_pb2_grpc,
    target_pb2,
    target_pb2_grpc,
)
from specserve.speculation.scoring import DraftRow, TargetRow, propose_row, score_row
from specserve.speculation.types import AcceptanceRule, SamplingParams


class Trouble(StrEnum):
    """What an answer can be, other than right."""

    LATE = "late"
    """It comes once the caller has given the call up."""
    LOST = "lost"
    """It never comes."""
    NAN = "nan"
    """Numbers are NaN: q of a draft, p of a target."""
    INF = "inf"
    """Numbers are +inf."""
    NAN_ROW = "nan row"
    """Target: the model's row was NaN, which is that request's error."""
    NO_TOKEN = "no token"
    """Nothing in it: no draft token, no replacement."""
    STRAY_ID = "stray id"
    """An id outside the vocabulary."""
    ODD_BYTES = "odd bytes"
    """An array that is no array."""


@dataclass(frozen=True, slots=True)
class Script:
    """What one side does."""

    accepts: str = "1"
    """Draft: which of a proposal's tokens are the target's own, row by row, again from the start
    when it is shorter than K. "1" is a perfect draft, "0" one that is always wrong."""
    trouble: Trouble | None = None
    every: int = 1
    """The trouble befalls every so-manieth answer."""
    prompt: tuple[int, ...] | None = None
    """The trouble befalls sessions of this prompt only."""


PERFECT = Script()
ALWAYS_WRONG = Script("0")


@dataclass(slots=True)
class Session:
    """What a service remembers of a session."""

    params: SamplingParams
    tokens: list[int] = field(default_factory=list)
    num_calls: int = 0

    def troubled(self, script: Script) -> Trouble | None:
        """Count an answer; say what is to go wrong with it."""
        self.num_calls += 1
        is_meant = (
            script.prompt is None or tuple(self.tokens[: len(script.prompt)]) == script.prompt
        )
        return script.trouble if is_meant and self.num_calls % script.every == 0 else None


class _Double:
    """What both sides share: sessions, streams, and answers that are late."""

    def __init__(self, model: str, script: Script) -> None:
        self.spec = ToySpec.parse(model)
        self.script = script
        self.sessions: dict[str, Session] = {}
        self.num_troubled = 0
        self._late: dict[int, Any] = {}

    def model(self, request: common_pb2.GetModelRequest, role: str) -> common_pb2.GetModelResponse:
        tokenizer = ToyTokenizer(self.spec)
        table = tokenizer.token_table()
        return common_pb2.GetModelResponse(
            protocol_version=codec.PROTOCOL_VERSION,
            model_id=f"scripted {role}",
            replica_id=f"scripted-{role}",
            weights_fingerprint=role,
            dtype="float32",
            vocab_size=self.spec.vocab_size,
            vocab_fingerprint=table.fingerprint,
            eos_token_ids=codec.pack_ids(tokenizer.eos_token_ids),
            max_model_len=4096,
            token_table=table.to_bytes() if request.include_token_table else b"",
        )

    async def serve(
        self,
        frames: Any,
        context: Any,
        answer: Callable[[Any, Session], Iterator[Any]],
        make_frame: Callable[..., Any],
    ) -> None:
        """Answer a stream of frames, each reply in a frame of its own."""
        async for frame in frames:
            for cancel in frame.cancels:
                if (reply := self._late.pop(cancel.call_id, None)) is not None:
                    await context.write(make_frame(replies=[reply]))
            for release in frame.releases:
                self.sessions.pop(release.session_id, None)
            for call in frame.calls:
                session = self._session(call.session)
                trouble = session.troubled(self.script) if self._counts(call) else None
                self.num_troubled += trouble is not None
                for reply in answer(call, session):
                    self._address(reply, call.session)
                    self.spoil(reply, trouble, session)
                    if trouble is Trouble.LATE:
                        self._late[call.session.call_id] = reply
                    elif trouble is not Trouble.LOST:
                        await context.write(make_frame(replies=[reply]))
                    if reply.HasField("error") or trouble in (Trouble.LATE, Trouble.LOST):
                        break

    def spoil(self, reply: Any, trouble: Trouble | None, session: Session) -> None:
        """Make a right answer wrong."""
        raise NotImplementedError

    def _counts(self, call: Any) -> bool:
        """Say whether a call asks for something that can be wrong."""
        raise NotImplementedError

    def _session(self, call: common_pb2.SessionCall) -> Session:
        opening = codec.unpack_opening(call)
        if opening is not None:
            self.sessions[call.session_id] = Session(opening.sampling)
        session = self.sessions[call.session_id]
        session.tokens[call.keep_length :] = codec.unpack_ids(call.append_token_ids, "append")
        return session

    @staticmethod
    def _address(reply: Any, call: common_pb2.SessionCall) -> None:
        reply.call_id, reply.session_id, reply.step = call.call_id, call.session_id, call.step


class DoubleDraft(_Double, draft_pb2_grpc.DraftServiceServicer):
    """Proposes the target's own next tokens, or wrong ones, as its script says."""

    async def GetModel(self, request: Any, context: Any) -> common_pb2.GetModelResponse:
        return self.model(request, "draft")

    async def Propose(self, request_iterator: Any, context: Any) -> None:
        await self.serve(request_iterator, context, self._propose, draft_pb2.ProposeReplyFrame)

    def _counts(self, call: draft_pb2.ProposeCall) -> bool:
        return call.num_speculative_tokens > 0

    def _propose(
        self, call: draft_pb2.ProposeCall, session: Session
    ) -> Iterator[draft_pb2.ProposeReply]:
        text, start, params = list(session.tokens), len(session.tokens), session.params
        supports: list[tuple[Any, Any]] = []
        for row in range(call.num_speculative_tokens):
            logits = toy_logits(self.spec, text)
            draw = propose_row(
                logits, DraftRow(params, start + row, start, row), self.spec.vocab_size
            )
            token_id, support = draw.token_id, (draw.support_token_ids, draw.support_weights)
            if self.script.accepts[row % len(self.script.accepts)] == "0":
                # Under the standard rule, which a token cannot fail for sure, the least likely one.
                is_standard = params.rule is AcceptanceRule.STANDARD
                token_id = int(logits.argmin()) if is_standard else (token_id + 1) % len(logits)
                support = (np.array([token_id], np.int32), np.ones(1, np.float32))
            text.append(token_id)
            supports.append(support)
        reply = draft_pb2.ProposeReply(
            draft_token_ids=codec.pack_ids(text[start:]), cached_length=start
        )
        if params.rule is AcceptanceRule.STANDARD and supports:
            size = max(len(ids) for ids, _ in supports)
            reply.support_size = size
            # Padding has weight 0, and any id.
            reply.support_token_ids = b"".join(
                np.pad(ids, (0, size - len(ids))).astype("<i4").tobytes() for ids, _ in supports
            )
            reply.support_weights = b"".join(
                np.pad(q, (0, size - len(q))).astype("<f4").tobytes() for _, q in supports
            )
        yield reply

    def spoil(self, reply: Any, trouble: Trouble | None, session: Session) -> None:
        match trouble:
            case Trouble.NAN | Trouble.INF:
                weights = np.frombuffer(reply.support_weights, "<f4")
                reply.support_weights = np.full_like(weights, float(trouble)).tobytes()
            case Trouble.NO_TOKEN:
                reply.draft_token_ids = reply.support_weights = reply.support_token_ids = b""
                reply.support_size = 0
            case Trouble.STRAY_ID:
                num_tokens = len(reply.draft_token_ids) // 4
                reply.draft_token_ids = codec.pack_ids([self.spec.vocab_size] * num_tokens)
            case Trouble.ODD_BYTES:
                reply.draft_token_ids += b"\0"
            case _:
                pass


class DoubleTarget(_Double, target_pb2_grpc.TargetServiceServicer):
    """Scores by the toy's law, as a real target does, and decodes ahead."""

    async def GetModel(self, request: Any, context: Any) -> common_pb2.GetModelResponse:
        return self.model(request, "target")

    async def Verify(self, request_iterator: Any, context: Any) -> None:
        await self.serve(request_iterator, context, self._verify, target_pb2.VerifyReplyFrame)

    def _counts(self, call: target_pb2.VerifyCall) -> bool:
        return not call.append_only

    def _verify(
        self, call: target_pb2.VerifyCall, session: Session
    ) -> Iterator[target_pb2.VerifyReply]:
        if call.append_only:
            yield target_pb2.VerifyReply(cached_length=len(session.tokens))
            return
        drafted = codec.unpack_ids(call.draft_token_ids, "draft_token_ids")
        if drafted:
            yield self._score(call, session, drafted)
            return
        num_steps = max(1, call.num_decode_steps)
        for step in range(num_steps):
            length = len(session.tokens)
            logits = toy_logits(self.spec, session.tokens)
            token_id = score_row(
                logits, TargetRow(session.params, length, length, 0, None)
            ).replacement_token_id
            goes_on = step + 1 < num_steps and token_id not in session.params.stop_token_ids
            yield target_pb2.VerifyReply(
                replacement_token_ids=codec.pack_ids([token_id]),
                cached_length=length,
                more_follows=goes_on,
            )
            if not goes_on:
                return
            session.tokens.append(token_id)

    def _score(
        self, call: target_pb2.VerifyCall, session: Session, drafted: tuple[int, ...]
    ) -> target_pb2.VerifyReply:
        q = codec.unpack_probs(
            call.support_size, call.support_token_ids, call.support_weights, len(drafted)
        )
        start, text = len(session.tokens), [*session.tokens, *drafted]
        # A row behind an id that is none is never reached: any context will do.
        text = [token if 0 <= token < self.spec.vocab_size else 0 for token in text]
        scores = [
            score_row(
                toy_logits(self.spec, text[: start + row]),
                TargetRow(
                    session.params,
                    start + row,
                    start,
                    row,
                    drafted[row] if row < len(drafted) else None,
                    q.token_ids[row] if q is not None and row < len(drafted) else None,
                    q.weights[row] if q is not None and row < len(drafted) else None,
                ),
            )
            for row in range(len(drafted) + 1)
        ]
        session.tokens += drafted
        return target_pb2.VerifyReply(
            target_probs=np.array([s.target_prob for s in scores[:-1]], "<f8").tobytes(),
            replacement_token_ids=codec.pack_ids([s.replacement_token_id for s in scores]),
            cached_length=len(session.tokens),
        )

    def spoil(self, reply: Any, trouble: Trouble | None, session: Session) -> None:
        match trouble:
            case Trouble.NAN | Trouble.INF:
                num_probs = len(reply.target_probs) // 8
                reply.target_probs = np.full(num_probs, float(trouble), "<f8").tobytes()
            case Trouble.NAN_ROW:
                error = NonFiniteLogits(reply.session_id, 0)
                reply.error.CopyFrom(status.to_call_error(error))
            case Trouble.NO_TOKEN:
                reply.target_probs = reply.replacement_token_ids = b""
            case Trouble.STRAY_ID:
                num_rows = len(reply.replacement_token_ids) // 4
                reply.replacement_token_ids = codec.pack_ids([self.spec.vocab_size] * num_rows)
            case Trouble.ODD_BYTES:
                reply.replacement_token_ids += b"\0"
            case _:
                pass


@asynccontextmanager
async def double_draft(model: str, script: Script) -> AsyncIterator[tuple[DoubleDraft, str]]:
    """Serve a draft that knows the target's law; gives it and its address."""
    draft = DoubleDraft(model, script)
    async with _serving(
        lambda server: draft_pb2_grpc.add_DraftServiceServicer_to_server(draft, server)
    ) as address:
        yield draft, address


@asynccontextmanager
async def double_target(
    model: str, script: Script = PERFECT
) -> AsyncIterator[tuple[DoubleTarget, str]]:
    """Serve a target; gives it and its address."""
    target = DoubleTarget(model, script)
    async with _serving(
        lambda server: target_pb2_grpc.add_TargetServiceServicer_to_server(target, server)
    ) as address:
        yield target, address


@asynccontextmanager
async def _serving(register: Callable[[grpc.aio.Server], None]) -> AsyncIterator[str]:
    server = grpc.aio.server(options=SERVER_OPTIONS)
    register(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)
