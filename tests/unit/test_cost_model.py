"""Costs by K from rounds that were run, as though every session chose the same K."""

import pytest

from specserve.speculation.cost_model import (
    CostModel,
    Load,
    PlainTiming,
    RoundTiming,
)

ALONE = Load(1, 1)


def timing(k=4, *, draft_s=0.002, verify_s=0.020, rest_s=0.001, hidden=0, queue_s=0.0, rows=None):
    """A round whose draft takes draft_s a token."""
    drafting = draft_s * (k - hidden)
    return RoundTiming(
        num_draft_tokens=k,
        wall_s=drafting + 0.0005 + queue_s + verify_s + rest_s,
        draft_wait_s=drafting + 0.0005,
        draft_queue_s=0.0,
        draft_forward_s=drafting,
        draft_rows=1 if hidden < k else 0,
        num_hidden_tokens=hidden,
        verify_queue_s=queue_s,
        verify_forward_s=verify_s,
        verify_rows=k + 1 if rows is None else rows,
    )


def rounds_of(count, *args, **kwargs):
    """Rounds alike but for a hair: two equal times at one size are taken for one forward."""
    verify_s = kwargs.pop("verify_s", 0.020)
    return [timing(*args, verify_s=verify_s * (1 + 1e-6 * n), **kwargs) for n in range(count)]


def plain(num_tokens=16, *, step_s=0.018, call_s=0.002, token_s=0.0001, rows=1):
    """A decode-ahead call."""
    first_s = call_s + step_s
    wall_s = first_s + (num_tokens - 1) * (step_s + token_s)
    forwards = tuple((rows, step_s * (1 + 1e-6 * n)) for n in range(num_tokens))
    return PlainTiming(num_tokens, wall_s, first_s, forwards)


def fed(rounds=(), plains=(), load=ALONE, model=None):
    model = model or CostModel()
    for number, one in enumerate(rounds):
        model.observe_round(one, load, number * 1e-3)
    for one in plains:
        model.observe_plain(one, 0.0)
    return model


def lived(rounds, load):
    """A model that is asked before every round, as a controller asks it, ten rounds a second."""
    model = CostModel()
    for number, one in enumerate(rounds):
        model.costs(load, 5, 16, 0.1 * number)
        model.observe_round(one, load, 0.1 * number)
    return model


def test_round_is_draft_plus_verify_plus_the_rest():
    """One session: each K costs a + b*K for the draft, its own rows, transport and the host."""
    model = fed([*rounds_of(4, 4), *rounds_of(4, 1, verify_s=0.0185)], [plain()] * 4)

    costs = model.costs(ALONE, 4, 16, 1.0)
    assert costs.round_s[4] == pytest.approx(4 * 0.002 + 0.0005 + 0.020 + 0.001, rel=0.01)
    assert costs.round_s[1] == pytest.approx(0.002 + 0.0005 + 0.0185 + 0.001, rel=0.01)
    # In between the lines join what was measured.
    assert costs.round_s[1] < costs.round_s[2] < costs.round_s[3] < costs.round_s[4]


def test_decode_ahead_shares_the_cost_of_a_call_among_its_tokens():
    model = fed([timing()], [plain()] * 4)

    short = model.costs(ALONE, 4, 4, 1.0).plain_s
    long = model.costs(ALONE, 4, 64, 2.0).plain_s
    assert short == pytest.approx(0.018 + 0.0001 + 0.002 / 4, rel=0.01)
    assert long == pytest.approx(0.018 + 0.0001 + 0.002 / 64, rel=0.01)


def test_costs_are_those_of_all_choosing_alike_not_of_one_alone():
    """32 sessions on a device that is as slow as it has rows: K = 4 costs five times K = 0."""
    model = CostModel()
    for rows in (1, 8, 32, 36):
        fed(rounds_of(4, 3, verify_s=0.002 * rows, rows=rows), model=model)
    model.observe_plain(plain(rows=32, step_s=0.064), 0.0)

    costs = model.costs(Load(32, 32), 4, 16, 1.0)
    # A single session that speculates among 31 that do not would see 36 rows instead of 32.
    assert costs.plain_s == pytest.approx(0.064, rel=0.05)
    assert costs.round_s[4] > 2 * costs.plain_s
    assert costs.delay_s[4] == pytest.approx(31 * 4 * 0.002, rel=0.3)


def test_half_drafts_while_the_other_half_is_verified():
    """Two halves that take turns beat all in step when drafting is long."""
    model = CostModel()
    for rows in (8, 16, 40, 80):
        fed(rounds_of(4, 4, draft_s=0.010, verify_s=0.001 * rows, rows=rows), model=model)

    # In step: 40 + 80 ms. By turns: 40 drafting beside 40 verifying.
    assert model.costs(Load(16, 16), 4, 16, 1.0).round_s[4] == pytest.approx(0.0815, rel=0.05)


def test_tokens_drafted_ahead_are_not_waited_for():
    """With three of four tokens hidden behind the last round a proposal costs a quarter."""
    hidden = fed(rounds_of(20, 4, hidden=3))
    asked = fed(rounds_of(20, 4))

    difference = asked.costs(ALONE, 4, 16, 1.0).round_s[4]
    difference -= hidden.costs(ALONE, 4, 16, 1.0).round_s[4]
    assert difference == pytest.approx(3 * 0.002, rel=0.05)


def test_queueing_counts_only_when_all_speculate():
    """A lone probe waits for a forward of the others; if all speculated there were none to wait."""
    load = Load(8, 8, all_draft=True)
    quiet = lived(rounds_of(60, 4, rows=40), load)
    lone = lived(rounds_of(60, 4, queue_s=0.015, rows=40), Load(8, 8))
    together = lived(rounds_of(60, 4, queue_s=0.015, rows=40), load)

    assert quiet.costs(load, 4, 16, 6.0).crowding == pytest.approx(1.0, abs=0.02)
    slow = together.costs(load, 4, 16, 6.0).seconds(4, 4)
    assert slow > 1.2 * lone.costs(load, 4, 16, 6.0).seconds(4, 4)
    # The opinion fades: what was crowded once is tried again.
    assert together.costs(load, 4, 16, 100.0).seconds(4, 4) < slow


def test_crowding_is_learned_however_few_of_the_tokens_come():
    """An unsure draft mostly stops short: what all rounds take tells of any K none the less."""
    load = Load(8, 8, all_draft=True)

    def unsure(queue_s):
        kinds = (timing(4, queue_s=queue_s, rows=24), *[timing(1, queue_s=queue_s, rows=16)] * 2)
        return lived([kinds[number % 3] for number in range(60)], load)

    model = unsure(0.015)
    costs = model.costs(load, 5, 16, 6.0)
    assert unsure(0.0).costs(load, 5, 16, 6.0).crowding == pytest.approx(1.0, abs=0.02)
    assert costs.crowding > 1.2
    assert costs.seconds(4, 2.0) == pytest.approx(costs.crowding * costs.round_s[2])
    assert costs.seconds(5, 9.0) == pytest.approx(costs.crowding * costs.round_s[5])
    assert model.costs(Load(2, 2), 4, 16, 6.0).crowding == 1.0


def test_a_round_is_held_against_what_came_on_average_though_less_was_asked_about():
    """Costs worked out for K = 1 must not stand for the 2.5 tokens that come on average."""
    load, model = Load(8, 8, all_draft=True), CostModel()
    four, one = timing(4, draft_s=0.020, rows=24), timing(1, draft_s=0.020, rows=24)
    # To whom one token comes waits for those to whom four do.
    one = one._replace(wall_s=four.wall_s, draft_wait_s=four.draft_wait_s, draft_queue_s=3 * 0.020)
    for number in range(60):
        model.costs(load, 1, 16, 0.1 * number)
        model.observe_round(four if number % 2 else one, load, 0.1 * number)

    ratio = four.wall_s / (four.wall_s - 1.5 * 0.020)
    assert model.crowding(8, 6.0) == pytest.approx((60 * ratio + 32) / 92, rel=0.03)


def test_late_proposals_make_drafting_dear():
    model = fed(rounds_of(4))
    before = model.costs(ALONE, 4, 16, 1.0).round_s[4]
    for _ in range(16):
        model.draft.observe_late(0.5, 1.0)

    assert model.costs(ALONE, 4, 16, 2.0).round_s[4] > before + 0.4


def test_nothing_measured_costs_nothing_and_says_so():
    costs = CostModel().costs(ALONE, 4, 16, 0.0)

    assert costs.num_rounds == 0
    assert costs.num_plain == 0
    assert CostModel().latest is None


def test_tokens_looked_up_without_a_model_cost_no_draft_forward():
    """A cascade of which half the rounds found their tokens in the text pays for the other half."""
    found = [
        one._replace(draft_rows=0, draft_wait_s=0.0, draft_forward_s=0.0, wall_s=0.021)
        for one in rounds_of(20, 4)
    ]
    mixed = fed([one for pair in zip(rounds_of(20, 4), found, strict=True) for one in pair])

    drafted_s = fed(rounds_of(40, 4)).draft.seconds(4, 1)
    assert mixed.draft.seconds(4, 1) == pytest.approx(drafted_s / 2, rel=0.1)
