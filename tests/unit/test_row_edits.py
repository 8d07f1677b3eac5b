"""One row's edits, by hand: each option, their order, and what may never happen to a row."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specserve.speculation.constraints import ConstraintState, TokenConstraints
from specserve.speculation.digest import TokenChain
from specserve.speculation.row_edits import RowEdits, edit_row
from support.constrained import Wanted, slow_row

INF, NAN = float("inf"), float("nan")


def ids(*values):
    return np.array(values, np.int64)


def row_of(*values):
    return np.array(values, np.float32)


def test_the_repetition_penalty_divides_positive_logits_and_multiplies_others():
    """Tokens that were not seen keep theirs; 0 and -inf stay what they are."""
    edits = RowEdits(
        seen_token_ids=ids(0, 1, 2, 3), num_outputs=ids(0, 0, 0, 0), repetition_penalty=2.0
    )

    assert edit_row(row_of(4, -4, 0, -INF, 4), edits).tolist() == [2, -8, 0, -INF, 4]


def test_frequency_counts_and_presence_does_not():
    """Three occurrences cost three times the one and once the other; a prompt token costs none."""
    edits = RowEdits(
        seen_token_ids=ids(0, 1, 2),
        num_outputs=ids(3, 1, 0),
        frequency_penalty=0.5,
        presence_penalty=0.25,
    )

    assert edit_row(row_of(1, 1, 1, 1), edits).tolist() == [-0.75, 0.25, 1, 1]


def test_the_order_is_bias_repetition_frequency_presence_bans():
    """(3 + 5) / 2 - 1 - 0.5: any other order gives another number; a ban beats a bias."""
    edits = RowEdits(
        bias_token_ids=ids(0, 1),
        biases=np.array([5.0, 100.0]),
        seen_token_ids=ids(0),
        num_outputs=ids(1),
        repetition_penalty=2.0,
        frequency_penalty=1.0,
        presence_penalty=0.5,
        banned_token_ids=ids(1),
    )

    assert edit_row(row_of(3, 3, 3), edits).tolist() == [2.5, -INF, 3]


def test_an_allow_list_leaves_its_tokens_and_their_edits():
    """Everything else is banned; a ban within the list holds too."""
    edits = RowEdits(banned_token_ids=ids(2), allowed_token_ids=ids(1, 2))

    assert edit_row(row_of(5, 6, 7, 8), edits).tolist() == [-INF, 6, -INF, -INF]


def test_ids_without_a_column_have_no_effect():
    """Beyond the row, or left out by a cut head; the others find their columns."""
    edits = RowEdits(
        bias_token_ids=ids(1, 20, 500),
        biases=np.array([1.0, 2.0, 3.0]),
        banned_token_ids=ids(30, 7, 499),
        allowed_token_ids=ids(10, 20, 30, 8),
    )

    whole = edit_row(np.zeros(40, np.float32), edits)
    assert {i: whole[i] for i in (8, 10, 20)} == {8: 0.0, 10: 0.0, 20: 2.0}
    assert np.isneginf(whole).sum() == 37
    cut = edit_row(np.zeros(3, np.float32), edits, ids(10, 20, 40))
    assert cut.tolist() == [0, 2, -INF]


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("touched", ["biased", "penalised", "banned", "not allowed"])
def test_b037_an_unusable_logit_stays_unusable_whatever_edits_it(bad, touched):
    """A ban must not hide what the model got wrong."""
    edits = {
        "biased": RowEdits(bias_token_ids=ids(1), biases=np.array([-100.0])),
        "penalised": RowEdits(
            seen_token_ids=ids(1), num_outputs=ids(2), repetition_penalty=2.0, frequency_penalty=2.0
        ),
        "banned": RowEdits(banned_token_ids=ids(1)),
        "not allowed": RowEdits(allowed_token_ids=ids(0)),
    }[touched]

    assert edit_row(row_of(1, bad, 1), edits)[1] == pytest.approx(bad, nan_ok=True)


def test_no_edit_overflows_a_finite_logit():
    """What would be infinite is the largest finite number: a request cannot spoil its own row."""
    huge = np.finfo(np.float32).max
    edits = RowEdits(
        bias_token_ids=ids(0, 1),
        biases=np.array([100.0, -100.0]),
        seen_token_ids=ids(0, 1),
        num_outputs=ids(10**6, 10**6),
        repetition_penalty=1e-6,
        frequency_penalty=-2.0,
    )

    edited = edit_row(np.array([huge, -huge], np.float32), edits)
    assert np.isfinite(edited).all()
    assert edited[0] == huge


@pytest.mark.parametrize("penalty", [1e-6, 1e-300, 5e-324])
def test_no_repetition_penalty_overflows_or_warns(penalty):
    """However small: the largest finite number, not an infinite one and no warning on the way."""
    edits = RowEdits(
        seen_token_ids=ids(0, 1, 2), num_outputs=ids(1, 1, 1), repetition_penalty=penalty
    )
    largest = float(np.finfo(np.float32).max)

    edited = edit_row(row_of(1e38, 0, -1e38), edits)
    assert edited.tolist() == [largest, 0, np.float32(np.float64(np.float32(-1e38)) * penalty)]


def test_the_row_that_is_edited_is_a_copy():
    """B029: the logits are read and never written."""
    row = row_of(1, 2, 3)
    row.flags.writeable = False

    edit_row(row, RowEdits(banned_token_ids=ids(0), allowed_token_ids=ids(1)))
    assert row.tolist() == [1, 2, 3]


tokens = st.lists(st.integers(0, 7), max_size=12)
wanteds = st.builds(
    Wanted,
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.5, 2.0]),
    presence_penalty=st.sampled_from([0.0, 0.7, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.3, -1.5]),
    logit_bias=st.dictionaries(st.integers(0, 9), st.floats(-100, 100), max_size=3),
    bad_words=st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=3), max_size=3),
    allowed_token_ids=st.lists(st.integers(0, 7), max_size=4),
    min_tokens=st.integers(0, 6),
    stop_token_ids=st.lists(st.integers(0, 7), max_size=2),
)


@settings(derandomize=True, deadline=None, database=None, max_examples=60)
@given(tokens.filter(len), tokens, wanteds, st.integers(0, 2**32))
def test_every_row_equals_the_slow_recount(prompt, output, wanted, seed):
    """Any options, any history: bit for bit what plain loops over the definitions give."""
    logits = (np.random.default_rng(seed).normal(size=8) * 4).astype(np.float32)
    state = ConstraintState(wanted.constraints(len(prompt)))
    state.follow(TokenChain([*prompt, *output]), len(prompt) + len(output))
    edits = state.edits()

    edited = logits if edits is None else edit_row(logits, edits)
    assert edited.tolist() == slow_row(logits, prompt, output, wanted)


def test_neutral_options_edit_nothing():
    """The defaults never make an edit; min_tokens alone makes none once they are out."""
    assert TokenConstraints(prompt_length=3, end_token_ids=(0,)).is_neutral
    state = ConstraintState(TokenConstraints(prompt_length=1, min_tokens=2, end_token_ids=(0,)))
    state.follow(TokenChain([5, 6, 6]), 2)
    assert state.edits() is not None
    state.push(6)
    assert state.edits() is None
