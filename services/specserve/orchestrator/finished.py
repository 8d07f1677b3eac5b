"""What a request adds to an orchestrator's counters once it has ended, however it did."""

from __future__ import annotations

from specserve.orchestrator.proposer import Proposer
from specserve.orchestrator.record import Record
from specserve.orchestrator.target_session import TargetSession
from specserve.telemetry import RoundMetrics


def count_request(
    metrics: RoundMetrics, record: Record, target: TargetSession, proposer: Proposer | None
) -> None:
    """Add a request's rounds, tokens and moves."""
    metrics.drafts.inc(record.num_spec_steps)
    metrics.draft_tokens.inc(record.num_draft_tokens)
    metrics.accepted_tokens.inc(record.num_accepted_draft_tokens)
    for name, counts in record.proposers.items():
        metrics.proposer_drafts.labels(proposer=name).inc(counts.num_spec_steps)
        metrics.proposer_draft_tokens.labels(proposer=name).inc(counts.num_draft_tokens)
        metrics.proposer_accepted_tokens.labels(proposer=name).inc(counts.num_accepted_draft_tokens)
    for position, count in enumerate(record.accepted_per_position):
        metrics.accepted_per_position.labels(position=str(position)).inc(count)
    metrics.recovered_tokens.inc(record.num_recovered_tokens)
    metrics.bonus_tokens.inc(record.num_bonus_tokens)
    metrics.plain_tokens.inc(record.num_plain_tokens)
    metrics.target_reopens.inc(target.num_reopens)
    metrics.preemptions.inc(target.num_preemptions)
    for reason, count in record.rounds_by_reason.items():
        metrics.rounds_by_reason.labels(reason=reason).inc(count)
    for k, count in record.rounds_by_k.items():
        metrics.rounds_by_k.labels(num_speculative_tokens=str(k)).inc(count)
    metrics.draft_seconds.inc(record.draft_s)
    metrics.verify_seconds.inc(record.verify_s)
    if proposer is not None:
        metrics.late_proposals.inc(proposer.num_late)
        metrics.invalid_proposals.inc(proposer.num_invalid)
