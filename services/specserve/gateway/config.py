"""The gateway's configuration: where it listens and what it refuses.

Knows no model: limits that follow from the served pair come from `GetPair`.
"""

from __future__ import annotations

from pydantic import Field

from specserve.config import Config


class GatewayConfig(Config):
    """One gateway process."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = Field(8000, ge=0, le=65535)
    """Port to listen on; 0 lets the system choose one."""
    served_model_name: str | None = None
    """Name that clients ask for; None takes the target's model id."""
    max_body_bytes: int = Field(1_048_576, ge=1024)
    """Largest request body; a larger one is answered 413 without being held in memory."""
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
    request_timeout_s: float = Field(600.0, gt=0)
    """Longest time for one request, in seconds."""
    failover_timeout_s: float = Field(30.0, ge=0)
    """How long a request looks for another orchestrator when its own is lost, in seconds."""
    pair_refresh_s: float = Field(2.0, ge=0)
    """Age at which what is known of the served pair is asked for again, in seconds."""
    tokenize_in_thread_chars: int = Field(2048, ge=0)
    """Texts longer than this are tokenised off the event loop."""
    shutdown_grace_s: float = Field(10.0, ge=0)
    """How long running requests may go on after a stop signal, in seconds."""
