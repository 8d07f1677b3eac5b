"""Which fault comes when: drawn from a seed, every kind before any comes too often.

Knows kinds and weights; knows no cluster.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Protocol, TypeVar


class Kind(Protocol):
    """What a plan needs to know of a fault."""

    @property
    def kind(self) -> str: ...

    @property
    def weight(self) -> int: ...


KindT = TypeVar("KindT", bound=Kind)


def draw(faults: Sequence[KindT], chance: random.Random) -> Iterator[KindT]:
    """Give faults without end: in each deck every kind comes as often as its weight says.

    The first deck has each kind once, so that a short run sees them all.
    """
    deck = list(faults)
    while True:
        chance.shuffle(deck)
        yield from deck
        deck = [fault for fault in faults for _ in range(fault.weight)]
