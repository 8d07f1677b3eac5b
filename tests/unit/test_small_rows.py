"""A small vocabulary's matrix gives the reference's numbers bit for bit, whatever rows it holds."""

import dataclasses

import numpy as np
import pytest

from specserve.errors import InvalidProposal
from specserve.model.small_rows import draw_small, score_small
from specserve.speculation.scoring import DraftRow, TargetRow, propose_row, score_row
from specserve.speculation.types import AcceptanceRule, SamplingParams

STANDARD, GREEDY, COUPLED = AcceptanceRule.STANDARD, AcceptanceRule.GREEDY, AcceptanceRule.COUPLED
CHANGES = ({}, {"temperature": 0.6}, {"temperature": 3.0}, {"temperature": 1.1e-5}, {"top_k": 9})
KINDS = ("smooth", "ties", "bans", "one left", "flat", "peaked", "extreme")


def logits_of(kind, num_rows, vocab_size, seed):
    """Rows of one kind; the last four underflow, are banned but for one, or are like the rest."""
    rng = np.random.default_rng(seed)
    normal = rng.normal(size=(num_rows, vocab_size)) * 3
    one = np.full((num_rows, vocab_size), -np.inf)
    one[np.arange(num_rows), rng.integers(0, vocab_size, num_rows)] = -3.0
    return {
        "smooth": normal,
        "ties": np.round(normal),
        "bans": np.where(rng.random((num_rows, vocab_size)) < 0.8, -np.inf, normal)
        if vocab_size > 50
        else normal,
        "one left": one,
        "flat": np.zeros((num_rows, vocab_size)),
        "peaked": normal * 200,
        "extreme": np.clip(normal * 3e37, -3e38, 3e38),
    }[kind].astype(np.float32)


def params_of(num_rows, rules=(STANDARD, COUPLED)):
    """Each change with each rule in turn, greedy at every eleventh."""
    return [
        SamplingParams(GREEDY, i, 0, temperature=0.0)
        if i % 11 == 10
        else SamplingParams(
            rules[i % len(rules)], 2**63 + i, i % 3, **CHANGES[i // len(rules) % len(CHANGES)]
        )
        for i in range(num_rows)
    ]


def same_draw(draw, expected):
    assert draw.token_id == expected.token_id
    if expected.support_token_ids is None:
        assert draw.support_token_ids is None
        assert draw.support_weights is None
        return
    assert draw.support_token_ids.dtype == np.int32
    assert draw.support_weights.dtype == np.float32
    assert draw.support_token_ids.tolist() == expected.support_token_ids.tolist()
    assert draw.support_weights.tolist() == expected.support_weights.tolist()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab_size", [2, 33, 96, 512])
def test_draws_and_scores_equal_the_reference_bit_for_bit(kind, vocab_size):
    """Rules, temperatures and filters in one batch: token, q, p and replacement, all equal."""
    params = params_of(66)
    logits = logits_of(kind, 66, vocab_size, seed=vocab_size)
    rows = [DraftRow(p, 40 + i, 40, i % 5) for i, p in enumerate(params)]
    for top_k in (1, 64):
        draws = draw_small(logits, rows, top_k, None)
        for i, draw in enumerate(draws):
            same_draw(draw, propose_row(logits[i], rows[i], top_k))
        other = logits_of("smooth", 66, vocab_size, seed=1)
        targets = [
            TargetRow(
                p,
                40 + i,
                40,
                i % 5,
                None if i % 5 == 4 else draw.token_id,
                draw.support_token_ids,
                draw.support_weights,
            )
            for i, (p, draw) in enumerate(zip(params, draws, strict=True))
        ]
        for of_target in (logits, other):  # p = q, where the residual may be empty, and p != q
            scores = score_small(of_target, targets)
            assert scores == [score_row(row, t) for row, t in zip(of_target, targets, strict=True)]
            assert score_small(of_target[7:8], targets[7:8]) == scores[7:8]
            assert score_small(of_target[7:30], targets[7:30]) == scores[7:30]


def test_a_cut_head_names_the_ids_of_its_columns():
    """Columns become ids, also far beyond the small matrix; noise follows the id."""
    params = params_of(40)
    logits = logits_of("ties", 40, 90, seed=3)
    ids = np.sort(np.random.default_rng(2).permutation(50_000)[:90])
    rows = [DraftRow(p, 7, 7, i) for i, p in enumerate(params)]
    for i, draw in enumerate(draw_small(logits, rows, 16, ids)):
        same_draw(draw, propose_row(logits[i], rows[i], 16, ids))


def test_odd_proposals_score_like_the_reference_and_so_do_their_neighbours():
    """Other widths, padding, doubled ids, ids out of range: none is trusted, all are exact."""
    logits = logits_of("smooth", 8, 40, seed=4)
    wide = np.arange(12, dtype=np.int32)
    weights = np.random.default_rng(5).random(12).astype(np.float32)
    padded = np.where(wide < 7, weights, 0).astype(np.float32)
    params = SamplingParams(STANDARD, 11, 0)
    good = TargetRow(params, 9, 9, 0, 3, wide, weights)
    for odd in (
        {"draft_support_token_ids": wide[:5], "draft_support_weights": weights[:5]},
        {"draft_support_weights": padded},
        {"draft_support_token_ids": wide % 4},
        {"draft_support_token_ids": np.where(padded > 0, wide, -1).astype(np.int32)},
        {"draft_support_token_ids": wide + np.int32(35)},
        {"draft_token_id": -1},
        {"draft_token_id": 40},
        {"draft_token_id": 39},
    ):
        strange = dataclasses.replace(good, **odd)
        rows = [dataclasses.replace(r, row=i) for i, r in enumerate([good, strange, good] * 2)]
        scores = score_small(logits[:6], rows)
        assert scores == [score_row(x, row) for x, row in zip(logits[:6], rows, strict=True)]


def test_a_q_that_is_none_is_refused_as_by_the_reference():
    """Missing, negative, empty and infinite q: InvalidProposal, as score_row says."""
    logits = logits_of("smooth", 1, 40, seed=4)
    ids = np.arange(3, dtype=np.int32)
    good = TargetRow(SamplingParams(STANDARD, 11, 0), 9, 9, 0, 1, ids, np.ones(3, np.float32))
    for bad in (None, [1, -1, 1], [0, 0, 0], [1, np.inf, 1], [1, np.nan, 1]):
        weights = None if bad is None else np.array(bad, np.float32)
        row = dataclasses.replace(good, draft_support_weights=weights)
        with pytest.raises(InvalidProposal):
            score_row(logits[0], row)
        with pytest.raises(InvalidProposal):
            score_small(logits, [row])
