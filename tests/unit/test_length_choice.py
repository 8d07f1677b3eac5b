"""Options, the standing choice and its hysteresis, the probing budget, the configured table."""

import pytest

from specserve.speculation.acceptance_rates import Expectation, PoolAcceptance
from specserve.speculation.cost_model import Load, PlainTiming, RoundCosts, RoundTiming
from specserve.speculation.length_choice import (
    MARGIN,
    NUM_TIMES,
    NUM_TIMES_AMONG,
    Choice,
    Option,
    Reason,
    Standing,
    best_of,
    options_of,
)
from specserve.speculation.length_pool import MOST_WARMING_UP, LengthPool
from specserve.speculation.length_table import length_by_batch_size
from specserve.speculation.probe_budget import (
    LONGEST_PAUSE_S,
    PROBE_SHARE,
    SAVINGS_S,
    ProbeBudget,
)

COSTS = RoundCosts(
    plain_s=0.020,
    token_s=0.019,
    call_s=0.016,
    round_s=(0.020, 0.024, 0.028, 0.032),
    crowding=1.0,
    delay_s=(0.0, 0.0, 0.0, 0.0),
    num_sessions=1,
    num_plain=9,
    num_rounds=99,
    num_fruitless=0,
    plain_at=0.0,
)


def options(*rates):
    """Options with these rates, K = 0 first, each a tenth of a second long."""
    return [Option(0.1 * rate, 0.1) for rate in rates]


def test_every_k_is_worth_its_tokens_over_its_seconds():
    expected = Expectation([0.0, 1.0, 2.0, 3.0], [1.0, 1.8, 2.4, 2.9], 0.0)

    found = options_of(expected, COSTS, num_steps_without=4)
    assert [option.seconds for option in found] == pytest.approx([0.020, 0.024, 0.028, 0.032])
    assert [option.num_tokens for option in found] == [1.0, 1.8, 2.4, 2.9]
    assert best_of(found) == 3


def test_rounds_that_come_empty_decode_a_little_and_pay_for_the_call():
    expected = Expectation([0.0, 1.0, 1.5, 1.5], [1.0, 2.0, 2.5, 2.5], 0.5)

    found = options_of(expected, COSTS, num_steps_without=2)
    assert found[1].num_tokens == pytest.approx(0.5 * 2.0 + 0.5 * 2)
    assert found[1].seconds == pytest.approx(0.5 * 0.024 + 0.5 * (0.016 + 2 * 0.019))
    # Asking for more than comes costs no more.
    assert found[3].seconds == pytest.approx(found[2].seconds)


def test_choice_moves_only_when_another_is_better_for_some_rounds():
    standing = Standing()
    assert standing.settle(options(10, 20), 0.0) is Reason.BEST
    assert standing.k == 1

    times = [standing.settle(options(21, 20), 0.11 * n) for n in range(1, NUM_TIMES)]
    assert times == [Reason.HYSTERESIS] * (NUM_TIMES - 1)
    assert standing.settle(options(21, 20), 0.11 * NUM_TIMES) is Reason.BEST
    assert standing.k == 0
    assert standing.num_switches == 1


def test_gain_below_the_margin_never_moves_it():
    standing = Standing(1)
    for number in range(1000):
        better = (MARGIN - 0.001) * 20
        assert standing.settle(options(better, 20), float(number)) is Reason.HYSTERESIS
    assert standing.k == 1


@pytest.mark.parametrize(("before", "gain", "after"), [(0, 1.05, 0), (0, 1.15, 1), (1, 1.05, 0)])
def test_among_others_drafting_begins_for_more_than_a_models_word(before, gain, after):
    """What rounds of all take is not measured before they run; what they lose then is."""
    standing = Standing(before)
    better = (20, 20 * gain) if before == 0 else (20 * gain, 20)
    for number in range(NUM_TIMES_AMONG):
        assert standing.k == before or number >= NUM_TIMES
        standing.settle(options(*better), float(number), is_alone=False)

    assert standing.k == after


def test_clear_gain_moves_it_at_once():
    standing = Standing(1)

    assert standing.settle(options(40, 20), 0.0) is Reason.BEST
    assert standing.k == 0


def test_many_requests_looking_in_one_round_count_once():
    """32 requests share a choice: it must not be turned in one round by one noisy number."""
    standing = Standing(1)
    for _ in range(32):
        standing.settle(options(21, 20), 5.0)

    assert standing.k == 1


def test_probing_loses_at_most_its_share_of_the_time():
    """However often it is asked, what is spent stays within the share, one probe's loss apart."""
    budget, spent, now = ProbeBudget(0.0), 0.0, 0.0
    while now < 100.0:
        now += 0.01
        budget.accrue(4, now)
        if budget.wait_s(0.05, 4) == 0:
            budget.spend(0.05)
            spent += 0.05

    assert 0.9 * PROBE_SHARE * 4 * 100 < spent <= PROBE_SHARE * 4 * 100 + 0.05


def test_dear_probe_is_put_off_and_not_forbidden():
    """A draft that seems to cost an hour is still looked at again, within the longest saving."""
    budget = ProbeBudget(0.0)
    budget.accrue(1, 1.0)
    assert budget.wait_s(3600.0, 1) == pytest.approx(SAVINGS_S - 1.0)
    for second in range(2, 2 + round(SAVINGS_S)):
        budget.accrue(1, second)
    assert budget.wait_s(3600.0, 1) == 0
    budget.spend(3600.0)

    assert budget.wait_s(0.0, 1) > SAVINGS_S


def test_a_pause_earns_no_probes():
    """Of the time in which nobody decodes nothing can be lost: an hour counts as two seconds."""
    budget = ProbeBudget(0.0)
    budget.accrue(1, 3600.0)
    assert budget.credit_s == pytest.approx(PROBE_SHARE * LONGEST_PAUSE_S)


def test_time_without_requests_earns_nothing():
    """One request of 0.4 s every 2 s: probing may lose a share of the 0.4 s, not of the 2."""
    pool = LengthPool(0.0)
    acceptance = PoolAcceptance()
    for number in range(100):
        began = 2.0 * number
        controller = pool.open(acceptance, 1, 4, began)
        pool.budget.accrue(1, began + 0.4)
        pool.close(controller)
    assert pool.budget.credit_s == pytest.approx(PROBE_SHARE * 0.4 * 100)


@pytest.mark.parametrize(
    ("num_sessions", "k"), [(1, 4), (8, 4), (9, 2), (31, 2), (32, 0), (999, 0), (1000, None)]
)
def test_table_names_k_by_batch_size(num_sessions, k):
    """Both ends of a range are in it; K is never above the request's own; a gap names none."""
    table = ((1, 8, 9), (9, 31, 2), (32, 999, 0))

    assert length_by_batch_size(table, num_sessions, 4) == k


def test_warming_up_goes_on_although_rounds_come_to_nothing():
    """Sixteen requests of which none gets its proposals in time at first: drafts late, prompts
    being read. Whoever comes later must still be let try."""
    pool = LengthPool(0.0)
    acceptance = PoolAcceptance()
    load = Load(16, 16)
    now = 0.0
    for _ in range(5):
        controllers = [pool.open(acceptance, 1, 4, now) for _ in range(16)]
        chosen = []
        for controller in controllers:
            now += 0.01
            choice = pool.choose(controller, load, 4, 16, now)
            pool.note(controller, choice.num_speculative_tokens, now)
            chosen.append(choice)
        assert {choice.reason for choice in chosen} == {Reason.WARMUP}
        drafting = [choice for choice in chosen if choice.num_speculative_tokens]
        assert len(drafting) == MOST_WARMING_UP, "a few at a time, but always some"
        for controller in controllers:
            pool.close(controller)


def knowing_pool(acceptance):
    """Make a pool of one session whose drafts are all accepted."""
    pool, load = LengthPool(0.0), Load(1, 1)
    drafting = RoundTiming(4, 0.030, 0.008, 0.0, 0.008, 1, 0, 0.0, 0.020, 5)
    controller = pool.open(acceptance, 1, 4, 0.0)
    for number in range(40):
        at = 0.03 * number
        pool.choose(controller, load, 4, 16, at)
        pool.observe_plain(controller, PlainTiming(4, 0.084, 0.021, ((1, 0.02),) * 4), 0.0, at)
        pool.observe_round(controller, drafting, 4, 4, load, at)
    return pool


def test_a_probe_that_is_only_foreseen_is_not_begun():
    """What is chosen a round ahead may never be done: it must not count as a look."""
    acceptance = PoolAcceptance()
    pool, load, later = knowing_pool(acceptance), Load(1, 1), 1000.0
    pool.budget.accrue(1000, later)
    controller = pool.open(acceptance, 1, 4, later)
    for _ in range(3):
        assert pool.choose(controller, load, 4, 16, later, is_ahead=True).reason is Reason.PROBE
    assert pool.choose(controller, load, 4, 16, later).reason is Reason.PROBE
    assert pool.choose(controller, load, 4, 16, later) == Choice(4, Reason.BEST)


def test_the_prompt_s_round_looks_at_nothing():
    """Its time tells nothing of decode-ahead, and a draft that is wanted reads the prompt in it."""
    acceptance = PoolAcceptance()
    pool, load = knowing_pool(acceptance), Load(1, 1)
    later = 1000.0
    pool.budget.accrue(1000, later)
    first = pool.open(acceptance, 1, 4, later)
    assert pool.choose(first, load, 4, 16, later, is_first=True) == Choice(4, Reason.BEST)
    assert pool.choose(first, load, 4, 16, later).reason is Reason.PROBE


@pytest.mark.parametrize("is_late", [True, False])
def test_warming_up_ends_when_nothing_ever_comes(is_late):
    """Drafts always late, or lookups that never match: target-only, with budgeted looks."""
    pool = LengthPool(0.0)
    acceptance = PoolAcceptance()
    controllers = [pool.open(acceptance, 1, 4, 0.0) for _ in range(16)]
    plain = PlainTiming(4, 0.084, 0.021, ((16, 0.02),) * 4)
    reasons = []
    for number in range(3200):
        now = 0.01 * number
        controller = controllers[number % 16]
        choice = pool.choose(controller, Load(16, 16), 4, 16, now)
        pool.note(controller, choice.num_speculative_tokens, now)
        reasons.append(choice.reason)
        if choice.num_speculative_tokens == 0:
            pool.observe_plain(controller, plain, 0.0, now)
        elif is_late:
            pool.costs.draft.observe_late(1.0, now)
            pool.costs.num_fruitless += 1
        else:
            pool.observe_empty(controller, plain, 4, now)
    assert Reason.WARMUP in reasons[:100]
    assert Reason.WARMUP not in reasons[200:]


def test_decode_ahead_of_single_tokens_is_measured_too():
    """`num_decode_steps: 1` must not leave a pool warming up for ever."""
    pool = LengthPool(0.0)
    controller = pool.open(PoolAcceptance(), 1, 4, 0.0)
    drafting = RoundTiming(4, 0.030, 0.008, 0.0, 0.008, 1, 0, 0.0, 0.020, 5)
    for number in range(40):
        at = 0.03 * number
        choice = pool.choose(controller, Load(1, 1), 4, 1, at)
        if choice.num_speculative_tokens:
            pool.observe_round(controller, drafting, 4, 4, Load(1, 1), at)
        else:
            pool.observe_plain(controller, PlainTiming(1, 0.021, 0.021, ((1, 0.02),)), 0.0, at)
    assert choice == Choice(4, Reason.BEST)
