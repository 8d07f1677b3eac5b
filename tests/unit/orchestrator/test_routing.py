"""Sessions find the replica that holds their prefix, and no replica gets more than its share."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from specserve.orchestrator.routing import (
    BOUND,
    MAX_PREFIX_BLOCKS,
    SLACK,
    Candidate,
    Demand,
    choose,
    prefix_key,
)

ADDRESSES = tuple(f"10.0.0.{number}:21200" for number in range(8))


def demand(key: bytes = b"", session: str = "s") -> Demand:
    return Demand(key, session, 16)


def idle(*addresses: str) -> list[Candidate]:
    return [Candidate(address, 0, 1.0, has_room=True) for address in addresses]


def home_of(key: bytes, addresses: tuple[str, ...] = ADDRESSES) -> str:
    address = choose(idle(*addresses), demand(key), is_known=True)
    assert address is not None
    return address


KEYS = [str(number).encode() for number in range(2000)]


def test_key_is_that_of_the_first_whole_blocks_and_of_the_tenant() -> None:
    """What follows them, and what fills no block, changes nothing; another tenant changes all."""
    head = list(range(64))
    key = prefix_key(head, 16, b"")
    assert key == prefix_key([*head, 7, 8], 16, b"") == prefix_key(head + [5] * 100, 16, b"")
    assert prefix_key(head[:47], 16, b"") == prefix_key([*head[:32], 9, 9], 16, b"")
    others = {prefix_key([1, *head[1:]], 16, b""), prefix_key(head, 16, b"a"), key}
    assert len(others) == 3
    assert prefix_key(head[:15], 16, b"") == prefix_key(head, 0, b"") == b""
    long = prefix_key(range(1000), 16, b"")  # type: ignore[arg-type]
    assert long == prefix_key(list(range(16 * MAX_PREFIX_BLOCKS)), 16, b"")


def test_same_prefix_goes_to_the_same_replica_whoever_chooses() -> None:
    """In whatever order the replicas are listed; and prefixes spread over all of them."""
    random.seed(1)
    homes = Counter[str]()
    for key in KEYS:
        home = home_of(key)
        homes[home] += 1
        shuffled = tuple(random.sample(ADDRESSES, len(ADDRESSES)))
        assert home_of(key, shuffled) == home
        assert choose(idle(*ADDRESSES), demand(key), is_known=False) == home
    assert len(homes) == len(ADDRESSES)
    assert max(homes.values()) < 1.3 * len(KEYS) / len(ADDRESSES)


@pytest.mark.parametrize("gone", ADDRESSES[:3])
def test_a_replica_that_goes_moves_its_own_share_and_no_other(gone: str) -> None:
    """A dead or draining one is not among the candidates; the others keep what they had."""
    left = tuple(address for address in ADDRESSES if address != gone)
    moved = 0
    for key in KEYS:
        before, after = home_of(key), home_of(key, left)
        assert before in (after, gone)
        moved += before == gone
    assert 0 < moved < 2 * len(KEYS) / len(ADDRESSES)


def test_home_is_kept_up_to_the_bound_and_left_beyond_it() -> None:
    """A popular prefix stays at home until that is too full, then has a second home."""
    key = KEYS[0]
    home = home_of(key)
    sessions = dict.fromkeys(ADDRESSES, 4)
    for count in range(4, 40):
        sessions[home] = count
        candidates = [Candidate(a, n, 1.0, has_room=True) for a, n in sessions.items()]
        mean = sum(c.burden for c in candidates) / len(candidates)
        chosen = choose(candidates, demand(key), is_known=True)
        if count + 1 <= BOUND * mean + SLACK:
            assert chosen == home
        else:
            left = tuple(address for address in ADDRESSES if address != home)
            assert chosen == home_of(key, left)


def test_new_prefix_costs_no_balance() -> None:
    """B191: what is cached nowhere goes to the emptiest: unlike prompts fill replicas evenly."""
    sessions = Counter(dict.fromkeys(ADDRESSES, 0))
    for key in KEYS[: 4 * len(ADDRESSES)]:
        candidates = [Candidate(a, n, 1.0, has_room=True) for a, n in sessions.items()]
        chosen = choose(candidates, demand(key), is_known=False)
        assert chosen is not None
        sessions[chosen] += 1
    assert set(sessions.values()) == {4}


def test_bound_is_kept_whatever_is_popular() -> None:
    """Prefixes by a power law, sessions that come and go: none exceeds the bound when chosen."""
    source = random.Random(7)
    sessions: dict[str, list[int]] = {address: [] for address in ADDRESSES}
    seen: set[bytes] = set()
    at_home = 0
    for now in range(6000):
        for held in sessions.values():
            held[:] = [end for end in held if end > now]
        key = KEYS[min(len(KEYS) - 1, int(source.paretovariate(0.8)) - 1)]
        candidates = [Candidate(a, len(n), 1.0, has_room=True) for a, n in sessions.items()]
        chosen = choose(candidates, demand(key), is_known=key in seen)
        assert chosen is not None
        at_home += chosen == home_of(key)
        seen.add(key)
        mean = sum(c.burden for c in candidates) / len(candidates)
        assert len(sessions[chosen]) + 1 <= BOUND * mean + SLACK
        sessions[chosen].append(now + source.randint(10, 90))
    assert at_home > 3000


def test_replica_without_room_is_the_last_choice() -> None:
    """A session that does not fit goes to its home only where it fits nowhere."""
    key = KEYS[1]
    home = home_of(key)
    full = [Candidate(a, 9, 0.0 if a == home else 0.5, has_room=a != home) for a in ADDRESSES]
    assert choose(full, demand(key), is_known=True) != home
    nowhere = [Candidate(a, 9, 0.0, has_room=False) for a in ADDRESSES]
    assert choose(nowhere, demand(key), is_known=True) == home
    assert choose(nowhere, demand(key), is_known=True, must_fit=True) is None
    assert choose([], demand(key), is_known=True) is None


@dataclass
class Orchestrator:
    """Chooses by reports that say nothing of what others have opened since."""

    reported: dict[str, int]
    num_callers: int
    opened: Counter[str] = field(default_factory=Counter)

    def open(self, session: str) -> str:
        candidates = [
            Candidate(a, n + self.num_callers * self.opened[a], 1.0, has_room=True)
            for a, n in self.reported.items()
        ]
        chosen = choose(candidates, demand(session=session), is_known=False)
        assert chosen is not None
        self.opened[chosen] += 1
        return chosen


@pytest.mark.parametrize("allow_for_others", [True, False])
def test_orchestrators_that_choose_at_once_do_not_herd(allow_for_others: bool) -> None:
    """Eight see one empty replica among four and open four sessions each on the same old reports:
    it gets about its share. (Were the others not allowed for it would get all 32.)"""
    reported = {**dict.fromkeys(ADDRESSES[:3], 12), ADDRESSES[3]: 4}
    callers = [Orchestrator(reported, 8 if allow_for_others else 1) for _ in range(8)]
    sessions = Counter(reported)
    for turn in range(4):
        for number, caller in enumerate(callers):
            sessions[caller.open(f"{turn}-{number}")] += 1
    if allow_for_others:
        assert max(sessions.values()) <= 1.25 * sum(sessions.values()) / 4
    else:
        assert sessions[ADDRESSES[3]] == 36
