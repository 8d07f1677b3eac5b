"""Philox4x32-10: a counter-based generator, numbers as a function of (counter, key).

Salmon et al., 2011, "Parallel random numbers: as easy as 1, 2, 3". Integer maths only, so every
machine and device computes the same words. Knows nothing of what they are used for.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

MASK = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
NUM_ROUNDS = 10

_MULTIPLIERS = np.array(MULTIPLIERS, np.uint64)
_WEYL_STEPS = np.arange(NUM_ROUNDS, dtype=np.uint64)[:, None] * np.array(WEYL, np.uint64)
"""[NUM_ROUNDS, 2]"""


def philox4x32(
    counter: tuple[int, int, int, int], key: tuple[int, int]
) -> tuple[int, int, int, int]:
    """Compute one Philox4x32-10 block in Python integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    mask = MASK  # locals are read faster, and this is the hottest loop of an orchestrator
    multiplier0, multiplier1 = MULTIPLIERS
    weyl0, weyl1 = WEYL
    for _ in range(NUM_ROUNDS):
        product0 = multiplier0 * c0
        product1 = multiplier1 * c2
        c0 = (product1 >> 32) ^ c1 ^ k0
        c1 = product1 & mask
        c2 = (product0 >> 32) ^ c3 ^ k1
        c3 = product0 & mask
        k0 = (k0 + weyl0) & mask
        k1 = (k1 + weyl1) & mask
    return c0, c1, c2, c3


def philox4x32_blocks(
    c0: ArrayLike, c1: ArrayLike, c2: ArrayLike, c3: ArrayLike, seed: ArrayLike
) -> NDArray[np.uint64]:
    """Compute Philox4x32-10 blocks for broadcast counters and 64-bit keys.

    Returns:
        [4, n] words, each below 2^32; n is the size of the broadcast shape.
    """
    seeds = np.asarray(seed, np.uint64)
    shape = np.broadcast_shapes(seeds.shape, *(np.shape(c) for c in (c0, c1, c2, c3)))
    even, odd = np.empty((2, *shape), np.uint64), np.empty((2, *shape), np.uint64)
    even[0], odd[0], even[1], odd[1] = c0, c1, c2, c3
    mask, half = np.uint64(MASK), np.uint64(32)
    # Both halves of a round in one array, [2, ...]: at this size calls cost, not arithmetic.
    multipliers = _MULTIPLIERS.reshape(2, *(1,) * len(shape))
    # Round r's key is the first one plus r times WEYL: [NUM_ROUNDS, 2, ...].
    first = np.stack((seeds & mask, seeds >> half))
    first = first.reshape(2, *(1,) * (len(shape) - seeds.ndim), *seeds.shape)
    for key in (_WEYL_STEPS.reshape(NUM_ROUNDS, 2, *(1,) * len(shape)) + first) & mask:
        even *= multipliers  # 32 x 32 bits fit 64: no product overflows
        crossed = even[::-1]
        even = crossed >> half
        even ^= odd
        even ^= key
        odd = crossed & mask
    return np.stack((even[0], odd[0], even[1], odd[1])).reshape(4, -1)
