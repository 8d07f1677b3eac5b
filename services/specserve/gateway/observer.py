"""One request's clock, counters and spans.

Knows what was sent and what came back, as numbers; knows no text. Never makes a span current: the
request's generator may be closed from another task, where a context token could not be undone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from specserve.gateway.blocks import Block, Round, TokenOrigin
from specserve.gateway.errors import ClientDisconnected, name_of, to_http
from specserve.gateway.fields import GenerationFields
from specserve.gateway.metrics import GatewayMetrics
from specserve.gateway.plan import GenerationPlan
from specserve.gateway.request_spans import RequestSpans
from specserve.gateway.rounds import record_of
from specserve.gateway.tally import Tally
from specserve.telemetry import CANCELLED, Tracing


class RequestObserver:
    """Watches one request from its arrival to its end, however it ends."""

    def __init__(
        self,
        operation: str,
        headers: Mapping[str, str],
        metrics: GatewayMetrics,
        tracing: Tracing,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._metrics = metrics
        self._clock = clock
        self._arrived_at = clock()
        self._last_block_at: dict[int, float] = {}  # {choice: seconds}
        self._first_block_at: dict[int, tuple[float, int]] = {}  # {choice: (seconds, tokens)}
        self._num_tokens: dict[int, int] = {}  # {choice: tokens received}
        self._finish_reasons: dict[int, str] = {}
        self._origins: dict[int, list[TokenOrigin]] = {}  # {choice: where its tokens came from}
        self._rounds: dict[int, list[Round]] = {}  # {choice: what was drafted}
        self._num_choices = 0
        self._tally: Tally | None = None
        self._tenant = ""
        self._spans = RequestSpans(operation, headers, tracing, self._arrived_at)
        self.context = self._spans.context
        """Of the request's own span."""
        self.traceparent = self.context.traceparent
        """Context for the calls below."""
        self._exemplar = self._spans.exemplar

    def on_body(self) -> None:
        """Note that the body was read and the pair is known: what follows is tokenising."""
        self._spans.parsed_at = self._clock()

    @contextmanager
    def detokenising(self) -> Iterator[None]:
        """Count the time inside as detokenising."""
        began = self._clock()
        try:
            yield
        finally:
            self._spans.detokenise_s += self._clock() - began

    @property
    def num_output_tokens(self) -> int:
        """Tokens received so far, all choices together."""
        return sum(self._num_tokens.values())

    def on_plan(self, plan: GenerationPlan, body: GenerationFields, tenant: str = "") -> None:
        """Note what will be decoded, and for whom."""
        self._tenant = tenant
        for length in plan.prompt_lengths:
            self._metrics.prompt_length.observe(length)
        self._tally = Tally(plan.prompt_lengths, plan.n)
        self._num_choices = len(plan.choices)
        self._metrics.running.inc(self._num_choices)
        self._metrics.prompt_tokens.inc(sum(plan.prompt_lengths))
        self._spans.on_plan(plan, body, self._clock())

    def on_block(self, block: Block) -> None:
        """Note one block's arrival from the backend, whether or not the client reads it."""
        now = self._clock()
        count = len(block.token_ids)
        self._num_tokens[block.index] = self._num_tokens.get(block.index, 0) + count
        self._origins.setdefault(block.index, []).extend(block.origins)
        self._rounds.setdefault(block.index, []).extend(block.rounds)
        self._metrics.generation_tokens.inc(count)
        if count and block.index not in self._first_block_at:
            self._first_block_at[block.index] = (now, count)
            self._metrics.time_to_first_token.observe(now - self._arrived_at, self._exemplar)
            if len(self._first_block_at) == 1:
                self._spans.first_token_at = now
        elif count:
            share = (now - self._last_block_at[block.index]) / count
            for _ in range(count):
                self._metrics.inter_token_latency.observe(share)
        if count:
            self._last_block_at[block.index] = now
            self._spans.last_block_at = now
        if self._tally is not None:
            self._tally.add(block)
        if block.finish_reason is not None:
            self._on_finish(block, now)

    def _on_finish(self, block: Block, now: float) -> None:
        reason = block.finish_reason or ""
        self._finish_reasons[block.index] = reason
        self._metrics.success.labels(reason).inc()
        self._metrics.running.dec()
        self._metrics.e2e_latency.observe(now - self._arrived_at, self._exemplar)
        if block.record is not None:
            self._metrics.count_record(block.record)
            self._spans.note_record(block.record)
        first_at, first_count = self._first_block_at.get(block.index, (now, 0))
        later = self._num_tokens[block.index] - first_count
        if later:
            self._metrics.time_per_output_token.observe((now - first_at) / later, self._exemplar)

    def end(self, error: BaseException | None) -> None:
        """Close the books; called once, on every way out."""
        unfinished = set(range(self._num_choices)) - set(self._finish_reasons)
        self._metrics.running.dec(len(unfinished))
        for index in unfinished:
            # Its tokens were emitted and counted: what speculation did for them is, too.
            record = record_of(self._origins.get(index, ()), self._rounds.get(index, ()))
            self._metrics.count_record(record)
        name, is_our_fault = "", False
        if error is not None:
            given_up = isinstance(error, asyncio.CancelledError | ClientDisconnected)
            name = CANCELLED if given_up else name_of(error)
            # A body that was refused is its sender's affair: it keeps no trace.
            is_our_fault = not isinstance(error, Exception) or to_http(error).status >= 500
            is_our_fault = is_our_fault or given_up
            self._metrics.failure.labels(name).inc()
        usage = None
        if self._tally is not None:
            usage = self._tally.usage()
            self._metrics.count_tenant(self._tenant, usage.prompt_tokens, usage.completion_tokens)
            for count in self._num_tokens.values():
                self._metrics.output_length.observe(count)
            self._metrics.cached_prompt_tokens.inc(usage.prompt_tokens_details.cached_tokens)
        reasons = [self._finish_reasons[index] for index in sorted(self._finish_reasons)]
        self._spans.end(self._clock(), name, usage, reasons, is_our_fault=is_our_fault)
