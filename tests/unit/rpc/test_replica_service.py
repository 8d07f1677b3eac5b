"""What a replica reports for scaling."""

from __future__ import annotations

import pytest

from specserve.rpc.replica_service import BusyShare


def test_busy_share_is_of_the_time_between_two_questions() -> None:
    """All of it at most; a device that was replaced counts from nothing."""
    now = [50.0]
    busy = BusyShare(lambda: now[0])
    now[0] += 2
    assert busy.share(0.5) == 0.25
    now[0] += 1
    assert busy.share(1.5) == 1.0
    now[0] += 1
    assert busy.share(0.2) == 0.0
    assert busy.share(0.2) == 0.0
    now[0] += 1
    assert busy.share(0.7) == pytest.approx(0.5)
