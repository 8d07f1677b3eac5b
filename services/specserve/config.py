"""Configuration: frozen, validated once, handed down as fields.

Names follow what users of this field already type (vLLM's `--speculative-config`). Knows no
command line and no environment.
"""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, field_validator

from specserve.errors import quoted

DType = Literal["auto", "float32", "bfloat16"]
Quantization = Literal["none", "int8"]
LoadFormat = Literal["auto", "dummy"]
RejectionSampleMethod = Literal["auto", "standard", "coupled", "synthetic"]
SpeculativeMethod = Literal["draft_model", "ngram", "suffix", "cascade"]

LengthSchedule = Literal["auto", "constant"]

DRAFT_MODEL_METHODS: tuple[SpeculativeMethod, ...] = ("draft_model", "cascade")
"""Methods that ask a draft service."""

MAX_NUM_SPECULATIVE_TOKENS = 64
"""No draft is worth a longer guess, and a verify block must fit the smallest token budget."""


_Triple = Annotated[tuple[int, int, int], Field(strict=False)]  # JSON writes it as a list


class Config(BaseModel):
    """Base of all configuration: unknown keys are errors, values never change.

    Strict: true is no number and "4" is none either, for whoever wrote them meant something else.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class EngineConfig(Config):
    """One replica's model, KV pool and scheduler."""

    model: str
    """Directory or hub id of a Hugging Face decoder-only model, or `toy:...` (see model/toy.py)."""
    revision: str | None = None
    """Hub revision; None takes the default branch."""
    load_format: LoadFormat = "auto"
    """auto: safetensors. dummy: random weights, the same ones each time, made on the device from
    config.json and the tokenizer alone: for measurements, its text means nothing."""
    dtype: DType = "auto"
    """auto: bfloat16 where the device computes it, else float32."""
    device: str = "auto"
    """auto: cuda when present, else cpu."""
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1)
    """Share of the GPU's memory that this process may use, weights, KV and 1 GiB for activations
    together; processes on one GPU need shares that add up to less than 1 (CUDA only)."""
    num_kv_blocks: int | None = Field(None, ge=2)
    """KV blocks in the pool; None sizes it from memory."""
    block_size: int = Field(16, ge=1, le=256)
    """Tokens per KV block."""
    max_model_len: int | None = Field(None, ge=2)
    """Longest sequence in tokens; None takes the model's own limit."""
    max_num_seqs: int = Field(64, ge=1)
    """Most sessions in one forward."""
    max_num_batched_tokens: int = Field(512, ge=MAX_NUM_SPECULATIVE_TOKENS + 1)
    """Token budget of one forward; longer prompts are prefilled in chunks."""
    enable_prefix_caching: bool = True
    """Reuse full KV blocks of equal prefixes within one tenant."""
    trust_remote_code: bool = False
    """Let a model directory run its own Python. Off unless you have read that code."""
    num_threads: int | None = Field(None, ge=1)
    """CPU threads of the device process; None leaves torch's choice."""
    pack_weights: bool = True
    """Repack linear weights for the CPU's matrix kernels (CPU only)."""
    enforce_eager: bool = True
    """CUDA: run every forward kernel by kernel. Off: decode steps are captured as CUDA graphs, one
    a shape, and replayed."""
    batch_invariant: bool = False
    """CPU: let no row's bits depend on the rows beside it in bfloat16, where the compiled forward
    does not run (it and float32 always do so); verify steps then take longer."""
    quantization: Quantization = "none"
    """Draft only. int8: weights rounded to 8 bits, one scale an output; in the CPU's compiled
    bfloat16 forward, elsewhere it is ignored."""
    draft_vocab_size: int | None = Field(None, ge=1)
    """Draft only: cut the head to this many frequent tokens (after FR-Spec, arXiv:2502.14856), and
    to those of each session's own text; None uses the list the model ships, if it ships one."""
    device_mode: Literal["process", "thread"] = "process"
    """process: the device loop has an interpreter of its own; thread: for tests and debuggers."""


class SpeculativeConfig(Config):
    """How proposals are made; the keys of `--speculative-config`."""

    method: SpeculativeMethod = "draft_model"
    """Proposer: a draft model, prompt lookup, suffix decoding, or the last where its match is long
    and else the first (cascade). Only draft_model and cascade need a draft service."""
    model: str | None = None
    """Draft model: a directory, a hub id or `toy:...`; needed by draft_model and cascade."""
    revision: str | None = None
    """Hub revision of the draft model."""
    num_speculative_tokens: int = Field(4, ge=0, le=MAX_NUM_SPECULATIVE_TOKENS)
    """K: most draft tokens per round; 0 switches speculation off."""
    num_speculative_tokens_schedule: LengthSchedule = "constant"
    """constant: every round asks for K draft tokens. auto: each for as many as promise the most
    tokens per second, K at most, by costs and acceptance measured while serving."""
    num_speculative_tokens_per_batch_size: tuple[_Triple, ...] = Field((), strict=False)
    """[[from, to, K], ...]: the K of rounds while a target holds so many sessions, both ends
    included, whatever the schedule; above num_speculative_tokens it counts as that."""
    rejection_sample_method: RejectionSampleMethod = "auto"
    """auto: coupled for requests that name a seed, else standard. Temperature 0 is greedy.
    synthetic: for benchmarks only, NOT lossless: draft tokens are accepted by the rates below, and
    the text means nothing."""
    synthetic_acceptance_rates: tuple[float, ...] = Field((), strict=False)
    """With synthetic: entry i is the probability that the first i + 1 draft tokens are all
    accepted, num_speculative_tokens numbers in [0, 1] that never rise."""
    synthetic_acceptance_length: float | None = Field(None, ge=1)
    """With synthetic, instead: mean tokens committed by a full round, 1 to
    num_speculative_tokens + 1; every position is then as likely as the other."""
    prompt_lookup_min: int = Field(1, ge=1)
    """Shortest n-gram that the ngram proposer matches."""
    prompt_lookup_max: int = Field(4, ge=1)
    """Longest n-gram that the ngram proposer matches."""
    suffix_decoding_max_tree_depth: int = Field(24, ge=2, le=256)
    """Longest match and its guess together, in tokens."""
    suffix_decoding_max_spec_factor: float = Field(1.0, gt=0, le=64)
    """A match of m tokens justifies a guess of at most factor * m tokens."""
    suffix_decoding_min_token_prob: float = Field(0.1, ge=0, le=1)
    """A guess ends before a token that is less likely than this, by counting."""
    suffix_decoding_max_cached_requests: int = Field(0, ge=0)
    """Past outputs that suffix decoding also looks into, those of the same tenant only; 0: none."""
    suffix_decoding_max_cached_tokens: int = Field(262_144, ge=1)
    """Most tokens of past outputs kept, all tenants together; about 150 bytes each."""
    cascade_min_match_length: int = Field(4, ge=1)
    """The cascade takes the suffix guess where this many tokens match, else asks the draft. (Of
    four tokens guessed on four matching ones half are accepted on a chat mix, as good drafts do.)
    """
    draft_sample_top_k: int = Field(64, ge=1, le=1024)
    """The draft samples from its own k most likely tokens; these are all of q."""
    draft_confidence_threshold: float = Field(0.0, ge=0, lt=1)
    """The draft stops short of K once the probabilities of its most likely tokens, multiplied over
    the round, fall below this; 0 never does. Worth it where a draft token costs much: about the
    time of one more draft token over the time per token served."""
    num_cached_outcomes: int = Field(0, ge=0, le=64)
    """Outcomes of a running verify call that the draft drafts for ahead of the next call, at most
    so many per session; 0 switches the outcome cache off."""
    max_model_len: int | None = Field(None, ge=2)
    """Longest sequence the draft is called for; None takes its own limit."""
    quantization: Quantization = "int8"
    """The draft's weights in the CPU's compiled bfloat16 forward; elsewhere it is ignored. Half as
    much is read a step, and speculation stays exact: q is whatever the draft samples from."""
    draft_vocab_size: int | None = Field(None, ge=1)
    """Cut the draft's head to this many frequent tokens, and to those of each session's own text;
    None uses the list the model ships, if it ships one."""

    @property
    def needs_draft_model(self) -> bool:
        """Whether the method asks a draft service; the others run in the orchestrator."""
        return self.method in DRAFT_MODEL_METHODS

    @property
    def methods(self) -> tuple[SpeculativeMethod, ...]:
        """Methods that a request may choose from: those that need no more than this one does."""
        if self.num_speculative_tokens == 0:
            return ()
        methods: tuple[SpeculativeMethod, ...] = get_args(SpeculativeMethod)
        if self.needs_draft_model:
            return methods
        return tuple(method for method in methods if method not in DRAFT_MODEL_METHODS)


class TlsSettings(Config):
    """How a process's gRPC links are secured."""

    tls_dir: str | None = None
    """Folder with ca.crt, tls.crt and tls.key, read anew when they change: gRPC is then mutual TLS.
    None is clear text."""
    tls_server_name: str = "specserve.internal"
    """Name (SAN) that every peer's certificate carries; "" asks no name of clients, and of servers
    the host that was dialled."""


class ServerConfig(TlsSettings):
    """One service's gRPC server, and how it dials others."""

    host: str = "127.0.0.1"
    """Address to bind; 0.0.0.0 to serve other machines."""
    port: int = Field(0, ge=0, le=65535)
    """Port to bind; 0 takes a free one."""
    advertise_host: str | None = None
    """Host that peers dial; None takes `host`, or this machine's address when bound to all."""
    lease_s: float = Field(10.0, gt=0)
    """A session without a heartbeat or a call for this long is released."""
    device_restart_s: float = Field(120.0, gt=0)
    """A device that stands still this long with calls to answer is ended and started anew."""
    drain_deadline_s: float = Field(30.0, ge=0)
    """How long live sessions may go on after the replica was told to stop."""
    metrics_port: int | None = Field(None, ge=0, le=65535)
    """Port of this process's own /metrics; None serves none."""


class DraftConfig(Config):
    """One draft replica."""

    engine: EngineConfig
    """The draft model's engine."""
    speculative: SpeculativeConfig = SpeculativeConfig()
    """How it samples."""
    server: ServerConfig = ServerConfig()


class TargetConfig(Config):
    """One target replica."""

    engine: EngineConfig
    """The target model's engine."""
    server: ServerConfig = ServerConfig()


class OrchestratorConfig(Config):
    """One orchestrator replica."""

    speculative: SpeculativeConfig | None = None
    """None: target-only, no draft is looked for."""
    target_addresses: tuple[str, ...] = Field((), strict=False)
    """host:port of target replicas known from the start."""
    draft_addresses: tuple[str, ...] = Field((), strict=False)
    """host:port of draft replicas known from the start."""
    server: ServerConfig = ServerConfig()

    @field_validator("target_addresses", "draft_addresses")
    @classmethod
    def _check_addresses(cls, addresses: tuple[str, ...]) -> tuple[str, ...]:
        for address in addresses:
            host, _, port = address.rpartition(":")
            if not host or not port.isdecimal():
                raise ValueError(f"{quoted(address)} is no HOST:PORT")
        return addresses

    drafts_optional: bool = False
    """Be ready without any draft, as where their pool may be scaled to none: rounds are then
    target-only until there is one."""
    draft_timeout_s: float = Field(1.0, gt=0)
    """A proposal later than this makes the round target-only."""
    draft_catch_up_timeout_s: float = Field(0.0, ge=0)
    """How long a round waits for a draft that is still taking in the prompt; 0: the target decodes
    alone meanwhile. For measurements that must draft however short their requests are."""
    target_timeout_s: float = Field(60.0, gt=0)
    """A verify call without an answer for this long counts as a lost replica."""
    reopen_timeout_s: float = Field(60.0, gt=0)
    """How long a request waits for any target replica before it fails with UNAVAILABLE."""
    device_hang_s: float = Field(10.0, gt=0)
    """A device that stands still this long with work queued counts as a lost replica."""
    num_decode_steps: int = Field(16, ge=1, le=256)
    """Tokens a target decodes ahead per call while speculation is off."""
    heartbeat_s: float = Field(2.0, gt=0)
    """Time between lease renewals."""
    max_num_requests: int = Field(256, ge=1)
    """Choices decoded at once; more wait, the most urgent first, then in order of arrival."""
    max_num_waiting: int = Field(1024, ge=0)
    """Choices that wait to be decoded; a further one is refused at once."""
    queue_timeout_s: float = Field(30.0, gt=0)
    """How long a choice waits for its turn and for free KV blocks before it is refused."""
    num_recent_requests: int = Field(512, ge=0)
    """Choices whose rounds are remembered for `specserve trace` and the console; 0 keeps none."""
    recent_requests_bytes: int = Field(16 << 20, ge=0)
    """Most bytes of rounds remembered, all choices together; about 250 a round."""
    require_verified: bool = False
    """Speculate only where a passing record of `specserve verify` fits the pair, the software, the
    hardware and the rule; else serve target-only, and say so."""
    verified_dir: str | None = Field(None, min_length=1)
    """Folder of these records; None takes ~/.cache/specserve/verified."""
