from specserve.rpc.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ProposeFrame(_message.Message):
    __slots__ = ("calls", "cancels", "releases", "heartbeat")
    CALLS_FIELD_NUMBER: _ClassVar[int]
    CANCELS_FIELD_NUMBER: _ClassVar[int]
    RELEASES_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    calls: _containers.RepeatedCompositeFieldContainer[ProposeCall]
    cancels: _containers.RepeatedCompositeFieldContainer[_common_pb2.Cancel]
    releases: _containers.RepeatedCompositeFieldContainer[_common_pb2.Release]
    heartbeat: _common_pb2.Heartbeat
    def __init__(self, calls: _Optional[_Iterable[_Union[ProposeCall, _Mapping]]] = ..., cancels: _Optional[_Iterable[_Union[_common_pb2.Cancel, _Mapping]]] = ..., releases: _Optional[_Iterable[_Union[_common_pb2.Release, _Mapping]]] = ..., heartbeat: _Optional[_Union[_common_pb2.Heartbeat, _Mapping]] = ...) -> None: ...

class ProposeCall(_message.Message):
    __slots__ = ("session", "num_speculative_tokens")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    NUM_SPECULATIVE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    session: _common_pb2.SessionCall
    num_speculative_tokens: int
    def __init__(self, session: _Optional[_Union[_common_pb2.SessionCall, _Mapping]] = ..., num_speculative_tokens: _Optional[int] = ...) -> None: ...

class ProposeReplyFrame(_message.Message):
    __slots__ = ("replies", "load", "draining")
    REPLIES_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    replies: _containers.RepeatedCompositeFieldContainer[ProposeReply]
    load: _common_pb2.Load
    draining: _common_pb2.DrainNotice
    def __init__(self, replies: _Optional[_Iterable[_Union[ProposeReply, _Mapping]]] = ..., load: _Optional[_Union[_common_pb2.Load, _Mapping]] = ..., draining: _Optional[_Union[_common_pb2.DrainNotice, _Mapping]] = ...) -> None: ...

class ProposeReply(_message.Message):
    __slots__ = ("call_id", "session_id", "step", "error", "cached_length", "draft_token_ids", "support_size", "support_token_ids", "support_weights", "timing")
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    CACHED_LENGTH_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SUPPORT_SIZE_FIELD_NUMBER: _ClassVar[int]
    SUPPORT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SUPPORT_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    TIMING_FIELD_NUMBER: _ClassVar[int]
    call_id: int
    session_id: str
    step: int
    error: _common_pb2.CallError
    cached_length: int
    draft_token_ids: bytes
    support_size: int
    support_token_ids: bytes
    support_weights: bytes
    timing: _common_pb2.CallTiming
    def __init__(self, call_id: _Optional[int] = ..., session_id: _Optional[str] = ..., step: _Optional[int] = ..., error: _Optional[_Union[_common_pb2.CallError, _Mapping]] = ..., cached_length: _Optional[int] = ..., draft_token_ids: _Optional[bytes] = ..., support_size: _Optional[int] = ..., support_token_ids: _Optional[bytes] = ..., support_weights: _Optional[bytes] = ..., timing: _Optional[_Union[_common_pb2.CallTiming, _Mapping]] = ...) -> None: ...
