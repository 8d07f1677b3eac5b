"""Where a round's seconds went, from its record. Pure; asks nobody."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from specserve.rpc.v1 import common_pb2


class Call(Protocol):
    """What is asked of a call, which `CallRecord` names."""

    @property
    def service(self) -> str: ...  # noqa: D102
    @property
    def began_s(self) -> float: ...  # noqa: D102
    @property
    def wall_s(self) -> float: ...  # noqa: D102
    @property
    def timing(self) -> common_pb2.CallTiming: ...  # noqa: D102
    @property
    def error(self) -> str: ...  # noqa: D102
    @property
    def is_background(self) -> bool: ...  # noqa: D102


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


def stage_seconds(wall_s: float, calls: Iterable[Call]) -> dict[str, float]:
    """Share a round's wall time out among its stages: they add up to it.

    Times of two clocks are in it, so that a part is never longer than what is left. Calls that
    nobody waited for take no time of the round.
    """
    seconds = dict.fromkeys(STAGES, 0.0)
    add_stages(seconds, wall_s, calls)
    return seconds


def add_stages(seconds: dict[str, float], wall_s: float, calls: Iterable[Call]) -> None:
    """Add a round's stages to what others took."""
    left = wall_s
    failed_until: float | None = None
    for call in calls:
        if call.is_background:
            continue
        call_s = call.wall_s
        if call.error:
            left = _take(seconds, "lost", call_s, left)
            failed_until = call.began_s + call_s
            continue
        if failed_until is not None:
            left = _take(seconds, "lost", call.began_s - failed_until, left)
            failed_until = None
        queue, forward, transport = _NAMES.get(call.service, _NAMES["target"])
        timing = call.timing
        forward_s, queue_s = timing.forward_s, timing.queue_s
        left = _take(seconds, forward, forward_s, left)
        left = _take(seconds, queue, queue_s, left)
        left = _take(seconds, transport, call_s - queue_s - forward_s, left)
    seconds["commit"] += left


def _take(seconds: dict[str, float], name: str, wanted_s: float, left: float) -> float:
    taken_s = min(max(0.0, wanted_s), left)
    seconds[name] += taken_s
    return left - taken_s
