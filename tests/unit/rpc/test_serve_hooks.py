"""What Ray Serve asks of a replica, and how pools are found, without any Ray."""

import asyncio

import pytest

from specserve.errors import PeerUnavailable
from specserve.rpc.serve_hooks import PoolView, PoolWatcher, ServiceReplica, view_of, watch_pools


class FakeService:
    """A running service that notes what is asked of it."""

    address = "10.0.0.1:4000"
    replica_id = "draft-1"

    def __init__(self):
        self.done = []
        self.broken = None

    async def drain(self, deadline_s):
        self.done.append(("drain", deadline_s))

    async def stop(self):
        self.done.append(("stop",))

    def failure(self):
        return self.broken

    def stats(self):
        return {"num_sessions": 3.0}


class Replica(ServiceReplica):
    role = "draft"


@pytest.fixture
def service():
    return FakeService()


@pytest.fixture
async def replica(service):
    replica = Replica()
    replica.run_service(service, drain_deadline_s=7.0)
    yield replica
    await replica.drain_and_stop()


async def test_a_replica_publishes_where_it_is(replica):
    description = await replica.describe()

    assert await replica.address() == "10.0.0.1:4000"
    assert replica.record_replica_metadata()["grpc_address"] == "10.0.0.1:4000"
    assert (description.role, description.replica_id) == ("draft", "draft-1")
    assert await replica.record_autoscaling_stats() == {"num_sessions": 3.0}


async def test_a_broken_service_fails_its_health_check_B170(replica, service):
    """Serve replaces a replica whose check raises."""
    await replica.check_health()
    service.broken = "the device is hung"

    with pytest.raises(PeerUnavailable, match="draft: the device is hung"):
        await replica.check_health()


async def test_the_end_drains_first_B158(service):
    """Serve does not see our streams: this is where they get their time."""
    replica = Replica()
    replica.run_service(service, drain_deadline_s=7.0)

    await replica.drain_and_stop()

    assert service.done == [("drain", 7.0), ("stop",)]


async def test_the_end_before_the_start_does_nothing():
    """Serve ends a replica also when its constructor failed."""
    await Replica().drain_and_stop()


def watcher_of(*views):
    """A watcher whose looks see these views in turn; an exception is raised."""
    left = list(views)

    async def look():
        view = left.pop(0)
        if isinstance(view, Exception):
            raise view
        return view

    return PoolWatcher("draft", look)


async def test_a_pool_follows_its_replicas_B190():
    """New replicas are dialled as they come: no name is resolved, no channel balances."""
    watcher = watcher_of(
        PoolView(("b", "a"), True), PoolView(("a", "b"), True), PoolView(("b",), True)
    )

    changed = [await watcher.refresh() for _ in range(3)]

    assert changed == [True, False, True]
    assert watcher.addresses == ("b",)


async def test_a_replica_that_does_not_answer_is_not_forgotten():
    """A busy replica keeps its sessions: one look without it proves nothing."""
    watcher = watcher_of(
        PoolView(("a", "b"), True),
        PoolView(("c",), False),
        RuntimeError("no controller"),
        PoolView(("c",), True),
    )

    seen = []
    for _ in range(4):
        await watcher.refresh()
        seen.append(watcher.addresses)

    assert seen == [("a", "b"), ("a", "b", "c"), ("a", "b", "c"), ("c",)]


def test_answers_are_sorted_into_addresses_and_failures():
    assert view_of(["a", "b"]) == PoolView(("a", "b"), True)
    assert view_of(["a", RuntimeError("lost")]) == PoolView(("a",), False)


async def test_changes_are_told_once():
    """Telling peers again what they know would be noise."""
    looks = 0
    enough = asyncio.Event()

    async def look():
        nonlocal looks
        looks += 1
        if looks == 3:
            enough.set()
        return PoolView(("a",), True)

    watcher = PoolWatcher("draft", look)
    told = []

    async def tell():
        told.append(watcher.addresses)

    task = asyncio.create_task(watch_pools([watcher], tell, period_s=0))
    await enough.wait()
    task.cancel()

    assert told == [("a",)]
