"""Bulk numbers of messages: little-endian bytes, and arrays. Knows no message."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from specserve.errors import InvalidRequest

T = TypeVar("T", bound=np.generic)


NUM_SMALL = 64
"""Up to so many numbers a compiled `struct` is several times faster than an array."""

_IDS = [struct.Struct(f"<{count}i") for count in range(NUM_SMALL + 1)]
_DOUBLES = [struct.Struct(f"<{count}d") for count in range(NUM_SMALL + 1)]


def pack_ids(token_ids: Sequence[int]) -> bytes:
    """Write token ids as little-endian int32."""
    if len(token_ids) <= NUM_SMALL:
        return _IDS[len(token_ids)].pack(*token_ids)
    return np.asarray(token_ids, dtype="<i4").tobytes()


def unpack_ids(data: bytes, field: str) -> tuple[int, ...]:
    """Read little-endian int32 token ids.

    Raises:
        InvalidRequest: the length is no multiple of 4.
    """
    count, rest = divmod(len(data), 4)
    if count <= NUM_SMALL and not rest:
        return _IDS[count].unpack(data)
    return tuple(unpack_array(data, np.int32, field).tolist())


def unpack_doubles(data: bytes, field: str) -> tuple[float, ...]:
    """Read little-endian float64 numbers.

    Raises:
        InvalidRequest: the length is no multiple of 8.
    """
    count, rest = divmod(len(data), 8)
    if count <= NUM_SMALL and not rest:
        return _DOUBLES[count].unpack(data)
    return tuple(unpack_array(data, np.float64, field).tolist())


def unpack_array(data: bytes, dtype: type[T], field: str) -> NDArray[T]:
    """Read a little-endian array; the result is read-only and shares the message's memory.

    Raises:
        InvalidRequest: the length is no multiple of the item size.
    """
    item = np.dtype(dtype).newbyteorder("<")
    if len(data) % item.itemsize:
        raise InvalidRequest(
            field, f"{len(data)} bytes, a multiple of {item.itemsize} was wanted ({item.name})"
        )
    return np.frombuffer(data, dtype=item)
