"""A recorded request as text: a line per round with its stages drawn, then totals and shares.

Pure: a view in, lines out. Knows no terminal and asks nobody.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from specserve.rpc.request_view import RequestView, RoundView, StageSeconds
from specserve.tools.terminal import table

WIDTH = 48
"""Columns of the drawing."""

MAX_ROUNDS = 200
"""Rounds drawn; of more, the longest ones, in order."""

MARKS = {
    "draft_queue_s": "q",
    "draft_forward_s": "d",
    "draft_transport_s": "t",
    "lost_s": "!",
    "verify_queue_s": "q",
    "verify_forward_s": "v",
    "verify_transport_s": "t",
    "commit_s": "c",
}
"""How a stage is drawn, in the order of a round."""

LONGER = ">"
"""Ends a round that is longer than the width."""

MAX_MEDIANS = 4
"""One round that waited long must not make all others invisible."""

OVERLAP = "x"
"""Drawn where the target verified while the draft drafted ahead for the next round."""

NAMES = {
    "draft_forward_s": "draft: forwards",
    "draft_queue_s": "draft: queue",
    "draft_transport_s": "draft: transport",
    "verify_forward_s": "verify: forwards",
    "verify_queue_s": "verify: queue",
    "verify_transport_s": "verify: transport",
    "lost_s": "lost calls, late or moved",
    "commit_s": "decide, accept, commit",
}

LEGEND = (
    "d draft  v verify  x verify with the draft drafting ahead  t transport  q queue  "
    "c commit  ! lost"
)


def lines_of(view: RequestView) -> list[str]:
    """Write one choice."""
    return [*_head(view), "", *_rounds(view), "", *_totals(view)]


def _head(view: RequestView) -> list[str]:
    ended = {"finished": f"finished: {view.finish_reason}", "failed": f"failed: {view.error}"}
    drafted, accepted = view.num_draft_tokens, view.num_accepted_draft_tokens
    rate = f", {accepted}/{drafted} draft tokens accepted" if drafted else ""
    sampled = " (sampled)" if view.sampled else ""
    prompt = f"prompt {view.prompt_length} tokens ({view.cached_prompt_tokens} cached)"
    rounds = f"{view.num_rounds} rounds, K at most {view.num_speculative_tokens}"
    lines = [
        f"request {view.request_id}  {ended.get(view.state, view.state)}",
        f"trace {view.trace_id}{sampled}",
        f"{prompt}, output {view.num_output_tokens} of at most {view.max_tokens}",
        f"{rounds} by {view.method or 'no proposer'}{rate}",
        f"{_ms(view.total_s)} in all, of which {_ms(view.queue_s)} before the first round",
    ]
    if view.attempt:
        lines.append(
            f"attempt {view.attempt + 1}: another orchestrator was lost after "
            f"{view.carried_over_length} tokens"
        )
    if view.num_target_reopens or view.num_late_proposals:
        lines.append(
            f"target sessions opened anew: {view.num_target_reopens}, "
            f"proposals too late: {view.num_late_proposals}"
        )
    return lines


def _rounds(view: RequestView) -> list[str]:
    rounds = list(enumerate(view.rounds))
    if len(rounds) > MAX_ROUNDS:
        longest = sorted(rounds, key=lambda pair: pair[1].wall_s, reverse=True)[:MAX_ROUNDS]
        rounds = sorted(longest, key=lambda pair: pair[0])
    scale = _scale([round_.wall_s for _, round_ in rounds])
    rows = []
    for number, round_ in rounds:
        following = view.rounds[number + 1] if number + 1 < len(view.rounds) else None
        rows.append(
            (
                str(number + 1),
                f"{1e3 * round_.began_s:.1f}",
                f"{1e3 * round_.wall_s:.1f}",
                f"{round_.num_speculative_tokens} {round_.reason}",
                f"{round_.num_accepted_tokens}/{round_.num_draft_tokens}",
                f"+{round_.num_emitted_tokens}",
                drawing(round_, following, scale),
                _notes(round_),
            )
        )
    if not rows:
        return ["no round is remembered"]
    width = f"the width is {_ms(scale)}, > is longer"
    header = ("round", "at ms", "ms", "K and why", "acc.", "out", width, "")
    left_out = len(view.rounds) - len(rows) + view.num_rounds_left_out
    more = [f"{left_out} more rounds are not shown"] if left_out else []
    return [table(header, rows), *more, LEGEND]


def drawing(round_: RoundView, following: RoundView | None, scale: float) -> str:
    """Draw a round's stages to scale: `scale` seconds fill WIDTH columns."""
    if scale <= 0:
        return ""
    text = ""
    done_s = 0.0
    for name, mark in MARKS.items():
        done_s += getattr(round_.stages, name)
        # By where each ends, so that rounding errors never add up.
        text += mark * (round(WIDTH * done_s / scale) - len(text))
    hidden_s = 0.0
    if following is not None:
        hidden_s = sum(call.hidden_s for call in following.calls)
    hidden = min(round(WIDTH * hidden_s / scale), text.count("v"))
    text = text.replace("v", OVERLAP, hidden)
    return text if len(text) <= WIDTH else text[: WIDTH - 1] + LONGER


def _scale(walls_s: Sequence[float]) -> float:
    """Choose what fills the width: the longest round, but no more than a few ordinary ones."""
    if not walls_s:
        return 0.0
    return min(max(walls_s), MAX_MEDIANS * statistics.median(walls_s))


def _notes(round_: RoundView) -> str:
    notes = [] if round_.proposer in (None, "draft_model") else [str(round_.proposer)]
    for call in round_.calls:
        if call.error:
            notes.append(f"{call.replica_id}: {call.error}")
        elif call.service == "target":
            notes.append(f"{call.rows} rows, batch {call.batch_size}")
        elif call.is_background:
            notes.append("draft catches up beside")
        elif call.hidden_tokens:
            notes.append(f"{call.hidden_tokens} drafted ahead")
    return ", ".join(notes)


def _totals(view: RequestView) -> list[str]:
    total_s = view.stages.total_s
    rows = [
        (name, _ms(seconds), f"{100 * seconds / total_s:.1f} %")
        for name, seconds in _by_size(view.stages)
        if seconds > 0
    ]
    if not rows:
        return []
    tokens = sum(round_.num_emitted_tokens for round_ in view.rounds)
    lines = [table(("stage", "in all", "share"), rows)]
    if view.overlap_s > 0:
        lines.append(f"drafted beside it, waited for by nobody: {_ms(view.overlap_s)}")
    if tokens:
        lines.append(f"{_ms(total_s / tokens)} per token, {tokens / len(view.rounds):.2f} a round")
    replicas = sorted({(c.service, c.replica_id, c.revision) for r in view.rounds for c in r.calls})
    lines += [f"{service} {replica} {revision}" for service, replica, revision in replicas]
    return lines


def _by_size(stages: StageSeconds) -> Sequence[tuple[str, float]]:
    pairs = [(text, float(getattr(stages, name))) for name, text in NAMES.items()]
    return sorted(pairs, key=lambda pair: pair[1], reverse=True)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms" if seconds < 10 else f"{seconds:.1f} s"
