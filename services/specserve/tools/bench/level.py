"""One load level: every side runs the same prompts, turn by turn, and pairs are compared.

Knows sides as something that runs prompts; knows no service and no peer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from specserve.tools.bench.host import ProcessorMeter
from specserve.tools.bench.sample import BenchPrompt, Wave, joined
from specserve.tools.bench.statistics import (
    Interval,
    Work,
    rate,
    ratio_of_rates,
    relative_difference,
)
from specserve.tools.bench.summary import Summary, summarise
from specserve.tools.load.arrivals import Pacing

Notify = Callable[[str, float], None]
"""Told what is being done and which share of it is done."""


class Arm(Protocol):
    """One side of a comparison: a setting of a running system, or a peer."""

    @property
    def name(self) -> str:
        """What reports call it."""
        ...

    @property
    def deployment(self) -> str:
        """Name of the system it runs on, as the conditions list it."""
        ...

    @property
    def num_speculative_tokens(self) -> int | None:
        """K that each request asks for; None takes what is configured."""
        ...

    async def run(self, prompts: Sequence[BenchPrompt], pacing: Pacing, label: str) -> Wave:
        """Decode the prompts and measure them.

        Args:
            label: part of every request id; unique within the run.
        """
        ...


@dataclass(frozen=True, slots=True)
class LevelPlan:
    """How one level is measured."""

    pacing: Pacing
    num_pairs: int
    requests_per_wave: int
    """Prompts that each side runs in one pair."""
    padding_credit: float | None = None
    """As measured beforehand; see Level."""
    num_unmeasured: int = 0
    """Pairs before those that are measured, on the same prompts: a side that learns the load has
    met it then."""

    @property
    def requests_per_turn(self) -> int:
        """Prompts after which another side comes.

        One after the other they are as well measured by turns: what the machine does meanwhile,
        from one second to the next, is then the same for all sides.
        """
        return 1 if self.pacing.concurrency == 1 else self.requests_per_wave


@dataclass(frozen=True, slots=True)
class ArmResult:
    """One side."""

    name: str
    deployment: str
    num_speculative_tokens: int | None
    summary: Summary


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two sides, pair by pair."""

    left: str
    right: str
    ratio: Interval | None
    """Tokens/s of the left over tokens/s of the right; None when a side brought no tokens."""
    halves: tuple[float, float] | None
    """The ratio in the first and in the second half of the pairs; None with fewer than four."""
    half_difference: float | None
    """How far the halves lie apart, in shares of the smaller."""


@dataclass(frozen=True, slots=True)
class Level:
    """What one level showed."""

    pacing: Pacing
    requests_per_wave: int
    num_pairs: int
    """Whole pairs measured."""
    prompts_reused: bool
    """Some prompt was measured more than once on a side: what remembers answers gains from that."""
    arms: tuple[ArmResult, ...]
    comparisons: tuple[Comparison, ...]
    padding_credit: float | None
    """Time of a one-row step of the target over that of its best padded one, 1 or more: how much
    faster target-only could be with padding. None when it was not measured."""
    others_cpu_share: float
    """Share of the machine's processor time that processes not of this run took meanwhile."""
    complete: bool
    """All planned pairs were measured."""

    def arm(self, name: str) -> ArmResult | None:
        """Return one side, if it is there."""
        return next((arm for arm in self.arms if arm.name == name), None)

    def comparison(self, left: str, right: str) -> Comparison | None:
        """Return one comparison, if it is there."""
        return next((c for c in self.comparisons if (c.left, c.right) == (left, right)), None)


async def run_level(
    arms: Sequence[Arm],
    prompts: Sequence[BenchPrompt],
    plan: LevelPlan,
    keep: Callable[[Level], None],
    notify: Notify,
    *,
    label: str = "",
) -> Level:
    """Measure all sides at one level; the sides change their order from turn to turn.

    Args:
        keep: given the level when it ends, also one that is cut short, with its whole pairs.
    """
    meter = ProcessorMeter()
    waves: dict[str, list[Wave]] = {arm.name: [] for arm in arms}
    title = f"{label}{plan.pacing}"
    num_turns = -(-plan.requests_per_wave // plan.requests_per_turn)
    num_done = 0

    def level() -> Level:
        cut = {name: own[:num_done] for name, own in waves.items()}
        return _level(arms, cut, plan, len(prompts), meter.others_share())

    try:
        for pair in range(-plan.num_unmeasured, plan.num_pairs):
            first = max(0, pair) * plan.requests_per_wave
            chosen = [
                prompts[(first + index) % len(prompts)] for index in range(plan.requests_per_wave)
            ]
            parts: dict[str, list[Wave]] = {arm.name: [] for arm in arms}
            for turn in range(num_turns):
                begin = turn * plan.requests_per_turn
                asked = chosen[begin : begin + plan.requests_per_turn]
                for place, arm in enumerate(order_of(arms, pair * num_turns + turn)):
                    done = (turn + place / len(arms)) / num_turns
                    notify(title, max(0.0, (pair + done) / plan.num_pairs))
                    own = f"{label}{plan.pacing}-{pair}.{turn}-{arm.name}".replace(" ", "-")
                    parts[arm.name].append(await arm.run(asked, plan.pacing, own))
            if pair >= 0:
                for name, own_parts in parts.items():
                    waves[name].append(joined(own_parts))
            num_done = max(0, pair + 1)
    finally:
        if num_done:
            keep(level())
    notify(title, 1.0)
    return level()


def order_of(arms: Sequence[Arm], turn: int) -> list[Arm]:
    """Return the order of one turn: every side comes first equally often, and after each other."""
    shift = turn % len(arms)
    turned = [*arms[shift:], *arms[:shift]]
    return turned if (turn // len(arms)) % 2 == 0 or len(arms) < 3 else turned[::-1]


def compare(left: str, right: str, waves: dict[str, list[Wave]]) -> Comparison:
    """Compare two sides over their pairs."""
    ours, theirs = ([_work(wave) for wave in waves[name]] for name in (left, right))
    half = len(ours) // 2
    halves = None
    if half >= 2:
        first, second = (
            (rate(ours[part]), rate(theirs[part])) for part in (slice(half), slice(half, None))
        )
        if all((*first, *second)):
            halves = (first[0] / first[1], second[0] / second[1])
    return Comparison(
        left,
        right,
        ratio_of_rates(ours, theirs),
        halves,
        None if halves is None else relative_difference(*halves),
    )


def _level(
    arms: Sequence[Arm],
    waves: dict[str, list[Wave]],
    plan: LevelPlan,
    num_prompts: int,
    others_cpu_share: float,
) -> Level:
    num_pairs = len(waves[arms[0].name])
    return Level(
        pacing=plan.pacing,
        requests_per_wave=plan.requests_per_wave,
        num_pairs=num_pairs,
        prompts_reused=num_pairs * plan.requests_per_wave > num_prompts,
        arms=tuple(
            ArmResult(
                arm.name, arm.deployment, arm.num_speculative_tokens, summarise(waves[arm.name])
            )
            for arm in arms
        ),
        comparisons=tuple(
            compare(left.name, right.name, waves)
            for number, left in enumerate(arms)
            for right in arms[number + 1 :]
        ),
        padding_credit=plan.padding_credit,
        others_cpu_share=others_cpu_share,
        complete=num_pairs == plan.num_pairs,
    )


def _work(wave: Wave) -> Work:
    return Work(wave.num_tokens, wave.wall_s)
