"""A live stream outlives its orchestrator: what was received goes along, and the text goes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specserve.errors import (
    CapacityExhausted,
    ContextOverflow,
    DeadlineExpired,
    Draining,
    InvalidProposal,
    InvalidRequest,
    ModelUnavailable,
    PeerUnavailable,
    SpecServeError,
)
from specserve.gateway import orchestrators
from specserve.gateway.grpc_backend import GrpcBackend
from specserve.gateway.metrics import NUM_FAILOVERS, GatewayMetrics
from specserve.gateway.orchestrators import OrchestratorPool
from specserve.rpc.channel import SERVER_OPTIONS
from specserve.rpc.codec import pack_ids, unpack_ids
from specserve.rpc.status import RemoteError, errors_as_status
from specserve.rpc.v1.generation_pb2 import (
    GenerateRequest,
    GenerateResponse,
    GetPairRequest,
    GetPairResponse,
    GetStatusRequest,
    GetStatusResponse,
)
from specserve.rpc.v1.generation_pb2_grpc import (
    GenerationServiceServicer,
    add_GenerationServiceServicer_to_server,
)
from unit.gateway.fakes import LENGTH, STOP, block, logprob, pair

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
TEXT = b"abcdefgh"
"""What every fake orchestrator would say in full, one token per byte."""


NUM_PROMPT_LOGPROBS = 5
"""What it tells of a prompt, if asked for, one response each."""


class FakeOrchestrator(GenerationServiceServicer):
    """Says TEXT token by token from the committed prefix on, and fails where it is told to."""

    def __init__(self) -> None:
        self.requests: list[GenerateRequest] = []
        self.metadata: list[dict[str, str]] = []
        self.fail_after = 1000
        self.error: Any = None
        """A SpecServeError, a status code, or None to hang."""
        self.hang = False
        self.num_open = 0
        self.changed = asyncio.Event()
        self.pair = pair()
        self.target_identity = "weights of old"

    async def Generate(
        self, request: GenerateRequest, context: Any
    ) -> AsyncIterator[GenerateResponse]:
        """Stream what follows the committed prefix."""
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        self.num_open += 1
        self.changed.set()
        try:
            async with errors_as_status(context):
                wanted = NUM_PROMPT_LOGPROBS if request.num_prompt_logprobs_plus_one else 0
                for sent, place in enumerate(range(request.num_prompt_logprobs_received, wanted)):
                    if sent == self.fail_after:
                        await self._fail(context)
                    yield GenerateResponse(prompt_logprobs=[logprob(-float(place))])
                done = len(unpack_ids(request.committed_token_ids, ""))
                for sent, position in enumerate(range(done, len(TEXT))):
                    if sent == self.fail_after:
                        await self._fail(context)
                    finish = STOP if position == len(TEXT) - 1 else 0
                    response = block(TEXT[position : position + 1], finish)
                    response.target_identity = "" if sent else self.target_identity
                    yield response
        finally:
            self.num_open -= 1
            self.changed.set()

    async def _fail(self, context: Any) -> None:
        if self.hang:
            await asyncio.Event().wait()
        if isinstance(self.error, SpecServeError):
            raise self.error
        await context.abort(self.error or grpc.StatusCode.UNAVAILABLE, "lost")

    async def GetPair(self, request: GetPairRequest, context: Any) -> GetPairResponse:
        """Return the pair."""
        return self.pair

    async def GetStatus(self, request: GetStatusRequest, context: Any) -> GetStatusResponse:
        """Return a recognisable state."""
        return GetStatusResponse(num_running=self.num_open, num_rounds=7)


@asynccontextmanager
async def serving(*servicers: FakeOrchestrator) -> AsyncIterator[list[str]]:
    """Serve each on a port of its own; yields the addresses."""
    async with AsyncExitStack() as stack:
        addresses = []
        for servicer in servicers:
            server = grpc.aio.server(options=SERVER_OPTIONS)
            add_GenerationServiceServicer_to_server(servicer, server)
            if isinstance(servicer, Silent):
                check = health_pb2_grpc.HealthServicer()
                check.Check = servicer.check
                health_pb2_grpc.add_HealthServicer_to_server(check, server)
            addresses.append(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
            await server.start()
            stack.push_async_callback(server.stop, None)
        yield addresses


async def test_a_prompt_s_logprobs_go_on_where_they_were_lost() -> None:
    """Each is told once, and before the first token, whoever scores the rest of the prompt."""
    first, second = FakeOrchestrator(), FakeOrchestrator()
    first.fail_after = second.fail_after = 3
    async with serving(first, second) as addresses:
        backend = GrpcBackend(addresses)
        request = GenerateRequest(request_id="r", max_tokens=8, num_prompt_logprobs_plus_one=1)
        responses = [response async for response in backend.generate(request)]
        await backend.close()

    told = [entry.logprob for response in responses for entry in response.prompt_logprobs]
    assert told == [-float(place) for place in range(NUM_PROMPT_LOGPROBS)]
    assert b"".join(response.text for response in responses) == TEXT
    received = [r.num_prompt_logprobs_received for r in first.requests + second.requests]
    assert sorted(received) == [0, 3, 5, 5]


async def decode(backend: GrpcBackend, **fields: Any) -> tuple[bytes, Sequence[int], int]:
    """Decode one choice; returns text, ids and the finish reason."""
    request = GenerateRequest(
        request_id="r-0", prompt_token_ids=pack_ids([1]), max_tokens=8, **fields
    )
    text, ids, finish = b"", [], 0
    async for response in backend.generate(request):
        text += response.text
        ids += unpack_ids(response.token_ids, "")
        finish = response.finish_reason
    return text, ids, finish


async def until(servicer: FakeOrchestrator, condition: Callable[[], bool]) -> None:
    """Wait for a servicer's state."""
    async with asyncio.timeout(5):
        while not condition():
            servicer.changed.clear()
            await servicer.changed.wait()


async def test_a_choice_is_streamed_to_its_end() -> None:
    """The plain case, with the trace's context as metadata and the deadline as a duration."""
    servicer = FakeOrchestrator()
    async with serving(servicer) as addresses:
        backend = GrpcBackend(addresses)
        request = GenerateRequest(request_id="r", max_tokens=8, timeout_s=60)
        responses = [r async for r in backend.generate(request, PARENT)]
        await backend.close()

    assert b"".join(r.text for r in responses) == TEXT
    assert servicer.metadata[0]["traceparent"] == PARENT
    assert 59 < servicer.requests[0].timeout_s <= 60


@pytest.mark.parametrize("error", [None, Draining("o1")])
async def test_a_stream_goes_on_at_another_orchestrator(error: SpecServeError | None) -> None:
    """Lost after three tokens, again after three: the text is whole, and nothing is repeated."""
    first, second = FakeOrchestrator(), FakeOrchestrator()
    for servicer in (first, second):
        servicer.fail_after, servicer.error = 3, error
    async with serving(first, second) as addresses:
        backend = GrpcBackend(addresses)
        text, ids, finish = await decode(backend, timeout_s=60)
        await backend.close()
    asked = sorted(
        first.requests + second.requests, key=lambda request: len(request.committed_token_ids)
    )

    assert (text, bytes(ids), finish) == (TEXT, TEXT, STOP)
    committed = [bytes(unpack_ids(request.committed_token_ids, "")) for request in asked]
    assert committed == [b"", b"abc", b"abcdef"]
    assert len(first.requests) in (1, 2)
    assert asked[0].timeout_s > asked[1].timeout_s > asked[2].timeout_s
    assert [request.target_identity for request in asked] == ["", *[first.target_identity] * 2]
    for request in asked:
        request.ClearField("target_identity")
        request.ClearField("committed_token_ids")
        request.ClearField("timeout_s")
    assert asked[0] == asked[1] == asked[2]


async def test_a_choice_that_was_carried_over_before_keeps_its_prefix() -> None:
    """The request's own committed prefix comes first."""
    servicer = FakeOrchestrator()
    servicer.fail_after = 2
    async with serving(servicer) as addresses:
        backend = GrpcBackend(addresses)
        text, _, _ = await decode(backend, committed_token_ids=pack_ids(list(b"ab")))
        await backend.close()

    assert text == b"cdefgh"
    committed = [bytes(unpack_ids(r.committed_token_ids, "")) for r in servicer.requests]
    assert committed == [b"ab", b"abcd", b"abcdef"]


async def test_the_same_orchestrator_is_asked_again_once_it_is_back() -> None:
    """Nobody listens at first; then somebody does, on the same port."""
    servicer = FakeOrchestrator()
    async with serving(servicer) as addresses:
        address = addresses[0]
    backend = GrpcBackend([address])
    running = asyncio.create_task(decode(backend))
    server = grpc.aio.server(options=SERVER_OPTIONS)
    add_GenerationServiceServicer_to_server(servicer, server)
    assert server.add_insecure_port(address)
    await server.start()
    text, _, _ = await asyncio.wait_for(running, 10)
    await backend.close()
    await server.stop(None)

    assert text == TEXT


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (InvalidRequest("top_k", "wrong"), InvalidRequest),
        (ContextOverflow("prompt", "too long"), ContextOverflow),
        (DeadlineExpired("the request", 1), DeadlineExpired),
        (PeerUnavailable("target", "none"), PeerUnavailable),
        (InvalidProposal("shapes"), InvalidProposal),
        (ModelUnavailable("missing"), ModelUnavailable),
        (CapacityExhausted("KV blocks", 2, 1), RemoteError),
        (grpc.StatusCode.INTERNAL, RemoteError),
    ],
)
async def test_an_answer_is_no_loss(error: Any, kind: type[SpecServeError]) -> None:
    """What an orchestrator says of the request itself is not asked of another one."""
    servicer = FakeOrchestrator()
    servicer.fail_after, servicer.error = 0, error
    async with serving(servicer) as addresses:
        backend = GrpcBackend(addresses)
        with pytest.raises(kind):
            await decode(backend)
        await backend.close()

    assert len(servicer.requests) == 1


async def test_the_search_for_another_orchestrator_ends() -> None:
    """Nobody listens: the error comes after the time that was set, not never."""
    backend = GrpcBackend(["127.0.0.1:1"], failover_timeout_s=0.0)
    with pytest.raises(PeerUnavailable):
        await asyncio.wait_for(decode(backend), 5)
    with pytest.raises(PeerUnavailable):
        await backend.get_pair()
    assert await backend.get_status() == []
    await backend.close()
    with pytest.raises(PeerUnavailable, match="none is known"):
        await decode(GrpcBackend([]))


async def test_orchestrators_lost_by_a_choice_that_fails_are_counted() -> None:
    """The count is wanted most where failover does not help."""
    backend, metrics = GrpcBackend(["127.0.0.1:1"], failover_timeout_s=0.5), GatewayMetrics()
    backend.on_failover = metrics.count_failover
    with pytest.raises(PeerUnavailable):
        await asyncio.wait_for(decode(backend), 5)
    await backend.close()

    count = metrics.registry.get_sample_value(NUM_FAILOVERS + "_total")
    assert count is not None
    assert count >= 1


@pytest.mark.parametrize("how", ["close", "cancel"])
async def test_giving_a_choice_up_ends_the_call(how: str) -> None:
    """B187: the orchestrator sees the end at once, whichever way the choice is given up."""
    servicer = FakeOrchestrator()
    servicer.fail_after, servicer.hang = 2, True
    async with serving(servicer) as addresses:
        backend = GrpcBackend(addresses)
        received = asyncio.Event()

        async def read() -> None:
            request = GenerateRequest(request_id="r", max_tokens=8)
            async with aclosing(backend.generate(request)) as responses:
                async for response in responses:
                    if response.text == b"b":
                        received.set()
                        if how == "close":
                            return

        task = asyncio.create_task(read())
        await asyncio.wait_for(received.wait(), 5)
        if how == "cancel":
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until(servicer, lambda: servicer.num_open == 0)
        await backend.close()

    assert len(servicer.requests) == 1


class Silent(FakeOrchestrator):
    """Says nothing more after a while; answers questions only where the test lets it."""

    def __init__(self, fail_after: int) -> None:
        super().__init__()
        self.fail_after, self.hang = fail_after, True
        self.may_answer = asyncio.Event()
        self.num_asked = 0

    async def check(self, request: Any, context: Any) -> health_pb2.HealthCheckResponse:
        self.num_asked += 1
        self.changed.set()
        await self.may_answer.wait()
        return health_pb2.HealthCheckResponse()


async def test_a_stream_leaves_an_orchestrator_that_hangs() -> None:
    """Its connection stays open, but it neither writes nor answers: the text goes on elsewhere, and
    nothing new is asked of it until it answers again."""
    hung, other = Silent(fail_after=3), FakeOrchestrator()
    async with serving(hung, other) as addresses:
        backend = GrpcBackend(addresses[:1], hang_s=0.2)
        decoding = asyncio.create_task(decode(backend))
        await until(hung, lambda: hung.num_open == 1)
        await backend.set_addresses(addresses)
        text, _, finish = await decoding
        assert (text, finish) == (TEXT, STOP)
        assert len(unpack_ids(other.requests[0].committed_token_ids, "")) == 3
        assert other.requests[0].target_identity == hung.target_identity
        assert hung.requests[0].target_identity == ""
        await until(hung, lambda: hung.num_open == 0)
        for _ in range(6):
            await decode(backend)
        assert len(hung.requests) == 1

        hung.may_answer.set()
        hung.fail_after = 1000
        while len(hung.requests) == 1:
            await decode(backend)
        await backend.close()


@pytest.mark.slow
async def test_an_orchestrator_with_nothing_to_say_is_not_left() -> None:
    """A long prefill is silence too: it answers when asked, and the stream stays."""
    slow = Silent(fail_after=3)
    slow.may_answer.set()
    async with serving(slow) as addresses:
        # Half of it for an answer: no machine is so busy.
        backend = GrpcBackend(addresses, hang_s=4.0)
        decoding = asyncio.create_task(decode(backend))
        await until(slow, lambda: slow.num_asked >= 2)
        assert slow.num_open == len(slow.requests) == 1
        decoding.cancel()
        await asyncio.gather(decoding, return_exceptions=True)
        await backend.close()


async def test_a_lone_orchestrator_that_hangs_ends_in_an_error() -> None:
    """Where there is no other the search ends after the time that was set, not never."""
    hung = Silent(fail_after=0)
    async with serving(hung) as addresses:
        backend = GrpcBackend(addresses, failover_timeout_s=0.3, hang_s=0.1)
        with pytest.raises(PeerUnavailable, match="does not answer"):
            await decode(backend)
        await backend.close()


async def test_the_last_word_counts_even_if_the_stream_breaks_after_it() -> None:
    """A finish reason ends the choice: a status that comes later asks nobody again."""

    class Breaks(FakeOrchestrator):
        async def Generate(self, request: GenerateRequest, context: Any) -> Any:
            self.requests.append(request)
            yield block(b"x", LENGTH)
            await context.abort(grpc.StatusCode.UNAVAILABLE, "lost")

    servicer = Breaks()
    async with serving(servicer) as addresses:
        backend = GrpcBackend(addresses)
        text, _, finish = await decode(backend)
        await backend.close()

    assert (text, finish) == (b"x", LENGTH)
    assert len(servicer.requests) == 1


async def test_choices_go_to_the_least_loaded_orchestrator() -> None:
    """Ten choices over two orchestrators that hold them: five each."""
    first, second = FakeOrchestrator(), FakeOrchestrator()
    for servicer in (first, second):
        servicer.fail_after, servicer.hang = 0, True
    async with serving(first, second) as addresses:
        backend = GrpcBackend(addresses)
        tasks = [asyncio.create_task(decode(backend)) for _ in range(10)]
        await until(first, lambda: first.num_open == 5)
        await until(second, lambda: second.num_open == 5)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await backend.close()


async def test_a_ready_pair_is_found_among_orchestrators_that_know_none() -> None:
    """One that has just started does not make the gateway unready."""
    new, old = FakeOrchestrator(), FakeOrchestrator()
    new.pair = pair(ready=False, reason="no target yet")
    async with serving(new, old) as addresses:
        backend = GrpcBackend([*addresses, "127.0.0.1:1"])
        assert (await backend.get_pair()).ready
        assert len(await backend.get_status()) == 2
        old.pair = new.pair
        assert (await backend.get_pair()).reason == "no target yet"
        await backend.close()


async def test_addresses_may_change_under_way() -> None:
    """A call on an address that is gone goes on; new ones go to the new address."""
    old, new = FakeOrchestrator(), FakeOrchestrator()
    old.fail_after, old.hang = 0, True
    async with serving(old, new) as addresses:
        backend = GrpcBackend(addresses[:1])
        running = asyncio.create_task(decode(backend))
        await until(old, lambda: old.num_open == 1)
        await backend.set_addresses(addresses[1:])
        text, _, _ = await decode(backend)
        assert text == TEXT
        assert old.num_open == 1
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await backend.close()


class Asked(FakeOrchestrator):
    """Is asked, and has not answered yet."""

    def __init__(self) -> None:
        super().__init__()
        self.num_asked = 0

    async def GetPair(self, request: GetPairRequest, context: Any) -> GetPairResponse:
        """Note it."""
        return await self._never()

    async def GetStatus(self, request: GetStatusRequest, context: Any) -> GetStatusResponse:
        """Note it."""
        return await self._never()

    async def _never(self) -> Any:
        self.num_asked += 1
        self.changed.set()
        await asyncio.Event().wait()


async def test_an_orchestrator_that_leaves_while_it_is_asked_is_one_that_is_not_there() -> None:
    """Closing its connection cancels the question, and not whoever asked: another one answers."""
    asked, other = Asked(), FakeOrchestrator()
    async with serving(asked, other) as addresses:
        alone, backend = GrpcBackend(addresses[:1]), GrpcBackend(addresses)
        questions = [
            asyncio.create_task(question)
            for question in (backend.get_pair(), backend.get_status(), alone.get_pair())
        ]
        await until(asked, lambda: asked.num_asked == 3)
        await backend.set_addresses(addresses[1:])
        await alone.set_addresses(())

        found, statuses, lost = await asyncio.gather(*questions, return_exceptions=True)

        assert isinstance(found, GetPairResponse)
        assert found.ready
        assert isinstance(statuses, list)
        assert len(statuses) == 1
        assert isinstance(lost, PeerUnavailable)
        assert addresses[0] in str(lost)
        await backend.close()
        await alone.close()


async def test_whoever_is_cancelled_while_they_ask_is_cancelled() -> None:
    """It is no loss of an orchestrator, and nobody else is asked."""
    asked, other = Asked(), FakeOrchestrator()
    async with serving(asked, other) as addresses:
        backend = GrpcBackend(addresses)
        question = asyncio.create_task(backend.get_pair())
        await until(asked, lambda: asked.num_asked == 1)
        question.cancel()
        with pytest.raises(asyncio.CancelledError):
            await question
        await backend.close()


def test_each_event_loop_gets_channels_of_its_own() -> None:
    """grpc.aio objects never cross loops."""
    pool = OrchestratorPool(["127.0.0.1:1"])

    async def member() -> orchestrators.Orchestrator:
        return pool.members()[0]

    first, second = asyncio.run(member()), asyncio.run(member())

    assert first.channel is not second.channel
