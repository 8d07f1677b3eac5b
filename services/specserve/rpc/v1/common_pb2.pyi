from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AcceptanceRule(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ACCEPTANCE_RULE_UNSPECIFIED: _ClassVar[AcceptanceRule]
    ACCEPTANCE_RULE_GREEDY: _ClassVar[AcceptanceRule]
    ACCEPTANCE_RULE_STANDARD: _ClassVar[AcceptanceRule]
    ACCEPTANCE_RULE_COUPLED: _ClassVar[AcceptanceRule]
ACCEPTANCE_RULE_UNSPECIFIED: AcceptanceRule
ACCEPTANCE_RULE_GREEDY: AcceptanceRule
ACCEPTANCE_RULE_STANDARD: AcceptanceRule
ACCEPTANCE_RULE_COUPLED: AcceptanceRule

class SamplingParams(_message.Message):
    __slots__ = ("rule", "seed", "choice", "temperature", "top_k", "top_p", "min_p", "stop_token_ids", "num_logprobs_plus_one", "constraints")
    RULE_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_LOGPROBS_PLUS_ONE_FIELD_NUMBER: _ClassVar[int]
    CONSTRAINTS_FIELD_NUMBER: _ClassVar[int]
    rule: AcceptanceRule
    seed: int
    choice: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    stop_token_ids: bytes
    num_logprobs_plus_one: int
    constraints: TokenConstraints
    def __init__(self, rule: _Optional[_Union[AcceptanceRule, str]] = ..., seed: _Optional[int] = ..., choice: _Optional[int] = ..., temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., stop_token_ids: _Optional[bytes] = ..., num_logprobs_plus_one: _Optional[int] = ..., constraints: _Optional[_Union[TokenConstraints, _Mapping]] = ...) -> None: ...

class TokenConstraints(_message.Message):
    __slots__ = ("prompt_length", "repetition_penalty", "presence_penalty", "frequency_penalty", "bias_token_ids", "biases", "bad_word_token_ids", "bad_word_lengths", "allowed_token_ids", "min_tokens", "end_token_ids", "grammar", "eos_token_ids")
    PROMPT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    BIAS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BIASES_FIELD_NUMBER: _ClassVar[int]
    BAD_WORD_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORD_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    END_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    prompt_length: int
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    bias_token_ids: bytes
    biases: bytes
    bad_word_token_ids: bytes
    bad_word_lengths: _containers.RepeatedScalarFieldContainer[int]
    allowed_token_ids: bytes
    min_tokens: int
    end_token_ids: bytes
    grammar: str
    eos_token_ids: bytes
    def __init__(self, prompt_length: _Optional[int] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., bias_token_ids: _Optional[bytes] = ..., biases: _Optional[bytes] = ..., bad_word_token_ids: _Optional[bytes] = ..., bad_word_lengths: _Optional[_Iterable[int]] = ..., allowed_token_ids: _Optional[bytes] = ..., min_tokens: _Optional[int] = ..., end_token_ids: _Optional[bytes] = ..., grammar: _Optional[str] = ..., eos_token_ids: _Optional[bytes] = ...) -> None: ...

class SessionOpening(_message.Message):
    __slots__ = ("sampling", "tenant_salt", "priority", "age_s")
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    TENANT_SALT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    sampling: SamplingParams
    tenant_salt: bytes
    priority: int
    age_s: float
    def __init__(self, sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., tenant_salt: _Optional[bytes] = ..., priority: _Optional[int] = ..., age_s: _Optional[float] = ...) -> None: ...

class SessionCall(_message.Message):
    __slots__ = ("call_id", "session_id", "epoch", "step", "keep_length", "keep_digest", "append_token_ids", "opening", "timeout_s", "traceparent", "alone")
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    KEEP_LENGTH_FIELD_NUMBER: _ClassVar[int]
    KEEP_DIGEST_FIELD_NUMBER: _ClassVar[int]
    APPEND_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    OPENING_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    ALONE_FIELD_NUMBER: _ClassVar[int]
    call_id: int
    session_id: str
    epoch: int
    step: int
    keep_length: int
    keep_digest: int
    append_token_ids: bytes
    opening: SessionOpening
    timeout_s: float
    traceparent: str
    alone: bool
    def __init__(self, call_id: _Optional[int] = ..., session_id: _Optional[str] = ..., epoch: _Optional[int] = ..., step: _Optional[int] = ..., keep_length: _Optional[int] = ..., keep_digest: _Optional[int] = ..., append_token_ids: _Optional[bytes] = ..., opening: _Optional[_Union[SessionOpening, _Mapping]] = ..., timeout_s: _Optional[float] = ..., traceparent: _Optional[str] = ..., alone: _Optional[bool] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("call_id",)
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    call_id: int
    def __init__(self, call_id: _Optional[int] = ...) -> None: ...

class Release(_message.Message):
    __slots__ = ("session_id", "is_poison")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    IS_POISON_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    is_poison: bool
    def __init__(self, session_id: _Optional[str] = ..., is_poison: _Optional[bool] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("session_ids",)
    SESSION_IDS_FIELD_NUMBER: _ClassVar[int]
    session_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, session_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("num_free_blocks", "num_blocks", "num_sessions", "num_waiting", "num_iterations", "queue_s", "num_callers", "least_priority", "stuck_session_ids")
    NUM_FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_ITERATIONS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    NUM_CALLERS_FIELD_NUMBER: _ClassVar[int]
    LEAST_PRIORITY_FIELD_NUMBER: _ClassVar[int]
    STUCK_SESSION_IDS_FIELD_NUMBER: _ClassVar[int]
    num_free_blocks: int
    num_blocks: int
    num_sessions: int
    num_waiting: int
    num_iterations: int
    queue_s: float
    num_callers: int
    least_priority: int
    stuck_session_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, num_free_blocks: _Optional[int] = ..., num_blocks: _Optional[int] = ..., num_sessions: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_iterations: _Optional[int] = ..., queue_s: _Optional[float] = ..., num_callers: _Optional[int] = ..., least_priority: _Optional[int] = ..., stuck_session_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class DrainNotice(_message.Message):
    __slots__ = ("deadline_s",)
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    deadline_s: float
    def __init__(self, deadline_s: _Optional[float] = ...) -> None: ...

class CallTiming(_message.Message):
    __slots__ = ("queue_s", "forward_s", "batch_size", "rows", "cached_tokens", "hidden_tokens", "hidden_s")
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    FORWARD_S_FIELD_NUMBER: _ClassVar[int]
    BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_S_FIELD_NUMBER: _ClassVar[int]
    queue_s: float
    forward_s: float
    batch_size: int
    rows: int
    cached_tokens: int
    hidden_tokens: int
    hidden_s: float
    def __init__(self, queue_s: _Optional[float] = ..., forward_s: _Optional[float] = ..., batch_size: _Optional[int] = ..., rows: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., hidden_tokens: _Optional[int] = ..., hidden_s: _Optional[float] = ...) -> None: ...

class CallError(_message.Message):
    __slots__ = ("code", "error", "message", "matching_length", "num_computed")
    CODE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    MATCHING_LENGTH_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_FIELD_NUMBER: _ClassVar[int]
    code: int
    error: str
    message: str
    matching_length: int
    num_computed: int
    def __init__(self, code: _Optional[int] = ..., error: _Optional[str] = ..., message: _Optional[str] = ..., matching_length: _Optional[int] = ..., num_computed: _Optional[int] = ...) -> None: ...

class GetModelRequest(_message.Message):
    __slots__ = ("include_token_table",)
    INCLUDE_TOKEN_TABLE_FIELD_NUMBER: _ClassVar[int]
    include_token_table: bool
    def __init__(self, include_token_table: _Optional[bool] = ...) -> None: ...

class GetModelResponse(_message.Message):
    __slots__ = ("protocol_version", "model_id", "revision", "weights_fingerprint", "vocab_size", "vocab_fingerprint", "max_model_len", "eos_token_ids", "dtype", "device", "replica_id", "num_blocks", "block_size", "weights_bytes", "kv_cache_bytes", "max_num_speculative_tokens", "token_table", "draining", "pid", "load", "hardware", "backend", "versions", "settings")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    VOCAB_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SPECULATIVE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_TABLE_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    HARDWARE_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    model_id: str
    revision: str
    weights_fingerprint: str
    vocab_size: int
    vocab_fingerprint: str
    max_model_len: int
    eos_token_ids: bytes
    dtype: str
    device: str
    replica_id: str
    num_blocks: int
    block_size: int
    weights_bytes: int
    kv_cache_bytes: int
    max_num_speculative_tokens: int
    token_table: bytes
    draining: bool
    pid: int
    load: Load
    hardware: str
    backend: str
    versions: _containers.RepeatedScalarFieldContainer[str]
    settings: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, protocol_version: _Optional[int] = ..., model_id: _Optional[str] = ..., revision: _Optional[str] = ..., weights_fingerprint: _Optional[str] = ..., vocab_size: _Optional[int] = ..., vocab_fingerprint: _Optional[str] = ..., max_model_len: _Optional[int] = ..., eos_token_ids: _Optional[bytes] = ..., dtype: _Optional[str] = ..., device: _Optional[str] = ..., replica_id: _Optional[str] = ..., num_blocks: _Optional[int] = ..., block_size: _Optional[int] = ..., weights_bytes: _Optional[int] = ..., kv_cache_bytes: _Optional[int] = ..., max_num_speculative_tokens: _Optional[int] = ..., token_table: _Optional[bytes] = ..., draining: _Optional[bool] = ..., pid: _Optional[int] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., hardware: _Optional[str] = ..., backend: _Optional[str] = ..., versions: _Optional[_Iterable[str]] = ..., settings: _Optional[_Iterable[str]] = ...) -> None: ...
