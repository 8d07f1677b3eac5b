"""What a run has seen: requests by verdict, faults by kind, and the worst pause under each.

Knows outcomes and times; knows no service.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from chaos.client import Outcome

SHOWN = 5
"""Details that are printed of each verdict."""

AFTERMATH_S = 2.0
"""How long after a fault was mended a pause is still put down to it."""

SEEN_S = 0.3
"""A stream's last token may have come so long before the fault that stopped it."""


@dataclass(slots=True)
class Harm:
    """One fault that happened."""

    kind: str
    began: float
    ended: float = float("inf")


@dataclass(slots=True)
class Tally:
    """One stage's counts."""

    name: str
    num_requests_wanted: int = 0
    num_faults_wanted: int = 0
    kinds: tuple[str, ...] = ()
    """Kinds of which none may be missing."""
    verdicts: Counter[str] = field(default_factory=Counter)
    details: dict[str, list[str]] = field(default_factory=dict)
    num_retries: int = 0
    harms: list[Harm] = field(default_factory=list)
    missed: Counter[str] = field(default_factory=Counter)
    bounds: dict[str, float] = field(default_factory=dict)
    """Longest pause to put up with by kind, seconds."""
    leaks: list[str] = field(default_factory=list)
    troubles: list[str] = field(default_factory=list)
    """What went wrong in the doing, such as a process that did not end."""
    worst: dict[str, float] = field(default_factory=dict)
    """Longest pause of any stream by the kind of fault that was on, seconds."""
    near_ties: int = 0

    def add(self, outcome: Outcome) -> None:
        """Take a request's outcome."""
        self.verdicts[outcome.verdict] += 1
        self.num_retries += outcome.num_retries
        self.near_ties += outcome.num_near_ties
        if outcome.verdict not in ("right", "left"):
            self.details.setdefault(outcome.verdict, []).append(outcome.detail)
        for began, seconds in outcome.pauses:
            kind = self._kind_at(began, began + seconds)
            if seconds > self.worst.get(kind, 0.0):
                self.worst[kind] = seconds

    def _kind_at(self, began: float, ended: float) -> str:
        """Name the fault that a pause is put down to.

        Of those that were on it is the last to begin before the pause did, else the first after.
        """
        on = [
            harm for harm in self.harms if harm.began <= ended and began <= harm.ended + AFTERMATH_S
        ]
        before = [harm for harm in on if harm.began <= began + SEEN_S]
        if before:
            return max(before, key=lambda harm: harm.began).kind
        return min(on, key=lambda harm: harm.began).kind if on else "(none)"

    @property
    def num_requests(self) -> int:
        """Requests that were sent, whatever became of them."""
        return self.verdicts.total()

    def faults(self) -> Counter[str]:
        """Count faults by kind."""
        return Counter(harm.kind for harm in self.harms)

    @property
    def is_enough(self) -> bool:
        """Whether as much was sent and broken as was asked for."""
        counts = self.faults()
        return (
            self.num_requests >= self.num_requests_wanted
            and counts.total() >= self.num_faults_wanted
            and all(counts[kind] for kind in self.kinds)
        )

    def faults_found(self) -> list[str]:
        """List why this stage did not pass; empty when it did."""
        found = [
            f"{self.verdicts[verdict]} {verdict}"
            for verdict in ("failed", "mismatched", "lost")
            if self.verdicts[verdict]
        ]
        found += [f"leaked: {leak}" for leak in self.leaks] + self.troubles
        if self.num_requests < self.num_requests_wanted:
            found.append(f"{self.num_requests} requests of {self.num_requests_wanted}")
        counts = self.faults()
        if counts.total() < self.num_faults_wanted:
            found.append(f"{counts.total()} faults of {self.num_faults_wanted}")
        found += [
            f"{kind}: a pause of {self.worst[kind]:.1f} s, {bound:.1f} s at most was wanted"
            for kind, bound in self.bounds.items()
            if self.worst.get(kind, 0.0) > bound
        ]
        found += [f"no fault of kind {kind!r}" for kind in self.kinds if not counts[kind]]
        return found

    def lines(self) -> Iterable[str]:
        """Write the stage's table."""
        yield f"{self.name}"
        for verdict in ("right", "left", "failed", "mismatched", "lost"):
            yield f"  {verdict:<34} {self.verdicts[verdict]:>7}"
        yield f"  {'requests':<34} {self.num_requests:>7}"
        yield f"  {'asked again (gateway lost)':<34} {self.num_retries:>7}"
        if self.near_ties:
            yield f"  {'near ties (allowed)':<34} {self.near_ties:>7}"
        yield f"  {'leaks':<34} {len(self.leaks):>7}"
        yield f"  {'fault':<34} {'times':>7} {'worst pause s':>14}"
        counts = self.faults()
        for kind in sorted(counts.keys() | set(self.kinds)):
            worst = self.worst.get(kind, 0.0)
            bound = f"  of {self.bounds[kind]:.1f}" if kind in self.bounds else ""
            yield f"  {kind:<34} {counts[kind]:>7} {worst:>14.2f}{bound}"
        yield f"  {'faults':<34} {counts.total():>7}"
        yield f"  {'no fault at the time':<34} {'':>7} {self.worst.get('(none)', 0.0):>14.2f}"
        for verdict, details in self.details.items():
            for detail in details[:SHOWN]:
                yield f"  {verdict}: {detail}"
