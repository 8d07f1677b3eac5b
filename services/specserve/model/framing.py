"""Frames on the local socket pair between a server and its device process.

A message becomes nested tuples and lists that `marshal` writes at C speed: a call or a reply costs
some microseconds, where pickled dataclasses with arrays cost tens. Both ends are one build on one
machine. Knows the message classes; knows no socket.
"""

from __future__ import annotations

import marshal
import pickle
import struct
from dataclasses import fields
from typing import cast

import numpy as np

from specserve.model import messages
from specserve.speculation.types import AcceptanceRule, SamplingParams, SparseProbs

_HEADER = struct.Struct("<Q")
RECEIVE_BYTES = 1 << 18

_PLAIN = frozenset({int, float, str, bytes, bool, type(None)})

_CLASSES: tuple[type, ...] = (
    messages.SessionOpening,
    messages.ProposeCall,
    messages.VerifyCall,
    messages.Cancel,
    messages.Release,
    messages.Shutdown,
    messages.Arrived,
    messages.TokenLogprobs,
    messages.CallTiming,
    messages.ProposeReply,
    messages.VerifyReply,
    messages.CallFailed,
    messages.OutcomeCounts,
    messages.EngineLoad,
    messages.EngineOutput,
    messages.ModelInfo,
    SamplingParams,
    SparseProbs,
)

# Lists mark what is not plain; no message has a list among its fields.
_TUPLE, _ARRAY, _RULE, _PICKLE = -1, -2, -3, -4


_FIELDS: dict[type, tuple[int, tuple[str, ...]]] = {
    kind: (code, tuple(field.name for field in fields(kind))) for code, kind in enumerate(_CLASSES)
}


def encode(message: object) -> bytes:
    """Return the frame of one message."""
    body = marshal.dumps(_pack(message))  # type: ignore[arg-type]  # _pack leaves nothing else
    return _HEADER.pack(len(body)) + body


class FrameReader:
    """Put a byte stream back into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[object]:
        """Take received bytes; return the messages that are complete now."""
        buffer = self._buffer
        buffer += data
        received: list[object] = []
        start = 0
        while len(buffer) - start >= _HEADER.size:
            (size,) = _HEADER.unpack_from(buffer, start)
            end = start + _HEADER.size + size
            if len(buffer) < end:
                break
            body = marshal.loads(memoryview(buffer)[start + _HEADER.size : end])  # noqa: S302 - ours
            received.append(_unpack(body) if type(body) is list else body)
            start = end
        del buffer[:start]
        return received


def _pack(value: object) -> object:
    """Turn a value into what marshal knows."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    entry = _FIELDS.get(kind)
    if entry is not None:
        packed: list[object] = [entry[0]]
        for name in entry[1]:
            item = getattr(value, name)
            packed.append(item if type(item) in _PLAIN else _pack(item))
        return packed
    if isinstance(value, tuple):
        # Tuples are of one kind: token ids go as they are, messages one by one.
        if not value or type(value[0]) in _PLAIN:
            return value
        return [_TUPLE, *map(_pack, value)]
    if isinstance(value, np.ndarray):
        return [_ARRAY, value.dtype.str, value.shape, value.tobytes()]
    if isinstance(value, AcceptanceRule):
        return [_RULE, value.value]
    # Rare: errors and configurations.
    return [_PICKLE, pickle.dumps(value)]


def _unpack(packed: list[object]) -> object:
    """Undo _pack for what is not plain."""
    code = cast(int, packed[0])
    if code >= 0:
        return _CLASSES[code](*[_unpack(v) if type(v) is list else v for v in packed[1:]])
    if code == _TUPLE:
        return tuple([_unpack(v) if type(v) is list else v for v in packed[1:]])
    if code == _ARRAY:
        _, dtype, shape, data = packed
        flat = np.frombuffer(cast(bytes, data), dtype=cast(str, dtype))
        return flat.reshape(cast(tuple[int, ...], shape))
    if code == _RULE:
        return AcceptanceRule(cast(str, packed[1]))
    return pickle.loads(cast(bytes, packed[1]))  # noqa: S301 - our own process wrote it
