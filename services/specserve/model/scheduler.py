"""Iteration-level scheduling: who is in the next forward, who waits, who loses its blocks.

Knows calls, blocks and times; knows no logits. The clock is the engine's: times come in as numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from specserve.model.calls import CallState
from specserve.model.forward_times import ForwardTimes
from specserve.model.hold_rule import LATE, Due, Room, best_hold_s
from specserve.model.kv_cache import BlockPool, CopyBlock
from specserve.model.session import KvSession

_READY_EXTRA_TOKENS = 16
"""A call with at most this many tokens beside its wanted rows is decoding, not prefilling."""

_PREFILL_SHARE = 4
"""The oldest prefill gets 1/4 of the token budget even when ready calls could fill all of it."""

_LEAST_HELD_FORWARD_S = 1e-3
"""Below this a forward is cheaper than the timer that would hold it."""


@dataclass(frozen=True, slots=True)
class PlannedSlice:
    """One call's part of the next forward; its blocks are ready to be written."""

    call: CallState
    start: int
    """Tokens of the session in the pool."""
    num_tokens: int
    num_rows: int
    """0 while tokens of the feed remain."""


class Scheduler:
    """Plan forwards over the calls in flight."""

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        copy_block: CopyBlock,
        preempt: Callable[[KvSession], None],
        times: ForwardTimes,
        reclaim: Callable[[], bool] = lambda: False,
    ) -> None:
        """Build a scheduler.

        Args:
            copy_block: copies a block before a write, when others share it.
            preempt: takes a session's blocks away and fails its call.
            times: what forwards took; the engine keeps it.
            reclaim: frees blocks that nobody asked for; False when there are none.
        """
        self._pool = pool
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._copy_block = copy_block
        self._preempt = preempt
        self._reclaim = reclaim
        self._times = times
        self._hold_until: float | None = None

    def plan(self, calls: Iterable[CallState], sessions: Iterable[KvSession]) -> list[PlannedSlice]:
        """Choose the slices of the next forward and make their blocks writable.

        Ready calls come first, by priority, then age; then prefill chunks. The first call of all in
        that order is always served: neither a full budget nor a lack of blocks stops it, so the
        oldest session of the highest priority always moves. A call that runs alone waits until it
        is the first, and then has the forward to itself.

        Returns:
            At most one slice a call; empty when every call waits for blocks.
        """
        self._hold_until = None
        everyone = list(sessions)
        plans = (self._fill(group, everyone) for group in _groups(calls))
        return next(filter(None, plans), [])

    def _fill(
        self, calls: Iterable[CallState], everyone: Sequence[KvSession]
    ) -> list[PlannedSlice]:
        """Share a forward among calls."""
        ready, prefill = self._split(calls)
        budget, seats = self._max_num_batched_tokens, self._max_num_seqs
        planned: list[PlannedSlice] = []
        reserved = 0
        if prefill and ready and _rank(prefill[0]) < _rank(ready[0]):
            reserved = max(prefill[0].num_rows, budget // _PREFILL_SHARE)
            seats -= 1
        budget -= self._take_ready(ready, seats, budget - reserved, planned, everyone)
        for call in prefill:
            if len(planned) >= self._max_num_seqs or budget <= 0:
                break
            if call.session.in_flight is not call:
                continue  # preempted a moment ago: blocks that it took now nobody would give back
            # Look again: another session may have published this prompt since the call came.
            skip_cached(call)
            count = min(budget, call.num_remaining)
            if count < call.num_remaining:
                # The wanted rows come out of one forward: never split them.
                count = min(count, call.num_remaining - call.num_rows)
            if count > 0:
                budget -= self._take(call, count, planned, everyone)
        if not planned and seats == 0:
            # The only seat was kept for a prompt that finds no blocks now.
            self._take_ready(ready, 1, budget, planned, everyone)
        return [item for item in planned if item.call.session.in_flight is item.call]

    def _take_ready(
        self,
        ready: Sequence[CallState],
        seats: int,
        budget: int,
        planned: list[PlannedSlice],
        everyone: Sequence[KvSession],
    ) -> int:
        """Plan calls that are computed whole, in order; returns the tokens that they take."""
        left = budget
        for call in ready:
            if len(planned) == seats:
                break
            if call.num_remaining <= left:
                left -= self._take(call, call.num_remaining, planned, everyone)
        return budget - left

    def hold_s(
        self, calls: Iterable[CallState], sessions: Iterable[KvSession], now: float
    ) -> float:
        """Return how long to wait for calls that are about to come; 0 to run now."""
        if self._hold_until is not None and now >= self._hold_until:
            return 0.0
        calls = list(calls)
        num_tokens = 0
        for call in calls:
            if call.is_started or call.runs_alone:
                self._hold_until = None
                return 0.0
            num_tokens += call.num_remaining
        num_tokens = min(num_tokens, self._max_num_batched_tokens)
        if not calls or len(calls) >= self._max_num_seqs:
            return 0.0
        if self._times.expected(num_tokens) < _LEAST_HELD_FORWARD_S:
            return 0.0
        due = [
            Due(waits, session.gaps_s[-1], session.call_tokens)
            for session in sessions
            if (waits := session.due_in_s(now, LATE))
        ]
        room = Room(self._max_num_seqs - len(calls), self._max_num_batched_tokens - num_tokens)
        best_wait = best_hold_s(len(calls), num_tokens, due, room, self._times.expected)
        if best_wait == 0.0:
            return 0.0
        # The first choice bounds the hold: later arrivals may shorten it, never extend it.
        until = now + best_wait
        self._hold_until = until if self._hold_until is None else min(until, self._hold_until)
        return self._hold_until - now

    def _is_ready(self, call: CallState) -> bool:
        return call.num_remaining <= min(
            call.num_rows + _READY_EXTRA_TOKENS, self._max_num_batched_tokens
        )

    def _split(self, calls: Iterable[CallState]) -> tuple[list[CallState], list[CallState]]:
        ready: list[CallState] = []
        prefill: list[CallState] = []
        for call in sorted(calls, key=_rank):
            (ready if self._is_ready(call) else prefill).append(call)
        return ready, prefill

    def _take(
        self,
        call: CallState,
        count: int,
        planned: list[PlannedSlice],
        sessions: Sequence[KvSession],
    ) -> int:
        """Plan a slice if its blocks can be had; return the tokens it uses."""
        session = call.session
        if session.in_flight is not call:
            return 0  # preempted a moment ago, for another call of this plan
        start = session.cached_length
        blocks = session.blocks
        if blocks is None or not self._make_room(session, start, start + count, sessions):
            return 0
        blocks.prepare_write(start, start + count, self._copy_block)
        rows = call.num_rows if count == call.num_remaining else 0
        planned.append(PlannedSlice(call, start, count, rows))
        return count

    def _make_room(
        self, session: KvSession, start: int, end: int, sessions: Sequence[KvSession]
    ) -> bool:
        """Free blocks for a write, at the cost of lower-ranked sessions; False to wait instead.

        Waiting while holding blocks cannot deadlock: whoever ranks higher may take them.
        """
        blocks = session.blocks
        if blocks is None:
            return True
        while blocks.num_missing(start, end) > self._pool.num_free:
            if self._reclaim():
                continue
            victims = [
                other
                for other in sessions
                if other.blocks is not None
                and other.blocks.blocks
                and _worth(other) < _worth(session)
            ]
            if not victims:
                return False
            self._preempt(min(victims, key=_worth))
        return True


def skip_cached(call: CallState) -> int:
    """Take over the prefix cache's blocks for the committed tokens at the head of a feed.

    Returns:
        Tokens that need not be computed. Where rows are wanted at least the last committed token
        stays to be computed.
    """
    session = call.session
    if session.blocks is None:
        return 0
    limit = call.committed_length - session.cached_length - (1 if call.num_rows else 0)
    if limit <= 0:
        return 0
    matched = session.blocks.match(session.cached_length, call.peek(limit), limit)
    if matched:
        call.advance(matched)
        call.prefix_cached_tokens += matched
    return matched


def _groups(calls: Iterable[CallState]) -> list[list[CallState]]:
    """Tell who may share a forward: each group to be tried where those before it get no blocks."""
    calls = list(calls)
    if not any(call.runs_alone for call in calls):
        return [calls]
    together = [call for call in calls if not call.runs_alone]
    alone = [[call] for call in sorted(calls, key=_rank) if call.runs_alone]
    if together and _rank(min(together, key=_rank)) < _rank(alone[0][0]):
        return [together, *alone]
    return [alone[0], together, *alone[1:]]


def _rank(call: CallState) -> tuple[int, float]:
    return -call.session.opening.priority, call.ready_at


def _worth(session: KvSession) -> tuple[int, float, int]:
    # One order for all orchestrators and targets: whoever loses its blocks and comes back is as old
    # as before, so that the oldest request of the highest priority always gets on.
    return session.opening.priority, -session.since, -session.serial
