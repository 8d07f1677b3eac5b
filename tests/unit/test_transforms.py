"""Temperature, min-p, top-k and top-p on one row of logits."""

import numpy as np
import pytest

from specserve.speculation.transforms import UnusableLogits, top_token_ids, transform
from specserve.speculation.types import AcceptanceRule, SamplingParams

INF, NAN = float("inf"), float("nan")


def params(**changes):
    return SamplingParams(AcceptanceRule.STANDARD, 0, 0, **changes)


def logits_of(*probs):
    with np.errstate(divide="ignore"):
        return np.log(np.array(probs)).astype(np.float32)


def test_plain_softmax_in_float64():
    """Without filters every finite logit stays, and the probabilities are the softmax."""
    logits = np.array([1.0, -2.0, 0.5, 3.0], np.float32)
    expected = np.exp(logits.astype(np.float64) / 0.7)
    result = transform(logits, params(temperature=0.7))
    assert result.token_ids.tolist() == [0, 1, 2, 3]
    assert result.probs == pytest.approx(expected / expected.sum(), rel=1e-14)


def test_banned_tokens_leave_the_support():
    """-inf has probability 0 and is not in the support."""
    result = transform(np.array([-INF, 0.0, -INF, 0.0], np.float32), params())
    assert result.token_ids.tolist() == [1, 3]
    assert result.prob(1) == 0.5
    assert [result.prob(i) for i in (-1, 0, 2, 4, 2**31 - 1)] == [0.0] * 5


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 9.9e-6])
def test_temperature_below_the_greedy_bound_is_one_hot(temperature):
    """Greedy is all probability on the lowest id of the largest logits, whatever the filters."""
    result = transform(np.array([0, 5, 5, 1], np.float32), params(temperature=temperature, top_k=3))
    assert result.token_ids.tolist() == [1]
    assert result.probs.tolist() == [1.0]


def test_temperature_extremes_stay_finite():
    """The smallest sampled temperature and a huge one overflow nowhere."""
    logits = np.array([3e38, 1.0, -3e38], np.float32)
    assert transform(logits, params(temperature=1e-5)).probs.tolist() == [1.0]
    flat = transform(np.array([4.0, 1.0, -3.0], np.float32), params(temperature=1e9))
    assert flat.probs == pytest.approx([1 / 3] * 3, abs=1e-8)


def test_top_k_breaks_ties_by_lowest_id():
    """Three equal logits for two places: the lower ids stay."""
    logits = np.array([1, 2, 1, 1], np.float32)
    assert transform(logits, params(top_k=3)).token_ids.tolist() == [0, 1, 2]
    assert transform(logits, params(top_k=1)).token_ids.tolist() == [1]
    assert transform(logits, params(top_k=100)).token_ids.tolist() == [0, 1, 2, 3]


def test_top_p_keeps_the_smallest_set_that_reaches_it():
    """A token stays iff those more likely do not reach top_p yet; at least one always stays."""
    logits = logits_of(0.1, 0.4, 0.3, 0.2)
    assert transform(logits, params(top_p=0.39)).token_ids.tolist() == [1]
    assert transform(logits, params(top_p=0.41)).token_ids.tolist() == [1, 2]
    assert transform(logits, params(top_p=0.71)).token_ids.tolist() == [1, 2, 3]
    assert transform(logits, params(top_p=1e-300)).token_ids.tolist() == [1]
    assert transform(logits, params(top_p=0.71)).probs == pytest.approx(
        np.array([0.4, 0.3, 0.2]) / 0.9, rel=1e-6
    )


def test_top_p_breaks_ties_by_lowest_id():
    """Four equal tokens and top_p 0.5: ids 0 and 1, exactly."""
    assert transform(np.zeros(4, np.float32), params(top_p=0.5)).token_ids.tolist() == [0, 1]


def test_min_p_is_relative_to_the_most_likely():
    """Tokens below min_p times the largest probability go; the bound itself stays."""
    logits = logits_of(0.5, 0.26, 0.24)
    assert transform(logits, params(min_p=0.5)).token_ids.tolist() == [0, 1]
    assert transform(np.zeros(3, np.float32), params(min_p=1.0)).token_ids.tolist() == [0, 1, 2]


def test_the_order_is_temperature_min_p_top_k_top_p():
    """top-p counts the share of what min-p and top-k left, after temperature."""
    logits = logits_of(0.4, 0.3, 0.2, 0.1)
    # Of (0.4, 0.3), top_k 2, the first has 4/7 > 0.55; of all four it has 0.4 < 0.55.
    assert transform(logits, params(top_k=2, top_p=0.55)).token_ids.tolist() == [0]
    assert transform(logits, params(top_p=0.55)).token_ids.tolist() == [0, 1]
    # min-p 0.4 leaves (0.4, 0.3, 0.2): 0.7 / 0.9 reaches 0.75; of all four 0.7 does not.
    assert transform(logits, params(min_p=0.4, top_p=0.75)).token_ids.tolist() == [0, 1]
    assert transform(logits, params(top_p=0.75)).token_ids.tolist() == [0, 1, 2]
    # At temperature 0.5 the squares count: (16, 9, 4, 1) / 30.
    assert transform(logits, params(temperature=0.5, top_p=0.52)).token_ids.tolist() == [0]


@pytest.mark.parametrize(
    "row", [[0.0, NAN, 1.0], [INF, 0.0], [-INF, -INF], [INF, NAN], [-INF, NAN], []]
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_B037_unusable_rows_are_refused_with_their_number(row, temperature):
    """NaN, +inf and nothing finite raise: comparisons with NaN would let it through."""
    with pytest.raises(UnusableLogits) as caught:
        transform(np.array(row, np.float32), params(temperature=temperature), row=3)
    assert caught.value.row == 3
    assert "row 3" in str(caught.value)


def test_B029_inputs_stay_as_they_were():
    """A read-only row works, twice, with the same result."""
    logits = np.random.default_rng(0).normal(size=50).astype(np.float32)
    logits.setflags(write=False)
    first, second = (transform(logits, params(top_p=0.8, min_p=0.01)) for _ in range(2))
    assert first.token_ids.tolist() == second.token_ids.tolist()
    assert first.probs.tolist() == second.probs.tolist()


def test_filters_agree_with_a_plain_sort():
    """For random rows full of ties, the support equals the one found by sorting (logit, id)."""
    rng = np.random.default_rng(1)
    for _ in range(300):
        logits = rng.integers(-4, 4, rng.integers(1, 30)).astype(np.float32)
        p = params(
            temperature=float(rng.choice([0.3, 1.0, 2.0])),
            top_k=int(rng.integers(0, 12)),
            top_p=float(rng.choice([0.05, 0.3, 0.77, 1.0])),
            min_p=float(rng.choice([0.0, 0.02, 0.6])),
        )
        order = sorted(range(len(logits)), key=lambda i, row=logits: (-row[i], i))
        weights = {i: np.exp((float(logits[i]) - logits.max()) / p.temperature) for i in order}
        order = [i for i in order if weights[i] >= p.min_p]
        order = order[: p.top_k or len(order)]
        total, kept, seen = sum(weights[i] for i in order), [], 0.0
        for i in order:
            if kept and seen >= p.top_p * total * (1 - 1e-12) and p.top_p < 1:
                break
            kept.append(i)
            seen += weights[i]
        assert transform(logits, p).token_ids.tolist() == sorted(kept)


def test_top_token_ids_of_everything():
    """Asking for as many as there are, or more, returns all ids."""
    assert top_token_ids(np.array([3.0, 1.0]), 5).tolist() == [0, 1]
