from specserve.rpc.v1 import generation_pb2 as _generation_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetSpeculationRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SetSpeculationRequest(_message.Message):
    __slots__ = ("mode",)
    MODE_FIELD_NUMBER: _ClassVar[int]
    mode: _generation_pb2.SpeculationMode
    def __init__(self, mode: _Optional[_Union[_generation_pb2.SpeculationMode, str]] = ...) -> None: ...

class SpeculationState(_message.Message):
    __slots__ = ("mode", "configured_mode", "num_speculative_tokens", "orchestrator_id", "num_running", "estimates")
    MODE_FIELD_NUMBER: _ClassVar[int]
    CONFIGURED_MODE_FIELD_NUMBER: _ClassVar[int]
    NUM_SPECULATIVE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ORCHESTRATOR_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    ESTIMATES_FIELD_NUMBER: _ClassVar[int]
    mode: _generation_pb2.SpeculationMode
    configured_mode: _generation_pb2.SpeculationMode
    num_speculative_tokens: int
    orchestrator_id: str
    num_running: int
    estimates: _containers.RepeatedCompositeFieldContainer[LengthEstimate]
    def __init__(self, mode: _Optional[_Union[_generation_pb2.SpeculationMode, str]] = ..., configured_mode: _Optional[_Union[_generation_pb2.SpeculationMode, str]] = ..., num_speculative_tokens: _Optional[int] = ..., orchestrator_id: _Optional[str] = ..., num_running: _Optional[int] = ..., estimates: _Optional[_Iterable[_Union[LengthEstimate, _Mapping]]] = ...) -> None: ...

class LengthEstimate(_message.Message):
    __slots__ = ("seconds", "num_tokens")
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    seconds: float
    num_tokens: float
    def __init__(self, seconds: _Optional[float] = ..., num_tokens: _Optional[float] = ...) -> None: ...
