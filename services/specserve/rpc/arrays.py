"""Bulk numbers of messages: little-endian bytes, and arrays. Knows no message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from specserve.errors import InvalidRequest

T = TypeVar("T", bound=np.generic)


def pack_ids(token_ids: Sequence[int]) -> bytes:
    """Write token ids as little-endian int32."""
    return np.asarray(token_ids, dtype="<i4").tobytes()


def unpack_ids(data: bytes, field: str) -> tuple[int, ...]:
    """Read little-endian int32 token ids.

    Raises:
        InvalidRequest: the length is no multiple of 4.
    """
    if not data:
        return ()
    return tuple(unpack_array(data, np.int32, field).tolist())


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
