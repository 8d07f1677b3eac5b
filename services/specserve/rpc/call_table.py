"""The calls that a replica's device has not answered yet, and where their answers go.

Callers number their calls per stream, the device numbers all of them. Knows both numbers; knows
nothing of what a call asks for.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from specserve.rpc.call_span import CallSpan
from specserve.rpc.frame_stream import FrameStream


@dataclass(frozen=True, slots=True)
class CallInFlight:
    """One call that the device has."""

    stream: FrameStream
    """Where the answer goes."""
    wire_call_id: int
    """The caller's number, unique on its stream."""
    session_id: str
    step: int
    span: CallSpan | None
    """Ends with the call; None when the request is not traced."""


class CallTable:
    """Every call in flight, by the device's number and by the caller's."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._calls: dict[int, CallInFlight] = {}
        self._by_wire_id: dict[tuple[FrameStream, int], int] = {}

    def __len__(self) -> int:
        return len(self._calls)

    def next_number(self) -> int:
        """Give a number that no other call of the device has had."""
        return next(self._numbers)

    def add(self, number: int, call: CallInFlight) -> None:
        """Remember a call that goes to the device."""
        self._calls[number] = call
        self._by_wire_id[call.stream, call.wire_call_id] = number

    def get(self, number: int) -> CallInFlight | None:
        """Find a call by the device's number; None when nobody waits for it any more."""
        return self._calls.get(number)

    def number_of(self, stream: FrameStream, wire_call_id: int) -> int | None:
        """Find the device's number of a caller's call; None when it is not in flight."""
        return self._by_wire_id.get((stream, wire_call_id))

    def forget(self, number: int) -> None:
        """Drop a call and end its span. Idempotent."""
        call = self._calls.pop(number, None)
        if call is not None:
            self._by_wire_id.pop((call.stream, call.wire_call_id), None)
            if call.span is not None:
                call.span.end()

    def forget_stream(self, stream: FrameStream) -> None:
        """Drop the calls of a stream that has ended: their answers find nobody."""
        for number in [n for n, call in self._calls.items() if call.stream is stream]:
            self.forget(number)

    def take_all(self) -> Iterator[CallInFlight]:
        """Give every call, and drop it: the device that had them is gone."""
        for number, call in list(self._calls.items()):
            yield call
            self.forget(number)

    def sessions(self) -> set[str]:
        """List the sessions that have a call in flight."""
        return {call.session_id for call in self._calls.values()}
