"""The constraint state moves with a session's tokens, and no rejected token leaves a trace."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specserve.errors import InvalidRequest
from specserve.rpc.constraints_codec import pack_constraints, unpack_constraints
from specserve.speculation.constraint_checks import complete_constraints
from specserve.speculation.constraints import ConstraintState, TokenConstraints
from specserve.speculation.digest import TokenChain

PENALTIES = TokenConstraints(
    prompt_length=3, repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.25
)


def counts(state):
    """Return {token id: occurrences in the output} as the state has it."""
    edits = state.edits()
    if edits is None:
        return {}
    return dict(zip(edits.seen_token_ids.tolist(), edits.num_outputs.tolist(), strict=True))


def recount(tokens, prompt_length):
    """The same by counting."""
    prompt, output = tokens[:prompt_length], tokens[prompt_length:]
    return {token: output.count(token) for token in {*prompt, *output}}


def test_b022_counts_are_those_of_the_committed_tokens_after_any_block():
    """Blocks of every length leave the true histogram: nothing counted twice, nothing left out."""
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, 6, 60).tolist()
    for block in (1, 2, 5, 9):
        chain, state = TokenChain(tokens[:3]), ConstraintState(PENALTIES)
        for start in range(3, 60, block):
            chain.append(tokens[start : start + block])
            state.follow(chain, len(chain))
            assert counts(state) == recount(chain.tokens, 3)


def test_b023_rejected_tokens_leave_the_counts():
    """A draft that is wrong after its first token, K = 8: committed tokens exactly once."""
    chain, state = TokenChain([1, 2, 3]), ConstraintState(PENALTIES)
    for round_number in range(12):
        committed = len(chain)
        drafted = [round_number % 5, 7, 7, 7, 7, 7, 7, 7]
        chain.append(drafted)
        rows = []
        for row in range(9):
            state.follow(chain, committed + row)
            rows.append(counts(state))
        assert rows == [recount([*chain.tokens[: committed + row]], 3) for row in range(9)]
        chain.truncate(committed + 1)
        state.truncate(committed + 1)
        chain.append([4])
        state.follow(chain, len(chain))
        assert counts(state) == recount(chain.tokens, 3)
        assert 7 not in counts(state)


steps = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.lists(st.integers(0, 5), max_size=6)),
        st.tuples(st.just("cut"), st.integers(0, 12)),
        st.tuples(st.just("row"), st.integers(0, 12)),
        st.tuples(st.just("branch"), st.lists(st.integers(0, 5), min_size=1, max_size=4)),
    ),
    max_size=40,
)


@settings(derandomize=True, deadline=None, database=None, max_examples=60)
@given(st.integers(0, 6), steps)
def test_any_course_of_a_session_leaves_the_state_of_its_tokens(prompt_length, course):
    """Appends, cuts (into the prompt too), rows at any length, branches: as a fresh recount."""
    constraints = TokenConstraints(
        prompt_length=prompt_length, repetition_penalty=1.2, frequency_penalty=0.5
    )
    chain, state = TokenChain([1]), ConstraintState(constraints)
    for step, value in course:
        if step == "append":
            chain.append(value)
        elif step == "cut":
            length = max(1, len(chain) - value)
            chain.truncate(length)
            state.truncate(length)
        elif step == "row":
            length = max(1, len(chain) - value)
            state.follow(chain, length)
            assert counts(state) == recount(chain.tokens[:length], prompt_length)
        else:
            state.follow(chain, len(chain))
            edits = state.edits_after(value)
            expected = recount([*chain.tokens, *value], prompt_length)
            if len(chain) >= prompt_length:
                assert dict(zip(edits.seen_token_ids, edits.num_outputs, strict=True)) == expected
            assert counts(state) == recount(chain.tokens, prompt_length)


@pytest.mark.parametrize(
    ("output", "banned"),
    [
        ([], [[], [], []]),
        ([4], [[9], [], []]),
        ([1, 4], [[9], [], []]),
        ([4, 9], [[], [], []]),
        ([5, 6], [[7], [], []]),
        ([6], [[], [], []]),
    ],
)
def test_b032_a_phrase_that_crosses_the_block_s_edge_is_banned_in_its_row_alone(output, banned):
    """Committed text ends in none, one or two tokens of a phrase; the draft goes on with 8, 8."""
    constraints = TokenConstraints(prompt_length=1, bad_words=((4, 9), (5, 6, 7)))
    chain, state = TokenChain([4, *output]), ConstraintState(constraints)
    chain.append([8, 8])
    rows = []
    for row in range(3):
        state.follow(chain, 1 + len(output) + row)
        edits = state.edits()
        rows.append([] if edits is None else edits.banned_token_ids.tolist())
    assert rows == banned


def test_b032_a_phrase_within_the_draft_is_banned_where_it_would_end():
    """draft = [5, 6, ...]: the third row bans 7, wherever the phrase began."""
    constraints = TokenConstraints(prompt_length=1, bad_words=((5, 6, 7),))
    for committed in ([3], [3, 5]):
        drafted = [5, 6, 1][len(committed) - 1 :]
        chain, state = TokenChain([*committed, *drafted]), ConstraintState(constraints)
        rows = []
        for length in range(len(committed), len(chain) + 1):
            state.follow(chain, length)
            edits = state.edits()
            rows.append(edits is not None and edits.banned_token_ids.tolist() == [7])
        assert rows == [length == 3 for length in range(len(committed), len(chain) + 1)]


def test_b049_end_tokens_are_banned_for_exactly_min_tokens_rows():
    """min_tokens 3: rows 0, 1, 2 of the output ban EOS and the stop id, row 3 does not."""
    constraints = TokenConstraints(prompt_length=2, min_tokens=3, end_token_ids=(0, 8))
    chain, state = TokenChain([1, 1, 5, 5, 5, 5]), ConstraintState(constraints)
    banned = []
    for length in range(2, 7):
        state.follow(chain, length)
        edits = state.edits()
        banned.append([] if edits is None else edits.banned_token_ids.tolist())
    assert banned == [[0, 8], [0, 8], [0, 8], [], []]


def test_a_token_costs_the_same_however_long_the_text_is():
    """One push after 200,000 tokens touches as many numbers as one after ten."""
    constraints = TokenConstraints(prompt_length=1, frequency_penalty=1.0)
    chain = TokenChain([1, *[i % 7 for i in range(200_000)]])
    state = ConstraintState(constraints)
    state.follow(chain, len(chain))
    read = []

    class Watched(TokenChain):
        def slice(self, start, stop):
            read.append(stop - start)
            return super().slice(start, stop)

    watched = Watched(chain.tokens)
    watched.append([3])
    state.follow(watched, len(watched))
    assert read == [1]
    edits = state.edits()
    assert edits.seen_token_ids.size == 7


def test_constraints_survive_the_wire():
    """Every field, packed and read, is what it was."""
    constraints = TokenConstraints(
        5, 1.25, -0.5, 2.0, ((7, 1.5), (3, -100.0)), ((1, 2, 3), (4,)), (1, 2, 9), 6, (0, 8)
    )

    assert unpack_constraints(pack_constraints(constraints)) == constraints


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("repetition_penalty", {"repetition_penalty": 0.0}),
        ("repetition_penalty", {"repetition_penalty": float("nan")}),
        ("repetition_penalty", {"repetition_penalty": 2.5}),
        ("presence_penalty", {"presence_penalty": 2.5}),
        ("frequency_penalty", {"frequency_penalty": float("-inf")}),
        ("logit_bias", {"logit_bias": ((1, 101.0),)}),
        ("logit_bias", {"logit_bias": ((1, float("nan")),)}),
        ("logit_bias", {"logit_bias": ((1, 1.0), (1, 2.0))}),
        ("bad_words", {"bad_words": ((1,), ())}),
    ],
)
def test_what_is_out_of_range_on_the_wire_is_refused_by_name(field, change):
    """A peer is not trusted: the field is named."""
    with pytest.raises(InvalidRequest, match=field):
        unpack_constraints(pack_constraints(TokenConstraints(**change)))


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("logit_bias", {"logit_bias": ((10, 1.0),)}),
        ("logit_bias", {"logit_bias": ((-1, 1.0),)}),
        ("bad_words", {"bad_words": ((1, 10),)}),
        ("allowed_token_ids", {"allowed_token_ids": (9, 10)}),
        ("min_tokens", {"min_tokens": 6}),
        ("allowed_token_ids", {"allowed_token_ids": (0, 8), "min_tokens": 1}),
        ("allowed_token_ids", {"allowed_token_ids": (4,), "bad_words": ((4,),)}),
    ],
)
def test_what_no_output_could_satisfy_is_refused_before_decoding(field, change):
    """Ids out of the vocabulary, min_tokens over max_tokens, bans that leave nothing."""
    with pytest.raises(InvalidRequest, match=field):
        complete_constraints(
            TokenConstraints(**change),
            vocab_size=10,
            eos_token_ids=(0,),
            stop_token_ids=(8,),
            prompt_length=4,
            max_tokens=5,
        )
