"""The controller on modelled devices: never far from the better of always-on and always-off.

Everything is seeded, so a pass stays a pass. Modelled time costs little: a minute of one session is
a tenth of a second here.
"""

from functools import cache

import pytest

from specserve.speculation.length_choice import Reason
from support.simulated_device import compute_bound, memory_bound, roofline
from support.simulated_pair import SimulatedPair, Simulation

CURVES = {"memory": memory_bound, "compute": compute_bound, "roofline": roofline}
STEP_S = 0.02
SECONDS = {1: 60.0, 4: 30.0, 16: 20.0, 32: 20.0}
WARM_S = 3.0


def pair_of(curve="memory", c=0.1, acceptance=0.0, **changes):
    """A pair whose draft step takes c target steps."""
    chance = acceptance if callable(acceptance) else lambda position: acceptance
    return SimulatedPair(CURVES[curve](STEP_S), memory_bound(STEP_S * c), chance, **changes)


@cache
def fixed_tokens(curve, c, acceptance, num_sessions, k):
    """Tokens of a fixed K between the warm-up and the end."""
    outcome = Simulation(pair_of(curve, c, acceptance)).run(
        num_sessions, SECONDS[num_sessions], fixed_k=k
    )
    return outcome.tokens_between(WARM_S, SECONDS[num_sessions])


def ratio_to_best(curve, c, acceptance, num_sessions):
    simulation = Simulation(pair_of(curve, c, acceptance))
    outcome = simulation.run(num_sessions, SECONDS[num_sessions])
    best = max(fixed_tokens(curve, c, acceptance, num_sessions, k) for k in (0, 4))
    return outcome.tokens_between(WARM_S, SECONDS[num_sessions]) / best


@pytest.mark.parametrize("acceptance", [0.0, 1.0], ids=["always wrong", "perfect"])
@pytest.mark.parametrize("c", [0.05, 0.1, 0.25])
@pytest.mark.parametrize("curve", CURVES)
def test_one_session_is_within_three_percent_of_the_better_side(curve, c, acceptance):
    assert ratio_to_best(curve, c, acceptance, 1) >= 0.97


@pytest.mark.slow
@pytest.mark.parametrize("num_sessions", [4, 16, 32])
@pytest.mark.parametrize("acceptance", [0.0, 1.0], ids=["always wrong", "perfect"])
@pytest.mark.parametrize(
    ("curve", "c"), [("memory", 0.05), ("memory", 0.25), ("compute", 0.1), ("roofline", 0.25)]
)
def test_many_sessions_are_within_three_percent_of_the_better_side_B143(
    curve, c, acceptance, num_sessions
):
    """B143: speculation never makes decoding slower than none, at whatever load."""
    assert ratio_to_best(curve, c, acceptance, num_sessions) >= 0.97


@pytest.mark.slow
@pytest.mark.parametrize("num_sessions", [1, 4, 16])
@pytest.mark.parametrize("acceptance", [0.5, 0.7])
@pytest.mark.parametrize("curve", CURVES)
def test_middling_drafts_too(curve, acceptance, num_sessions):
    """Near break-even a few per cent go to noise and to looking; mostly K beats both sides."""
    assert ratio_to_best(curve, 0.1, acceptance, num_sessions) >= 0.95


@pytest.mark.slow
def test_draft_as_slow_as_the_target_is_switched_off_B143():
    """B143: with c = 1 not even a perfect draft pays, at any concurrency."""
    for num_sessions in (1, 16):
        pair = pair_of("memory", 1.0, 1.0)
        auto = Simulation(pair).run(num_sessions, 30.0)
        off = Simulation(pair).run(num_sessions, 30.0, fixed_k=0)
        assert auto.tokens_between(WARM_S, 30.0) >= 0.97 * off.tokens_between(WARM_S, 30.0)


@pytest.mark.slow
def test_load_on_a_compute_bound_target_makes_k_fall_to_0_and_its_end_brings_it_back():
    """A choice for the whole: alone K = 4 pays, among 32 each row makes everybody wait."""
    pair = pair_of("compute", 0.05, 0.7)
    simulation = Simulation(pair)
    simulation.run(1, 20.0)
    assert simulation.standing.k is not None
    assert simulation.standing.k >= 2
    for _ in range(31):
        simulation.start(num_tokens=200)
    simulation.run(0, 8.0)
    assert simulation.num_sessions == 32
    assert simulation.ks.count(0) >= 31
    while simulation.num_sessions > 1:
        simulation.run(0, 5.0)
    simulation.run(0, 30.0)

    assert simulation.standing.k >= 2


def test_acceptance_that_changes_in_mid_request_is_followed_both_ways():
    """Code, then prose, then code again: K falls to 0 within 60 tokens and comes back by probes."""
    good, bad = range(1000), range(1000, 2500)
    pair = pair_of("memory", 0.1, lambda n: 0.0 if n in bad else 0.9)
    simulation = Simulation(pair)
    tokens = simulation.run(1, 1.0).num_tokens
    while tokens < good.stop - 50:
        tokens = simulation.run(0, 0.2).num_tokens
    assert simulation.ks == [4]
    while simulation.ks != [0]:
        tokens = simulation.run(0, 0.05).num_tokens
    assert tokens < bad.start + 60
    while tokens < bad.stop - 64:
        tokens = simulation.run(0, 0.5).num_tokens
    assert simulation.ks == [0]
    while simulation.ks == [0]:
        tokens = simulation.run(0, 0.5).num_tokens

    assert tokens < bad.stop + 500


def test_slow_start_of_a_draft_does_not_switch_it_off_for_good():
    """A draft that takes fifty times as long for ten seconds is found again, by probing alone."""
    simulation = Simulation(pair_of("memory", 0.1, 0.8, draft_pauses_until=10.0))
    simulation.run(1, 10.0)
    assert simulation.ks == [0]
    simulation.run(0, 100.0)

    assert simulation.ks == [4]


def test_pauses_of_the_devices_change_no_choice():
    """One forward in fifty takes twenty times as long: a collector, a neighbour, a prefill."""
    outcome = Simulation(pair_of("memory", 0.1, 0.8, pause_chance=0.02)).run(1, 120.0)

    plain = sum(n for k, n in outcome.rounds_by_k.items() if k == 0)
    assert outcome.rounds_by_k[4] > 20 * plain


@pytest.mark.parametrize("acceptance", [0.0, 0.35, 0.6, 1.0])
def test_choice_is_stable_when_nothing_changes(acceptance):
    """Two minutes of an unchanging pair, near break-even too: a handful of switches."""
    simulation = Simulation(pair_of("memory", 0.25, acceptance))
    simulation.run(1, 120.0)

    assert simulation.standing.num_switches <= 12


def test_probing_costs_less_than_one_percent():
    """An always wrong draft is probed for ever, and always-off is hardly faster."""
    pair = pair_of("memory", 0.25, 0.0)
    auto = Simulation(pair).run(1, 300.0)
    off = Simulation(pair).run(1, 300.0, fixed_k=0)

    assert auto.reasons[Reason.PROBE] > 50
    late = auto.tokens_between(10.0, 300.0) / off.tokens_between(10.0, 300.0)
    assert late >= 0.985


def test_new_request_starts_from_what_its_pool_has_learned():
    """A second request with the always wrong draft hardly drafts; with the perfect one at once."""
    news = {}
    for acceptance in (0.0, 1.0):
        simulation = Simulation(pair_of("memory", 0.1, acceptance))
        simulation.run(1, 20.0)
        before = simulation.outcome.rounds_by_k.copy()
        simulation.run(1, 4.0)
        news[acceptance] = simulation.outcome.rounds_by_k - before

    assert sum(n for k, n in news[0.0].items() if k > 0) <= 6
    assert news[1.0][0] <= 6
    assert news[1.0].total() > 100
