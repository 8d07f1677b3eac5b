"""One request's times and counts, and what a side's waves add up to."""

import pytest

from specserve.tools.bench.sample import Reading, Sample, Speculated, Wave, checked
from specserve.tools.bench.summary import summarise
from support.bench_samples import sample, wave


def test_times_of_a_request():
    """TTFT: the first block. TPOT: over the tokens after it. ITL: a gap, shared out among them."""
    made = Sample("p", "c", 3, block_at_s=(0.5, 0.8, 1.0), block_sizes=(2, 3, 1), e2e_s=1.1)

    assert made.ttft_s == 0.5
    assert made.tpot_s == pytest.approx(0.5 / 4)
    assert made.itl_s == pytest.approx((0.1, 0.1, 0.1, 0.2))
    assert made.gaps_s == pytest.approx((0.3, 0.2))
    assert made.num_tokens == 6


def test_a_request_without_tokens_has_no_times():
    made = Sample("p", "c", 3)

    assert (made.ttft_s, made.tpot_s, made.itl_s) == (None, None, ())


def test_counts_that_disagree_fail_the_request():
    """A server whose record does not add up to what it sent is not reported on."""
    good = sample()
    assert checked(good) is good

    short = Sample("p", "c", 3, (0.1,), (5,), 0.1, good.origins, good.speculated)
    assert "5 tokens came, the record counts 6" in checked(short).error

    other = Sample("p", "c", 3, (0.1,), (6,), 0.1, ("plain",) * 6, good.speculated)
    assert "the record counts" in checked(other).error
    assert checked(other).num_tokens == 0


def test_summary_adds_up():
    """Tokens are the sum over origins; rates are over the waves' wall time."""
    waves = [Wave((sample(0), sample(1, category="code")), 0.5), Wave((sample(2),), 0.25)]

    summary = summarise(waves)

    assert summary.num_output_tokens == 18 == sum(summary.tokens_by_origin.values())
    assert summary.tokens_by_origin == {"accepted": 9, "recovered": 6, "bonus": 0, "plain": 3}
    assert summary.tokens_per_s == pytest.approx(18 / 0.75)
    assert summary.tokens_per_minute == pytest.approx(60 * 18 / 0.75)
    assert summary.requests_per_s == pytest.approx(3 / 0.75)
    assert summary.num_prompt_tokens == 9
    assert [(c.category, c.num_requests) for c in summary.categories] == [("chat", 2), ("code", 1)]


def test_acceptance_is_over_drafts_and_by_position():
    """Mean acceptance length is 1 + accepted / drafts; every position counts who got that far."""
    made = sample(sizes=(1, 5, 1, 3), drafted=(4, 2, 4), accepted=(4, 0, 2))

    acceptance = summarise([Wave((made,), 1.0)]).acceptance

    assert acceptance is not None
    assert acceptance.num_drafts == 3
    assert acceptance.mean_acceptance_length == pytest.approx(1 + 6 / 3)
    assert acceptance.acceptance_rate == pytest.approx(6 / 10)
    assert [(p.num_verified, p.num_accepted) for p in acceptance.by_position] == [
        (3, 2),
        (3, 2),
        (2, 1),
        (2, 1),
    ]
    assert acceptance.tokens_per_round == pytest.approx(10 / 4)


def test_a_side_that_never_drafts_has_no_acceptance_length():
    acceptance = summarise([wave(4, 1.0)]).acceptance

    assert acceptance is not None
    assert acceptance.mean_acceptance_length is None
    assert acceptance.by_position == ()


def test_stages_are_shares_of_the_requests_own_time():
    summary = summarise([Wave((sample(), sample(1)), 1.0)])

    stages = {stage.name: stage for stage in summary.stages}
    assert stages["draft_s"].total_s == pytest.approx(0.1)
    assert stages["verify_s"].share_of_e2e == pytest.approx(0.4 / 0.6)
    assert stages["verify_s"].ms_per_round == pytest.approx(1e3 * 0.4 / 6)


def test_failed_requests_count_as_failed_and_in_nothing_else():
    summary = summarise(
        [Wave((sample(), sample(1, error="Boom: x"), sample(2, error="Boom: x")), 1)]
    )

    assert (summary.num_requests, summary.num_failed) == (3, 2)
    assert summary.errors == ("Boom: x",)
    assert summary.num_output_tokens == 6
    assert summary.e2e_s is not None
    assert summary.e2e_s.count == 1


def test_readings_give_batch_sizes_and_the_peak_of_the_cache():
    readings = (Reading(2, {"target": 5}), Reading(4, {"target": 9, "draft": 3}))

    summary = summarise([Wave((sample(),), 1.0, readings)])

    assert summary.batch_size is not None
    assert (summary.batch_size.p50, summary.batch_size.largest) == (3.0, 4.0)
    assert summary.kv_blocks_peak == {"target": 9, "draft": 3}


def test_nothing_measured_is_no_error():
    summary = summarise([])

    assert (summary.num_requests, summary.tokens_per_s, summary.ttft_s) == (0, 0.0, None)
    assert Speculated().num_tokens == 0
