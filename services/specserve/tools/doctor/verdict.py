"""Why a pair is as fast as it is, and what would make it faster.

Each cause is judged by the speedup that would be left without it, the rest as measured: they do not
add up, and each is a bound. Pure: figures in, sentences out.
"""

from __future__ import annotations

from dataclasses import dataclass

from specserve.tools.doctor.figures import Basis, Figures
from specserve.tools.doctor.prediction import Prediction, formula
from specserve.tools.doctor.status import Check, Status

MIN_ROUNDS = 5
"""With fewer rounds than this nothing is said."""

GOOD_ACCEPTANCE = 0.8
"""Per token: what a draft of the target's own kind reaches on ordinary text."""

HIGH_ACCEPTANCE = 0.6
"""From here on it is not the draft's guesses that make a pair slow."""

WORTH_NAMING = 1.05
"""A cause that is less than this part of the speedup is not named."""

FAR_FROM = 0.7
"""Below this share of the formula's speedup, what the formula leaves out is named."""

ADVICE = {
    "acceptance": "fewer draft tokens, a draft distilled on this text (`specserve distill`), or "
    "`suffix` or `ngram` where the output repeats its input",
    "draft": "a smaller draft, fewer draft tokens, `num_cached_outcomes` to draft ahead, or "
    "`ngram` or `suffix`, which need no draft model",
    "draft queue": "another draft replica",
    "transport": "draft and target nearer to the orchestrator (the network, one zone); more "
    "orchestrators where their processors are full",
    "verify": "fewer draft tokens or more targets: a verification costs more than one token's step",
    "verify queue": "another target replica",
    "lost calls": "keep those replicas: their logs say why they went or were late",
    "orchestrator": "more orchestrators, or processors for them",
    "rounds without a draft": "see their reasons: draft_lost and draft_late want drafts, more or "
    "nearer; catch_up and first rounds weigh less the longer the answers are",
}


@dataclass(frozen=True, slots=True)
class Cause:
    """One thing that takes speed."""

    name: str
    """A key of ADVICE."""
    speedup: float
    """What would be left of target-only's time without it."""


def causes(figures: Figures) -> list[Cause]:
    """Weigh every cause, the heaviest first."""
    drafted, total_s = figures.drafted, figures.stages.total_s
    k = figures.k
    good = max(1.0, formula(GOOD_ACCEPTANCE, k, 0.0) / figures.tokens_per_round)
    wide_s = drafted.verify_forward_s - figures.num_rounds * figures.target_only.forward_s
    stages = figures.stages
    without_s = {
        "acceptance": total_s - drafted.total_s * (1 - 1 / good),
        "draft": total_s - stages.draft_forward_s,
        "draft queue": total_s - stages.draft_queue_s,
        "transport": total_s - stages.draft_transport_s - stages.verify_transport_s,
        "verify": total_s - max(0.0, wide_s),
        "verify queue": total_s - stages.verify_queue_s,
        "lost calls": total_s - stages.lost_s,
        "orchestrator": total_s - stages.commit_s,
        "rounds without a draft": min(
            total_s, drafted.total_s * figures.num_tokens / figures.num_emitted_tokens
        ),
    }
    found = [Cause(name, figures.speedup_in(seconds)) for name, seconds in without_s.items()]
    return sorted(found, key=lambda cause: cause.speedup, reverse=True)


def named(figures: Figures) -> list[Cause]:
    """Return the causes that weigh something."""
    least = WORTH_NAMING * figures.speedup
    return [cause for cause in causes(figures) if cause.speedup >= least]


def judge(figures: Figures, prediction: Prediction) -> list[Check]:
    """Say whether speculation pays, and whether it pays as it should."""
    if figures.num_rounds < MIN_ROUNDS:
        found = f"{figures.num_rounds} rounds with draft tokens are too few to judge"
        return [Check("speed", Status.NOTE, found)]
    speedup, heavy = figures.speedup, named(figures)
    because = f"; mostly {heavy[0].name}" if heavy else ""
    basis = "at most " if figures.target_only.basis is Basis.VERIFICATION else ""
    said = (
        f"{basis}{speedup:.2f} x target-only ({1e3 * figures.token_s:.2f} ms a token, "
        f"{1e3 * figures.target_only.token_s:.2f} ms without speculation)"
    )
    checks = []
    if speedup < 1:
        checks.append(Check("speed", Status.PROBLEM, f"{said}: slower than without{because}"))
    elif speedup < FAR_FROM * prediction.formula:
        far = f"{said}; {prediction.formula:.2f} x by the formula{because}"
        checks.append(Check("speed", Status.NOTE, far))
    else:
        checks.append(Check("speed", Status.OK, said))
    checks.append(_high_but_slow(figures, heavy))
    return checks


def _high_but_slow(figures: Figures, heavy: list[Cause]) -> Check:
    name, share = "acceptance and speed", f"{figures.acceptance:.0%} of the draft tokens looked at"
    if figures.acceptance < HIGH_ACCEPTANCE or figures.speedup >= 1:
        return Check(name, Status.OK, f"{share} are accepted; no high acceptance beside low speed")
    others = [cause.name for cause in heavy if cause.name != "acceptance"]
    found = f"{share} are accepted, and it is slower: {', '.join(others[:2]) or 'no one stage'}"
    return Check(name, Status.PROBLEM, found)


def what_would_pay(figures: Figures, prediction: Prediction) -> list[str]:
    """Say what to change, what promises most first."""
    lines = []
    best, k = prediction.best_k, prediction.k
    promised = prediction.by_k[best]
    if best == 0:
        lines.append(
            f"no speculation: 1.00 x, where the cost model expects {prediction.at_k:.2f} x of "
            f"K = {k} (`specserve speculation off`, or `auto`, which chooses K = 0 by itself)"
        )
    elif best != k and promised >= WORTH_NAMING * prediction.at_k:
        lines.append(
            f"K = {best}: {promised:.2f} x by the cost model, {prediction.at_k:.2f} x at the "
            f"present K = {k} (`specserve speculation auto` lets K follow)"
        )
    lines += [
        f"{cause.name}: {cause.speedup:.2f} x at most {_without(cause.name)}; {ADVICE[cause.name]}"
        for cause in named(figures)[:4]
    ]
    return lines


def _without(name: str) -> str:
    return f"at {GOOD_ACCEPTANCE:g} a token" if name == "acceptance" else "without it"
