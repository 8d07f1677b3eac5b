"""Whether a replica whose device dies is ill, or had a request that devices die of.

Knows who was computed when; knows no device and no session.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MAX_RESTARTS = 3
"""More deaths than this that are the device's own, and its replica is ill."""

MAX_BLAMED = 12
"""And so it is after more deaths than this, whatever they are blamed on."""


@dataclass(frozen=True, slots=True)
class DeviceDeath:
    """One death of a device."""

    at: float
    """When, in seconds."""
    computed: frozenset[str]
    """Sessions that it was about, or the one known to be guilty; empty where it idled."""
    has_answered: bool
    """Whether it had answered any call since it was started."""


def is_ill(deaths: Sequence[DeviceDeath]) -> bool:
    """Judge a replica by the recent deaths of its devices.

    A session that was computed alone when a device died is blamed for that, and for the deaths
    before in which it had company: all of them together are no death of the device's own if it had
    worked until then, and else one. So a request that kills costs a replica one restart each time,
    and a device on which nothing works any more is found out by a few different requests.
    """
    alone = [next(iter(death.computed)) for death in deaths if len(death.computed) == 1]
    num_own, idle = 0, set[str]()
    for death in deaths:
        blamed = death.computed.intersection(alone)
        if not blamed:
            num_own += 1
        elif not death.has_answered:
            idle.add(min(blamed))
    return num_own + len(idle) > MAX_RESTARTS or len(deaths) > MAX_BLAMED
