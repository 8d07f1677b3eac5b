"""The ring keeps what fits its count and its bytes, and finds a request by any of its names."""

from __future__ import annotations

from specserve.orchestrator.recent_requests import KeptRequest, RecentRequests
from specserve.rpc.v1 import requests_pb2


def begin(ring: RecentRequests, name: str, trace_id: str = "") -> KeptRequest:
    """Take a request in."""
    return ring.begin(name, trace_id, lambda: requests_pb2.RequestRecord(request_id=name))


def packed(reason: str = "best") -> bytes:
    """Make a round."""
    return requests_pb2.RoundRecord(reason=reason).SerializeToString()


def names(ring: RecentRequests) -> list[str]:
    """List what is kept, newest first."""
    return [record.request_id for record in ring.latest(1000)]


def test_the_oldest_finished_request_makes_room() -> None:
    """One that still runs stays as long as another can go."""
    ring = RecentRequests(3, 10_000)
    running = begin(ring, "running")
    for name in "abc":
        begin(ring, name).is_finished = True

    assert names(ring) == ["c", "b", "running"]
    ring.add_round(running, packed())
    assert len(ring.find("running")[0].rounds) == 1


def test_bytes_are_bounded_whatever_is_kept() -> None:
    """Finished ones go; where none is left, the latest rounds of running ones are left out."""
    size = len(packed())
    ring = RecentRequests(100, 40 * size)
    old = begin(ring, "old")
    for _ in range(10):
        ring.add_round(old, packed())
    old.is_finished = True
    many = [begin(ring, f"r{i}") for i in range(5)]
    for _ in range(12):
        for kept in many:
            ring.add_round(kept, packed())
            assert ring.num_bytes <= 40 * size

    assert ring.find("old") == []
    records = [ring.find(f"r{i}")[0] for i in range(5)]
    assert sum(len(record.rounds) for record in records) == 40
    assert all(len(r.rounds) + r.num_rounds_left_out == 12 for r in records)


def test_one_long_request_leaves_the_others_be() -> None:
    """It fills a part of the ring; its first rounds stay."""
    size = len(packed())
    ring = RecentRequests(100, 40 * size)
    short = begin(ring, "short")
    ring.add_round(short, packed("first_round"))
    short.is_finished = True
    long = begin(ring, "long")
    for _ in range(1000):
        ring.add_round(long, packed())

    assert ring.find("short")[0].rounds[0].reason == "first_round"
    assert len(long.rounds) == 10
    assert ring.find("long")[0].num_rounds_left_out == 990


def test_a_request_has_several_names() -> None:
    """The choice's id, that of its body, the client's own, the trace's."""
    ring = RecentRequests(10, 1000)
    for choice in range(2):
        begin(ring, f"chatcmpl-my-id-{choice}", "0af7").is_finished = True
    begin(ring, "cmpl-other-0", "0b").is_finished = True

    both = ["chatcmpl-my-id-0", "chatcmpl-my-id-1"]
    for name in ("chatcmpl-my-id", "my-id", "0af7"):
        assert [record.request_id for record in ring.find(name)] == both
    assert [record.request_id for record in ring.find("my-id-1")] == both[1:]
    assert ring.find("my") == ring.find("") == []


def test_no_room_at_all_keeps_nothing() -> None:
    ring = RecentRequests(0, 1000)
    kept = begin(ring, "a")
    ring.add_round(kept, packed())

    assert names(ring) == []
    assert ring.num_bytes == 0


def test_a_running_request_that_had_to_go_keeps_nothing_more() -> None:
    """More run than are kept: the bytes of those dropped come back, and no more are added."""
    ring = RecentRequests(2, 1000)
    first, *_ = (begin(ring, name) for name in "abc")
    size = ring.num_bytes
    ring.add_round(first, packed())

    assert names(ring) == ["c", "b"]
    assert ring.num_bytes == size == 0
