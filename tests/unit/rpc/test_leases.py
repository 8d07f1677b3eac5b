"""A lease ends by itself, and only by itself or by a word."""

from __future__ import annotations

from specserve.rpc.leases import Leases


def test_only_what_was_not_heard_of_for_longer_than_the_lease_expires() -> None:
    """To the second: at the lease's end it still holds. A call in flight holds it on."""
    now = [0.0]
    leases = Leases(10.0, lambda: now[0])
    for session_id in ("idle", "busy", "renewed", "ended"):
        leases.take(session_id)
    leases.end("ended")
    leases.end("ended")
    now[0] = 5.0
    leases.renew(["renewed", "never held"])
    now[0] = 10.0
    assert leases.end_expired(busy=()) == []
    now[0] = 10.1
    assert leases.end_expired(busy={"busy"}) == ["idle"]
    assert "idle" not in leases
    assert "busy" in leases
    assert len(leases) == 2
    assert leases.end_expired(busy=()) == ["busy"]
    now[0] = 15.1
    assert leases.end_expired(busy=()) == ["renewed"]
    assert len(leases) == 0


def test_heartbeat_begins_no_lease() -> None:
    """A session that the device does not hold must not seem to be held."""
    leases = Leases(10.0, lambda: 0.0)
    leases.renew(["s"])
    assert "s" not in leases
    leases.take("s")
    leases.clear()
    assert len(leases) == 0
