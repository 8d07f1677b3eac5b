from specserve.rpc.v1 import common_pb2 as _common_pb2
from specserve.rpc.v1 import generation_pb2 as _generation_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RequestState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REQUEST_STATE_UNSPECIFIED: _ClassVar[RequestState]
    REQUEST_STATE_RUNNING: _ClassVar[RequestState]
    REQUEST_STATE_FINISHED: _ClassVar[RequestState]
    REQUEST_STATE_FAILED: _ClassVar[RequestState]
    REQUEST_STATE_CANCELLED: _ClassVar[RequestState]
REQUEST_STATE_UNSPECIFIED: RequestState
REQUEST_STATE_RUNNING: RequestState
REQUEST_STATE_FINISHED: RequestState
REQUEST_STATE_FAILED: RequestState
REQUEST_STATE_CANCELLED: RequestState

class ListRequestsRequest(_message.Message):
    __slots__ = ("limit",)
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    limit: int
    def __init__(self, limit: _Optional[int] = ...) -> None: ...

class ListRequestsResponse(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[RequestRecord]
    def __init__(self, requests: _Optional[_Iterable[_Union[RequestRecord, _Mapping]]] = ...) -> None: ...

class GetRequestsRequest(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    def __init__(self, id: _Optional[str] = ...) -> None: ...

class GetRequestsResponse(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[RequestRecord]
    def __init__(self, requests: _Optional[_Iterable[_Union[RequestRecord, _Mapping]]] = ...) -> None: ...

class RequestRecord(_message.Message):
    __slots__ = ("request_id", "trace_id", "span_id", "sampled", "state", "finish_reason", "error", "arrived_unix_s", "queue_s", "total_s", "prompt_length", "num_output_tokens", "max_tokens", "num_speculative_tokens", "method", "rule", "attempt", "carried_over_length", "record", "num_rounds", "num_rounds_left_out", "rounds", "orchestrator_id", "tenant_salt")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    SPAN_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    ARRIVED_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    TOTAL_S_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_SPECULATIVE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    RULE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CARRIED_OVER_LENGTH_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    NUM_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    NUM_ROUNDS_LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    ORCHESTRATOR_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_SALT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    trace_id: str
    span_id: str
    sampled: bool
    state: RequestState
    finish_reason: _generation_pb2.FinishReason
    error: str
    arrived_unix_s: float
    queue_s: float
    total_s: float
    prompt_length: int
    num_output_tokens: int
    max_tokens: int
    num_speculative_tokens: int
    method: _generation_pb2.SpeculativeMethod
    rule: _common_pb2.AcceptanceRule
    attempt: int
    carried_over_length: int
    record: _generation_pb2.SpeculationRecord
    num_rounds: int
    num_rounds_left_out: int
    rounds: _containers.RepeatedCompositeFieldContainer[RoundRecord]
    orchestrator_id: str
    tenant_salt: bytes
    def __init__(self, request_id: _Optional[str] = ..., trace_id: _Optional[str] = ..., span_id: _Optional[str] = ..., sampled: _Optional[bool] = ..., state: _Optional[_Union[RequestState, str]] = ..., finish_reason: _Optional[_Union[_generation_pb2.FinishReason, str]] = ..., error: _Optional[str] = ..., arrived_unix_s: _Optional[float] = ..., queue_s: _Optional[float] = ..., total_s: _Optional[float] = ..., prompt_length: _Optional[int] = ..., num_output_tokens: _Optional[int] = ..., max_tokens: _Optional[int] = ..., num_speculative_tokens: _Optional[int] = ..., method: _Optional[_Union[_generation_pb2.SpeculativeMethod, str]] = ..., rule: _Optional[_Union[_common_pb2.AcceptanceRule, str]] = ..., attempt: _Optional[int] = ..., carried_over_length: _Optional[int] = ..., record: _Optional[_Union[_generation_pb2.SpeculationRecord, _Mapping]] = ..., num_rounds: _Optional[int] = ..., num_rounds_left_out: _Optional[int] = ..., rounds: _Optional[_Iterable[_Union[RoundRecord, _Mapping]]] = ..., orchestrator_id: _Optional[str] = ..., tenant_salt: _Optional[bytes] = ...) -> None: ...

class RoundRecord(_message.Message):
    __slots__ = ("began_s", "wall_s", "num_speculative_tokens", "reason", "proposer", "num_draft_tokens", "num_accepted_tokens", "num_emitted_tokens", "committed_length", "draft_cached_length", "target_cached_length", "calls", "target_probs", "draft_probs")
    BEGAN_S_FIELD_NUMBER: _ClassVar[int]
    WALL_S_FIELD_NUMBER: _ClassVar[int]
    NUM_SPECULATIVE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    PROPOSER_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_EMITTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_LENGTH_FIELD_NUMBER: _ClassVar[int]
    DRAFT_CACHED_LENGTH_FIELD_NUMBER: _ClassVar[int]
    TARGET_CACHED_LENGTH_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    TARGET_PROBS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_PROBS_FIELD_NUMBER: _ClassVar[int]
    began_s: float
    wall_s: float
    num_speculative_tokens: int
    reason: str
    proposer: _generation_pb2.SpeculativeMethod
    num_draft_tokens: int
    num_accepted_tokens: int
    num_emitted_tokens: int
    committed_length: int
    draft_cached_length: int
    target_cached_length: int
    calls: _containers.RepeatedCompositeFieldContainer[CallRecord]
    target_probs: _containers.RepeatedScalarFieldContainer[float]
    draft_probs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, began_s: _Optional[float] = ..., wall_s: _Optional[float] = ..., num_speculative_tokens: _Optional[int] = ..., reason: _Optional[str] = ..., proposer: _Optional[_Union[_generation_pb2.SpeculativeMethod, str]] = ..., num_draft_tokens: _Optional[int] = ..., num_accepted_tokens: _Optional[int] = ..., num_emitted_tokens: _Optional[int] = ..., committed_length: _Optional[int] = ..., draft_cached_length: _Optional[int] = ..., target_cached_length: _Optional[int] = ..., calls: _Optional[_Iterable[_Union[CallRecord, _Mapping]]] = ..., target_probs: _Optional[_Iterable[float]] = ..., draft_probs: _Optional[_Iterable[float]] = ...) -> None: ...

class CallRecord(_message.Message):
    __slots__ = ("service", "replica_id", "revision", "began_s", "wall_s", "timing", "num_replies", "error", "is_background", "epoch")
    SERVICE_FIELD_NUMBER: _ClassVar[int]
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    BEGAN_S_FIELD_NUMBER: _ClassVar[int]
    WALL_S_FIELD_NUMBER: _ClassVar[int]
    TIMING_FIELD_NUMBER: _ClassVar[int]
    NUM_REPLIES_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    IS_BACKGROUND_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    service: str
    replica_id: str
    revision: str
    began_s: float
    wall_s: float
    timing: _common_pb2.CallTiming
    num_replies: int
    error: str
    is_background: bool
    epoch: int
    def __init__(self, service: _Optional[str] = ..., replica_id: _Optional[str] = ..., revision: _Optional[str] = ..., began_s: _Optional[float] = ..., wall_s: _Optional[float] = ..., timing: _Optional[_Union[_common_pb2.CallTiming, _Mapping]] = ..., num_replies: _Optional[int] = ..., error: _Optional[str] = ..., is_background: _Optional[bool] = ..., epoch: _Optional[int] = ...) -> None: ...
