"""Keyed randomness: known answers, disjoint purposes, extremes."""

import math

import numpy as np
import pytest

from specserve.speculation.philox import philox4x32, philox4x32_blocks
from specserve.speculation.randomness import (
    Purpose,
    RoundUniforms,
    exponential_from_words,
    exponential_noise,
    keyed_leading_noise,
    keyed_noise,
    keyed_uniforms,
    leading_noise_words,
    noise_words,
    uniform,
    uniforms,
    uniforms_from_words,
)

# Random123's kat_vectors, "philox4x32 10": counter, key, output.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (
        (0xFFFFFFFF,) * 4,
        (0xFFFFFFFF,) * 2,
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "output"), KNOWN_ANSWERS)
def test_philox_gives_the_known_answers(counter, key, output):
    """Both forms compute Random123's published words."""
    assert philox4x32(counter, key) == output
    blocks = philox4x32_blocks(*counter, key[0] | key[1] << 32)
    assert tuple(blocks[:, 0].tolist()) == output


def test_both_forms_of_philox_agree():
    """Vectorised blocks equal single ones for random counters and keys, and leave inputs alone."""
    rng = np.random.default_rng(0)
    counters = rng.integers(0, 2**32, (4, 50), np.uint64)
    seeds = rng.integers(0, 2**64, 50, np.uint64)
    counters.setflags(write=False)
    seeds.setflags(write=False)
    blocks = philox4x32_blocks(*counters, seeds)
    for i, seed in enumerate(seeds.tolist()):
        key = (seed & 0xFFFFFFFF, seed >> 32)
        assert tuple(blocks[:, i].tolist()) == philox4x32(tuple(counters[:, i].tolist()), key)


def test_uniforms_fill_53_bits_below_one():
    """The largest words give the largest double below 1, the smallest give 0."""
    words = np.array([0, 0xFFFFFFFF], np.uint64)
    low, high = uniforms_from_words(words, words).tolist()
    assert low == 0.0
    assert high == 1.0 - 2.0**-53


def test_single_and_vectorised_uniforms_agree():
    """One row, a range, a list of rows and a batch of sessions see the same numbers."""
    seed = 0xFEDCBA9876543210
    single = [uniform(seed, 3, 1000, row, Purpose.ACCEPT) for row in range(40)]
    assert uniforms(seed, 3, 1000, 40, Purpose.ACCEPT).tolist() == single
    assert uniforms(seed, 3, 1000, range(4), Purpose.ACCEPT).tolist() == single[:4]
    assert uniforms(seed, 3, 1000, [7, 2], Purpose.ACCEPT).tolist() == [single[7], single[2]]
    keys = [(seed, 3, 1000, row) for row in range(40)]
    assert keyed_uniforms(keys, Purpose.ACCEPT).tolist() == single
    assert uniforms(seed, 3, 1000, 0, Purpose.ACCEPT).shape == (0,)
    lazy = RoundUniforms(seed, 3, 1000, 40, Purpose.ACCEPT)
    assert len(lazy) == 40
    assert list(lazy) == single


def test_B010_uniforms_are_uniform_and_follow_the_seed():
    """100,000 accept draws pass Kolmogorov-Smirnov, and another seed gives other draws.

    False alarm below 1e-6: P(sqrt(n) D > 2.7) = 2 exp(-2 * 2.7^2) = 9e-7.
    """
    keys = [(42, 0, committed, row) for committed in range(20_000) for row in range(5)]
    draws = np.sort(keyed_uniforms(keys, Purpose.ACCEPT))
    assert draws[0] >= 0.0
    assert draws[-1] < 1.0
    steps = np.arange(len(draws) + 1) / len(draws)
    distance = max((steps[1:] - draws).max(), (draws - steps[:-1]).max())
    assert math.sqrt(len(draws)) * distance < 2.7
    other = [uniform(52, 0, 0, row, Purpose.ACCEPT) for row in range(5)]
    assert not set(other) & {uniform(42, 0, 0, row, Purpose.ACCEPT) for row in range(5)}


def test_B013_no_two_purposes_keys_or_places_share_a_block():
    """Every key field and the purpose change the number; the domains' counters are disjoint."""
    base = (7, 1, 10, 2)
    variants = [(8, 1, 10, 2), (7 | 1 << 40, 1, 10, 2), (7, 2, 10, 2), (7, 1, 11, 2), (7, 1, 10, 3)]
    draws = [uniform(*key, Purpose.DRAFT) for key in [base, *variants]]
    draws += [uniform(*base, purpose) for purpose in (Purpose.ACCEPT, Purpose.REPLACE)]
    assert len(set(draws)) == len(draws)
    assert len({int(purpose) for purpose in Purpose}) == 4


def test_B014_B016_draws_depend_on_nothing_but_their_key():
    """The same key gives the same number in another order, batch size or company."""
    keys = [(seed, choice, 5, 0) for seed in range(20) for choice in range(3)]
    together = dict(zip(keys, keyed_uniforms(keys, Purpose.REPLACE).tolist(), strict=True))
    for key in reversed(keys):
        assert uniform(*key, Purpose.REPLACE) == together[key]


def test_noise_is_finite_and_positive_at_both_ends():
    """x = 0 and x = 2^32 - 1, where float32 would give an infinite log E or an infinite E."""
    noise = exponential_from_words(np.array([0, 2**32 - 1], np.uint64))
    assert noise[0] == pytest.approx(2.0**-33, rel=1e-9)
    assert noise[1] == pytest.approx(33 * math.log(2), rel=1e-9)
    assert np.isfinite(np.log(noise)).all()


def test_noise_does_not_depend_on_which_ids_are_asked_for():
    """One id, a sparse set, a dense set, a batch and the whole vocabulary see the same noise."""
    whole = leading_noise_words(9, 2, 77, 5001)
    assert whole.shape == (5001,)
    for ids in ([0], [5000], [3, 2, 1], [11, 40, 4999], list(range(4000, 5001)), list(range(9))):
        assert noise_words(9, 2, 77, np.array(ids)).tolist() == whole[ids].tolist()
    noise = exponential_from_words(whole)
    sets = [np.array([5, 4]), np.array([4000]), np.arange(30)]
    batch = keyed_noise([(9, 2, 77)] * 3, sets)
    for ids, values in zip(sets, batch, strict=True):
        assert values.tolist() == noise[ids].tolist()
    assert noise_words(9, 2, 77, np.zeros(0, np.int64)).size == 0
    assert keyed_noise([], []) == []
    rows = keyed_leading_noise([(9, 2, 78), (9, 2, 77), (2**64 - 1, 0, 1)], 5001)
    assert rows[1].tolist() == noise.tolist()
    assert rows[2].tolist() == exponential_noise(2**64 - 1, 0, 1, np.arange(5001)).tolist()


def test_four_ids_share_a_block_laid_out_as_written():
    """Token id t is word t % 4 of counter (t // 4, position, choice, 0) under the seed."""
    seed = 0x0123456789ABCDEF
    block = philox4x32((6, 300, 4, 0), (seed & 0xFFFFFFFF, seed >> 32))
    assert noise_words(seed, 4, 300, np.arange(24, 28)).tolist() == list(block)


def test_noise_is_exponential():
    """50,000 ids have the mean of a unit exponential (6 sigma: false alarm 2e-9)."""
    noise = exponential_noise(1, 0, 3, np.arange(50_000))
    assert abs(noise.mean() - 1.0) < 6 / math.sqrt(50_000)
