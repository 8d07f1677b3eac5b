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


def philox4x32(
    counter: tuple[int, int, int, int], key: tuple[int, int]
) -> tuple[int, int, int, int]:
    """Compute one Philox4x32-10 block in Python integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(NUM_ROUNDS):
        product0 = MULTIPLIERS[0] * c0
        product1 = MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (product1 >> 32) ^ c1 ^ k0,
            product1 & MASK,
            (product0 >> 32) ^ c3 ^ k1,
            product0 & MASK,
        )
        k0 = (k0 + WEYL[0]) & MASK
        k1 = (k1 + WEYL[1]) & MASK
    return c0, c1, c2, c3


def philox4x32_blocks(
    c0: ArrayLike, c1: ArrayLike, c2: ArrayLike, c3: ArrayLike, seed: ArrayLike
) -> NDArray[np.uint64]:
    """Compute Philox4x32-10 blocks for broadcast counters and 64-bit keys.

    Returns:
        [4, n] words, each below 2^32; n is the size of the broadcast shape.
    """
    counters = [np.asarray(c, np.uint64) for c in (c0, c1, c2, c3)]
    seeds = np.asarray(seed, np.uint64)
    shape = np.broadcast_shapes(seeds.shape, *(c.shape for c in counters))
    x0, x1, x2, x3 = (np.array(np.broadcast_to(c, shape)).reshape(-1) for c in counters)
    k0, k1 = seeds.reshape(-1) & np.uint64(MASK), seeds.reshape(-1) >> np.uint64(32)
    mask, half = np.uint64(MASK), np.uint64(32)
    m0, m1 = (np.uint64(m) for m in MULTIPLIERS)
    w0, w1 = (np.uint64(w) for w in WEYL)
    for _ in range(NUM_ROUNDS):
        # 32 x 32 bits fit 64: no product overflows.
        x0 *= m0
        x2 *= m1
        y0 = x2 >> half
        y0 ^= x1
        y0 ^= k0
        y2 = x0 >> half
        y2 ^= x3
        y2 ^= k1
        x2 &= mask
        x0 &= mask
        x0, x1, x2, x3 = y0, x2, y2, x0
        k0 = (k0 + w0) & mask
        k1 = (k1 + w1) & mask
    return np.stack((x0, x1, x2, x3))
