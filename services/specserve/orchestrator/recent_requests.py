"""The ring of recent requests: as many as fit its count and its bytes, the oldest go first.

Knows records, ids and sizes; knows no request's meaning.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from specserve.rpc.v1 import requests_pb2

MAX_SHARE_OF_ONE = 4
"""One request may fill at most this part of the ring, as 1 / n: a long one leaves the others be."""


@dataclass(slots=True, eq=False)
class KeptRequest:
    """One request in the ring."""

    summary: Callable[[], requests_pb2.RequestRecord]
    """Its record as of now, without rounds."""
    request_id: str
    trace_id: str
    rounds: list[bytes] = field(default_factory=list)
    """Packed RoundRecords, in order."""
    num_bytes: int = 0
    """Of the rounds."""
    num_left_out: int = 0
    """Rounds that found no room."""
    is_finished: bool = False
    is_dropped: bool = False
    """It had to go while it ran; what follows of it is not kept."""

    def record(self, *, with_rounds: bool) -> requests_pb2.RequestRecord:
        """Give its record as of now."""
        record = self.summary()
        record.num_rounds_left_out = self.num_left_out
        if with_rounds:
            record.rounds.extend(map(requests_pb2.RoundRecord.FromString, self.rounds))
        return record

    def answers_to(self, name: str) -> bool:
        """Say whether somebody who asks for `name` means this one.

        The gateway makes a choice's id of its body's id and a number, and that of a kind and the
        client's own id.
        """
        body_id = self.request_id.rpartition("-")[0]
        return name in (
            self.request_id,
            self.trace_id,
            body_id,
            self.request_id.partition("-")[2],
            body_id.partition("-")[2],
        )


class RecentRequests:
    """Running requests, and the last finished ones."""

    def __init__(self, max_requests: int, max_bytes: int) -> None:
        """Make room.

        Args:
            max_requests: most requests, running ones included; 0 keeps none.
            max_bytes: most bytes of packed rounds, all requests together.
        """
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._kept: deque[KeptRequest] = deque()
        self.num_bytes = 0
        """Bytes of packed rounds at present."""

    def __len__(self) -> int:
        return len(self._kept)

    def begin(
        self, request_id: str, trace_id: str, summary: Callable[[], requests_pb2.RequestRecord]
    ) -> KeptRequest:
        """Take a request in; its rounds follow."""
        kept = KeptRequest(summary, request_id, trace_id)
        if self._max_requests:
            self._kept.append(kept)
            if len(self._kept) > self._max_requests:
                self._drop(self._oldest() or self._kept[0])
        return kept

    def add_round(self, kept: KeptRequest, packed: bytes) -> None:
        """Keep a round of a request, if there is room or can be made."""
        if kept.is_dropped or not self._max_requests:
            return
        size = len(packed)
        fits = kept.num_bytes + size <= self._max_bytes // MAX_SHARE_OF_ONE
        while fits and self.num_bytes + size > self._max_bytes:
            oldest = self._oldest()
            fits = oldest is not None
            if oldest is not None:
                self._drop(oldest)
        # The latest are left out: a request's first rounds, and with them its first token, stay.
        if not fits or kept.num_left_out:
            kept.num_left_out += 1
            return
        kept.rounds.append(packed)
        kept.num_bytes += size
        self.num_bytes += size

    def find(self, name: str) -> list[requests_pb2.RequestRecord]:
        """Give every choice of one request, with its rounds; none when it is not known."""
        return [kept.record(with_rounds=True) for kept in self._kept if kept.answers_to(name)]

    def latest(self, limit: int) -> list[requests_pb2.RequestRecord]:
        """Give the latest requests without rounds, newest first."""
        newest: Iterator[KeptRequest] = reversed(self._kept)
        return [kept.record(with_rounds=False) for kept in itertools.islice(newest, limit)]

    def _oldest(self) -> KeptRequest | None:
        return next((kept for kept in self._kept if kept.is_finished), None)

    def _drop(self, kept: KeptRequest) -> None:
        self._kept.remove(kept)
        self.num_bytes -= kept.num_bytes
        kept.is_dropped = True
