"""A small gRPC client of the generation service, for benchmarks and the equivalence gate.

Speaks the same path as a gateway, without HTTP and text. Knows the contract; measures nothing.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import grpc
import numpy as np

from specserve.config import SpeculativeMethod
from specserve.errors import PeerUnavailable
from specserve.rpc import codec
from specserve.rpc.channel import open_channel
from specserve.rpc.status import from_rpc_error
from specserve.rpc.tls import MutualTls
from specserve.rpc.v1 import admin_pb2, admin_pb2_grpc, generation_pb2, generation_pb2_grpc
from specserve.speculation.length_choice import SpeculationMode
from specserve.speculation.types import AcceptanceRule, SamplingParams

READY_POLL_S = 0.05

MAX_LOGPROBS = 20
"""Most likely tokens that may be asked for."""


@dataclass(frozen=True, slots=True)
class Job:
    """One choice to decode."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    max_tokens: int
    num_speculative_tokens: int | None = None
    """None takes the configured K; 0 switches speculation off."""
    ignore_eos: bool = False
    method: SpeculativeMethod | None = None
    """Proposer; None takes the configured one."""


@dataclass(frozen=True, slots=True)
class TopLogprobs:
    """The target's most likely tokens at one output position."""

    logprob: float
    """Of the emitted token."""
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Generated:
    """One decoded choice."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TopLogprobs, ...]
    """Empty unless asked for."""
    record: generation_pb2.SpeculationRecord
    block_at_s: tuple[float, ...]
    """When each block came, in seconds after the call."""
    total_s: float
    block_sizes: tuple[int, ...]
    """Tokens of each block; the last one may have none."""
    origins: tuple[str, ...]
    """Where each token came from: accepted, recovered, bonus or plain."""

    def candidates_at(self, position: int) -> dict[int, float]:
        """Return the target's candidates at an output position and their log-probabilities.

        Empty where the text has ended or was not asked for any.
        """
        if position >= len(self.logprobs):
            return {}
        row = self.logprobs[position]
        emitted = {self.token_ids[position]: row.logprob}
        return emitted | dict(zip(row.token_ids, row.logprobs, strict=True))

    @property
    def num_rounds(self) -> int:
        """Rounds, with and without draft tokens."""
        return self.record.num_spec_steps + self.record.num_plain_steps


class TextClient(ABC):
    """Whoever decodes choices and tells what the target thinks of a next token."""

    @abstractmethod
    async def generate(self, job: Job) -> Generated:
        """Decode one choice.

        Raises:
            SpecServeError: the request was refused or could not go on.
        """

    @abstractmethod
    async def candidates(self, token_ids: Sequence[int], request_id: str) -> dict[int, float]:
        """Ask the target, without any draft, what may come after a text.

        Returns:
            Log-probabilities of at least the MAX_LOGPROBS most likely tokens.
        """

    async def generate_each(
        self, jobs: Sequence[Job], concurrency: int, take: Callable[[Job, Generated], None]
    ) -> None:
        """Decode many choices, `concurrency` at a time; `take` is given each as it is done.

        Raises:
            SpecServeError: the first that a choice failed with; the others are given up.
        """
        waiting = iter(jobs)

        async def work() -> None:
            for job in waiting:
                take(job, await self.generate(job))

        tasks = [asyncio.create_task(work()) for _ in range(min(concurrency, len(jobs)))]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def generate_all(self, jobs: Sequence[Job], concurrency: int) -> list[Generated]:
        """Decode many choices, `concurrency` at a time, answers in the order of the jobs."""
        slots = asyncio.Semaphore(concurrency)

        async def one(job: Job) -> Generated:
            async with slots:
                return await self.generate(job)

        return list(await asyncio.gather(*(one(job) for job in jobs)))


class GenerationClient(TextClient):
    """A connection to one orchestrator; an async context manager."""

    def __init__(
        self, address: str, *, for_verification: bool = False, tls: MutualTls | None = None
    ) -> None:
        """Open a connection; `for_verification` also speculates where a record is still wanted."""
        self._address = address
        self._for_verification = for_verification
        self._channel = open_channel(address, tls)
        self._stub = generation_pb2_grpc.GenerationServiceStub(self._channel)
        self._admin = admin_pb2_grpc.AdminServiceStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._channel.close()

    async def wait_ready(
        self, timeout_s: float = 120.0, *, include_token_table: bool = False
    ) -> generation_pb2.GetPairResponse:
        """Wait until the pair is loaded and compared.

        Raises:
            PeerUnavailable: it was not ready in time; says why.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout_s
        reason = "no answer"
        while loop.time() < end:
            try:
                pair: generation_pb2.GetPairResponse = await self._stub.GetPair(
                    generation_pb2.GetPairRequest(include_token_table=include_token_table),
                    timeout=5,
                )
            except grpc.aio.AioRpcError as error:
                reason = error.details() or error.code().name
            else:
                if pair.ready:
                    return pair
                reason = pair.reason
            await asyncio.sleep(READY_POLL_S)
        raise PeerUnavailable(self._address, f"not ready after {timeout_s:.0f} s: {reason}")

    async def status(self) -> generation_pb2.GetStatusResponse:
        """Ask for the orchestrator's live state."""
        status: generation_pb2.GetStatusResponse = await self._stub.GetStatus(
            generation_pb2.GetStatusRequest(), timeout=5
        )
        return status

    async def switch(self, mode: SpeculationMode) -> None:
        """Choose otherwise whether rounds speculate, from now on and for every request.

        Raises:
            SpecServeError: there is no speculation to switch on.
        """
        request = admin_pb2.SetSpeculationRequest(mode=codec.pack_mode(mode))
        try:
            await self._admin.SetSpeculation(request, timeout=5)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, self._address) from error

    async def generate(self, job: Job) -> Generated:
        """Decode one choice.

        Raises:
            SpecServeError: the request was refused or could not go on.
        """
        k = job.num_speculative_tokens
        request = generation_pb2.GenerateRequest(
            request_id=job.request_id,
            prompt_token_ids=codec.pack_ids(job.prompt_token_ids),
            sampling=codec.pack_sampling(job.sampling),
            max_tokens=job.max_tokens,
            num_speculative_tokens_plus_one=0 if k is None else k + 1,
            ignore_eos=job.ignore_eos,
            include_origins=True,
            speculative_method=codec.pack_method(job.method),
            for_verification=self._for_verification,
        )
        token_ids: list[int] = []
        logprobs: list[TopLogprobs] = []
        record = generation_pb2.SpeculationRecord()
        block_at: list[float] = []
        block_sizes: list[int] = []
        origins: list[str] = []
        began = time.perf_counter()
        call = self._stub.Generate(request)
        try:
            async for response in call:
                block_at.append(time.perf_counter() - began)
                block = codec.unpack_ids(response.token_ids, "token_ids")
                token_ids += block
                block_sizes.append(len(block))
                origins += map(_origin_name, response.origins)
                logprobs += map(_top_logprobs, response.logprobs)
                if response.HasField("record"):
                    record = response.record
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, self._address) from error
        finally:
            call.cancel()
        total = time.perf_counter() - began
        return Generated(
            tuple(token_ids),
            tuple(logprobs),
            record,
            tuple(block_at),
            total,
            tuple(block_sizes),
            tuple(origins),
        )

    async def candidates(self, token_ids: Sequence[int], request_id: str) -> dict[int, float]:
        """Ask the target, without any draft, what may come after a text."""
        sampling = SamplingParams(
            AcceptanceRule.GREEDY, 0, 0, temperature=0.0, num_logprobs=MAX_LOGPROBS
        )
        job = Job(
            request_id,
            tuple(token_ids),
            sampling,
            max_tokens=1,
            num_speculative_tokens=0,
            ignore_eos=True,
        )
        return (await self.generate(job)).candidates_at(0)


def _origin_name(origin: generation_pb2.TokenOrigin) -> str:
    return generation_pb2.TokenOrigin.Name(origin).removeprefix("TOKEN_ORIGIN_").lower()


def _top_logprobs(message: generation_pb2.TokenLogprob) -> TopLogprobs:
    values = codec.unpack_array(message.top_logprobs, np.float32, "top_logprobs").tolist()
    return TopLogprobs(
        message.logprob,
        codec.unpack_ids(message.top_token_ids, "top_token_ids"),
        tuple(values),
    )
