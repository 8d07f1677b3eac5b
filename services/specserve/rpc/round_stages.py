"""Where a round's seconds went, from its record. Pure; asks nobody."""

from __future__ import annotations

from collections.abc import Iterable

from specserve.rpc.v1 import requests_pb2

STAGES = (
    "draft_queue",
    "draft_forward",
    "draft_transport",
    "verify_queue",
    "verify_forward",
    "verify_transport",
    "lost",
    "commit",
)
"""Stages of a round; also a metric's label, so the set is fixed. `transport` is the way there and
back, event loops included; `lost` are calls that failed or came too late, and finding another
replica; `commit` is the rest: deciding K, accepting, committing, writing the answer."""

_NAMES = {
    "draft": ("draft_queue", "draft_forward", "draft_transport"),
    "target": ("verify_queue", "verify_forward", "verify_transport"),
}


def stage_seconds(wall_s: float, calls: Iterable[requests_pb2.CallRecord]) -> dict[str, float]:
    """Share a round's wall time out among its stages: they add up to it.

    Times of two clocks are in it, so that a part is never longer than what is left. Calls that
    nobody waited for take no time of the round.
    """
    seconds = dict.fromkeys(STAGES, 0.0)
    left = wall_s
    failed_until: float | None = None
    for call in calls:
        if call.is_background:
            continue
        parts: tuple[tuple[str, float], ...]
        if call.error:
            parts = (("lost", call.wall_s),)
            failed_until = call.began_s + call.wall_s
        else:
            queue, forward, transport = _NAMES.get(call.service, _NAMES["target"])
            timing = call.timing
            way_s = call.wall_s - timing.queue_s - timing.forward_s
            parts = ((forward, timing.forward_s), (queue, timing.queue_s), (transport, way_s))
            if failed_until is not None:
                parts = (("lost", call.began_s - failed_until), *parts)
                failed_until = None
        for name, wanted_s in parts:
            taken_s = min(max(0.0, wanted_s), left)
            seconds[name] += taken_s
            left -= taken_s
    seconds["commit"] = left
    return seconds
