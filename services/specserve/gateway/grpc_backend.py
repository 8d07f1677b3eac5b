"""The orchestrators over gRPC: a stream outlives the one it started on.

When an orchestrator is lost in mid-stream the choice is sent to another one, or to the same one
once it is back, together with the ids received so far; what follows goes on where the text stopped,
and the record that comes with its end covers the parts before. Knows the contract; knows no HTTP
and no text.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from typing import Any

import grpc

from specserve.errors import Draining, PeerUnavailable, SpecServeError
from specserve.gateway.blocks import Round, TokenOrigin, unpack_origins, unpack_rounds
from specserve.gateway.liveness import HANG_S
from specserve.gateway.orchestrators import Orchestrator, OrchestratorPool
from specserve.gateway.rounds import merge_records, record_of
from specserve.rpc.call_origin import CallOrigin
from specserve.rpc.status import ERROR_KEY, from_rpc_error
from specserve.rpc.tls import MutualTls
from specserve.rpc.v1 import generation_pb2
from specserve.rpc.v1.generation_pb2 import (
    GenerateRequest,
    GenerateResponse,
    GetPairRequest,
    GetPairResponse,
    GetStatusRequest,
    GetStatusResponse,
)
from specserve.rpc.v1.requests_pb2 import GetRequestsRequest, ListRequestsRequest, RequestRecord
from specserve.telemetry import TraceContext

logger = logging.getLogger(__name__)

ASK_TIMEOUT_S = 5.0
"""Longest wait for an orchestrator's word on the pair or its state, in seconds."""

DEADLINE_SLACK_S = 1.0
"""How much longer than the orchestrator the gateway waits: the better message is the former's."""

FIRST_PAUSE_S = 0.05
LAST_PAUSE_S = 1.0
"""Pauses between attempts double from the first to the last, in seconds."""


class GrpcBackend:
    """A `GenerationBackend` over one or more orchestrators."""

    def __init__(
        self,
        addresses: Iterable[str],
        failover_timeout_s: float = 30.0,
        tls: MutualTls | None = None,
        hang_s: float = HANG_S,
    ) -> None:
        self._pool = OrchestratorPool(addresses, tls, hang_s)
        self._failover_timeout_s = failover_timeout_s
        self.on_failover: Callable[[], None] = lambda: None
        """Called whenever an orchestrator is lost under a choice that goes on elsewhere."""

    async def set_addresses(self, addresses: Iterable[str]) -> None:
        """Learn which orchestrators there are now."""
        await self._pool.set_addresses(addresses)

    async def generate(
        self, request: GenerateRequest, traceparent: str = ""
    ) -> AsyncGenerator[GenerateResponse, None]:
        """Decode one choice; see `GenerationBackend`."""
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + request.timeout_s if request.timeout_s else None
        committed = bytearray(request.committed_token_ids)
        num_prompt_logprobs = request.num_prompt_logprobs_received
        target_identity = request.target_identity
        num_device_deaths = request.num_device_deaths
        origins: list[TokenOrigin] = []
        rounds: list[Round] = []
        pause_s = FIRST_PAUSE_S
        give_up_at: float | None = None
        origin = CallOrigin(TraceContext.parse(traceparent))
        while True:
            member = self._pool.choose()
            attempt = GenerateRequest()
            attempt.CopyFrom(request)
            attempt.committed_token_ids = bytes(committed)
            attempt.num_prompt_logprobs_received = num_prompt_logprobs
            attempt.num_device_deaths = num_device_deaths
            if committed or num_prompt_logprobs:
                attempt.target_identity = target_identity
            if ends_at is not None:
                attempt.timeout_s = max(ends_at - loop.time(), 0.001)
            # Tokens and rounds whose record went with their orchestrator.
            lost_origins, lost_rounds = tuple(origins), tuple(rounds)
            # A call is left only by an answer that ends it, an error, or the caller's going away.
            call = self._call(member, attempt, origin)
            with member.running(call):
                try:
                    async for response in call:
                        member.heard()
                        num_device_deaths = max(num_device_deaths, response.num_device_deaths)
                        num_prompt_logprobs += len(response.prompt_logprobs)
                        committed += response.token_ids
                        target_identity = target_identity or response.target_identity
                        origins += unpack_origins(response.origins)
                        rounds += unpack_rounds(response)
                        if lost_origins and response.HasField("record"):
                            before = record_of(lost_origins, lost_rounds)
                            response.record.CopyFrom(merge_records(before, response.record))
                        if origin.attempt and response.HasField("record"):
                            response.record.num_failovers = origin.attempt
                        pause_s, give_up_at = FIRST_PAUSE_S, None
                        if _says_nothing(response):
                            continue
                        yield response
                        if response.finish_reason != generation_pb2.FINISH_REASON_UNSPECIFIED:
                            return
                    lost: SpecServeError = PeerUnavailable(
                        "orchestrator", f"{member.address} ended a stream without finishing it"
                    )
                except grpc.aio.AioRpcError as error:
                    lost = from_rpc_error(error, "orchestrator")
                    if not _is_worth_another_try(error):
                        raise lost from error
                except asyncio.CancelledError:
                    # Only the call is: the orchestrator hangs, or its connection was closed.
                    if _is_cancelled():
                        raise
                    lost = PeerUnavailable("orchestrator", f"{member.address} does not answer")
            now = loop.time()
            give_up_at = now + self._failover_timeout_s if give_up_at is None else give_up_at
            if now + pause_s > min(give_up_at, ends_at or give_up_at):
                raise lost
            self._pool.avoid(member)
            origin = origin.again()
            self.on_failover()
            logger.log(
                logging.WARNING if pause_s == FIRST_PAUSE_S else logging.DEBUG,
                "%s: lost orchestrator %s after %d tokens; asking again",
                request.request_id,
                member.address,
                len(committed) // 4,
            )
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LAST_PAUSE_S)

    async def get_pair(self) -> GetPairResponse:
        """Ask the orchestrators one after the other, until one of them knows a ready pair."""
        answer: GetPairResponse | None = None
        lost: SpecServeError = PeerUnavailable("orchestrator", "none is known")
        for member in sorted(self._pool.members(), key=lambda m: m.avoid_until):
            try:
                answer = await self._ask(member, member.stub.GetPair, GetPairRequest())
            except SpecServeError as error:
                lost = error
                self._pool.avoid(member)
                continue
            if answer.ready:
                return answer
        if answer is None:
            raise lost
        return answer

    async def get_status(self) -> list[GetStatusResponse]:
        """Ask all orchestrators at once; those that do not answer are left out."""
        answers = await asyncio.gather(*(self._status(member) for member in self._pool.members()))
        return [answer for answer in answers if answer is not None]

    async def get_requests(self, name: str) -> list[RequestRecord]:
        """Ask all orchestrators; a choice that was carried over is in the ring of each."""
        request = GetRequestsRequest(id=name)
        found = await self._recent(
            self._ask(member, member.recent.GetRequests, request) for member in self._pool.members()
        )
        return sorted(found, key=lambda record: (record.arrived_unix_s, record.request_id))

    async def list_requests(self, limit: int) -> list[RequestRecord]:
        """Ask all orchestrators at once; those that do not answer are left out."""
        request = ListRequestsRequest(limit=limit)
        found = await self._recent(
            self._ask(member, member.recent.ListRequests, request)
            for member in self._pool.members()
        )
        return sorted(found, key=lambda record: record.arrived_unix_s, reverse=True)[:limit]

    async def close(self) -> None:
        """Close all connections."""
        await self._pool.close()

    @staticmethod
    def _call(member: Orchestrator, request: GenerateRequest, origin: CallOrigin) -> Any:
        timeout_s = request.timeout_s + DEADLINE_SLACK_S if request.timeout_s else None
        return member.stub.Generate(request, metadata=origin.metadata(), timeout=timeout_s)

    @staticmethod
    async def _recent(calls: Iterable[Awaitable[Any]]) -> list[RequestRecord]:
        answers = await asyncio.gather(*calls, return_exceptions=True)
        # Those that are lost, or of an older build, remember nothing.
        return [
            record
            for answer in answers
            if not isinstance(answer, BaseException)
            for record in answer.requests
        ]

    @staticmethod
    async def _ask(member: Orchestrator, ask: Callable[..., Awaitable[Any]], request: Any) -> Any:
        """Ask one question.

        Raises:
            PeerUnavailable: it is gone, maybe taken off the list while it was being asked.
            SpecServeError: it could not answer.
        """
        try:
            return await ask(request, timeout=ASK_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, "orchestrator") from error
        except (asyncio.CancelledError, grpc.aio.UsageError) as error:
            # A channel that is closed cancels its calls, and takes no more.
            if _is_cancelled():
                raise
            raise PeerUnavailable("orchestrator", f"{member.address} is gone") from error

    async def _status(self, member: Orchestrator) -> GetStatusResponse | None:
        try:
            answer: GetStatusResponse = await self._ask(
                member, member.stub.GetStatus, GetStatusRequest()
            )
        except SpecServeError:
            return None
        return answer


def _is_cancelled() -> bool:
    """Say whether it is this task that was cancelled, and not only the call that it waits on."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _says_nothing(response: GenerateResponse) -> bool:
    """Say whether a response is for the gateway alone: it carries no part of the answer."""
    return not (
        response.token_ids or response.text or response.prompt_logprobs or response.finish_reason
    )


def _is_worth_another_try(error: grpc.aio.AioRpcError) -> bool:
    """Say whether the orchestrator was lost, rather than having answered with a failure.

    An orchestrator that found no target has looked for one as long as it may.
    """
    names = [str(value) for key, value in error.trailing_metadata() or () if key == ERROR_KEY]
    if names:
        return names[0] == Draining.__name__
    return error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
