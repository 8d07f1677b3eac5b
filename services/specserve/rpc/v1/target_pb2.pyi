from specserve.rpc.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class VerifyFrame(_message.Message):
    __slots__ = ("calls", "cancels", "releases", "heartbeat")
    CALLS_FIELD_NUMBER: _ClassVar[int]
    CANCELS_FIELD_NUMBER: _ClassVar[int]
    RELEASES_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    calls: _containers.RepeatedCompositeFieldContainer[VerifyCall]
    cancels: _containers.RepeatedCompositeFieldContainer[_common_pb2.Cancel]
    releases: _containers.RepeatedCompositeFieldContainer[_common_pb2.Release]
    heartbeat: _common_pb2.Heartbeat
    def __init__(self, calls: _Optional[_Iterable[_Union[VerifyCall, _Mapping]]] = ..., cancels: _Optional[_Iterable[_Union[_common_pb2.Cancel, _Mapping]]] = ..., releases: _Optional[_Iterable[_Union[_common_pb2.Release, _Mapping]]] = ..., heartbeat: _Optional[_Union[_common_pb2.Heartbeat, _Mapping]] = ...) -> None: ...

class VerifyCall(_message.Message):
    __slots__ = ("session", "draft_token_ids", "support_size", "support_token_ids", "support_weights", "num_decode_steps", "append_only")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SUPPORT_SIZE_FIELD_NUMBER: _ClassVar[int]
    SUPPORT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SUPPORT_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    NUM_DECODE_STEPS_FIELD_NUMBER: _ClassVar[int]
    APPEND_ONLY_FIELD_NUMBER: _ClassVar[int]
    session: _common_pb2.SessionCall
    draft_token_ids: bytes
    support_size: int
    support_token_ids: bytes
    support_weights: bytes
    num_decode_steps: int
    append_only: bool
    def __init__(self, session: _Optional[_Union[_common_pb2.SessionCall, _Mapping]] = ..., draft_token_ids: _Optional[bytes] = ..., support_size: _Optional[int] = ..., support_token_ids: _Optional[bytes] = ..., support_weights: _Optional[bytes] = ..., num_decode_steps: _Optional[int] = ..., append_only: _Optional[bool] = ...) -> None: ...

class VerifyReplyFrame(_message.Message):
    __slots__ = ("replies", "load", "draining")
    REPLIES_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    replies: _containers.RepeatedCompositeFieldContainer[VerifyReply]
    load: _common_pb2.Load
    draining: _common_pb2.DrainNotice
    def __init__(self, replies: _Optional[_Iterable[_Union[VerifyReply, _Mapping]]] = ..., load: _Optional[_Union[_common_pb2.Load, _Mapping]] = ..., draining: _Optional[_Union[_common_pb2.DrainNotice, _Mapping]] = ...) -> None: ...

class VerifyReply(_message.Message):
    __slots__ = ("call_id", "session_id", "step", "error", "cached_length", "target_probs", "replacement_token_ids", "logprobs", "more_follows", "timing")
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    CACHED_LENGTH_FIELD_NUMBER: _ClassVar[int]
    TARGET_PROBS_FIELD_NUMBER: _ClassVar[int]
    REPLACEMENT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    MORE_FOLLOWS_FIELD_NUMBER: _ClassVar[int]
    TIMING_FIELD_NUMBER: _ClassVar[int]
    call_id: int
    session_id: str
    step: int
    error: _common_pb2.CallError
    cached_length: int
    target_probs: bytes
    replacement_token_ids: bytes
    logprobs: RowLogprobs
    more_follows: bool
    timing: _common_pb2.CallTiming
    def __init__(self, call_id: _Optional[int] = ..., session_id: _Optional[str] = ..., step: _Optional[int] = ..., error: _Optional[_Union[_common_pb2.CallError, _Mapping]] = ..., cached_length: _Optional[int] = ..., target_probs: _Optional[bytes] = ..., replacement_token_ids: _Optional[bytes] = ..., logprobs: _Optional[_Union[RowLogprobs, _Mapping]] = ..., more_follows: _Optional[bool] = ..., timing: _Optional[_Union[_common_pb2.CallTiming, _Mapping]] = ...) -> None: ...

class RowLogprobs(_message.Message):
    __slots__ = ("draft", "replacement", "num_top", "top_token_ids", "top")
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    REPLACEMENT_FIELD_NUMBER: _ClassVar[int]
    NUM_TOP_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    draft: bytes
    replacement: bytes
    num_top: int
    top_token_ids: bytes
    top: bytes
    def __init__(self, draft: _Optional[bytes] = ..., replacement: _Optional[bytes] = ..., num_top: _Optional[int] = ..., top_token_ids: _Optional[bytes] = ..., top: _Optional[bytes] = ...) -> None: ...
