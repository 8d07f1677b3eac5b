"""The contract of draft and target as any client sees it: sessions, steps, errors, health."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from helpers.pair import DRAFT, TARGET, greedy_tokens, make_draft, make_target
from specserve.rpc import codec
from specserve.rpc.v1 import (
    common_pb2,
    draft_pb2,
    draft_pb2_grpc,
    target_pb2,
    target_pb2_grpc,
)
from specserve.speculation.digest import TokenChain

PROMPT = (5, 6, 7)
OPENING = common_pb2.SessionOpening(
    sampling=common_pb2.SamplingParams(
        rule=common_pb2.ACCEPTANCE_RULE_GREEDY, temperature=0.0, top_p=1.0
    )
)


class Stream:
    """One open stream of frames, a call at a time."""

    def __init__(self, stream: Any, make_frame: Any) -> None:
        self._stream = stream
        self._make_frame = make_frame

    async def ask(self, *calls: Any, **fields: Any) -> list[Any]:
        """Send calls in one frame, and wait for as many final replies."""
        await self._stream.write(self._make_frame(calls=calls, **fields))
        replies: list[Any] = []
        while sum(not getattr(reply, "more_follows", False) for reply in replies) < len(calls):
            replies += (await self._stream.read()).replies
        return replies


@asynccontextmanager
async def target_stream(model: str = TARGET) -> AsyncIterator[Stream]:
    """Open a stream to a toy target."""
    service = await make_target(model)
    try:
        async with grpc.aio.insecure_channel(service.address) as channel:
            stream = target_pb2_grpc.TargetServiceStub(channel).Verify()
            yield Stream(stream, target_pb2.VerifyFrame)
            stream.cancel()
    finally:
        await service.stop()


@asynccontextmanager
async def draft_stream(model: str = DRAFT) -> AsyncIterator[Stream]:
    """Open a stream to a toy draft."""
    service = await make_draft(model)
    try:
        async with grpc.aio.insecure_channel(service.address) as channel:
            stream = draft_pb2_grpc.DraftServiceStub(channel).Propose()
            yield Stream(stream, draft_pb2.ProposeFrame)
            stream.cancel()
    finally:
        await service.stop()


def session(
    call_id: int,
    tokens: tuple[int, ...] = PROMPT,
    *,
    keep: int = 0,
    step: int = 1,
    epoch: int = 1,
    opens: bool = False,
    digest: int | None = None,
) -> common_pb2.SessionCall:
    """Make a session's part: keep some of `tokens`, append the rest."""
    return common_pb2.SessionCall(
        call_id=call_id,
        session_id="s",
        epoch=epoch,
        step=step,
        keep_length=keep,
        keep_digest=TokenChain(tokens).digest(keep) if digest is None else digest,
        append_token_ids=codec.pack_ids(tokens[keep:]),
        opening=OPENING if opens else None,
    )


def verify(*args: Any, draft: tuple[int, ...] = (), steps: int = 1, **fields: Any) -> Any:
    """Make a target's call."""
    return target_pb2.VerifyCall(
        session=session(*args, **fields),
        draft_token_ids=codec.pack_ids(draft),
        num_decode_steps=steps,
    )


async def test_verify_scores_k_plus_one_rows_and_rolls_back_by_length() -> None:
    """K scores, K + 1 replacements; the next call's keep_length is all the rollback there is."""
    truth = greedy_tokens(TARGET, PROMPT, 6)
    wrong = (truth[2] + 1) % 48
    async with target_stream() as stream:
        (reply,) = await stream.ask(verify(1, opens=True, draft=(*truth[:2], wrong, 9)))
        probs = codec.unpack_array(reply.target_probs, np.float64, "target_probs")
        replacements = codec.unpack_ids(reply.replacement_token_ids, "replacement_token_ids")
        assert probs.tolist()[:3] == [1.0, 1.0, 0.0]
        assert replacements[:3] == tuple(truth[:3])
        assert len(replacements) == 5
        assert reply.cached_length == 3 + 4
        committed = (*PROMPT, *truth[:3])
        (reply,) = await stream.ask(verify(2, committed, keep=5, step=2))
        assert codec.unpack_ids(reply.replacement_token_ids, "r") == (truth[3],)
        assert reply.cached_length == 6


async def test_same_step_gets_the_stored_reply_and_advances_nothing_B154() -> None:
    """A reply that was lost is given again, bit for bit, under the new call id."""
    async with target_stream() as stream:
        (first,) = await stream.ask(verify(1, opens=True, draft=(1, 2)))
        (again,) = await stream.ask(verify(2, opens=True, draft=(1, 2)))
        assert again.call_id == 2
        again.call_id = first.call_id
        assert again == first


async def test_older_epoch_or_step_is_refused() -> None:
    """ABORTED with StaleStep; the session goes on as it was."""
    async with target_stream() as stream:
        await stream.ask(verify(1, opens=True, step=5, epoch=2))
        for call in (verify(2, step=4, epoch=2), verify(3, step=9, epoch=1)):
            (reply,) = await stream.ask(call)
            assert reply.error.error == "StaleStep"
            assert reply.error.code == grpc.StatusCode.ABORTED.value[0]
        (reply,) = await stream.ask(verify(4, keep=2, step=50, epoch=2))
        assert not reply.HasField("error"), "steps may skip"


async def test_missing_or_different_content_is_told_with_the_matching_length() -> None:
    """FAILED_PRECONDITION (CacheMismatch); sending more repairs it."""
    async with target_stream() as stream:
        await stream.ask(verify(1, opens=True))
        longer = (*PROMPT, 1, 2, 3)
        (reply,) = await stream.ask(verify(2, longer, keep=5, step=2))
        assert (reply.error.error, reply.error.matching_length) == ("CacheMismatch", 3)
        assert reply.error.code == grpc.StatusCode.FAILED_PRECONDITION.value[0]
        (reply,) = await stream.ask(verify(3, longer, keep=3, step=3))
        assert reply.cached_length == 6
        (reply,) = await stream.ask(verify(4, longer, keep=3, step=4, digest=12345))
        assert (reply.error.error, reply.error.matching_length) == ("CacheMismatch", 0)


async def test_unknown_session_is_not_found_and_release_is_idempotent() -> None:
    """Without an opening nothing is opened; a released session is forgotten, twice over."""
    async with target_stream() as stream:
        (reply,) = await stream.ask(verify(1))
        assert reply.error.error == "SessionNotFound"
        assert reply.error.code == grpc.StatusCode.NOT_FOUND.value[0]
        await stream.ask(verify(2, opens=True))
        release = common_pb2.Release(session_id="s")
        (reply,) = await stream.ask(verify(3, keep=2, step=2), releases=[release, release])
        assert reply.error.error == "SessionNotFound", "releases act before calls"


async def test_decode_ahead_streams_one_token_a_reply() -> None:
    """more_follows on all but the last, under one call id, the cache one behind the tokens."""
    async with target_stream() as stream:
        replies = await stream.ask(verify(1, opens=True, steps=5))
        tokens = [codec.unpack_ids(r.replacement_token_ids, "r")[0] for r in replies]
        assert tokens == greedy_tokens(TARGET, PROMPT, 5)
        assert [reply.more_follows for reply in replies] == [True] * 4 + [False]
        assert {reply.call_id for reply in replies} == {1}
        assert [reply.cached_length for reply in replies] == [3, 4, 5, 6, 7]


async def test_decode_ahead_stops_at_a_stop_id() -> None:
    """What the session's opening names ends it early."""
    truth = greedy_tokens(TARGET, PROMPT, 8)
    async with target_stream() as stream:
        call = verify(1, opens=True, steps=8)
        call.session.opening.sampling.stop_token_ids = codec.pack_ids((truth[3],))
        replies = await stream.ask(call)
    assert len(replies) == truth.index(truth[3]) + 1
    assert not replies[-1].more_follows


async def test_draft_holds_one_token_less_than_it_drafted() -> None:
    """K tokens, of which the last was never fed; K = 0 only appends."""
    async with draft_stream() as stream:
        call = draft_pb2.ProposeCall(session=session(1, opens=True))
        (reply,) = await stream.ask(call)
        assert (reply.cached_length, reply.draft_token_ids) == (3, b"")
        call = draft_pb2.ProposeCall(session=session(2, keep=2, step=2), num_speculative_tokens=4)
        (reply,) = await stream.ask(call)
        drafted = codec.unpack_ids(reply.draft_token_ids, "d")
        assert list(drafted) == greedy_tokens(DRAFT, PROMPT, 4)
        assert reply.cached_length == 3 + 4 - 1
        assert reply.support_size == 0, "greedy needs no q"


async def test_sampled_draft_sends_the_q_it_drew_from() -> None:
    """Each token lies in the support of its own row, with weight."""
    opening = common_pb2.SessionOpening()
    opening.CopyFrom(OPENING)
    opening.sampling.rule = common_pb2.ACCEPTANCE_RULE_STANDARD
    opening.sampling.temperature = 1.0
    async with draft_stream() as stream:
        part = session(1)
        part.opening.CopyFrom(opening)
        call = draft_pb2.ProposeCall(session=part, num_speculative_tokens=3)
        (reply,) = await stream.ask(call)
    probs = codec.unpack_probs(
        reply.support_size, reply.support_token_ids, reply.support_weights, 3
    )
    assert probs is not None
    for row, token in enumerate(codec.unpack_ids(reply.draft_token_ids, "d")):
        assert probs.weights[row][probs.token_ids[row] == token].sum() > 0


@pytest.mark.parametrize("spoiled", ["missing q", "append_only with draft", "too many steps"])
async def test_wrong_call_fails_alone(spoiled: str) -> None:
    """INVALID_ARGUMENT in its reply; a good call of the same frame is served."""
    bad = verify(1, opens=True, draft=(1, 2))
    bad.session.session_id = "bad"
    if spoiled == "missing q":
        bad.session.opening.sampling.rule = common_pb2.ACCEPTANCE_RULE_STANDARD
        bad.session.opening.sampling.temperature = 1.0
    elif spoiled == "append_only with draft":
        bad.append_only = True
    else:
        bad.draft_token_ids = b""
        bad.num_decode_steps = 257
    async with target_stream() as stream:
        replies = await stream.ask(bad, verify(2, opens=True))
    by_id = {reply.call_id: reply for reply in replies}
    assert by_id[1].error.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert not by_id[2].HasField("error")


@pytest.mark.parametrize("role", ["draft", "target"])
async def test_model_health_and_reflection(role: str) -> None:
    """Every replica says what it serves, that it serves, and what it understands."""
    service = await (make_draft() if role == "draft" else make_target())
    name = f"specserve.rpc.v1.{role.capitalize()}Service"
    try:
        async with grpc.aio.insecure_channel(service.address) as channel:
            stub = {
                "draft": draft_pb2_grpc.DraftServiceStub,
                "target": target_pb2_grpc.TargetServiceStub,
            }[role](channel)
            model = await stub.GetModel(common_pb2.GetModelRequest())
            assert model.protocol_version == codec.PROTOCOL_VERSION
            assert model.vocab_size == 48
            assert model.max_model_len > 0
            assert model.vocab_fingerprint
            assert model.token_table == b""
            assert model.replica_id == service.replica_id
            assert model.max_num_speculative_tokens == 64
            assert codec.unpack_ids(model.eos_token_ids, "eos") == (0,)
            whole = await stub.GetModel(common_pb2.GetModelRequest(include_token_table=True))
            assert whole.token_table
            health = health_pb2_grpc.HealthStub(channel)
            for asked in ("", name):
                answer = await health.Check(health_pb2.HealthCheckRequest(service=asked))
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
            reflect = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
            await reflect.write(reflection_pb2.ServerReflectionRequest(list_services=""))
            listed = (await reflect.read()).list_services_response.service
            assert name in {entry.name for entry in listed}
            reflect.cancel()
            await service.drain(0.0)
            answer = await health.Check(health_pb2.HealthCheckRequest(service=name))
            assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
            assert (await stub.GetModel(common_pb2.GetModelRequest())).draining
    finally:
        await service.stop()
