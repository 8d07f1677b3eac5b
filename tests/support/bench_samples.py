"""Measured values for tests of benchmarks, made by hand: samples, waves, and sides of a pair."""

from __future__ import annotations

from collections.abc import Sequence

from specserve.tools.bench.sample import BenchPrompt, Sample, Speculated, Wave
from specserve.tools.load.arrivals import Pacing


def prompt(number: int, category: str = "chat") -> BenchPrompt:
    """Make a prompt of three tokens."""
    return BenchPrompt(f"p{number}", category, f"prompt {number}", (5, 6, 7))


def sample(
    number: int = 0,
    *,
    sizes: Sequence[int] = (1, 3, 2),
    gap_s: float = 0.1,
    drafted: Sequence[int] = (4, 4),
    accepted: Sequence[int] = (2, 1),
    category: str = "chat",
    error: str = "",
) -> Sample:
    """Make a request whose blocks come `gap_s` apart: one plain token, then rounds with drafts."""
    if error:
        return Sample(f"p{number}", category, 3, error=error)
    at = tuple(gap_s * (index + 1) for index in range(len(sizes)))
    full = [a == d for d, a in zip(drafted, accepted, strict=True)]
    num_plain = sum(sizes) - sum(accepted) - len(drafted)
    origins = [*["plain"] * num_plain]
    for is_full, count in zip(full, accepted, strict=True):
        origins += [*["accepted"] * count, "bonus" if is_full else "recovered"]
    return Sample(
        f"p{number}",
        category,
        3,
        block_at_s=at,
        block_sizes=tuple(sizes),
        e2e_s=at[-1],
        origins=tuple(origins),
        speculated=Speculated(
            per_step_drafted=tuple(drafted),
            per_step_accepted=tuple(accepted),
            num_plain_steps=num_plain,
            num_recovered_tokens=full.count(False),
            num_bonus_tokens=full.count(True),
            num_plain_tokens=num_plain,
            stage_s={"draft_s": 0.05, "verify_s": 0.2},
        ),
    )


def wave(num_tokens: int, seconds: float, *, error: str = "", gap_s: float | None = None) -> Wave:
    """Make a wave of one request that took so long for so many tokens."""
    gap = seconds / num_tokens if gap_s is None else gap_s
    made = sample(sizes=(1,) * num_tokens, gap_s=gap, drafted=(), accepted=(), error=error)
    return Wave((made,), seconds)


class ScriptedArm:
    """A side whose waves the test chooses, in turn; it says when it ran."""

    deployment = "scripted"

    def __init__(
        self,
        name: str,
        waves: Sequence[Wave],
        log: list[str] | None = None,
        num_speculative_tokens: int | None = None,
    ) -> None:
        self.name = name
        self.num_speculative_tokens = num_speculative_tokens
        self.asked: list[list[str]] = []
        self.labels: list[str] = []
        self._waves = list(waves)
        self._log = log if log is not None else []

    async def run(self, prompts: Sequence[BenchPrompt], pacing: Pacing, label: str) -> Wave:
        """Return the next wave."""
        self._log.append(self.name)
        self.asked.append([each.prompt_id for each in prompts])
        self.labels.append(label)
        return self._waves[(len(self.asked) - 1) % len(self._waves)]
