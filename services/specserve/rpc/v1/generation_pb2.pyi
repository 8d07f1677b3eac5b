from specserve.rpc.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SpeculativeMethod(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SPECULATIVE_METHOD_UNSPECIFIED: _ClassVar[SpeculativeMethod]
    SPECULATIVE_METHOD_DRAFT_MODEL: _ClassVar[SpeculativeMethod]
    SPECULATIVE_METHOD_NGRAM: _ClassVar[SpeculativeMethod]
    SPECULATIVE_METHOD_SUFFIX: _ClassVar[SpeculativeMethod]
    SPECULATIVE_METHOD_CASCADE: _ClassVar[SpeculativeMethod]

class TokenOrigin(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TOKEN_ORIGIN_UNSPECIFIED: _ClassVar[TokenOrigin]
    TOKEN_ORIGIN_ACCEPTED: _ClassVar[TokenOrigin]
    TOKEN_ORIGIN_RECOVERED: _ClassVar[TokenOrigin]
    TOKEN_ORIGIN_BONUS: _ClassVar[TokenOrigin]
    TOKEN_ORIGIN_PLAIN: _ClassVar[TokenOrigin]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]

class SpeculationMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SPECULATION_MODE_UNSPECIFIED: _ClassVar[SpeculationMode]
    SPECULATION_MODE_OFF: _ClassVar[SpeculationMode]
    SPECULATION_MODE_ON: _ClassVar[SpeculationMode]
    SPECULATION_MODE_AUTO: _ClassVar[SpeculationMode]
SPECULATIVE_METHOD_UNSPECIFIED: SpeculativeMethod
SPECULATIVE_METHOD_DRAFT_MODEL: SpeculativeMethod
SPECULATIVE_METHOD_NGRAM: SpeculativeMethod
SPECULATIVE_METHOD_SUFFIX: SpeculativeMethod
SPECULATIVE_METHOD_CASCADE: SpeculativeMethod
TOKEN_ORIGIN_UNSPECIFIED: TokenOrigin
TOKEN_ORIGIN_ACCEPTED: TokenOrigin
TOKEN_ORIGIN_RECOVERED: TokenOrigin
TOKEN_ORIGIN_BONUS: TokenOrigin
TOKEN_ORIGIN_PLAIN: TokenOrigin
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
SPECULATION_MODE_UNSPECIFIED: SpeculationMode
SPECULATION_MODE_OFF: SpeculationMode
SPECULATION_MODE_ON: SpeculationMode
SPECULATION_MODE_AUTO: SpeculationMode

class GenerateRequest(_message.Message):
    __slots__ = ("request_id", "prompt_token_ids", "committed_token_ids", "sampling", "max_tokens", "num_speculative_tokens_plus_one", "stop", "stop_token_ids", "ignore_eos", "tenant_salt", "priority", "timeout_s", "include_origins", "include_special_tokens", "speculative_method", "num_prompt_logprobs_plus_one", "num_prompt_logprobs_received", "target_identity", "for_verification", "include_provenance", "num_device_deaths")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_SPECULATIVE_TOKENS_PLUS_ONE_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    TENANT_SALT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_ORIGINS_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SPECULATIVE_METHOD_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_LOGPROBS_PLUS_ONE_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_LOGPROBS_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    TARGET_IDENTITY_FIELD_NUMBER: _ClassVar[int]
    FOR_VERIFICATION_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_PROVENANCE_FIELD_NUMBER: _ClassVar[int]
    NUM_DEVICE_DEATHS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt_token_ids: bytes
    committed_token_ids: bytes
    sampling: _common_pb2.SamplingParams
    max_tokens: int
    num_speculative_tokens_plus_one: int
    stop: _containers.RepeatedScalarFieldContainer[bytes]
    stop_token_ids: bytes
    ignore_eos: bool
    tenant_salt: bytes
    priority: int
    timeout_s: float
    include_origins: bool
    include_special_tokens: bool
    speculative_method: SpeculativeMethod
    num_prompt_logprobs_plus_one: int
    num_prompt_logprobs_received: int
    target_identity: str
    for_verification: bool
    include_provenance: bool
    num_device_deaths: int
    def __init__(self, request_id: _Optional[str] = ..., prompt_token_ids: _Optional[bytes] = ..., committed_token_ids: _Optional[bytes] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., max_tokens: _Optional[int] = ..., num_speculative_tokens_plus_one: _Optional[int] = ..., stop: _Optional[_Iterable[bytes]] = ..., stop_token_ids: _Optional[bytes] = ..., ignore_eos: _Optional[bool] = ..., tenant_salt: _Optional[bytes] = ..., priority: _Optional[int] = ..., timeout_s: _Optional[float] = ..., include_origins: _Optional[bool] = ..., include_special_tokens: _Optional[bool] = ..., speculative_method: _Optional[_Union[SpeculativeMethod, str]] = ..., num_prompt_logprobs_plus_one: _Optional[int] = ..., num_prompt_logprobs_received: _Optional[int] = ..., target_identity: _Optional[str] = ..., for_verification: _Optional[bool] = ..., include_provenance: _Optional[bool] = ..., num_device_deaths: _Optional[int] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("token_ids", "text", "logprobs", "origins", "finish_reason", "stop_index_plus_one", "record", "per_round_drafted", "per_round_proposer", "prompt_logprobs", "target_identity", "provenance", "num_device_deaths")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ORIGINS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_INDEX_PLUS_ONE_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    PER_ROUND_DRAFTED_FIELD_NUMBER: _ClassVar[int]
    PER_ROUND_PROPOSER_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TARGET_IDENTITY_FIELD_NUMBER: _ClassVar[int]
    PROVENANCE_FIELD_NUMBER: _ClassVar[int]
    NUM_DEVICE_DEATHS_FIELD_NUMBER: _ClassVar[int]
    token_ids: bytes
    text: bytes
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    origins: _containers.RepeatedScalarFieldContainer[TokenOrigin]
    finish_reason: FinishReason
    stop_index_plus_one: int
    record: SpeculationRecord
    per_round_drafted: _containers.RepeatedScalarFieldContainer[int]
    per_round_proposer: _containers.RepeatedScalarFieldContainer[SpeculativeMethod]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    target_identity: str
    provenance: _containers.RepeatedCompositeFieldContainer[BlockProvenance]
    num_device_deaths: int
    def __init__(self, token_ids: _Optional[bytes] = ..., text: _Optional[bytes] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ..., origins: _Optional[_Iterable[_Union[TokenOrigin, str]]] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., stop_index_plus_one: _Optional[int] = ..., record: _Optional[_Union[SpeculationRecord, _Mapping]] = ..., per_round_drafted: _Optional[_Iterable[int]] = ..., per_round_proposer: _Optional[_Iterable[_Union[SpeculativeMethod, str]]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ..., target_identity: _Optional[str] = ..., provenance: _Optional[_Iterable[_Union[BlockProvenance, _Mapping]]] = ..., num_device_deaths: _Optional[int] = ...) -> None: ...

class BlockProvenance(_message.Message):
    __slots__ = ("round", "first_position", "num_tokens", "draft_replica_id", "draft_revision", "target_replica_id", "target_probs", "draft_probs")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    FIRST_POSITION_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    DRAFT_REVISION_FIELD_NUMBER: _ClassVar[int]
    TARGET_REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    TARGET_PROBS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_PROBS_FIELD_NUMBER: _ClassVar[int]
    round: int
    first_position: int
    num_tokens: int
    draft_replica_id: str
    draft_revision: str
    target_replica_id: str
    target_probs: bytes
    draft_probs: bytes
    def __init__(self, round: _Optional[int] = ..., first_position: _Optional[int] = ..., num_tokens: _Optional[int] = ..., draft_replica_id: _Optional[str] = ..., draft_revision: _Optional[str] = ..., target_replica_id: _Optional[str] = ..., target_probs: _Optional[bytes] = ..., draft_probs: _Optional[bytes] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("logprob", "top_token_ids", "top_logprobs")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    top_token_ids: bytes
    top_logprobs: bytes
    def __init__(self, logprob: _Optional[float] = ..., top_token_ids: _Optional[bytes] = ..., top_logprobs: _Optional[bytes] = ...) -> None: ...

class SpeculationRecord(_message.Message):
    __slots__ = ("num_spec_steps", "num_plain_steps", "num_draft_tokens", "num_accepted_draft_tokens", "num_recovered_tokens", "num_bonus_tokens", "num_plain_tokens", "num_late_proposals", "num_target_reopens", "accepted_per_position", "cached_prompt_tokens", "num_speculative_tokens", "draft_s", "verify_s", "per_step_drafted", "per_step_accepted", "per_step_proposer", "proposers", "num_failovers")
    NUM_SPEC_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_PLAIN_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_RECOVERED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_BONUS_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PLAIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_LATE_PROPOSALS_FIELD_NUMBER: _ClassVar[int]
    NUM_TARGET_REOPENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_PER_POSITION_FIELD_NUMBER: _ClassVar[int]
    CACHED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_SPECULATIVE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_S_FIELD_NUMBER: _ClassVar[int]
    VERIFY_S_FIELD_NUMBER: _ClassVar[int]
    PER_STEP_DRAFTED_FIELD_NUMBER: _ClassVar[int]
    PER_STEP_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    PER_STEP_PROPOSER_FIELD_NUMBER: _ClassVar[int]
    PROPOSERS_FIELD_NUMBER: _ClassVar[int]
    NUM_FAILOVERS_FIELD_NUMBER: _ClassVar[int]
    num_spec_steps: int
    num_plain_steps: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    num_recovered_tokens: int
    num_bonus_tokens: int
    num_plain_tokens: int
    num_late_proposals: int
    num_target_reopens: int
    accepted_per_position: _containers.RepeatedScalarFieldContainer[int]
    cached_prompt_tokens: int
    num_speculative_tokens: int
    draft_s: float
    verify_s: float
    per_step_drafted: _containers.RepeatedScalarFieldContainer[int]
    per_step_accepted: _containers.RepeatedScalarFieldContainer[int]
    per_step_proposer: _containers.RepeatedScalarFieldContainer[SpeculativeMethod]
    proposers: _containers.RepeatedCompositeFieldContainer[ProposerCounts]
    num_failovers: int
    def __init__(self, num_spec_steps: _Optional[int] = ..., num_plain_steps: _Optional[int] = ..., num_draft_tokens: _Optional[int] = ..., num_accepted_draft_tokens: _Optional[int] = ..., num_recovered_tokens: _Optional[int] = ..., num_bonus_tokens: _Optional[int] = ..., num_plain_tokens: _Optional[int] = ..., num_late_proposals: _Optional[int] = ..., num_target_reopens: _Optional[int] = ..., accepted_per_position: _Optional[_Iterable[int]] = ..., cached_prompt_tokens: _Optional[int] = ..., num_speculative_tokens: _Optional[int] = ..., draft_s: _Optional[float] = ..., verify_s: _Optional[float] = ..., per_step_drafted: _Optional[_Iterable[int]] = ..., per_step_accepted: _Optional[_Iterable[int]] = ..., per_step_proposer: _Optional[_Iterable[_Union[SpeculativeMethod, str]]] = ..., proposers: _Optional[_Iterable[_Union[ProposerCounts, _Mapping]]] = ..., num_failovers: _Optional[int] = ...) -> None: ...

class ProposerCounts(_message.Message):
    __slots__ = ("proposer", "num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens")
    PROPOSER_FIELD_NUMBER: _ClassVar[int]
    NUM_SPEC_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    proposer: SpeculativeMethod
    num_spec_steps: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    def __init__(self, proposer: _Optional[_Union[SpeculativeMethod, str]] = ..., num_spec_steps: _Optional[int] = ..., num_draft_tokens: _Optional[int] = ..., num_accepted_draft_tokens: _Optional[int] = ...) -> None: ...

class GetPairRequest(_message.Message):
    __slots__ = ("include_token_table",)
    INCLUDE_TOKEN_TABLE_FIELD_NUMBER: _ClassVar[int]
    include_token_table: bool
    def __init__(self, include_token_table: _Optional[bool] = ...) -> None: ...

class GetPairResponse(_message.Message):
    __slots__ = ("ready", "reason", "target", "draft", "num_speculative_tokens", "speculation_enabled", "rejection_sample_method", "speculative_method", "speculative_methods", "speculation_mode", "synthetic_acceptance_rates", "versions")
    READY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    NUM_SPECULATIVE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_ENABLED_FIELD_NUMBER: _ClassVar[int]
    REJECTION_SAMPLE_METHOD_FIELD_NUMBER: _ClassVar[int]
    SPECULATIVE_METHOD_FIELD_NUMBER: _ClassVar[int]
    SPECULATIVE_METHODS_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_MODE_FIELD_NUMBER: _ClassVar[int]
    SYNTHETIC_ACCEPTANCE_RATES_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    ready: bool
    reason: str
    target: _common_pb2.GetModelResponse
    draft: _common_pb2.GetModelResponse
    num_speculative_tokens: int
    speculation_enabled: bool
    rejection_sample_method: str
    speculative_method: SpeculativeMethod
    speculative_methods: _containers.RepeatedScalarFieldContainer[SpeculativeMethod]
    speculation_mode: SpeculationMode
    synthetic_acceptance_rates: _containers.RepeatedScalarFieldContainer[float]
    versions: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, ready: _Optional[bool] = ..., reason: _Optional[str] = ..., target: _Optional[_Union[_common_pb2.GetModelResponse, _Mapping]] = ..., draft: _Optional[_Union[_common_pb2.GetModelResponse, _Mapping]] = ..., num_speculative_tokens: _Optional[int] = ..., speculation_enabled: _Optional[bool] = ..., rejection_sample_method: _Optional[str] = ..., speculative_method: _Optional[_Union[SpeculativeMethod, str]] = ..., speculative_methods: _Optional[_Iterable[_Union[SpeculativeMethod, str]]] = ..., speculation_mode: _Optional[_Union[SpeculationMode, str]] = ..., synthetic_acceptance_rates: _Optional[_Iterable[float]] = ..., versions: _Optional[_Iterable[str]] = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("num_running", "num_waiting", "replicas", "orchestrator_id", "pid", "cpu_s", "num_rounds", "speculation_mode")
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    ORCHESTRATOR_ID_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    CPU_S_FIELD_NUMBER: _ClassVar[int]
    NUM_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_MODE_FIELD_NUMBER: _ClassVar[int]
    num_running: int
    num_waiting: int
    replicas: _containers.RepeatedCompositeFieldContainer[ReplicaStatus]
    orchestrator_id: str
    pid: int
    cpu_s: float
    num_rounds: int
    speculation_mode: SpeculationMode
    def __init__(self, num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., replicas: _Optional[_Iterable[_Union[ReplicaStatus, _Mapping]]] = ..., orchestrator_id: _Optional[str] = ..., pid: _Optional[int] = ..., cpu_s: _Optional[float] = ..., num_rounds: _Optional[int] = ..., speculation_mode: _Optional[_Union[SpeculationMode, str]] = ...) -> None: ...

class ReplicaStatus(_message.Message):
    __slots__ = ("role", "address", "replica_id", "state", "load", "pid", "num_sessions")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    NUM_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    role: str
    address: str
    replica_id: str
    state: str
    load: _common_pb2.Load
    pid: int
    num_sessions: int
    def __init__(self, role: _Optional[str] = ..., address: _Optional[str] = ..., replica_id: _Optional[str] = ..., state: _Optional[str] = ..., load: _Optional[_Union[_common_pb2.Load, _Mapping]] = ..., pid: _Optional[int] = ..., num_sessions: _Optional[int] = ...) -> None: ...
