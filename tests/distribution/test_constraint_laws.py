"""The standard rule keeps the law under constraints that change inside a block.

Both engines play whole rounds; the law is enumerated by the slow recount. Chi-square at nominal
odds of 1e-7 (false alarm below 1e-6 a test; seeds are fixed); each planted fault must push the same
statistic over the same bound.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from distribution.simulator import Fit, fit
from specserve.model.messages import ProposeReply, Release, VerifyReply
from specserve.model.session import KvSession
from specserve.model.target_calls import VerifyState
from specserve.model.toy import ToySpec, toy_logits
from specserve.model.toy_tokenizer import ToyTokenizer
from specserve.speculation.acceptance import accept
from specserve.speculation.randomness import Purpose, uniforms
from specserve.speculation.row_edits import RowEdits
from specserve.speculation.types import AcceptanceRule, Proposal, SamplingParams, TargetScores
from support.constrained import Wanted, slow_row
from support.engines import Caller, run, toy_engine

TARGET = "toy:vocab_size=4,seed=11,order=1,sharpness=1.0"
DRAFT = f"{TARGET},noise=0.8,noise_seed=3"
PROMPT = (1, 3)
LENGTH = 4
NUM_SEQUENCES = 10_000
NUM_TOGETHER = 250
K = 3

PENALTIES = Wanted(repetition_penalty=1.6, presence_penalty=0.5, frequency_penalty=0.9)
BANS = Wanted(
    bad_words=[(2, 1), (3, 3, 0)], min_tokens=2, logit_bias={3: 0.8}, frequency_penalty=-0.5
)
ALLOWED = Wanted(allowed_token_ids=[0, 1, 3], presence_penalty=0.9)

GRAMMAR = Wanted(
    regex="(a| b){1,2}a?",
    letters=" ab",
    token_bytes=ToyTokenizer(ToySpec.parse(TARGET)).token_table().token_bytes,
    presence_penalty=0.4,
)


def law_of(wanted: Wanted) -> dict[tuple[int, ...], float]:
    """Enumerate target-only sampling, EOS a token like the others."""
    spec = ToySpec.parse(TARGET)
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LENGTH):
        longer: dict[tuple[int, ...], float] = {}
        for output, probability in law.items():
            logits = toy_logits(spec, [*PROMPT, *output])
            weights = np.exp(np.array(slow_row(logits.tolist(), PROMPT, output, wanted)))
            # Behind a text that cannot be, nothing need be allowed.
            for token, p in enumerate(weights / weights.sum() if probability else 0.0 * weights):
                longer[(*output, token)] = probability * float(p)
        law = longer
    return law


def together(first_seed: int, wanted: Wanted, engines: Sequence[Any]) -> Iterator[list[int]]:
    """Play NUM_TOGETHER sequences in one batch."""
    draft, target = engines
    constraints = wanted.constraints(len(PROMPT))
    sides: list[tuple[int, Caller, Caller]] = []
    for seed in range(first_seed, first_seed + NUM_TOGETHER):
        params = SamplingParams(AcceptanceRule.STANDARD, seed, 0, constraints=constraints)
        sides.append((seed, *(Caller(str(seed), PROMPT, params) for _ in range(2))))
    live = sides
    while live:
        proposals = {r.session_id: r for r in run(draft, *(d.propose(K) for _, d, _ in live))}
        calls = []
        for seed, _, on_target in live:
            proposed = proposals[str(seed)]
            assert isinstance(proposed, ProposeReply), proposed
            calls.append(on_target.verify(proposed.draft_token_ids, proposed.draft_probs))
        scored = {r.session_id: r for r in run(target, *calls)}
        for seed, on_draft, on_target in live:
            proposed, reply = proposals[str(seed)], scored[str(seed)]
            assert isinstance(proposed, ProposeReply)
            assert isinstance(reply, VerifyReply), reply
            drafted = proposed.draft_token_ids
            verdict = accept(
                Proposal(drafted, proposed.draft_probs),
                TargetScores(reply.target_probs.tolist(), reply.replacement_token_ids),
                uniforms(seed, 0, len(on_target.committed), len(drafted), Purpose.ACCEPT),
                AcceptanceRule.STANDARD,
            )
            emitted = [*drafted[: verdict.num_accepted], verdict.next_token_id]
            on_target.heard(reply, verdict.num_accepted)
            on_draft.heard(proposed, verdict.num_accepted)
            for caller in (on_draft, on_target):
                caller.committed.append(emitted)
        live = [side for side in live if len(side[2].committed) < len(PROMPT) + LENGTH]
    for seed, _, on_target in sides:
        for engine in engines:
            run(engine, Release(str(seed)))
        yield on_target.committed.slice(len(PROMPT), len(PROMPT) + LENGTH)


def played(wanted: Wanted) -> Fit:
    """Compare what the engines play with the law."""
    settings = {"max_num_seqs": NUM_TOGETHER, "num_kv_blocks": 4 * NUM_TOGETHER}
    engines = [toy_engine("draft", DRAFT, **settings), toy_engine("target", TARGET, **settings)]
    sequences = [
        sequence
        for first in range(1, NUM_SEQUENCES, NUM_TOGETHER)
        for sequence in together(first, wanted, engines)
    ]
    assert len(sequences) == NUM_SEQUENCES
    return fit(np.array(sequences), law_of(wanted))


@pytest.mark.slow
@pytest.mark.parametrize(
    "wanted",
    [PENALTIES, BANS, ALLOWED, GRAMMAR],
    ids=["penalties", "bans", "allowed", "grammar"],
)
def test_b023_b025_the_law_is_that_of_target_only_sampling(wanted: Wanted) -> None:
    """Whole sequences of 4 tokens with K = 3: rows 1 to 3 of a block see the draft before them."""
    result = played(wanted)

    assert result.holds, result


ROW_EDITS = KvSession.row_edits
TARGET_ROWS = VerifyState.target_rows


def one_position_late(session: KvSession, length: int, then: Sequence[int] = ()) -> RowEdits | None:
    """The fault: the newest token before the row is not counted yet."""
    return ROW_EDITS(session, max(length - 1, len(PROMPT)), then)


def state_of_the_block_s_start(call: VerifyState) -> list[Any]:
    """The fault: every row of a block sees the committed tokens only."""
    first = call.session.row_edits(call.committed_length)
    return [replace(row, edits=first) for row in TARGET_ROWS(call)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("owner", "name", "fault"),
    [
        (KvSession, "row_edits", one_position_late),
        (VerifyState, "target_rows", state_of_the_block_s_start),
    ],
)
def test_penalties_one_position_late_are_caught(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, fault: Any
) -> None:
    """On both engines, or inside the target's blocks only: the law test sees it."""
    monkeypatch.setattr(owner, name, fault)

    result = played(PENALTIES)
    assert not result.holds, result
