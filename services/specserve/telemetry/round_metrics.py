"""An orchestrator's counters of rounds. Knows Prometheus; counts nothing itself."""

from __future__ import annotations

from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics

from specserve.telemetry.loop_histogram import LoopHistogram

# Every counter would have a gauge `..._created` beside it, which a scraper that matches names by
# their beginning adds to the counts.
disable_created_metrics()

ROUND_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
REQUEST_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320)
BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@dataclass(slots=True)
class RoundMetrics:
    """An orchestrator's counters of rounds. `prometheus_client` appends `_total`.

    A gateway counts the same rounds from its answers under the names users of vLLM know; these have
    a prefix of their own, so that no sum over both jobs counts a round twice.
    """

    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    drafts: Counter = field(init=False)
    draft_tokens: Counter = field(init=False)
    accepted_tokens: Counter = field(init=False)
    proposer_drafts: Counter = field(init=False)
    proposer_draft_tokens: Counter = field(init=False)
    proposer_accepted_tokens: Counter = field(init=False)
    accepted_per_position: Counter = field(init=False)
    recovered_tokens: Counter = field(init=False)
    bonus_tokens: Counter = field(init=False)
    plain_tokens: Counter = field(init=False)
    late_proposals: Counter = field(init=False)
    invalid_proposals: Counter = field(init=False)
    target_reopens: Counter = field(init=False)
    preemptions: Counter = field(init=False)
    refused: Counter = field(init=False)
    rounds_by_reason: Counter = field(init=False)
    rounds_by_k: Counter = field(init=False)
    draft_seconds: Counter = field(init=False)
    verify_seconds: Counter = field(init=False)
    stage_seconds: Counter = field(init=False)
    rejections_per_position: Counter = field(init=False)
    outcome_cache_hits: Counter = field(init=False)
    calls_failed: Counter = field(init=False)
    round_seconds: LoopHistogram = field(init=False)
    batch_size: LoopHistogram = field(init=False)
    request_queue_time: Histogram = field(init=False)
    request_prefill_time: Histogram = field(init=False)
    request_decode_time: Histogram = field(init=False)
    revision_draft_tokens: Counter = field(init=False)
    revision_accepted_tokens: Counter = field(init=False)

    def __post_init__(self) -> None:
        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"specserve_orchestrator_{name}", text, labels, registry=self.registry)

        self.drafts = counter("num_drafts", "Rounds that verified a draft {round}")
        self.draft_tokens = counter("num_draft_tokens", "Draft tokens verified {token}")
        self.accepted_tokens = counter(
            "num_accepted_tokens", "Draft tokens accepted and emitted {token}"
        )
        proposer = ("proposer",)  # draft_model, ngram, suffix
        self.proposer_drafts = counter(
            "proposer_num_drafts", "Rounds that verified a draft, by proposer {round}", proposer
        )
        self.proposer_draft_tokens = counter(
            "proposer_num_draft_tokens", "Draft tokens verified, by proposer {token}", proposer
        )
        self.proposer_accepted_tokens = counter(
            "proposer_num_accepted_tokens",
            "Draft tokens accepted and emitted, by proposer {token}",
            proposer,
        )
        self.accepted_per_position = counter(
            "num_accepted_tokens_per_pos",
            "Draft tokens accepted, by position in their block {token}",
            ("position",),
        )
        self.recovered_tokens = counter("num_recovered_tokens", "Recovered tokens {token}")
        self.bonus_tokens = counter("num_bonus_tokens", "Bonus tokens {token}")
        self.plain_tokens = counter(
            "num_plain_tokens", "Tokens of rounds without draft tokens {token}"
        )
        self.late_proposals = counter(
            "num_late_proposals", "Proposals that missed their round {proposal}"
        )
        self.invalid_proposals = counter(
            "num_invalid_proposals", "Proposals with ids outside the vocabulary {proposal}"
        )
        self.target_reopens = counter("num_target_reopens", "Target sessions opened anew {session}")
        self.preemptions = counter(
            "num_preemptions", "Target sessions that lost their KV blocks to others {session}"
        )
        self.refused = counter("num_requests_refused", "Choices not admitted in time {request}")
        self.rounds_by_reason = counter(
            "num_rounds_by_reason", "Rounds, by why they had their K {round}", ("reason",)
        )
        self.rounds_by_k = counter(
            "num_rounds_by_num_speculative_tokens",
            "Rounds, by the draft tokens they asked for {round}",
            ("num_speculative_tokens",),
        )
        self.draft_seconds = counter("draft_seconds", "Waited for proposals s")
        self.verify_seconds = counter("verify_seconds", "Waited for verification s")
        self.stage_seconds = counter(
            "round_stage_seconds", "Wall time of rounds, by stage: they add up s", ("stage",)
        )
        self.rejections_per_position = counter(
            "num_rejections_per_pos",
            "Rounds whose first rejected draft token stood at a position {round}",
            ("position",),
        )
        self.outcome_cache_hits = counter(
            "num_outcome_cache_hits", "Proposals drafted before they were asked for {proposal}"
        )
        self.calls_failed = counter(
            "num_calls_failed",
            "Calls that ended in an error, or late, by service {call}",
            ("service", "error"),
        )
        revisions = ("model", "draft_revision")
        self.revision_draft_tokens = counter(
            "revision_num_draft_tokens",
            "Draft tokens verified, by who drew them {token}",
            revisions,
        )
        self.revision_accepted_tokens = counter(
            "revision_num_accepted_tokens",
            "Draft tokens accepted, by who drew them {token}",
            revisions,
        )

        self.round_seconds = LoopHistogram(
            "specserve_orchestrator_round_seconds",
            "Wall time of a round s",
            ROUND_BUCKETS_S,
            self.registry,
        )
        self.batch_size = LoopHistogram(
            "specserve_orchestrator_batch_size",
            "Sessions in the last forward of a call {session}",
            BATCH_BUCKETS,
            self.registry,
            "service",
            ("draft", "target"),
        )

        def histogram(name: str, text: str) -> Histogram:
            return Histogram(
                f"specserve_{name}", text, buckets=REQUEST_BUCKETS_S, registry=self.registry
            )

        self.request_queue_time = histogram(
            "request_queue_time_seconds", "From arrival to the first round s"
        )
        self.request_prefill_time = histogram(
            "request_prefill_time_seconds",
            "From the first round to the first token s",
        )
        self.request_decode_time = histogram(
            "request_decode_time_seconds", "From the first token to the end s"
        )
