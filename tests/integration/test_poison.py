"""Requests that devices die of: what becomes of them, and of those that were in their company."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from helpers.pair import (
    Generated,
    Pair,
    greedy_tokens,
    is_idle,
    make_request,
    make_target,
    running_pair,
)
from helpers.waiting import eventually
from specserve.errors import PoisonRequest
from specserve.gateway.errors import to_http
from specserve.gateway.grpc_backend import GrpcBackend
from specserve.rpc.replica_service import ReplicaService
from specserve.rpc.status import ERROR_KEY, RemoteError, from_rpc_error
from specserve.rpc.v1 import generation_pb2

TOY = "toy:vocab_size=48,seed=7,eos_bias=-1000"
FATAL = TOY + ",fatal_token=0"
DRAFT = TOY + ",noise=0.7"
POISON = (5, 0, 6)
ENDLESS = 4000
"""More tokens than a stream gets to here."""
NO_DRAFT: dict[str, object] = {"method": "ngram"}

pytestmark = pytest.mark.slow


def count_deaths(service: ReplicaService, deaths: list[frozenset[str]]) -> None:
    """Note whom each device of a replica was about when it died."""
    supervisor = service.replica._supervisor
    forget = supervisor._on_death

    def on_death(computed: frozenset[str]) -> None:
        deaths.append(computed)
        forget(computed)

    supervisor._on_death = on_death


async def given_up(pair: Pair, **fields: object) -> grpc.aio.AioRpcError:
    """Send the request that devices die of; returns what comes of it."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await pair.generate(make_request(POISON, **fields))  # type: ignore[arg-type]
    return caught.value


def check_error(error: grpc.aio.AioRpcError, num_deaths: int) -> None:
    """It is the request's own, names it, and says nothing of its prompt."""
    names = dict(error.trailing_metadata() or ())
    assert names[ERROR_KEY] == PoisonRequest.__name__
    answer = to_http(from_rpc_error(error, "orchestrator"))
    assert (answer.status, answer.code) == (500, "poison_request")
    assert answer.headers == {"x-should-retry": "false"}
    assert "request request-" in answer.message
    assert f"{num_deaths} devices died or hung" in answer.message


async def test_a_request_sent_again_and_again_takes_no_replica_down() -> None:
    """More device deaths in a minute than any replica may have of its own; each is the request's.

    With two targets the second death is the other one's, which alone sees whose it was: the first
    is told, for it has seen its device die in company again and again."""
    async with running_pair(FATAL, draft=None, speculative=NO_DRAFT) as pair:
        other = await make_target(FATAL)
        pair.owned.append(other)
        targets = [pair.target, other]
        deaths: list[frozenset[str]] = []
        for target in targets:
            count_deaths(target, deaths)
        pair.orchestrator.update_peers([target.address for target in targets], [])
        await eventually(lambda: len(pair.orchestrator.pair.targets.usable()) == 2, "both usable")
        for number in range(1, 7):
            # They begin alike, so that the same target has them all.
            calls = [pair.generate(make_request(p, k=0)) for p in (POISON, (5, 1), (5, 2))]
            error, *beside = await asyncio.gather(*calls, return_exceptions=True)
            assert isinstance(error, grpc.aio.AioRpcError)
            check_error(error, 2)
            assert [told.token_ids for told in beside if isinstance(told, Generated)] == [
                greedy_tokens(TOY, prompt, 32) for prompt in ((5, 1), (5, 2))
            ]
            assert len(deaths) == 2 * number
            await eventually(lambda: not any(t.failure() for t in targets), "devices again")


async def test_what_scores_a_prompt_is_given_up_alike() -> None:
    """The session that scores a prompt and the one that decodes are one request."""
    async with running_pair(FATAL, draft=None, speculative=NO_DRAFT) as pair:
        request = make_request(POISON, k=0)
        request.num_prompt_logprobs_plus_one = 1
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await pair.generate(request)
        check_error(caught.value, 2)
        await eventually(lambda: is_idle(pair.target), "idle")


async def test_deaths_are_known_to_the_orchestrator_that_takes_over() -> None:
    """The gateway tells it, so that a request does not begin anew with each orchestrator: the
    first death is told at once, and one more is enough for the next orchestrator."""
    async with running_pair(FATAL, draft=None, speculative=NO_DRAFT) as pair:
        request = make_request(POISON, k=0)
        call = pair.blocks(request)
        assert (await call.read()).num_device_deaths in (1, 2)
        with pytest.raises(grpc.aio.AioRpcError):
            await pair.finish(call, Generated())
        request.num_device_deaths = 1
        deaths: list[frozenset[str]] = []
        count_deaths(pair.target, deaths)
        backend = GrpcBackend([pair.orchestrator.address])
        try:
            # The notice of the death is no block: nothing but the error comes.
            with pytest.raises(RemoteError, match="2 devices died or hung"):
                await anext(backend.generate(request))
        finally:
            await backend.close()
        assert len(deaths) == 1


async def test_a_draft_that_dies_of_a_request_costs_it_its_draft_alone() -> None:
    """The request is target-only after the second death; the streams beside it get their draft
    back, and every token is right."""
    async with running_pair(TOY + ",step_ms=2", DRAFT + ",fatal_token=0") as pair:
        assert pair.draft is not None
        deaths: list[frozenset[str]] = []
        count_deaths(pair.draft, deaths)
        beside, answer = Generated(), Generated()
        call = pair.blocks(make_request(max_tokens=ENDLESS))
        await pair.take(call, beside, 10)
        poison = pair.blocks(make_request(POISON, max_tokens=ENDLESS))
        while len(deaths) < 2:
            await pair.take(poison, answer, len(answer.token_ids) + 1)
        draft = pair.draft
        await eventually(lambda: draft.failure() is None, "the draft has a device again")
        seen = len(beside.token_ids)
        while generation_pb2.TOKEN_ORIGIN_ACCEPTED not in beside.origins[seen:]:
            await pair.take(call, beside, len(beside.token_ids) + 1)
        await pair.take(poison, answer, len(answer.token_ids) + 50)
        for stream, told, prompt in ((call, beside, (5, 6, 7)), (poison, answer, POISON)):
            assert told.token_ids == greedy_tokens(TOY, prompt, len(told.token_ids))
            stream.cancel()
        assert len(deaths) == 2
        assert draft.failure() is None
        await pair.until_idle()


async def test_a_draft_that_died_of_what_targets_found_out_is_not_blamed_for_it() -> None:
    """The request ends with its target, before drafts have shown what it is: they are told."""
    async with running_pair(FATAL, DRAFT + ",fatal_token=0") as pair:
        assert pair.draft is not None
        supervisor = pair.draft.replica._supervisor
        for _ in range(2):
            check_error(await given_up(pair), 2)
            await eventually(
                lambda: all(len(death.computed) == 1 for death in supervisor._deaths), "put down"
            )
            await eventually(lambda: supervisor.failure is None, "the draft has a device again")
        assert supervisor._deaths, "drafts die of it, too"
        assert supervisor._condemned
