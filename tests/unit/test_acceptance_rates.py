"""Acceptance by position: only verified tokens count, and a request starts from its pool."""

import random

import pytest

from specserve.speculation.acceptance_rates import (
    PRIOR_RATE,
    PoolAcceptance,
    RequestAcceptance,
)


def fed(acceptance, rounds):
    """Tell it (asked, drafted, accepted) of each round."""
    for asked, drafted, accepted in rounds:
        acceptance.observe(asked, drafted, accepted)
    return acceptance


def test_tokens_after_the_first_rejection_count_nowhere():
    """Of K = 4 with one accepted, positions 0 and 1 were verified; 2 and 3 were not."""
    pool = fed(PoolAcceptance(), [(4, 4, 1)] * 400)

    first, second, third, fourth = pool.rates(4).accepted
    assert first == pytest.approx(1.0, abs=0.02)
    assert second == pytest.approx(0.0, abs=0.02)
    # Never verified: they take after the position before them.
    assert third == second
    assert fourth == second


def test_new_request_starts_from_its_pool_and_an_unknown_pool_from_the_prior():
    pool = PoolAcceptance()
    assert pool.rates(1).expect().num_tokens[1] == 1 + PRIOR_RATE

    fed(pool, [(4, 4, 4)] * 300)

    assert pool.rates(4).expect().num_tokens[4] > 4.9


def test_new_tenant_starts_from_all_tenants_and_then_goes_its_own_way():
    """A pool within a pool: what it sees is told to both, and its own evidence wins."""
    wider = fed(PoolAcceptance(), [(4, 4, 4)] * 300)
    tenant = PoolAcceptance(wider)
    before = wider.num_rounds

    assert tenant.rates(1).accepted[0] > 0.95
    fed(tenant, [(4, 4, 0)] * 60)

    assert tenant.rates(1).accepted[0] < 0.1
    assert wider.num_rounds == before + 60
    assert wider.rates(1).accepted[0] > 0.6


def test_request_like_its_pool_is_not_told_apart_by_chance():
    """Requests that are alike choose alike: 200 fair coins, and hardly one stands out."""
    chance = random.Random(5)
    pool = PoolAcceptance()
    unlike = 0
    for _ in range(200):
        request = RequestAcceptance(pool)
        for _ in range(30):
            accepted = 0
            while accepted < 4 and chance.random() < 0.6:
                accepted += 1
            request.observe(4, 4, accepted)
        unlike += request.is_unlike(pool.rates(4))

    assert unlike <= 12  # 1.2 % each at 2.5 deviations, and rates that move a little


def test_request_unlike_its_pool_is_told_apart_within_a_few_rounds():
    pool = fed(PoolAcceptance(), [(4, 4, 3)] * 300)
    request = fed(RequestAcceptance(pool), [(4, 4, 0)] * 6)

    assert request.is_unlike(pool.rates(4))
    assert request.own(pool.rates(4)).expect().num_tokens[4] < 1.7


def test_opinion_from_long_ago_gives_way_to_a_new_probe():
    """After 300 tokens without a draft, three good probes outweigh twenty bad rounds."""
    pool = PoolAcceptance()
    request = fed(RequestAcceptance(pool), [(1, 1, 0)] * 20)
    request.fade(300)
    fed(request, [(1, 1, 1)] * 3)

    own = request.own(pool.rates(1)).expect().num_tokens[1] - 1
    assert own > pool.rates(1).accepted[0]
    assert own > 0.4


def test_lookup_that_seldom_matches_is_expected_to_come_empty():
    """Half the rounds find nothing, the others three of eight: both are in what is expected."""
    pool = fed(PoolAcceptance(), [(8, 3, 3), (8, 0, 0)] * 200)

    expected = pool.rates(8).expect()
    assert expected.share_empty == pytest.approx(0.5, abs=0.02)
    assert expected.num_draft_tokens[8] == pytest.approx(3.0, abs=0.2)
    assert expected.num_tokens[8] == pytest.approx(4.0, abs=0.2)
    assert expected.num_draft_tokens[2] == pytest.approx(2.0, abs=0.05)


@pytest.mark.parametrize(
    "rounds",
    [
        [(5, 5, 5), (5, 1, 0)],  # a long guess is a sure one
        [(5, 1, 1), (5, 5, 0)],  # the other way round
        [(5, 2, 2), (5, 4, 1), (5, 3, 0), (5, 5, 4)],
    ],
)
def test_expected_tokens_are_those_that_rounds_gave_whatever_length_goes_with_acceptance(rounds):
    """No independence is assumed between how many draft tokens come and how many are accepted."""
    pool = fed(PoolAcceptance(), rounds * 400)

    expected = pool.rates(5).expect()

    for k in range(1, 6):
        given = sum(1 + min(accepted, k) for _, _, accepted in rounds) / len(rounds)
        assert expected.num_tokens[k] == pytest.approx(given, abs=0.05)
    drafted = sum(drafted for _, drafted, _ in rounds) / len(rounds)
    assert expected.num_draft_tokens[5] == pytest.approx(drafted, abs=0.05)


def test_smaller_k_teaches_nothing_of_the_positions_it_does_not_ask_for():
    pool = fed(PoolAcceptance(), [(4, 4, 4)] * 300)
    fed(pool, [(1, 1, 1)] * 50)

    assert pool.rates(4).accepted[3] > 0.95
