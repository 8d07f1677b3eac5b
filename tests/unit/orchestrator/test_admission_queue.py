"""Who is admitted next, who waits, and who is told to come back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from helpers.waiting import eventually
from specserve.errors import Draining, Overloaded
from specserve.orchestrator.admission_queue import MAX_RETRY_S, MIN_RETRY_S, AdmissionQueue
from specserve.orchestrator.routing import Demand


class Line:
    """A queue whose room the test sets, and the choices that came to it."""

    def __init__(
        self, *, max_running: int = 1, max_waiting: int = 9, timeout_s: float = 60
    ) -> None:
        self.room = 100
        """Tokens that a choice may need to be admitted."""
        self.least_priority = 0
        self.admitted: list[str] = []
        self.refused: list[str] = []
        self.waits_s: list[float] = []
        """What the refused were told to wait."""
        self.ends: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.queue = AdmissionQueue(
            max_running=max_running,
            max_waiting=max_waiting,
            timeout_s=timeout_s,
            has_room=lambda demand, priority: (
                demand.num_tokens <= self.room or priority > self.least_priority
            ),
        )

    async def comes(
        self, name: str, priority: int = 0, need: int = 1, *, is_resumed: bool = False
    ) -> None:
        """Have a choice come; it runs until `ends`."""
        self.ends[name] = asyncio.Event()
        self.tasks[name] = asyncio.create_task(self._run(name, priority, need, is_resumed))
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    async def _run(self, name: str, priority: int, need: int, is_resumed: bool) -> None:
        demand = Demand(b"", name, need)
        try:
            async with self.queue.admitted(demand, priority, is_resumed=is_resumed):
                self.admitted.append(name)
                await self.ends[name].wait()
        except Overloaded as error:
            self.refused.append(name)
            self.waits_s.append(error.retry_after_s)

    async def ends_now(self, name: str) -> None:
        self.ends[name].set()
        await self.tasks[name]
        await asyncio.sleep(0)


@asynccontextmanager
async def line(**settings: float) -> AsyncIterator[Line]:
    made = Line(**settings)  # type: ignore[arg-type]
    try:
        yield made
    finally:
        for task in made.tasks.values():
            task.cancel()
        await asyncio.gather(*made.tasks.values(), return_exceptions=True)
        assert (made.queue.num_running, made.queue.num_waiting) == (0, 0)
        assert all(MIN_RETRY_S <= wait_s <= MAX_RETRY_S for wait_s in made.waits_s)


async def test_order_is_by_priority_then_streams_that_have_begun_then_arrival() -> None:
    async with line() as made:
        await made.comes("runs")
        await made.comes("first")
        await made.comes("second")
        await made.comes("begun", is_resumed=True)
        await made.comes("idle", priority=-1)
        await made.comes("urgent", priority=1)
        for name in ("runs", "urgent", "begun", "first", "second", "idle"):
            assert made.admitted[-1] == name
            await made.ends_now(name)
        assert made.refused == []


async def test_head_that_needs_much_is_not_overtaken() -> None:
    """A long prompt waits for blocks; short ones that would fit wait behind it, not before."""
    async with line(max_running=9) as made:
        made.room = 10
        await made.comes("long", need=50)
        await made.comes("short", need=5)
        assert made.admitted == []
        made.room = 50
        made.queue.look()
        await eventually(lambda: made.admitted == ["long", "short"], "both are admitted")


async def test_urgent_choice_waits_for_no_blocks_that_less_urgent_sessions_hold() -> None:
    """The target's scheduler will take them from those."""
    async with line(max_running=9) as made:
        made.room = 0
        await made.comes("ordinary")
        await made.comes("urgent", priority=1)
        assert made.admitted == ["urgent"]


async def test_longer_line_than_may_be_refuses_the_least_urgent_at_once() -> None:
    """The newcomer, unless another is less urgent; a stream that has begun never for the length."""
    async with line(max_waiting=2) as made:
        await made.comes("runs")
        await made.comes("low", priority=-1)
        await made.comes("one")
        await made.comes("two")
        assert made.refused == ["low"]
        await made.comes("three")
        assert made.refused == ["low", "three"]
        await made.comes("begun", priority=-5, is_resumed=True)
        assert made.refused == ["low", "three"]
        await made.ends_now("runs")
        assert made.admitted == ["runs", "one"]


async def test_choice_that_waits_too_long_is_refused_and_a_begun_stream_is_not() -> None:
    """The deadline of the queue, and nobody is left waiting for ever."""
    async with line(timeout_s=0.01) as made:
        await made.comes("runs")
        await made.comes("begun", is_resumed=True)
        await made.comes("new")
        await made.tasks["new"]
        assert made.refused == ["new"]
        await made.ends_now("runs")
        await eventually(lambda: made.admitted == ["runs", "begun"], "the begun one is admitted")


async def test_client_that_goes_away_makes_room_in_line_and_running() -> None:
    """B074 for the line: cancelled while waiting, or just when its turn came."""
    async with line() as made:
        await made.comes("runs")
        await made.comes("leaves")
        await made.comes("stays")
        made.tasks["leaves"].cancel()
        await asyncio.gather(made.tasks["leaves"], return_exceptions=True)
        made.ends["runs"].set()
        made.tasks["stays"].cancel()
        await asyncio.gather(*made.tasks.values(), return_exceptions=True)
        assert made.queue.num_running == 0
        await made.comes("next")
        assert made.admitted[-1] == "next"


async def test_line_of_one_that_stops_is_sent_away_and_what_runs_goes_on() -> None:
    """Whoever waits may wait elsewhere at once; nobody is admitted by one that drains."""
    async with line() as made:
        await made.comes("runs")
        await made.comes("waits")
        made.queue.refuse_all(Draining("orchestrator-1"))
        await made.comes("late")
        for name in ("waits", "late"):
            with pytest.raises(Draining):
                await made.tasks[name]
        assert (made.queue.num_running, made.queue.num_waiting) == (1, 0)


def test_empty_line_needs_no_event_loop() -> None:
    """Reports of loads come all the time: without anybody in line they cost nothing."""
    asked: list[Demand] = []

    def has_room(demand: Demand, priority: int) -> bool:
        asked.append(demand)
        return True

    queue = AdmissionQueue(max_running=1, max_waiting=1, timeout_s=1, has_room=has_room)
    queue.look()
    assert asked == []


@pytest.mark.parametrize("when", ["waiting", "admitted"])
async def test_cancellation_at_the_moment_of_the_turn_leaks_no_slot(when: str) -> None:
    """Admitted and cancelled in one turn of the loop: the slot goes to the next."""
    async with line() as made:
        await made.comes("runs")
        await made.comes("victim")
        if when == "admitted":
            made.ends["runs"].set()
            await made.tasks["runs"]  # its turn has come; it has not run yet
        made.tasks["victim"].cancel()
        await asyncio.gather(made.tasks["victim"], return_exceptions=True)
        made.ends["runs"].set()
        await made.tasks["runs"]
        assert made.queue.num_running == 0
