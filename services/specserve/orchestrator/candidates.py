"""What an orchestrator knows of replicas and of prefixes when it chooses between them.

Knows reports and what was opened since they came; the choice itself is `routing.py`'s.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from specserve.orchestrator.routing import Candidate
from specserve.rpc.link import FrameLink

MAX_PREFIXES = 16_384
"""Prefixes remembered by an orchestrator, the latest used: about 100 bytes each."""

WAITING_WEIGHT = 0.2
"""What a call that waits counts beside its session, which is counted as well. Little: calls also
wait for others to share a forward with, and a target held so is no fuller than its neighbour."""

OTHERS_SHARE = 0.4
"""Of what an orchestrator opened since a replica's last report, what each other one is taken to
have opened there as well. Reports come at once when sessions change: as many would be too many, and
of two sessions that ended together the second would not find the way back to the seat it left."""


class SeenPrefixes:
    """The prefixes of the latest sessions: what was seen before may be cached."""

    def __init__(self, capacity: int = MAX_PREFIXES) -> None:
        self._capacity = capacity
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def note(self, key: bytes) -> bool:
        """Remember a key; True when it was known."""
        if not key:
            return False
        is_known = key in self._keys
        self._keys[key] = None
        self._keys.move_to_end(key)
        if len(self._keys) > self._capacity:
            self._keys.popitem(last=False)
        return is_known


def candidate_of(link: FrameLink[Any, Any], num_tokens: int) -> Candidate:
    """Say how full a replica is, by its last report and by what was opened since.

    The others that call it are taken to have opened some meanwhile, too: a replica that looks empty
    to all of them is then not filled by each.
    """
    load, own = link.load, len(link.sessions)
    if load is None:
        return Candidate(link.address, own, 1.0, has_room=True)
    since: float = own - link.num_sessions_at_load
    if since > 0:
        since *= 1 + OTHERS_SHARE * max(0, load.num_callers - 1)
    num_sessions = max(own, load.num_sessions + since) + WAITING_WEIGHT * load.num_waiting
    if load.num_blocks == 0:
        return Candidate(link.address, num_sessions, 1.0, has_room=True)
    block_size = max(1, link.model.block_size) if link.model else 1
    wanted = -(-num_tokens // block_size)
    free = max(0.0, load.num_free_blocks - max(0.0, since) * wanted)
    return Candidate(link.address, num_sessions, free / load.num_blocks, has_room=wanted <= free)
