"""The gateway's counters and clocks, in Prometheus' text format.

Counters, never rates. Names are those that dashboards of this field already query, with
specserve's prefix. Knows numbers; knows no request body. One registry per app, no global.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import choose_encoder

from specserve.rpc.v1.generation_pb2 import GetStatusResponse, SpeculationRecord
from specserve.telemetry.bounded_labels import BoundedLabels

PREFIX = "specserve_"
REQUEST_SUCCESS = PREFIX + "request_success"
REQUEST_FAILURE = PREFIX + "request_failure"
PROMPT_TOKENS = PREFIX + "prompt_tokens"
GENERATION_TOKENS = PREFIX + "generation_tokens"
CACHED_PROMPT_TOKENS = PREFIX + "prompt_tokens_cached"
TIME_TO_FIRST_TOKEN = PREFIX + "time_to_first_token_seconds"
INTER_TOKEN_LATENCY = PREFIX + "inter_token_latency_seconds"
TIME_PER_OUTPUT_TOKEN = PREFIX + "request_time_per_output_token_seconds"
E2E_REQUEST_LATENCY = PREFIX + "e2e_request_latency_seconds"
NUM_REQUESTS_RUNNING = PREFIX + "num_requests_running"
NUM_REQUESTS_WAITING = PREFIX + "num_requests_waiting"
SPEC_NUM_DRAFTS = PREFIX + "spec_decode_num_drafts"
SPEC_NUM_DRAFT_TOKENS = PREFIX + "spec_decode_num_draft_tokens"
SPEC_NUM_ACCEPTED_TOKENS = PREFIX + "spec_decode_num_accepted_tokens"
SPEC_NUM_ACCEPTED_PER_POS = PREFIX + "spec_decode_num_accepted_tokens_per_pos"
SPEC_NUM_RECOVERED_TOKENS = PREFIX + "spec_decode_num_recovered_tokens"
SPEC_NUM_BONUS_TOKENS = PREFIX + "spec_decode_num_bonus_tokens"
SPEC_NUM_PLAIN_TOKENS = PREFIX + "spec_decode_num_plain_tokens"
SPEC_NUM_PLAIN_STEPS = PREFIX + "spec_decode_num_plain_steps"
SPEC_NUM_LATE_PROPOSALS = PREFIX + "spec_decode_num_late_proposals"
NUM_FAILOVERS = PREFIX + "num_failovers"
REQUEST_PROMPT_TOKENS = PREFIX + "request_prompt_tokens"
REQUEST_GENERATION_TOKENS = PREFIX + "request_generation_tokens"
TENANT_REQUESTS = PREFIX + "tenant_requests"
TENANT_PROMPT_TOKENS = PREFIX + "tenant_prompt_tokens"
TENANT_GENERATION_TOKENS = PREFIX + "tenant_generation_tokens"
NUM_TARGET_REOPENS = PREFIX + "num_target_reopens"
KV_CACHE_USAGE = PREFIX + "kv_cache_usage_perc"
NUM_SESSIONS = PREFIX + "num_sessions"
REQUESTS_UNAUTHORIZED = PREFIX + "requests_unauthorized"
API_KEY_FILE_FAILING = PREFIX + "api_key_file_failing"

_TOKEN_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
_LENGTH_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000)
_REQUEST_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """What drafting has come to, over all finished choices."""

    num_drafts: int
    """Rounds that verified draft tokens."""
    num_draft_tokens: int
    num_accepted: int
    accepted_per_position: list[int]


class GatewayMetrics:
    """All of the gateway's metrics."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.success = Counter(
            REQUEST_SUCCESS,
            "Choices that ended well",
            ["finished_reason"],
            registry=self.registry,
        )
        self.failure = Counter(
            REQUEST_FAILURE,
            "Requests that were refused or failed, and those whose client went away (cancelled)",
            ["error"],
            registry=self.registry,
        )
        self.prompt_tokens = self._counter(PROMPT_TOKENS, "Prompt tokens")
        self.cached_prompt_tokens = self._counter(
            CACHED_PROMPT_TOKENS, "Prompt tokens that the target found in its prefix cache"
        )
        self.generation_tokens = self._counter(GENERATION_TOKENS, "Tokens emitted")
        self.time_to_first_token = self._histogram(
            TIME_TO_FIRST_TOKEN,
            "Seconds from request to a choice's first token",
            _REQUEST_BUCKETS_S,
        )
        self.inter_token_latency = self._histogram(
            INTER_TOKEN_LATENCY,
            "Seconds between blocks, shared out among the block's tokens",
            _TOKEN_BUCKETS_S,
        )
        self.time_per_output_token = self._histogram(
            TIME_PER_OUTPUT_TOKEN,
            "Seconds per token after a choice's first block, one value per choice",
            _TOKEN_BUCKETS_S,
        )
        self.e2e_latency = self._histogram(
            E2E_REQUEST_LATENCY, "Seconds from request to a choice's last token", _REQUEST_BUCKETS_S
        )
        self.prompt_length = self._histogram(
            REQUEST_PROMPT_TOKENS, "Tokens of a prompt {token}", _LENGTH_BUCKETS
        )
        self.output_length = self._histogram(
            REQUEST_GENERATION_TOKENS, "Tokens emitted for a choice {token}", _LENGTH_BUCKETS
        )
        self._tenants = BoundedLabels()
        self._tenant_requests = self._of_tenant(TENANT_REQUESTS, "Requests decoded, by tenant")
        self._tenant_prompt_tokens = self._of_tenant(
            TENANT_PROMPT_TOKENS, "Prompt tokens, by tenant"
        )
        self._tenant_generation_tokens = self._of_tenant(
            TENANT_GENERATION_TOKENS, "Tokens emitted, by tenant"
        )
        self._failovers = self._counter(NUM_FAILOVERS, "Orchestrators lost under way")
        self.running = self._gauge(NUM_REQUESTS_RUNNING, "Choices being decoded for this gateway")
        self._waiting = self._gauge(NUM_REQUESTS_WAITING, "Choices that wait for a target")
        self._num_drafts = self._counter(SPEC_NUM_DRAFTS, "Rounds that verified draft tokens")
        self._plain_steps = self._counter(SPEC_NUM_PLAIN_STEPS, "Rounds without draft tokens")
        self._draft_tokens = self._counter(SPEC_NUM_DRAFT_TOKENS, "Draft tokens verified")
        self._accepted = self._counter(SPEC_NUM_ACCEPTED_TOKENS, "Draft tokens accepted")
        self._accepted_per_pos = Counter(
            SPEC_NUM_ACCEPTED_PER_POS,
            "Draft tokens accepted, by position in their block from 0",
            ["position"],
            registry=self.registry,
        )
        self._recovered = self._counter(SPEC_NUM_RECOVERED_TOKENS, "Recovered tokens emitted")
        self._bonus = self._counter(SPEC_NUM_BONUS_TOKENS, "Bonus tokens emitted")
        self._plain = self._counter(SPEC_NUM_PLAIN_TOKENS, "Tokens of rounds without draft tokens")
        self._late = self._counter(SPEC_NUM_LATE_PROPOSALS, "Proposals that came after their round")
        self._reopens = self._counter(NUM_TARGET_REOPENS, "Target sessions opened anew")
        self._kv_usage = self._gauge(
            KV_CACHE_USAGE, "Share of KV blocks in use, 0 to 1", ["role", "replica"]
        )
        self._num_sessions = self._gauge(NUM_SESSIONS, "Sessions held", ["role", "replica"])
        self.unauthorized = Counter(
            REQUESTS_UNAUTHORIZED,
            "Requests answered 401, for a key that was missing or wrong",
            ["key"],
            registry=self.registry,
        )
        self.api_key_file_failing = self._gauge(
            API_KEY_FILE_FAILING, "1 while older keys are in use, for the file cannot be read"
        )

    def count_record(self, record: SpeculationRecord) -> None:
        """Add what speculation did for one finished choice."""
        self._num_drafts.inc(record.num_spec_steps)
        self._plain_steps.inc(record.num_plain_steps)
        self._draft_tokens.inc(record.num_draft_tokens)
        self._accepted.inc(record.num_accepted_draft_tokens)
        self._recovered.inc(record.num_recovered_tokens)
        self._bonus.inc(record.num_bonus_tokens)
        self._plain.inc(record.num_plain_tokens)
        self._late.inc(record.num_late_proposals)
        self._reopens.inc(record.num_target_reopens)
        for position, count in enumerate(record.accepted_per_position):
            self._accepted_per_pos.labels(str(position)).inc(count)

    def count_failover(self) -> None:
        """Count an orchestrator that was lost under way, whatever comes of its choice."""
        self._failovers.inc()

    def draft_counts(self) -> DraftCounts:
        """Return what drafting has come to since the start."""
        read = self.registry.get_sample_value
        positions: list[int] = []
        name = SPEC_NUM_ACCEPTED_PER_POS + "_total"
        while (count := read(name, {"position": str(len(positions))})) is not None:
            positions.append(int(count))
        return DraftCounts(
            int(read(SPEC_NUM_DRAFTS + "_total") or 0),
            int(read(SPEC_NUM_DRAFT_TOKENS + "_total") or 0),
            int(read(SPEC_NUM_ACCEPTED_TOKENS + "_total") or 0),
            positions,
        )

    def count_tenant(self, tenant: str, prompt_tokens: int, generation_tokens: int) -> None:
        """Add one decoded request to its tenant's; the common tenant has no name."""
        (name,) = self._tenants.of(tenant)
        self._tenant_requests.labels(name).inc()
        self._tenant_prompt_tokens.labels(name).inc(prompt_tokens)
        self._tenant_generation_tokens.labels(name).inc(generation_tokens)

    def set_replicas(self, statuses: Sequence[GetStatusResponse]) -> None:
        """Replace the replicas' gauges; a replica that is gone leaves no stale line behind."""
        self._kv_usage.clear()
        self._num_sessions.clear()
        self._waiting.set(sum(status.num_waiting for status in statuses))
        for status in statuses:
            for replica in status.replicas:
                if not replica.replica_id:
                    continue  # it was not reached yet, and has told no load
                labels = (replica.role, replica.replica_id)
                self._num_sessions.labels(*labels).set(replica.load.num_sessions)
                if replica.load.num_blocks:
                    free = replica.load.num_free_blocks / replica.load.num_blocks
                    self._kv_usage.labels(*labels).set(1 - free)

    def render(self) -> bytes:
        """Write everything in Prometheus' text format."""
        return generate_latest(self.registry)

    def render_for(self, accept: str) -> tuple[bytes, str]:
        """Write everything as the scraper wants it: OpenMetrics has exemplars, the old text none.

        Returns:
            The text and its content type.
        """
        encoder, content_type = choose_encoder(accept)
        return encoder(self.registry), content_type

    def _of_tenant(self, name: str, text: str) -> Counter:
        return Counter(name, text, ["tenant"], registry=self.registry)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, registry=self.registry)

    def _gauge(self, name: str, text: str, labels: Sequence[str] = ()) -> Gauge:
        return Gauge(name, text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(name, text, registry=self.registry, buckets=buckets)
