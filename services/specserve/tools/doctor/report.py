"""What the doctor found out about a running pair, as JSON values and as lines for people.

Values in, text out; asks nobody and judges nothing.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from specserve.tools.doctor.figures import Figures
from specserve.tools.doctor.prediction import Prediction
from specserve.tools.doctor.status import Check, Status
from specserve.tools.doctor.verdict import GOOD_ACCEPTANCE, causes
from specserve.tools.terminal import table
from specserve.tools.waterfall import NAMES


@dataclass(frozen=True, slots=True)
class Report:
    """What was found."""

    checks: list[Check]
    figures: Figures | None
    prediction: Prediction | None
    pays: list[str]
    """What would make it faster, what promises most first."""

    @property
    def is_well(self) -> bool:
        """No check is a problem."""
        return all(check.status is not Status.PROBLEM for check in self.checks)

    def as_json(self) -> dict[str, Any]:
        """Return the values for `--json`."""
        speed: dict[str, Any] | None = None
        if self.figures is not None and self.prediction is not None:
            figures = self.figures
            speed = {
                "speedup": figures.speedup,
                "token_s": figures.token_s,
                "target_only_token_s": figures.target_only.token_s,
                "target_only_basis": figures.target_only.basis.value,
                "num_requests": figures.num_requests,
                "num_rounds": figures.num_rounds,
                "num_draft_tokens_per_round": figures.k,
                "tokens_per_round": figures.tokens_per_round,
                "acceptance": figures.acceptance,
                "draft_cost": figures.draft_cost,
                "stages": _shares(figures),
                "rounds_without_draft": figures.reasons,
                "lost_calls": figures.lost,
                "predicted": dataclasses.asdict(self.prediction),
            }
        checks = [check.as_json() for check in self.checks]
        return {"checks": checks, "speed": speed, "what_would_pay": self.pays}

    def lines(self) -> list[str]:
        """Lay the figures out for people; the checks are the caller's to show."""
        figures, prediction = self.figures, self.prediction
        if figures is None or prediction is None:
            return []
        rows = [
            (
                NAMES[name],
                f"{1e3 * s:.2f} ms",
                f"{100 * share:.1f} %",
                f"{figures.speedup_in(s_):.2f}",
            )
            for name, (s, share, s_) in _stage_rows(figures)
        ]
        at_best = next(one.speedup for one in causes(figures) if one.name == "acceptance")
        head = (
            f"{figures.num_requests} requests, {figures.num_rounds} rounds with draft tokens: "
            f"K = {figures.k:.1f}, {figures.tokens_per_round:.2f} tokens a round, "
            f"a = {figures.acceptance:.2f}, c = {figures.draft_cost:.2f}"
        )
        rows.append((f"acceptance of {GOOD_ACCEPTANCE:g} a token", "", "", f"{at_best:.2f}"))
        lines = [head, f"target-only by {figures.target_only.basis}"]
        lines += ["", table(("stage", "a token", "share", "speedup without it, or with"), rows), ""]
        if figures.reasons:
            said = ", ".join(f"{reason} {count}" for reason, count in figures.reasons.items())
            lines.append(f"rounds without draft tokens: {said}")
        if figures.lost:
            said = ", ".join(f"{name} ({count})" for name, count in figures.lost.items())
            lines.append(f"lost calls: {said}")
        lines.append(
            f"predicted: {prediction.formula:.2f} x by (1 - a^(K+1)) / ((1 - a)(1 + cK)), "
            f"{prediction.at_k:.2f} x by the cost model, whose best is K = {prediction.best_k} "
            f"with {prediction.by_k[prediction.best_k]:.2f} x; measured {figures.speedup:.2f} x"
        )
        if self.pays:
            lines += ["what would pay:", *(f"  {line}" for line in self.pays)]
        return lines


def _stage_rows(figures: Figures) -> list[tuple[str, tuple[float, float, float]]]:
    """Return (field, (seconds a token, share, all seconds without it)), the heaviest first."""
    total_s = figures.stages.total_s
    seconds = {name: float(getattr(figures.stages, name)) for name in NAMES}
    return [
        (name, (s / figures.num_tokens, s / total_s, total_s - s))
        for name, s in sorted(seconds.items(), key=lambda pair: pair[1], reverse=True)
        if s > 0
    ]


def _shares(figures: Figures) -> dict[str, dict[str, float]]:
    return {
        name: {"token_s": token_s, "share": share, "speedup_without": figures.speedup_in(rest_s)}
        for name, (token_s, share, rest_s) in _stage_rows(figures)
    }
