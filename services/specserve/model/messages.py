"""What crosses the pipe between a server process and its device process.

Plain values only: no protobuf, no tensors. The servicers translate frames to these and back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from specserve.errors import SpecServeError
from specserve.speculation.types import SamplingParams, SparseProbs


@dataclass(frozen=True, slots=True)
class SessionOpening:
    """What is fixed for a session's life; sent with its first call."""

    sampling: SamplingParams
    tenant_salt: bytes = b""
    """Mixed into prefix-cache keys, so that tenants never share blocks."""
    priority: int = 0
    """Higher is kept longer when blocks run out."""
    age_s: float = 0.0
    """Seconds since the request came: of equal priorities the older is kept longer."""


@dataclass(frozen=True, slots=True)
class SessionCall:
    """The part every call shares: which session, what it keeps, what is appended."""

    call_id: int
    """Unique among the calls in flight of one engine; replies are matched by it."""
    session_id: str
    epoch: int
    """Rises when the session moves to another replica or is opened anew."""
    step: int
    """Rises with each call of an epoch; may skip. The same step is joined or replayed."""
    keep_length: int
    """Tokens of the cache that stay visible; everything beyond is rolled back."""
    keep_digest: int
    """digest(tokens[:keep_length]) (speculation/digest.py); 0 when keep_length is 0."""
    append_token_ids: tuple[int, ...]
    """Committed tokens to append after keep_length; keep + append = all committed tokens."""
    opening: SessionOpening | None
    """Present on the session's opening call of an epoch."""


@dataclass(frozen=True, slots=True)
class ProposeCall(SessionCall):
    """Append, then draft."""

    num_speculative_tokens: int
    """K; 0 only appends."""
    alone: bool = False
    """Share no forward: a device may have died of this session."""


@dataclass(frozen=True, slots=True)
class VerifyCall(SessionCall):
    """Append, then score the draft tokens, or decode ahead."""

    draft_token_ids: tuple[int, ...]
    draft_probs: SparseProbs | None
    """q of each draft token; required by the standard rule when there are draft tokens."""
    num_decode_steps: int = 1
    """With no draft tokens: decode up to this many tokens, streamed as they come."""
    append_only: bool = False
    """Only hold the tokens (a piece of a long prompt): no row is scored."""
    alone: bool = False
    """Share no forward: a device may have died of this session."""


Call = ProposeCall | VerifyCall


@dataclass(frozen=True, slots=True)
class Cancel:
    """Stop a call in flight; it is answered with what it has, or with DeadlineExpired."""

    call_id: int


@dataclass(frozen=True, slots=True)
class Release:
    """Forget a session and free its blocks; unknown sessions are fine."""

    session_id: str


@dataclass(frozen=True, slots=True)
class Arrived:
    """When the messages behind it came; first in each batch that a server hands to its device.

    A device reads nothing during a forward: by its own clock, every call would come at an end of
    one, and no forward would seem to keep a call waiting.
    """

    at: float
    """Seconds of the host's monotonic clock, which all its processes share."""


@dataclass(frozen=True, slots=True)
class Shutdown:
    """End the device loop."""


Message = Call | Cancel | Release | Arrived | Shutdown
"""What goes into a device."""

Role = Literal["draft", "target"]
"""What a device serves as."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of the unmodified target distribution, [R] rows of one reply."""

    draft: NDArray[np.float32]
    """[K]; of each draft token."""
    replacement: NDArray[np.float32]
    """[K + 1]; of each replacement token."""
    top_token_ids: NDArray[np.int32]
    """[K + 1, n]; most likely first."""
    top: NDArray[np.float32]
    """[K + 1, n]"""


@dataclass(frozen=True, slots=True)
class CallTiming:
    """Where a call's time went inside the device process."""

    queue_s: float
    """From arrival to the start of its first forward."""
    forward_s: float
    """Wall time of the forwards and the sampling it took part in."""
    batch_size: int
    """Sessions in its last forward."""
    rows: int
    """Tokens in its last forward, all sessions together."""
    hidden_tokens: int = 0
    """Draft tokens that were drafted before the call came: the outcome cache hit."""
    hidden_s: float = 0.0
    """Wall time of the forwards that drew them; not part of forward_s."""


@dataclass(frozen=True, slots=True)
class ProposeReply:
    """K drafted tokens. cached_length moves the caller's idea of this service's cache."""

    call_id: int
    session_id: str
    step: int
    cached_length: int
    """Tokens whose KV is held after this call: N + K - 1 with N committed and K >= 1 drafted."""
    prefix_cached_tokens: int
    """Prompt tokens found in the prefix cache by this call."""
    draft_token_ids: tuple[int, ...]
    draft_probs: SparseProbs | None
    timing: CallTiming


@dataclass(frozen=True, slots=True)
class VerifyReply:
    """K + 1 scored rows, or one streamed token of decode-ahead."""

    call_id: int
    session_id: str
    step: int
    cached_length: int
    """Tokens whose KV is held after this reply: N + K with N committed and K draft tokens."""
    prefix_cached_tokens: int
    target_probs: NDArray[np.float64]
    """[K]"""
    replacement_token_ids: tuple[int, ...]
    """[K + 1]; empty for append_only."""
    logprobs: TokenLogprobs | None
    timing: CallTiming
    more_follows: bool = False
    """Decode-ahead goes on: another reply with the same call_id follows."""


@dataclass(frozen=True, slots=True)
class CallFailed:
    """A call that ended in an error; only its own session is concerned."""

    call_id: int
    session_id: str
    step: int
    error: SpecServeError


@dataclass(frozen=True, slots=True)
class OutcomeCounts:
    """What the outcome cache did since the engine's start."""

    num_hits: int
    """Propose calls answered, at least in part, with tokens drafted before they came."""
    num_misses: int
    """Propose calls whose session was looked ahead of, and that found nothing."""
    num_hidden_tokens: int
    """Draft tokens answered that were drafted before their call came."""
    num_branch_tokens: int
    """Draft tokens drafted ahead, of use or not."""
    hidden_s: float
    """Wall time of the forwards that drew the hidden tokens, added up over calls."""
    asked_s: float
    """Wall time of the forwards that these calls waited for all the same, added up over calls: the
    share of draft time hidden is hidden_s / (hidden_s + asked_s)."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Piggybacked on replies, so that routing needs no polling."""

    num_free_blocks: int
    num_blocks: int
    num_sessions: int
    num_waiting: int
    """Calls not yet in a forward."""
    num_iterations: int
    """Device iterations so far: a hung device stops moving it."""
    outcomes: OutcomeCounts | None = None
    """None where no outcome cache is switched on."""
    queue_s: float = 0.0
    """Seconds that calls wait for their first forward, of late or by now; 0 while none is here."""
    least_priority: int = 0
    """Of the session that would lose its blocks first; 0 where none holds any."""
    busy_s: float = 0.0
    """Seconds of forwards since the start."""
    num_callers: int = 0
    """Orchestrators with an open stream; the server knows, a device does not."""
    stuck: tuple[str, ...] = ()
    """Sessions in a forward that takes more than a second; the server knows."""


Reply = ProposeReply | VerifyReply | CallFailed


@dataclass(frozen=True, slots=True)
class EngineOutput:
    """Everything one device iteration has to say; one message on the pipe."""

    replies: tuple[Reply, ...]
    load: EngineLoad


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a loaded model is; made once by the device process when it is ready."""

    model_id: str
    revision: str
    weights_fingerprint: str
    """Hex SHA-256 over the weight files (or the toy's spec)."""
    vocab_size: int
    """Tokens of the tokenizer; padded embedding rows are not counted."""
    max_model_len: int
    """Longest sequence, in tokens, that fits the model and the KV pool."""
    dtype: str
    device: str
    num_blocks: int
    block_size: int
    weights_bytes: int
    kv_cache_bytes: int
    hardware: str = ""
    """Processor or GPU that computes, as its maker names it."""
    backend: str = ""
    """What computes the forward and its attention."""
    versions: tuple[str, ...] = ()
    """What runs in the device's own process, each as "name=version"."""
