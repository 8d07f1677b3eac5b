"""When a pool of no drafts tries one again: what they are worth can only be measured on one.

Rarely, for it seldom changes: after some hours, longer each time that it was in vain, or when
sessions have become of another kind. Pure: the state is a value, times come in.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

FIRST_PAUSE_S = 3 * 3600.0
"""Time without drafts before the first trial; twice as long after each one in vain."""

LONGEST_PAUSE_S = 24 * 3600.0

LEAST_PAUSE_S = 1800.0
"""Not even another kind of sessions is tried on sooner."""

TRIAL_S = 1200.0
"""A trial: a replica starts, and requests learn what it is worth to them."""

OTHER_KIND = 2.0
"""Sessions that hold so many times the KV they held before, or that share of it, are others."""

MEMORY_S = 600.0
"""KV per session is averaged over about so long."""


@dataclass(frozen=True, slots=True)
class Probing:
    """What is remembered of a pool's trials between two looks."""

    pause_s: float = FIRST_PAUSE_S
    """Time without drafts before the next one."""
    without_since: float | None = None
    """Since when there is none; None while there is one."""
    tried_since: float | None = None
    """Since when one is tried; None while none is."""
    reason: str = ""
    """Why it is."""
    kv_per_session: float = 0.0
    """Of late, in replicas' worth; 0 while no session was seen."""
    kv_before: float = 0.0
    """The same when the drafts went."""
    looked_at: float | None = None


def probe(
    state: Probing,
    *,
    wanted: float,
    num_replicas: int,
    num_draftable: float,
    kv_per_session: float,
    now: float,
) -> tuple[str | None, Probing]:
    """Return why one draft is to be tried, None where none is, and what to remember.

    Args:
        wanted: drafts that the demand asks for.
        num_replicas: drafts that were asked for last.
        num_draftable: sessions that would draft were it worth it to them.
        kv_per_session: on targets, in replicas' worth; 0 without any session.
    """
    state = _averaged(state, kv_per_session, now)
    if wanted > 0:  # what is worth it needs no trial
        return None, Probing(kv_per_session=state.kv_per_session, looked_at=now)
    if state.tried_since is not None:
        if now - state.tried_since < TRIAL_S:
            return state.reason, state
        pause_s = min(2 * state.pause_s, LONGEST_PAUSE_S)
        state = replace(state, tried_since=None, without_since=None, pause_s=pause_s)
    if num_replicas > 0:
        return None, state
    if state.without_since is None:
        state = replace(state, without_since=now, kv_before=state.kv_per_session)
    if num_draftable < 1 or state.without_since is None:
        return None, state
    without_s = now - state.without_since
    if without_s >= state.pause_s:
        why = f"none was worth it {without_s / 3600:.1f} h ago"
    elif without_s >= LEAST_PAUSE_S and _is_other(state.kv_per_session, state.kv_before):
        times = state.kv_per_session / state.kv_before
        why = f"sessions hold {times:.2g} times the KV that they held when none was worth it"
    else:
        return None, state
    reason = f"{why}: one is tried again on {num_draftable:.0f} sessions"
    return reason, replace(state, tried_since=now, reason=reason)


def _averaged(state: Probing, kv_per_session: float, now: float) -> Probing:
    if kv_per_session <= 0:
        return replace(state, looked_at=now)
    passed_s = math.inf if state.looked_at is None else max(0.0, now - state.looked_at)
    kept = math.exp(-passed_s / MEMORY_S) if state.kv_per_session else 0.0
    mean = kept * state.kv_per_session + (1 - kept) * kv_per_session
    return replace(state, kv_per_session=mean, looked_at=now)


def _is_other(kv_now: float, kv_before: float) -> bool:
    if not kv_now or not kv_before:
        return False
    return not 1 / OTHER_KIND < kv_now / kv_before < OTHER_KIND
