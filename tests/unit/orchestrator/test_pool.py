"""Which replica a session goes to, and what becomes of those that are no longer listed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import pytest

from helpers.replica import FakeReplica, serving
from helpers.waiting import eventually
from specserve.model.messages import EngineLoad
from specserve.orchestrator.candidates import candidate_of
from specserve.orchestrator.pool import DRAFT_KIND, DraftLink, Pool
from specserve.orchestrator.routing import Demand
from specserve.rpc.codec import PROTOCOL_VERSION
from specserve.rpc.v1 import common_pb2, draft_pb2

DraftPool = Pool[draft_pb2.ProposeCall, draft_pb2.ProposeReply]

DEMAND = Demand(b"", "session", 1)


@asynccontextmanager
async def pool_of(
    *replicas: FakeReplica, approve: bool = True
) -> AsyncIterator[tuple[DraftPool, list[DraftLink]]]:
    """Serve replicas and connect a pool to all of them."""
    async with AsyncExitStack() as stack:
        for number, replica in enumerate(replicas):
            replica.replica_id = f"replica-{number}"
        addresses = [await stack.enter_async_context(serving(replica)) for replica in replicas]
        pool: DraftPool = Pool(DRAFT_KIND, heartbeat_s=0.02, hang_s=30.0)
        stack.push_async_callback(pool.close)
        if approve:
            pool.check = pool.approve
        pool.update(addresses)
        links = [pool.links[address] for address in addresses]
        await eventually(lambda: all(link.connected for link in links), "all are connected")
        await eventually(lambda: all(replica.num_open for replica in replicas), "all are streaming")
        yield pool, links


async def test_burst_of_sessions_spreads_over_replicas_B191() -> None:
    """Sessions opened since the last load report count at once."""
    async with pool_of(FakeReplica(), FakeReplica(), FakeReplica()) as (pool, links):
        for number in range(9):
            link = pool.choose(DEMAND)
            assert link is not None
            link.sessions.add(f"s{number}")
        assert [len(link.sessions) for link in links] == [3, 3, 3]


async def test_fuller_cache_is_avoided() -> None:
    """A replica whose KV pool is nearly full takes no session while another has room."""
    async with pool_of(FakeReplica(), FakeReplica()) as (pool, links):
        links[0].load = EngineLoad(1, 10, 0, 0, 1)
        links[1].load = EngineLoad(9, 10, 0, 0, 1)
        links[1].sessions.update("abcdef")
        links[1].num_sessions_at_load = 6
        assert pool.choose(DEMAND) is links[1]


async def test_report_is_read_with_what_was_opened_since_here_and_by_others() -> None:
    """Three orchestrators call: two sessions opened here since count as 3.6, their blocks too; the
    next report tells of them all, and a replica that says nothing of callers has one. A call that
    waits counts a little."""
    async with pool_of(FakeReplica()) as (_, (link,)):
        link.load = EngineLoad(80, 100, 5, 1, 1, num_callers=3)
        link.num_sessions_at_load = 1
        link.sessions.update("abc")
        found = candidate_of(link, 4)
        assert found.num_sessions == pytest.approx(5 + 3.6 + 0.2)
        assert found.free_share == pytest.approx((80 - 3.6 * 4) / 100)
        assert candidate_of(link, 17).has_room
        assert not candidate_of(link, 18).has_room
        link.load = EngineLoad(80, 100, 5, 1, 1)
        assert candidate_of(link, 4).num_sessions == 5 + 2 + 0.2
        link.sessions.clear()
        assert candidate_of(link, 4).num_sessions == 5 - 1 + 0.2


async def test_reports_tell_how_many_sessions_were_known_when_they_came() -> None:
    """And whoever waits for room hears of each."""
    replica = FakeReplica()
    async with pool_of(replica) as (pool, (link,)):
        heard: list[int] = []
        pool.on_load = lambda: heard.append(link.num_sessions_at_load)
        link.sessions.update("ab")
        await replica.say(load=common_pb2.Load(num_iterations=7, num_callers=2, least_priority=-1))
        await eventually(lambda: heard == [2], "the report came")
        assert link.load is not None
        assert (link.load.num_callers, link.load.least_priority) == (2, -1)


async def test_room_is_free_blocks_or_those_of_a_less_urgent_session() -> None:
    """Where no replica is usable there is nothing to wait for: whoever asks for one will wait."""
    async with pool_of(FakeReplica(), FakeReplica()) as (pool, links):
        for link in links:
            link.load = EngineLoad(3, 10, 2, 0, 1, least_priority=-1)
        assert pool.has_room(replace(DEMAND, num_tokens=3), -1)
        assert not pool.has_room(replace(DEMAND, num_tokens=4), -1)
        assert pool.has_room(replace(DEMAND, num_tokens=4), 0)
        assert pool.choose(replace(DEMAND, num_tokens=4), must_fit=True) is None
        assert pool.choose(replace(DEMAND, num_tokens=4)) in links
        for link in links:
            link.draining = True
        assert pool.has_room(replace(DEMAND, num_tokens=99), -5)


async def test_known_beginning_goes_home_and_a_new_one_to_the_emptiest() -> None:
    """The first session with a beginning may be cached nowhere yet; the next one is."""
    async with pool_of(*(FakeReplica() for _ in range(4))) as (pool, links):
        demand = Demand(b"beginning", "s", 1)
        home = pool.choose(demand)
        assert home is not None
        home.sessions.update("ab")
        assert pool.choose(demand) is home
        other = pool.choose(Demand(b"another", "s", 1))
        assert other in links
        assert other is not home


async def test_avoided_replica_is_taken_only_when_there_is_no_other() -> None:
    """After a failure the session goes elsewhere, or back where it was."""
    async with pool_of(FakeReplica(), FakeReplica()) as (pool, links):
        assert pool.choose(DEMAND, {links[0].address}) is links[1]
        links[1].draining = True
        assert pool.choose(DEMAND, {links[0].address}) is links[0]
        links[0].draining = True
        assert pool.choose(DEMAND) is None


async def test_only_a_draining_replica_has_a_successor() -> None:
    """A session moves away from one that drains, if there is one that does not."""
    async with pool_of(FakeReplica(), FakeReplica()) as (pool, links):
        assert pool.successor(links[0], DEMAND) is None
        links[0].draining = True
        assert pool.successor(links[0], DEMAND) is links[1]
        links[1].draining = True
        assert pool.successor(links[0], DEMAND) is None


async def test_unchecked_replica_is_not_used_and_a_waiter_hears_of_its_approval() -> None:
    """Nothing is opened before draft and target were compared."""
    async with pool_of(FakeReplica(), approve=False) as (pool, links):
        assert pool.usable() == []
        assert pool.unchecked() == links
        waiting = asyncio.create_task(pool.wait_for_one(5.0, DEMAND))
        await asyncio.sleep(0)
        pool.approve(links[0])
        assert await waiting is links[0]
        assert pool.unchecked() == []
        assert pool.may_use(links[0])
        pool.refuse(links[0], "no")
        assert not pool.may_use(links[0])
        assert await pool.wait_for_one(0.0, DEMAND) is None


async def test_other_protocol_is_refused_with_both_versions() -> None:
    """A peer two versions ahead is named; it never gets a session."""
    replica = FakeReplica()
    replica.protocol_version = PROTOCOL_VERSION + 2
    async with pool_of(replica, approve=False) as (pool, _):
        (reason,) = pool.refusals.values()
        assert f"protocol {PROTOCOL_VERSION + 2}" in reason
        assert pool.unchecked() == []


async def test_replica_no_longer_listed_ends_with_its_last_session() -> None:
    """It opens nothing more, serves what it holds, and is forgotten then."""
    replicas = (FakeReplica(), FakeReplica())
    async with pool_of(*replicas) as (pool, links):
        links[0].sessions.add("live")
        pool.update([links[1].address])
        assert pool.usable() == [links[1]]
        assert links[0].address in pool.links
        links[0].release("live")
        await eventually(lambda: replicas[0].num_open == 0, "its stream has ended")
        assert set(pool.links) == {links[1].address}
        released = [r.session_id for frame in replicas[0].frames for r in frame.releases]
        assert released == ["live"]


async def test_replica_listed_again_in_time_is_kept() -> None:
    """A look that missed it costs no session."""
    async with pool_of(FakeReplica(), FakeReplica()) as (pool, links):
        addresses = [link.address for link in links]
        links[0].sessions.add("live")
        pool.update(addresses[1:])
        pool.update(addresses)
        links[0].sessions.clear()
        assert pool.usable() == links


async def test_verdicts_on_replicas_that_are_gone_are_forgotten() -> None:
    """Restarts do not add up: one verdict per address at most."""
    replica = FakeReplica()
    async with pool_of(replica) as (pool, links):
        for number in range(3):
            await eventually(lambda n=number: replica.num_streams == n + 1, "it streams again")
            replica.replica_id = f"life-{number}"
            replica.end_streams()
            await eventually(lambda n=number: pool.approved == {f"life-{n}"}, "approved anew")
        pool.refuse(links[0], "wrong")
        assert pool.approved == set()
        assert pool.refusals == {"life-2": "wrong"}


async def test_two_sessions_that_ended_together_both_find_the_seats_they_left() -> None:
    """Two orchestrators, four sessions a replica: the first to come back must not fill the second
    one's seat in its orchestrator's eyes, for it would then go where none is free."""
    async with pool_of(FakeReplica(), FakeReplica()) as (pool, links):
        for link in links:
            link.load = EngineLoad(0, 0, 4, 0, 1, num_callers=2)
            link.sessions.update(f"{link.address}-{number}" for number in range(2))
            link.num_sessions_at_load = 2
        links[0].sessions.clear()
        links[0].load = EngineLoad(0, 0, 2, 0, 1, num_callers=2)
        links[0].num_sessions_at_load = 0
        links[0].sessions.add("came back first")
        # Ties fall by the session's name: none of these may be one.
        for number in range(20):
            assert pool.choose(Demand(b"", f"second-{number}", 4)) is links[0]
