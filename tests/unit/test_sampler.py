"""The tensor twin equals the numpy reference, row by row, in any company."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch

from specserve.model import sampler_ops
from specserve.model.ranking import exact_top
from specserve.model.sampler import (
    SMALL_VOCAB_SIZE,
    DraftRow,
    TargetRow,
    draw_proposals,
    score_rows,
)
from specserve.speculation.randomness import leading_noise_words
from specserve.speculation.scoring import propose_row, score_row
from specserve.speculation.types import AcceptanceRule, SamplingParams

V = 700
assert V > SMALL_VOCAB_SIZE
STANDARD, GREEDY, COUPLED = AcceptanceRule.STANDARD, AcceptanceRule.GREEDY, AcceptanceRule.COUPLED

CHANGES = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"temperature": 1.1e-5},
    {"temperature": 50.0},
    {"top_k": 1},
    {"top_k": 50},
    {"top_k": 64, "top_p": 0.9},
    {"top_k": 65, "temperature": 1.7},
    {"top_k": 300, "top_p": 0.95},
    {"top_k": 5000, "top_p": 0.8},
    {"top_k": 5000, "min_p": 0.02},
    {"top_p": 0.9},
    {"top_p": 0.9999, "temperature": 3.0},
    {"top_p": 1e-9},
    {"top_p": 0.6, "min_p": 0.001},
    {"min_p": 0.1},
    {"min_p": 1e-6, "top_p": 0.99},
    {"min_p": 1.0},
]


def all_params():
    """Every combination of filters with both sampling rules."""
    for number, (changes, rule) in enumerate(itertools.product(CHANGES, (STANDARD, COUPLED))):
        if changes.get("temperature") == 0.0:
            rule = GREEDY
        yield SamplingParams(rule, 2**63 + 1000 * number, number % 3, **changes)


def kinds_of_logits(num_rows, seed=0, vocab_size=V):
    """Smooth rows, rows full of ties, rows with bans, flat rows, peaked and extreme rows."""
    rng = np.random.default_rng(seed)
    normal = rng.normal(size=(num_rows, vocab_size)) * 3
    yield "smooth", normal
    yield "ties", np.round(normal)
    yield "bfloat16", torch.from_numpy(normal).to(torch.bfloat16).float().numpy()
    yield "bans", np.where(rng.random((num_rows, vocab_size)) < 0.9, -np.inf, normal)
    one = np.full((num_rows, vocab_size), -np.inf)
    one[np.arange(num_rows), rng.integers(0, vocab_size, num_rows)] = -3.0
    yield "one left", one
    yield "flat", np.zeros((num_rows, vocab_size))
    yield "peaked", normal * 100
    yield "extreme", np.clip(normal * 3e37, -3e38, 3e38)


def rows_for(params_list, logits, drafts):
    """Target rows with drafts of the reference's draft side; every fifth a bonus row."""
    rows = []
    for i, p in enumerate(params_list):
        draw = propose_row(drafts[i], DraftRow(p, 40 + i, 40, i))
        drafted = None if i % 5 == 4 else draw.token_id
        rows.append(
            TargetRow(p, 40 + i, 40, i, drafted, draw.support_token_ids, draw.support_weights)
        )
    return rows


def assert_same_score(score, expected):
    assert score.replacement_token_id == expected.replacement_token_id
    assert score.target_prob == pytest.approx(expected.target_prob, rel=1e-11, abs=1e-300)


@pytest.mark.parametrize("kind", [kind for kind, _ in kinds_of_logits(1)])
def test_scores_equal_the_reference(kind):
    """One mixed batch of every filter and rule, on rows of every kind."""
    params_list = list(all_params())
    logits = dict(kinds_of_logits(len(params_list)))[kind].astype(np.float32)
    finite = np.where(np.isfinite(logits), logits, 0)
    noise = np.random.default_rng(9).normal(size=logits.shape)
    drafts = np.clip(finite + noise, -3e38, 3e38).astype(np.float32)
    rows = rows_for(params_list, logits, drafts)
    for i, score in enumerate(score_rows(torch.from_numpy(logits), rows)):
        assert_same_score(score, score_row(logits[i], rows[i]))


@pytest.mark.parametrize("kind", [kind for kind, _ in kinds_of_logits(1)])
@pytest.mark.parametrize("cut_head", [False, True])
def test_draws_equal_the_reference(kind, cut_head):
    """Token, support and weights, exactly; with and without a cut head."""
    params_list = list(all_params())
    logits = dict(kinds_of_logits(len(params_list), seed=1))[kind].astype(np.float32)
    ids = np.sort(np.random.default_rng(2).permutation(50_000)[:V]) if cut_head else None
    rows = [DraftRow(p, 70 + i, 70, i) for i, p in enumerate(params_list)]
    for top_k in (1, 64, 1000):
        draws = draw_proposals(
            torch.from_numpy(logits), rows, top_k, None if ids is None else torch.from_numpy(ids)
        )
        for i, draw in enumerate(draws):
            expected = propose_row(logits[i], rows[i], top_k, ids)
            assert draw.token_id == expected.token_id
            if expected.support_token_ids is None:
                assert draw.support_token_ids is None
                continue
            assert draw.support_token_ids.tolist() == expected.support_token_ids.tolist()
            assert draw.support_weights.tolist() == expected.support_weights.tolist()
            assert draw.support_weights.dtype == np.float32
            assert draw.support_token_ids.dtype == np.int32


def test_flat_rows_of_a_large_vocabulary_take_the_slow_way_and_agree():
    """top-p and min-p that keep thousands of tokens: beyond any short ranking, still exact."""
    rng = np.random.default_rng(8)
    logits = np.round(rng.normal(size=(6, 9000)) * 0.5, 1).astype(np.float32)
    changes = ({"top_p": 0.3}, {"top_p": 0.97}, {"min_p": 0.05})
    params_list = [
        SamplingParams(rule, 6, 0, **change)
        for change, rule in itertools.product(changes, (STANDARD, COUPLED))
    ]
    rows = rows_for(params_list, logits, logits[::-1])
    for i, score in enumerate(score_rows(torch.from_numpy(logits), rows)):
        assert_same_score(score, score_row(logits[i], rows[i]))


def test_a_row_scores_the_same_in_any_company():
    """Alone, in a batch, in another order: the same score (B014: nothing hangs on the slot)."""
    params_list = list(all_params())
    logits = dict(kinds_of_logits(len(params_list), seed=3))["smooth"].astype(np.float32)
    rows = rows_for(params_list, logits, logits[::-1])
    together = score_rows(torch.from_numpy(logits), rows)
    backwards = score_rows(torch.from_numpy(logits[::-1].copy()), rows[::-1])[::-1]
    for i, row in enumerate(rows):
        alone = score_rows(torch.from_numpy(logits[i : i + 1]), [row])[0]
        assert_same_score(together[i], alone)
        assert_same_score(backwards[i], alone)


@pytest.mark.parametrize("vocab_size", [16, V])
def test_B037_B038_unusable_rows_fail_alone(vocab_size):
    """NaN, +inf and all -inf rows are marked -1; their neighbours score as without them."""
    params_list = list(all_params())
    clean = dict(kinds_of_logits(len(params_list), vocab_size=vocab_size))["smooth"].astype("f4")
    rows = rows_for(params_list, clean, clean)
    draft_rows = [DraftRow(p, 3, 3, 0) for p in params_list]
    expected = score_rows(torch.from_numpy(clean), rows)
    expected_draws = draw_proposals(torch.from_numpy(clean), draft_rows, 8)
    spoilt = clean.copy()
    for i, spoil in zip(range(0, len(rows), 2), itertools.cycle((np.nan, np.inf, None))):
        if spoil is None:
            spoilt[i] = -np.inf
        else:
            spoilt[i, i % vocab_size] = spoil
    scores = score_rows(torch.from_numpy(spoilt), rows)
    draws = draw_proposals(torch.from_numpy(spoilt), draft_rows, 8)
    for i, score in enumerate(scores):
        assert score.is_usable == bool(i % 2)
        assert (draws[i].token_id >= 0) == bool(i % 2)
        if i % 2:
            assert_same_score(score, expected[i])
            assert draws[i].token_id == expected_draws[i].token_id
        else:
            assert score.replacement_token_id == -1


def test_B035_ids_outside_the_vocabulary_take_nothing_and_crash_nothing():
    """Draft ids and q supports beyond V score like the reference, on the whole-row path too."""
    logits = np.random.default_rng(4).normal(size=(6, V)).astype(np.float32)
    weights = np.array([0.5, 0.25, 0.25], np.float32)
    rows = [
        TargetRow(
            SamplingParams(STANDARD, 1, 0, **changes),
            9,
            9,
            i,
            drafted,
            np.array([drafted, 7, 7], np.int32),
            weights,
        )
        for i, (drafted, changes) in enumerate(
            itertools.product((-1, V, 2**31 - 1), ({}, {"top_k": 40}))
        )
    ]
    for i, score in enumerate(score_rows(torch.from_numpy(logits), rows)):
        assert score.target_prob == 0.0
        assert 0 <= score.replacement_token_id < V
        assert_same_score(score, score_row(logits[i], rows[i]))


def test_q_equal_to_p_still_names_a_valid_replacement():
    """Over the whole row the residual may vanish: the answer is an id of p, never garbage."""
    logits = np.full((40, V), -np.inf, np.float32)
    logits[:, [3, 500]] = 0.0
    rows = [
        TargetRow(
            SamplingParams(STANDARD, seed, 0),
            9,
            9,
            0,
            3,
            np.array([3, 500], np.int32),
            np.ones(2, np.float32),
        )
        for seed in range(40)
    ]
    scores = score_rows(torch.from_numpy(logits), rows)
    assert {score.replacement_token_id for score in scores} == {3, 500}
    assert {score.target_prob for score in scores} == {0.5}


def test_torch_philox_equals_numpy():
    """int64 tensors with wrapping products give the reference's words, seeds above 2^63 too."""
    keys = np.array([[2**64 - 1, 0, 5], [2**63, 7, 2**31], [12345, 1, 0]], np.uint64)
    words = sampler_ops.philox_noise_words(keys, 1001, torch.device("cpu"))
    for row, key in zip(words.tolist(), keys.tolist(), strict=True):
        assert row == leading_noise_words(*key, 1001).tolist()


@pytest.mark.parametrize("kind", [kind for kind, _ in kinds_of_logits(1)])
@pytest.mark.parametrize("temperature", [1.1e-5, 0.8, 30.0])
def test_both_whole_row_coupled_draws_equal_the_reference(kind, temperature):
    """The accelerator's way (all logarithms) and the CPU's (few) name the reference's token."""
    logits = dict(kinds_of_logits(40, seed=5))[kind].astype(np.float32)
    p = [
        SamplingParams(COUPLED, 2**63 + seed, seed % 4, temperature=temperature)
        for seed in range(40)
    ]
    expected = [
        score_row(row, TargetRow(p[i], i, i, 0, None)).replacement_token_id
        for i, row in enumerate(logits)
    ]
    keys = [(params.seed, params.choice, i) for i, params in enumerate(p)]
    on_device = sampler_ops.coupled_draws(
        torch.from_numpy(logits),
        logits.max(axis=1),
        np.full(40, temperature),
        np.array(keys, np.uint64),
    )
    assert on_device.tolist() == expected
    on_cpu = [
        sampler_ops.coupled_draw_on_cpu(row, int(row.argmax()), temperature, key)
        for row, key in zip(logits, keys, strict=True)
    ]
    assert on_cpu == expected


@pytest.mark.parametrize("count", [1, 5, 64, V - 1, V, V + 5])
def test_exact_top_orders_by_logit_then_column(count):
    """Rows full of ties, also at the last place, equal a plain sort."""
    logits = np.random.default_rng(6).integers(-3, 3, (8, V)).astype(np.float32)
    logits[0] = 0.0
    logits[1, 10:] = -np.inf
    values, columns = exact_top(torch.from_numpy(logits), count)
    for row, got, ids in zip(logits, values, columns, strict=True):
        order = sorted(range(V), key=lambda i, row=row: (-row[i], i))[:count]
        if np.isfinite(row[order[-1]]):  # banned tokens at the end may come in any order
            assert ids.tolist() == order
        assert got.tolist() == row[order].tolist()


@pytest.mark.parametrize("vocab_size", [16, V])
def test_logprobs_are_those_of_the_unmodified_row(vocab_size):
    """log-softmax before temperature and filters: draft, replacement, top n; only where asked."""
    logits = np.random.default_rng(7).normal(size=(5, vocab_size)).astype(np.float32)
    logits[0, :3] = 9.0
    base = SamplingParams(COUPLED, 3, 0, temperature=0.5, top_k=3)
    asks, drafts = (2, -1, 0, 5, 5), (4, 4, None, 999_999, 1)
    rows = [
        TargetRow(dataclasses.replace(base, num_logprobs=n), 8, 8, i, drafted)
        for i, (n, drafted) in enumerate(zip(asks, drafts, strict=True))
    ]
    scores = score_rows(torch.from_numpy(logits), rows)
    assert scores[1].logprobs is None
    for i in (0, 2, 3, 4):
        expected = logits[i] - np.log(np.exp(logits[i].astype(np.float64)).sum())
        got = scores[i].logprobs
        assert got.replacement == pytest.approx(expected[scores[i].replacement_token_id], abs=2e-6)
        if i in {0, 4}:
            assert got.draft == pytest.approx(expected[drafts[i]], abs=2e-6)
        else:
            assert np.isnan(got.draft)
        top = np.argsort(-logits[i], kind="stable")[: asks[i]]
        assert got.top_token_ids.tolist() == top.tolist()
        assert got.top == pytest.approx(expected[top], abs=2e-6)


def test_B029_logits_are_not_written():
    """The sampler leaves its input bit for bit as it was."""
    params_list = list(all_params())
    logits = torch.from_numpy(dict(kinds_of_logits(len(params_list)))["smooth"].astype("f4"))
    before = logits.clone()
    score_rows(logits, rows_for(params_list, logits.numpy(), logits.numpy()))
    draw_proposals(logits, [DraftRow(p, 1, 1, 0) for p in params_list], 64)
    assert torch.equal(before, logits)


def test_no_rows_give_no_results():
    """An iteration of prefill alone asks for nothing."""
    for size in (16, V):
        assert score_rows(torch.zeros(0, size), []) == []
        assert draw_proposals(torch.zeros(0, size), [], 64) == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_an_accelerator_gives_the_results_of_the_cpu():
    """Every filter and rule on CUDA: the same tokens, supports and marks as on CPU."""
    params_list = list(all_params())
    for _, kind in kinds_of_logits(len(params_list)):
        logits = kind.astype(np.float32)
        logits[3, 5] = np.nan
        drafts = np.nan_to_num(logits, nan=0.0, neginf=-9.0)
        rows = rows_for(params_list, logits, drafts)
        on_cpu, on_cuda = torch.from_numpy(logits), torch.from_numpy(logits).cuda()
        pairs = zip(score_rows(on_cuda, rows), score_rows(on_cpu, rows), strict=True)
        for score, expected in pairs:
            assert_same_score(score, expected)
        draft_rows = [DraftRow(p, 3, 3, 0) for p in params_list]
        draws = draw_proposals(on_cuda, draft_rows, 64)
        for draw, expected in zip(draws, draw_proposals(on_cpu, draft_rows, 64), strict=True):
            assert draw.token_id == expected.token_id
