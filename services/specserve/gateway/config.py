"""The gateway's configuration: where it listens and what it refuses.

Knows no model: limits that follow from the served pair come from `GetPair`.
"""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from specserve.config import Config, TlsSettings


class TenantLimits(Config):
    """What one tenant may have; None is no limit. Each gateway counts for itself."""

    requests_per_minute: int | None = Field(None, ge=1)
    """Requests, in bursts of at most so many."""
    tokens_per_minute: int | None = Field(None, ge=1)
    """Prompt and output tokens. A request is let in for its prompt and its max_tokens, or for the
    whole minute's if that is less, and what it did not use is given back at its end."""
    max_concurrent_sessions: int | None = Field(None, ge=1)
    """Choices decoded or waiting at once; a request for more than this alone is a 400."""
    best_priority: int | None = None
    """Smallest `priority` that a request may name; None lets it name any."""


class GatewayConfig(TlsSettings):
    """One gateway process."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = Field(8000, ge=0, le=65535)
    """Port to listen on; 0 lets the system choose one."""
    api_key_file: str | None = None
    """File of API keys' hashes, written by `specserve keys` and read anew when it changes; every
    path but /health and /ready then wants a key. None asks for none."""
    metrics_without_key: bool = False
    """Answer /metrics without a key too, for a Prometheus that has none."""
    console: bool = True
    """Serve the page /console, and /v1/specserve/pool, which it shows."""
    served_model_name: str | None = None
    """Name that clients ask for; None takes the target's model id."""
    max_body_bytes: int = Field(1_048_576, ge=1024)
    """Largest request body; a larger one is answered 413 without being held in memory."""
    body_timeout_s: float = Field(60.0, gt=0)
    """Longest that a client may take to send its body, in seconds; then it is answered 408."""
    max_prompts: int = Field(128, ge=1)
    """Most prompts in one body."""
    max_n: int = Field(128, ge=1, le=128)
    """Most choices per prompt."""
    max_choices: int = Field(256, ge=1)
    """Most choices in one body, prompts times n."""
    max_stops: int = Field(16, ge=0, le=16)
    """Most stop strings."""
    max_logprobs: int = Field(20, ge=0, le=20)
    """Most top log-probabilities per token."""
    default_completion_tokens: int = Field(16, ge=1)
    """max_tokens of a completion that names none, as OpenAI has it."""
    default_chat_tokens: int | None = Field(None, ge=1)
    """max_tokens of a chat that names none; None goes on to the end of the context."""
    stream_interval_ms: float = Field(0.0, ge=0, le=10_000)
    """Time between two writes of a stream, there being something new or not, so that times do not
    tell how many tokens a round accepted; 0 writes at once."""
    stream_pad_bytes: int = Field(0, ge=0, le=1_048_576)
    """Every write of a stream is filled up to a multiple of so many bytes, so that sizes do not
    tell it either; 0 fills nothing. 4096 holds some ten rounds of plain text."""
    request_timeout_s: float = Field(600.0, gt=0)
    """Longest time for one request, in seconds."""
    failover_timeout_s: float = Field(30.0, ge=0)
    """How long a request looks for another orchestrator when its own is lost, in seconds."""
    orchestrator_hang_s: float = Field(5.0, gt=0)
    """An orchestrator that neither writes nor answers for this long counts as lost, in seconds."""
    pair_refresh_s: float = Field(2.0, ge=0)
    """Age at which what is known of the served pair is asked for again, in seconds."""
    tokenize_in_thread_chars: int = Field(2048, ge=0)
    """Texts longer than this are tokenised off the event loop."""
    tenant_header: str | None = Field(None, pattern=r"^[A-Za-z0-9-]{1,64}$")
    """Header that names a request's tenant, such as X-Specserve-Tenant. None: all are one tenant.
    Whoever can reach the gateway can write any header: only a proxy that sets this one itself, and
    throws away what a client sent, makes it worth anything."""
    limits: TenantLimits = TenantLimits()
    """Of every tenant that `tenant_limits` does not name, each for itself."""
    tenant_limits: dict[str, TenantLimits] = Field(default_factory=dict)
    """Limits by tenant, in place of those above."""
    show_recent_requests: bool = True
    """Answer `/v1/specserve/requests`: lengths and times of the recent requests of whoever asks, by
    its tenant."""
    shutdown_grace_s: float = Field(10.0, ge=0)
    """How long running requests may go on after a stop signal, in seconds."""

    @model_validator(mode="after")
    def _one_source_of_tenants(self) -> Self:
        if self.api_key_file is not None and self.tenant_header is not None:
            raise ValueError("tenant_header has no say where api_key_file is set; leave it out")
        return self
