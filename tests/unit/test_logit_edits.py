"""Edits of a whole batch equal the reference row by row, in any company, and leave no trace."""

import dataclasses

import numpy as np
import pytest
import torch

from specserve.model import logit_edits
from specserve.model.logit_edits import edited
from specserve.model.sampler import SMALL_VOCAB_SIZE, draw_proposals, score_rows
from specserve.speculation.row_edits import RowEdits, edit_row
from specserve.speculation.scoring import DraftRow, TargetRow, propose_row, score_row
from specserve.speculation.types import AcceptanceRule, SamplingParams

LARGE = 700
assert LARGE > SMALL_VOCAB_SIZE
STANDARD, GREEDY, COUPLED = AcceptanceRule.STANDARD, AcceptanceRule.GREEDY, AcceptanceRule.COUPLED
FILTERS = ({}, {"temperature": 0.6}, {"top_k": 9}, {"top_p": 0.8}, {"min_p": 0.05, "top_k": 300})


def edits_of(kind, vocab_size, rng):
    """Edits of one kind, some of their ids beyond the row."""

    def ids(count):
        return rng.permutation(vocab_size + 3)[:count].astype(np.int64)

    many = min(vocab_size // 2, 60)
    seen = {"seen_token_ids": ids(many), "num_outputs": rng.integers(0, 4, many)}
    return {
        "none": None,
        "bias": RowEdits(bias_token_ids=ids(5), biases=rng.uniform(-100, 100, 5)),
        "repetition": RowEdits(**seen, repetition_penalty=1.7),
        "frequency": RowEdits(**seen, frequency_penalty=-0.9),
        "presence": RowEdits(**seen, presence_penalty=1.1),
        "bans": RowEdits(banned_token_ids=np.concatenate((ids(4), ids(2)))),
        "allowed": RowEdits(allowed_token_ids=np.sort(ids(vocab_size // 3))),
        "all": RowEdits(
            ids(5),
            rng.uniform(-9, 9, 5),
            **seen,
            repetition_penalty=0.8,
            frequency_penalty=0.3,
            presence_penalty=-0.4,
            banned_token_ids=ids(4),
            allowed_token_ids=np.sort(ids(vocab_size // 2)),
        ),
    }[kind]


KINDS = ("none", "bias", "repetition", "frequency", "presence", "bans", "allowed", "all")


def batch(vocab_size, seed=0):
    """Every kind with every rule and filter; every seventh row greedy."""
    rng = np.random.default_rng(seed)
    params, edits = [], []
    for filters in FILTERS:
        for rule in (STANDARD, COUPLED):
            for kind in KINDS:
                number = len(params)
                params.append(
                    SamplingParams(GREEDY, number, 0, temperature=0.0)
                    if number % 7 == 6
                    else SamplingParams(rule, 2**63 + number, 1, **filters)
                )
                edits.append(edits_of(kind, vocab_size, rng))
    logits = (rng.normal(size=(len(params), vocab_size)) * 3).astype(np.float32)
    return logits, params, edits


@pytest.mark.parametrize("vocab_size", [33, LARGE])
@pytest.mark.parametrize("cut_head", [False, True])
def test_draws_with_edits_equal_the_reference(vocab_size, cut_head):
    """Token, support and weights, exactly: small and large rows, whole and cut heads."""
    logits, params, edits = batch(vocab_size)
    rng = np.random.default_rng(3)
    ids = np.sort(rng.permutation(2 * vocab_size)[:vocab_size]) if cut_head else None
    rows = [DraftRow(p, 70 + i, 70, i, edits[i]) for i, p in enumerate(params)]
    tensor, head = torch.from_numpy(logits), None if ids is None else torch.from_numpy(ids)
    for top_k in (1, 64):
        draws = draw_proposals(tensor, rows, top_k, head)
        for i, draw in enumerate(draws):
            expected = propose_row(logits[i], rows[i], top_k, ids)
            assert draw.token_id == expected.token_id
            if expected.support_token_ids is not None:
                assert draw.support_token_ids.tolist() == expected.support_token_ids.tolist()
                assert draw.support_weights.tolist() == expected.support_weights.tolist()
        alone = [draw_proposals(tensor[i : i + 1], rows[i : i + 1], top_k, head) for i in (3, 15)]
        assert [draw.token_id for (draw,) in alone] == [draws[3].token_id, draws[15].token_id]


@pytest.mark.parametrize("vocab_size", [33, LARGE])
def test_scores_with_edits_equal_the_reference(vocab_size):
    """p of the draft token and the replacement; a row's neighbours change nothing (B034)."""
    logits, params, edits = batch(vocab_size, seed=1)
    drafts = logits + np.random.default_rng(4).normal(size=logits.shape).astype(np.float32)
    rows = []
    for i, (p, e) in enumerate(zip(params, edits, strict=True)):
        # A draft that knows nothing of the constraints proposes banned tokens too.
        draw = propose_row(drafts[i], DraftRow(p, 40 + i, 40, i, e if i % 2 else None))
        drafted = None if i % 5 == 4 else draw.token_id
        rows.append(
            TargetRow(p, 40 + i, 40, i, drafted, draw.support_token_ids, draw.support_weights, e)
        )
    tensor = torch.from_numpy(logits)
    scores = score_rows(tensor, rows)
    backwards = score_rows(torch.from_numpy(logits[::-1].copy()), rows[::-1])[::-1]
    for i, row in enumerate(rows):
        expected = score_row(logits[i], row)
        for score in (scores[i], backwards[i], score_rows(tensor[i : i + 1], [row])[0]):
            assert score.replacement_token_id == expected.replacement_token_id
            assert score.target_prob == pytest.approx(expected.target_prob, rel=1e-11, abs=1e-300)


@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.parametrize("cut_head", [False, True])
def test_within_the_block_the_logits_are_the_reference_s_and_then_the_model_s(on_cpu, cut_head):
    """Bit for bit, both; by numpy's way and by the accelerator's (here on the CPU's tensors)."""
    logits, params, edits = batch(LARGE, seed=2)
    ids = np.sort(np.random.default_rng(5).permutation(900)[:LARGE]) if cut_head else None
    logits[2, 5], logits[3, 6] = np.nan, np.inf
    rows = [DraftRow(p, 1, 1, 0, e) for p, e in zip(params, edits, strict=True)]
    with torch.inference_mode():
        tensor = torch.from_numpy(logits.copy())  # as the runners' outputs: no autograd
    original = logit_edits._Page.__init__

    def on_accelerator(page, given):
        original(page, given)
        page._on_cpu = on_cpu

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logit_edits._Page, "__init__", on_accelerator)
        with edited(tensor, rows, ids) as plain:
            assert all(row.edits is None for row in plain)
            inside = tensor.clone().numpy()
    for i, e in enumerate(edits):
        expected = logits[i] if e is None else edit_row(logits[i], e, ids)
        np.testing.assert_array_equal(inside[i], expected)
    np.testing.assert_array_equal(tensor.numpy(), logits)


def test_b029_an_error_within_the_block_leaves_the_logits_as_they_were():
    """The next row of the same forward must not see this one's bans."""
    logits, params, edits = batch(33)
    tensor = torch.from_numpy(logits.copy())
    rows = [DraftRow(p, 1, 1, 0, e) for p, e in zip(params, edits, strict=True)]
    with pytest.raises(RuntimeError), edited(tensor, rows):
        raise RuntimeError
    np.testing.assert_array_equal(tensor.numpy(), logits)


@pytest.mark.parametrize("vocab_size", [33, LARGE])
def test_b038_constraints_that_leave_nothing_are_told_from_unusable_logits(vocab_size):
    """-2 for the one, -1 for the other, and the neighbours as without them."""
    logits = np.random.default_rng(6).normal(size=(4, vocab_size)).astype(np.float32)
    logits[1, 4] = np.nan
    nothing = RowEdits(banned_token_ids=np.array([2]), allowed_token_ids=np.array([2]))
    params = SamplingParams(GREEDY, 1, 0, temperature=0.0)
    rows = [
        TargetRow(params, 3, 3, 0, None, edits=edits) for edits in (None, nothing, nothing, None)
    ]

    scores = score_rows(torch.from_numpy(logits), rows)
    assert [score.replacement_token_id for score in scores] == [
        int(logits[0].argmax()),
        -1,
        -2,
        int(logits[3].argmax()),
    ]


@pytest.mark.parametrize("vocab_size", [16, LARGE])
def test_logprobs_are_of_the_unmodified_row_under_edits_too(vocab_size):
    """log-softmax of what the model gave: a penalised token shows the model's own probability."""
    logits = np.random.default_rng(7).normal(size=(2, vocab_size)).astype(np.float32)
    best = logits.argmax(axis=1)
    params = SamplingParams(GREEDY, 3, 0, temperature=0.0, num_logprobs=2)
    rows = [
        TargetRow(params, 8, 8, i, int(best[i]), edits=RowEdits(banned_token_ids=best[i : i + 1]))
        for i in range(2)
    ]
    for i, score in enumerate(score_rows(torch.from_numpy(logits), rows)):
        expected = logits[i] - np.log(np.exp(logits[i].astype(np.float64)).sum())
        order = np.argsort(-logits[i])
        assert score.target_prob == 0.0
        assert score.replacement_token_id == order[1]
        assert score.logprobs.replacement == pytest.approx(expected[order[1]], abs=2e-6)
        assert score.logprobs.draft == pytest.approx(expected[best[i]], abs=2e-6)
        assert score.logprobs.top_token_ids.tolist() == order[:2].tolist()


def test_rows_without_edits_are_scored_as_ever():
    """Beside an edited neighbour or not: the very same scores."""
    logits, params, edits = batch(LARGE, seed=8)
    rows = [TargetRow(p, 9, 9, 0, None, edits=e) for p, e in zip(params, edits, strict=True)]
    plain = [dataclasses.replace(row, edits=None) for row in rows]
    tensor = torch.from_numpy(logits)
    mixed, alone = score_rows(tensor, rows), score_rows(tensor, plain)
    for i, e in enumerate(edits):
        if e is None:
            assert mixed[i] == alone[i]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_an_accelerator_edits_as_the_cpu_does():
    """The same float32 numbers, and the same ones restored."""
    logits, params, edits = batch(LARGE, seed=9)
    rows = [DraftRow(p, 1, 1, 0, e) for p, e in zip(params, edits, strict=True)]
    on_cpu, on_cuda = torch.from_numpy(logits.copy()), torch.from_numpy(logits).cuda()
    with edited(on_cpu, rows), edited(on_cuda, rows):
        np.testing.assert_array_equal(on_cuda.cpu().numpy(), on_cpu.numpy())
    np.testing.assert_array_equal(on_cuda.cpu().numpy(), logits)
