"""When requests are due: arrivals that do not wait for answers, and closed loops that do.

Pure: numbers in, offsets out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

ArrivalProcess = Literal["poisson", "constant", "gamma"]


@dataclass(frozen=True, slots=True)
class Pacing:
    """How requests are sent: either field is set, never both."""

    concurrency: int | None = None
    """Closed loop: so many at once, the next one when one ends."""
    arrival_rate: float | None = None
    """Open loop: requests per second, whatever the answers do."""

    def __str__(self) -> str:
        if self.arrival_rate is not None:
            return f"{self.arrival_rate:g} requests/s"
        return f"concurrency {self.concurrency}"


def arrival_offsets(
    rate: float,
    count: int,
    seed: int,
    process: ArrivalProcess = "poisson",
    burstiness: float = 1.0,
) -> list[float]:
    """Draw when each of `count` requests is due, in seconds from the start, the first at 0.

    Args:
        rate: requests per second in the mean.
        seed: the same seed gives the same arrivals.
        process: poisson has exponential gaps, constant equal ones, gamma those of `burstiness`.
        burstiness: shape of the gamma gaps: 1 is poisson, below 1 comes in bursts, above is
            more even.
    """
    if process == "constant":
        return [index / rate for index in range(count)]
    shape = burstiness if process == "gamma" else 1.0
    gaps = np.random.default_rng(seed).gamma(shape, 1 / (rate * shape), max(0, count - 1))
    return [0.0, *np.cumsum(gaps).tolist()][:count]


def offsets_within(
    rate: float,
    duration_s: float,
    seed: int,
    process: ArrivalProcess = "poisson",
    burstiness: float = 1.0,
) -> list[float]:
    """Draw when requests are due until `duration_s` is over; at least one is."""
    count = max(1, round(rate * duration_s))
    while True:
        offsets = arrival_offsets(rate, count, seed, process, burstiness)
        if offsets[-1] >= duration_s or process == "constant":
            return [offset for offset in offsets if offset < duration_s]
        # The same seed draws the same gaps again, and more of them.
        count *= 2
