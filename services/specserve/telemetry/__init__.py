"""Names and units of traces and metrics, and their set-up: the only reader of OTEL_* variables.

Counters, not rates: acceptance rate and mean acceptance length are queries
(accepted / drafted; 1 + accepted / rounds). No prompt and no token text is ever recorded here.
"""

from __future__ import annotations

from specserve.telemetry.context import TraceContext as TraceContext
from specserve.telemetry.round_metrics import RoundMetrics as RoundMetrics
from specserve.telemetry.tracing import AttributeValue as AttributeValue
from specserve.telemetry.tracing import SpanData as SpanData
from specserve.telemetry.tracing import Tracing as Tracing
from specserve.telemetry.tracing import start_tracing as start_tracing

SPAN_GATEWAY_QUEUE = "gateway.queue"
SPAN_TOKENISE = "gateway.tokenise"
SPAN_ANSWER = "gateway.answer"
SPAN_GENERATE = "orchestrator.generate"
SPAN_ORCHESTRATOR_QUEUE = "orchestrator.queue"
SPAN_ROUND = "specserve.round"
SPAN_DRAFT = "spec_draft"
SPAN_VERIFY = "spec_verify"
SPAN_ACCEPT = "spec_accept"
"""From a round's last call to its end: accepting, committing, writing the answer."""
SPAN_PREPARE = "spec_prepare"
"""From a round's start, or a call's end, to its next call, where that is worth a span."""
SPAN_FAILOVER = "specserve.failover"
SPAN_DRAFT_CALL = "draft.propose"
"""The draft's own span of a call; `spec_draft` is the orchestrator's, transport included."""
SPAN_TARGET_CALL = "target.verify"
"""The target's own span of a call; `spec_verify` is the orchestrator's."""

EVENT_TOKENS = "tokens"
"""On a round: the origin of each token that it emitted, and the draft tokens' probabilities."""
EVENT_FIRST_TOKEN = "first_token"  # noqa: S105 - a name

CANCELLED = "cancelled"
"""Error of a span whose client went away."""

ATTRIBUTE_ERROR = "error.type"
ATTRIBUTE_OPERATION = "gen_ai.operation.name"
ATTRIBUTE_PROVIDER = "gen_ai.provider.name"
ATTRIBUTE_REQUEST_MODEL = "gen_ai.request.model"
ATTRIBUTE_TEMPERATURE = "gen_ai.request.temperature"
ATTRIBUTE_TOP_P = "gen_ai.request.top_p"
ATTRIBUTE_MAX_TOKENS = "gen_ai.request.max_tokens"
ATTRIBUTE_CHOICE_COUNT = "gen_ai.request.choice.count"
ATTRIBUTE_SEED = "gen_ai.request.seed"
ATTRIBUTE_RESPONSE_MODEL = "gen_ai.response.model"
ATTRIBUTE_RESPONSE_ID = "gen_ai.response.id"
ATTRIBUTE_FINISH_REASONS = "gen_ai.response.finish_reasons"
ATTRIBUTE_INPUT_TOKENS = "gen_ai.usage.input_tokens"
ATTRIBUTE_OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
ATTRIBUTE_CACHED_PROMPT_TOKENS = "gen_ai.usage.cache_read.input_tokens"

ATTRIBUTE_REQUEST_ID = "specserve.request_id"
ATTRIBUTE_ORCHESTRATOR = "specserve.orchestrator"
ATTRIBUTE_ATTEMPT = "specserve.attempt"
ATTRIBUTE_NUM_ROUNDS = "specserve.num_rounds"
ATTRIBUTE_NUM_TARGET_REOPENS = "specserve.num_target_reopens"

ATTRIBUTE_NUM_SPECULATIVE_TOKENS = "specserve.num_speculative_tokens"
ATTRIBUTE_LENGTH_REASON = "specserve.length_reason"
ATTRIBUTE_NUM_DRAFT_TOKENS = "specserve.num_draft_tokens"
ATTRIBUTE_NUM_ACCEPTED_TOKENS = "specserve.num_accepted_tokens"
ATTRIBUTE_NUM_EMITTED_TOKENS = "specserve.num_emitted_tokens"
ATTRIBUTE_TOKEN_ORIGINS = "specserve.token_origins"  # noqa: S105 - a name
ATTRIBUTE_TARGET_PROBS = "specserve.target_probs"
ATTRIBUTE_DRAFT_PROBS = "specserve.draft_probs"
ATTRIBUTE_FIRST_REJECTION = "specserve.first_rejection"
ATTRIBUTE_OUTCOME_CACHE_HIT = "specserve.outcome_cache_hit"
ATTRIBUTE_PROPOSER = "specserve.proposer"
ATTRIBUTE_COMMITTED_LENGTH = "specserve.committed_length"
ATTRIBUTE_DRAFT_CACHED_LENGTH = "specserve.draft.cached_length"
ATTRIBUTE_TARGET_CACHED_LENGTH = "specserve.target.cached_length"
ATTRIBUTE_TOKENISE_S = "specserve.gateway.tokenise_s"
ATTRIBUTE_DETOKENISE_S = "specserve.gateway.detokenise_s"
ATTRIBUTE_REPLICA = "specserve.replica"
ATTRIBUTE_REPLICA_LEFT = "specserve.replica_left"
ATTRIBUTE_SERVICE = "specserve.service"
ATTRIBUTE_REVISION = "specserve.model_revision"
ATTRIBUTE_EPOCH = "specserve.epoch"
ATTRIBUTE_NUM_REPLIES = "specserve.num_replies"
ATTRIBUTE_IS_BACKGROUND = "specserve.is_background"
ATTRIBUTE_TRANSPORT_S = "specserve.transport_s"
ATTRIBUTE_QUEUE_S = "specserve.queue_s"
ATTRIBUTE_FORWARD_S = "specserve.forward_s"
ATTRIBUTE_BATCH_SIZE = "specserve.batch_size"
ATTRIBUTE_ROWS = "specserve.rows"
ATTRIBUTE_HIDDEN_TOKENS = "specserve.draft.hidden_tokens"
ATTRIBUTE_HIDDEN_S = "specserve.draft.hidden_s"
