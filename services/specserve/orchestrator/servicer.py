"""GenerationService: one choice in, committed blocks out.

Knows the contract, the pools and the pair; the round itself is `decode.py`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from contextlib import aclosing
from typing import Any

import grpc

from specserve import telemetry
from specserve.config import OrchestratorConfig
from specserve.errors import DeadlineExpired, Draining, Overloaded
from specserve.model.environment import code_versions
from specserve.model.messages import SessionOpening
from specserve.orchestrator.admission import PairLimits, admit
from specserve.orchestrator.admission_queue import AdmissionQueue
from specserve.orchestrator.decode import Decoder
from specserve.orchestrator.finished import count_request
from specserve.orchestrator.length_control import LengthControl
from specserve.orchestrator.outbox import Outbox
from specserve.orchestrator.pair import Pair
from specserve.orchestrator.prompt_scorer import largest_block, score_prompt
from specserve.orchestrator.proposer import Proposer
from specserve.orchestrator.proposers import Proposers
from specserve.orchestrator.request_length import RequestLength
from specserve.orchestrator.request_log import LoggedRequest, RequestLog
from specserve.orchestrator.request_state import RequestState
from specserve.orchestrator.responses import (
    add_steps,
    block_response,
    nothing_decoded,
    record_message,
)
from specserve.orchestrator.routing import Demand
from specserve.orchestrator.synthetic import synthetic_acceptance
from specserve.orchestrator.target_session import TargetSession
from specserve.orchestrator.trimming import Trimmer
from specserve.orchestrator.verified_pair import PairVerification
from specserve.orchestrator.vocabulary import Vocabulary, check_same_model
from specserve.rpc import codec
from specserve.rpc.call_origin import CallOrigin
from specserve.rpc.v1 import common_pb2, generation_pb2, generation_pb2_grpc
from specserve.speculation.length_choice import SpeculationMode

logger = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    """The gRPC face of one orchestrator."""

    def __init__(
        self,
        config: OrchestratorConfig,
        pair: Pair,
        proposers: Proposers,
        length: LengthControl,
        metrics: telemetry.RoundMetrics,
        orchestrator_id: str,
        log: RequestLog,
        verified: PairVerification,
    ) -> None:
        self.draining = False
        self.num_rounds = 0
        self._config = config
        self._pair = pair
        self._proposers = proposers
        self._length = length
        self._metrics = metrics
        self._orchestrator_id = orchestrator_id
        self.log = log
        self._verified = verified
        self.queue = AdmissionQueue(
            max_running=config.max_num_requests,
            max_waiting=config.max_num_waiting,
            timeout_s=config.queue_timeout_s,
            has_room=self._has_room,
        )
        pair.targets.on_load = self.queue.look
        self._synthetic = synthetic_acceptance(config.speculative)

    def start_drain(self) -> None:
        """Take no more choices; those in line are sent away, and those that run go on."""
        self.draining = True
        self.queue.refuse_all(Draining(self._orchestrator_id))

    @property
    def num_running(self) -> int:
        """Choices admitted that have not ended."""
        return self.queue.num_running

    @property
    def num_waiting(self) -> int:
        """Choices that wait to be admitted."""
        return self.queue.num_waiting

    def _has_room(self, demand: Demand, priority: int) -> bool:
        return self._pair.targets.has_room(demand, priority)  # another pool once the model changed

    async def Generate(  # noqa: N802 - the contract's name
        self, request: generation_pb2.GenerateRequest, context: Context
    ) -> None:
        """Decode one choice; ending the call cancels it and frees both KV caches."""
        if self.draining:
            raise Draining(self._orchestrator_id)
        # NaN is no time to wait for; admission names the field.
        timeout_s = request.timeout_s if request.timeout_s > 0 else None
        origin = CallOrigin.of(context.invocation_metadata())
        with self.log.request(request, origin.parent, origin.attempt) as logged:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._generate(request, context, logged)
            except TimeoutError:
                raise DeadlineExpired("the request", request.timeout_s) from None

    async def _generate(
        self, request: generation_pb2.GenerateRequest, context: Context, logged: LoggedRequest
    ) -> None:
        outbox = Outbox()
        decoding = asyncio.create_task(self._decode(request, logged, outbox))
        decoding.add_done_callback(lambda _: outbox.close())
        try:
            while (response := await outbox.take()) is not None:
                await context.write(response)
            await decoding
        finally:
            decoding.cancel()
            await asyncio.gather(decoding, return_exceptions=True)

    async def _decode(
        self, request: generation_pb2.GenerateRequest, logged: LoggedRequest, outbox: Outbox
    ) -> None:
        """Decode a choice; cancelling frees both KV caches."""
        vocabulary = await self._pair.wait_ready(self._config.reopen_timeout_s)
        with self._pair.in_use():
            await self._decode_on(vocabulary, request, logged, outbox)

    async def _decode_on(
        self,
        vocabulary: Vocabulary,
        request: generation_pb2.GenerateRequest,
        logged: LoggedRequest,
        outbox: Outbox,
    ) -> None:
        pair = self._pair
        limits = PairLimits(
            pair.max_model_len,
            pair.num_speculative_tokens,
            pair.method,
            pair.methods,
            pair.targets.block_size,
        )
        state, trimmer = admit(request, vocabulary, limits)
        deaths = state.target_deaths
        deaths.on_death = lambda: outbox.put(
            generation_pb2.GenerateResponse(num_device_deaths=deaths.count)
        )
        logged.admitted(state)
        try:
            async with self.queue.admitted(
                state.demand, request.priority, is_resumed=bool(request.committed_token_ids)
            ):
                await self._score_prompt(request, state, logged, outbox)
                if request.max_tokens == 0:
                    outbox.put(nothing_decoded(state.num_speculative_tokens))
                    return
                await self._run(vocabulary, request, state, trimmer, logged, outbox)
        except Overloaded:
            self._metrics.refused.inc()
            raise

    async def _score_prompt(
        self,
        request: generation_pb2.GenerateRequest,
        state: RequestState,
        logged: LoggedRequest,
        outbox: Outbox,
    ) -> None:
        """Send the prompt's log-probabilities, if they are asked for."""
        if not request.num_prompt_logprobs_plus_one:
            return
        scores = score_prompt(
            state,
            request.num_prompt_logprobs_plus_one - 1,
            request.num_prompt_logprobs_received,
            lambda scored: self._open_target(scored, request),
            largest_block(self._pair.targets),
            logged.trace.context.traceparent if logged.trace.context.is_sampled else "",
        )
        async with aclosing(scores) as blocks:
            async for logprobs in blocks:
                identity = request.target_identity = self._pair.targets.identity
                outbox.put(
                    generation_pb2.GenerateResponse(
                        prompt_logprobs=logprobs, target_identity=identity
                    )
                )

    def _open_target(
        self, state: RequestState, request: generation_pb2.GenerateRequest
    ) -> TargetSession:
        targets = self._pair.targets  # those of now: the wait may have seen another model come
        if request.target_identity:
            check_same_model(request.target_identity, targets.identity)
        return TargetSession(
            state,
            targets,
            _opening(state, request),
            call_timeout_s=self._config.target_timeout_s,
            reopen_timeout_s=self._config.reopen_timeout_s,
        )

    async def _run(
        self,
        vocabulary: Vocabulary,
        request: generation_pb2.GenerateRequest,
        state: RequestState,
        trimmer: Trimmer,
        logged: LoggedRequest,
        outbox: Outbox,
    ) -> None:
        """Decode an admitted choice."""
        opening = _opening(state, request)
        target = self._open_target(state, request)
        proposer = self._proposers.make(state, opening, request.tenant_salt)
        length = RequestLength(
            self._length,
            state,
            request.tenant_salt,
            target,
            proposer,
            for_verification=request.for_verification,
        )
        decoder = Decoder(
            state,
            target,
            proposer,
            trimmer,
            length,
            vocab_size=vocabulary.table.vocab_size,
            synthetic=self._synthetic,
        )
        is_first, num_cut = True, 0
        finish_reason = generation_pb2.FINISH_REASON_UNSPECIFIED
        try:
            async with aclosing(decoder.decode()) as rounds:
                async for committed in rounds:
                    self.num_rounds += 1
                    response = block_response(
                        committed,
                        origins=request.include_origins,
                        provenance=request.include_provenance,
                    )
                    if is_first:
                        response.target_identity, is_first = target.identity, False
                    if committed.emission.finish_reason is not None:
                        # Free the KV before anything else; a slow reader holds none of it.
                        decoder.close()
                        finish_reason = response.finish_reason
                        record = _record_of(decoder, target, proposer, request, state)
                        if request.include_origins:
                            add_steps(record, decoder.record)
                        response.record.CopyFrom(record)
                        num_cut = committed.num_accepted + 1 - len(committed.token_ids)
                    outbox.put(response)
            await self._proposers.finished(state, request.tenant_salt, num_cut)
        finally:
            decoder.close()
            count_request(self._metrics, decoder.record, target, proposer)
            record = _record_of(decoder, target, proposer, request, state)
            logged.note_record(record, finish_reason)

    async def GetPair(  # noqa: N802 - the contract's name
        self, request: generation_pb2.GetPairRequest, context: Context
    ) -> generation_pb2.GetPairResponse:
        """Say what is served and whether it is ready."""
        response = self._pair.describe(include_token_table=request.include_token_table)
        response.speculation_mode = codec.pack_mode(self._length.mode)
        response.versions.extend(code_versions())
        if response.speculation_enabled and self._length.mode is SpeculationMode.OFF:
            response.speculation_enabled = False
            response.reason = response.reason or "speculation is off: an operator switched it off"
        if response.speculation_enabled:
            response.reason = response.reason or self._verified.reason()
            response.speculation_enabled = self._verified.may_speculate
        return response

    async def GetStatus(  # noqa: N802 - the contract's name
        self, request: generation_pb2.GetStatusRequest, context: Context
    ) -> generation_pb2.GetStatusResponse:
        """Give the live state of this orchestrator and the replicas it knows."""
        return generation_pb2.GetStatusResponse(
            num_running=self.num_running,
            num_waiting=self.num_waiting,
            replicas=self._pair.replica_statuses(),
            orchestrator_id=self._orchestrator_id,
            pid=os.getpid(),
            cpu_s=time.process_time(),
            num_rounds=self.num_rounds,
            speculation_mode=codec.pack_mode(self._length.mode),
        )


def _opening(
    state: RequestState, request: generation_pb2.GenerateRequest
) -> common_pb2.SessionOpening:
    return codec.pack_opening(SessionOpening(state.sampling, request.tenant_salt, request.priority))


def _record_of(
    decoder: Decoder,
    target: TargetSession,
    proposer: Proposer | None,
    request: generation_pb2.GenerateRequest,
    state: RequestState,
) -> generation_pb2.SpeculationRecord:
    record = record_message(decoder.record)
    record.num_late_proposals = proposer.num_late if proposer else 0
    record.num_target_reopens = target.num_reopens
    if not request.num_prompt_logprobs_plus_one:
        # What scoring the prompt has just put there was not cached before.
        record.cached_prompt_tokens = target.cached_prompt_tokens
    record.num_speculative_tokens = state.num_speculative_tokens
    return record
