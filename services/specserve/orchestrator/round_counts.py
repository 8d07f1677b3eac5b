"""Counts rounds and requests from their records, as they end.

Label values that come from outside are bounded. Knows records and counters; decides nothing.
"""

from __future__ import annotations

from collections import Counter

from specserve.orchestrator.round_note import RoundNote
from specserve.rpc.round_stages import STAGES, add_stages
from specserve.rpc.v1 import requests_pb2
from specserve.telemetry import RoundMetrics, TraceContext
from specserve.telemetry.bounded_labels import BoundedLabels

LOOKUP = "none"
"""Draft revision of tokens that no draft model drew."""

MAX_UNWRITTEN = 32
"""Rounds that are added up before counters take them in: a counter's lock costs more than its sum,
and a round has ten of them between the target's answer and the draft's next call."""


class RoundCounts:
    """One orchestrator's counters of what its records hold."""

    def __init__(self, metrics: RoundMetrics) -> None:
        self._metrics = metrics
        self._revisions = BoundedLabels()
        self._stages = {name: metrics.stage_seconds.labels(stage=name) for name in STAGES}
        self._seconds = dict.fromkeys(self._stages, 0.0)
        self._num_rejections: Counter[int] = Counter()
        """{position: rounds that a rejection ended there}"""
        self._num_hits = 0
        self._tokens: dict[tuple[str, ...], list[int]] = {}
        """{labels: [drafted, accepted]}"""
        self._num_unwritten = 0
        self._round_seconds = metrics.round_seconds.of()
        self._batch = {name: metrics.batch_size.of(name) for name in ("draft", "target")}

    def on_round(self, note: RoundNote, context: TraceContext) -> None:
        """Count a round that has ended; some counters show it with the next `write`."""
        add_stages(self._seconds, note.wall_s, note.calls)
        self._round_seconds.observe(note.wall_s, exemplar(context))
        drafted, accepted = note.num_draft_tokens, note.num_accepted_tokens
        if accepted < drafted:
            self._num_rejections[accepted] += 1
        target = draft = None
        for call in note.calls:
            service, timing = call.service, call.timing
            if call.error:
                self._metrics.calls_failed.labels(service=service, error=call.error).inc()
                continue
            if service in self._batch and timing.batch_size:
                self._batch[service].observe(timing.batch_size)
            if service == "target":
                target = call
            elif not call.is_background:
                draft = call
            if timing.hidden_tokens:
                self._num_hits += 1
        if drafted:
            model = "" if target is None else target.revision
            revision = LOOKUP if draft is None else draft.revision
            tokens = self._tokens.setdefault(self._revisions.of(model, revision), [0, 0])
            tokens[0] += drafted
            tokens[1] += accepted
        self._num_unwritten += 1
        if self._num_unwritten >= MAX_UNWRITTEN:
            self.write()

    def write(self) -> None:
        """Let the counters take in what was added up."""
        metrics = self._metrics
        for name, seconds in self._seconds.items():
            if seconds > 0:
                self._stages[name].inc(seconds)
                self._seconds[name] = 0.0
        for position, count in self._num_rejections.items():
            metrics.rejections_per_position.labels(position=str(position)).inc(count)
        self._num_rejections.clear()
        metrics.outcome_cache_hits.inc(self._num_hits)
        for labels, (drafted, accepted) in self._tokens.items():
            metrics.revision_draft_tokens.labels(*labels).inc(drafted)
            metrics.revision_accepted_tokens.labels(*labels).inc(accepted)
        self._tokens.clear()
        self._num_hits = self._num_unwritten = 0

    def on_end(
        self, record: requests_pb2.RequestRecord, first_token_s: float | None, context: TraceContext
    ) -> None:
        """Count a request that has ended, with its clocks where it got so far.

        Args:
            first_token_s: from its arrival to its first token.
        """
        self.write()
        if not record.num_rounds:
            return
        sample = exemplar(context)
        self._metrics.request_queue_time.observe(record.queue_s, sample)
        if first_token_s is not None:
            self._metrics.request_prefill_time.observe(first_token_s - record.queue_s, sample)
            self._metrics.request_decode_time.observe(record.total_s - first_token_s, sample)


def exemplar(context: TraceContext) -> dict[str, str] | None:
    """Link a measurement to its trace; None where nobody recorded one."""
    return {"trace_id": context.trace_id_text} if context.is_sampled else None
