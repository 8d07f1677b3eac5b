"""Which versions of the contract can talk to one another: neighbours.

A rolling update replaces one service after the other, so that for a while each meets the version
before its own. Knows numbers alone.
"""

from __future__ import annotations

from specserve.rpc.codec import PROTOCOL_VERSION


def is_spoken(theirs: int, ours: int = PROTOCOL_VERSION) -> bool:
    """Say whether a peer of another version can be talked to.

    The newer of both is the one that keeps to what the older one knows. A peer that says none (0)
    is no peer of ours.
    """
    return theirs >= 1 and abs(theirs - ours) <= 1
