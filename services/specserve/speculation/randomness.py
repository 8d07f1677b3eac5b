"""Randomness by key: every number is a pure function of (seed, choice, where it is used, purpose).

A retry, another batch row, another replica or a restart sees the same numbers, because nothing is
ever drawn from a running generator. Each service derives its own numbers; none travels.

One Philox block of four 32-bit words per counter, key = the 64-bit seed:

| counter word | uniforms (standard rule)               | noise (coupled rule)               |
|--------------|----------------------------------------|------------------------------------|
| 0            | row within the round                   | token_id // 4 (word token_id % 4)  |
| 1            | committed length at round start        | absolute position of the token     |
| 2            | choice                                 | choice                             |
| 3            | purpose: DRAFT 1, ACCEPT 2, REPLACE 3  | NOISE 0                            |

Uniforms are keyed by the committed length at round start, never by absolute position: a position
can be redrafted after a rejection, and its draws must be fresh then. Knows no logits and no rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from specserve.speculation.philox import MASK, philox4x32, philox4x32_blocks

SMALL_NUM_BLOCKS = 10
"""Up to this many blocks, Python integers beat some hundred numpy calls (5 us a block)."""


class Purpose(IntEnum):
    """What a number is drawn for: counter word 3, so no two purposes share a block."""

    NOISE = 0
    """Exponential noise of the coupled rule, shared by draft and target by design."""
    DRAFT = 1
    """The draft's own draw from q."""
    ACCEPT = 2
    """The orchestrator's accept test."""
    REPLACE = 3
    """The target's draw from the residual, or from p on the bonus row."""


def uniform(seed: int, choice: int, committed_length: int, row: int, purpose: Purpose) -> float:
    """Draw the uniform of one row of one round.

    Args:
        committed_length: committed tokens at round start, keep_length + len(append_token_ids).
        row: 0..K within the round.

    Returns:
        A multiple of 2^-53 in [0, 1).
    """
    counter = (row & MASK, committed_length & MASK, choice & MASK, int(purpose))
    word0, word1, _, _ = philox4x32(counter, (seed & MASK, (seed >> 32) & MASK))
    return ((word0 >> 5) * 67108864 + (word1 >> 6)) * 2.0**-53


def uniforms(
    seed: int, choice: int, committed_length: int, rows: int | Sequence[int], purpose: Purpose
) -> NDArray[np.float64]:
    """Draw the uniforms of several rows of one round; an int asks for rows 0..rows-1.

    Returns:
        [len(rows)] in [0, 1).
    """
    row_ids = range(rows) if isinstance(rows, int) else rows
    return keyed_uniforms([(seed, choice, committed_length, row) for row in row_ids], purpose)


@dataclass(frozen=True, slots=True)
class RoundUniforms:
    """`uniforms` of rows 0..num_rows-1, each drawn when it is looked at: most accept tests look at
    none (p >= q), and a block costs more than the rest of the test.
    """

    seed: int
    choice: int
    committed_length: int
    num_rows: int
    purpose: Purpose

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, row: int) -> float:
        if not 0 <= row < self.num_rows:
            raise IndexError(row)
        return uniform(self.seed, self.choice, self.committed_length, row, self.purpose)


def keyed_uniforms(
    keys: Sequence[tuple[int, int, int, int]], purpose: Purpose
) -> NDArray[np.float64]:
    """Draw one uniform per (seed, choice, committed_length, row), for rows of many sessions.

    Returns:
        [len(keys)] in [0, 1).
    """
    if len(keys) <= SMALL_NUM_BLOCKS:
        return np.array([uniform(*key, purpose) for key in keys], np.float64)
    table = np.array(keys, np.uint64)
    word0, word1, _, _ = philox4x32_blocks(
        table[:, 3], table[:, 2], table[:, 1], int(purpose), table[:, 0]
    )
    return uniforms_from_words(word0, word1)


def uniforms_from_words(
    word0: NDArray[np.uint64], word1: NDArray[np.uint64]
) -> NDArray[np.float64]:
    """Join two 32-bit words into 53-bit uniforms in [0, 1)."""
    joined = (word0 >> np.uint64(5)) * np.uint64(67108864) + (word1 >> np.uint64(6))
    uniform_values: NDArray[np.float64] = joined * 2.0**-53
    return uniform_values


def noise_words(
    seed: int, choice: int, position: int, token_ids: NDArray[np.integer]
) -> NDArray[np.uint64]:
    """Draw the 32-bit word of each token id at one absolute position.

    Returns:
        [n] words below 2^32.
    """
    ids = np.asarray(token_ids, np.int64)
    if ids.size == 0:
        return np.zeros(0, np.uint64)
    num_blocks = (int(ids.max()) >> 2) + 1
    if num_blocks > SMALL_NUM_BLOCKS and num_blocks > 2 * ids.size:
        words = philox4x32_blocks(ids >> 2, position, choice, int(Purpose.NOISE), seed)
        return np.asarray(words[ids & 3, np.arange(ids.size)])
    return leading_noise_words(seed, choice, position, 4 * num_blocks)[ids]


def leading_noise_words(
    seed: int, choice: int, position: int, vocab_size: int
) -> NDArray[np.uint64]:
    """Draw the words of token ids 0..vocab_size-1 at one absolute position; one block serves four.

    Returns:
        [vocab_size] words below 2^32.
    """
    num_blocks = (vocab_size + 3) >> 2
    if num_blocks <= SMALL_NUM_BLOCKS:
        key = (seed & MASK, (seed >> 32) & MASK)
        flat = [
            word
            for block in range(num_blocks)
            for word in philox4x32((block, position, choice, int(Purpose.NOISE)), key)
        ]
        return np.array(flat[:vocab_size], np.uint64)
    blocks = np.arange(num_blocks, dtype=np.uint64)
    words = philox4x32_blocks(blocks, position, choice, int(Purpose.NOISE), seed)
    return words.T.reshape(-1)[:vocab_size]


def keyed_leading_noise(
    keys: Sequence[tuple[int, int, int]], vocab_size: int
) -> NDArray[np.float64]:
    """Draw exponential noise for ids 0..vocab_size-1 of many rows, each (seed, choice, position).

    Returns:
        [len(keys), vocab_size] finite values > 0.
    """
    num_blocks = (vocab_size + 3) >> 2
    table = np.array(keys, np.uint64).reshape(-1, 3, 1)
    blocks = np.arange(num_blocks, dtype=np.uint64)
    words = philox4x32_blocks(blocks, table[:, 2], table[:, 1], int(Purpose.NOISE), table[:, 0])
    flat = words.T.reshape(len(keys), 4 * num_blocks)  # a block's four words side by side
    return exponential_from_words(flat[:, :vocab_size])


def keyed_noise(
    keys: Sequence[tuple[int, int, int]], token_ids: Sequence[NDArray[np.integer]]
) -> list[NDArray[np.float64]]:
    """Draw exponential noise for the ids of many rows at once.

    Args:
        keys: (seed, choice, position) of each row.
        token_ids: [n_i] ids of each row.

    Returns:
        [n_i] noise of each row.
    """
    sizes = [ids.size for ids in token_ids]
    if len(keys) <= 1 or max(sizes) > 4096:
        return [exponential_noise(*key, ids) for key, ids in zip(keys, token_ids, strict=True)]
    ids = np.concatenate(token_ids).astype(np.int64)
    table = np.repeat(np.array(keys, np.uint64).reshape(-1, 3), sizes, axis=0)
    words = philox4x32_blocks(ids >> 2, table[:, 2], table[:, 1], int(Purpose.NOISE), table[:, 0])
    noise = exponential_from_words(words[ids & 3, np.arange(ids.size)])
    return np.split(noise, np.cumsum(sizes)[:-1])


def exponential_from_words(words: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Turn 32-bit words into exponential noise: E = -log1p(-U) with U = (x + 1/2) / 2^32.

    Always finite and > 0: 1.2e-10 for x = 0 and 22.9 for x = 2^32 - 1. (In float32 both ends break:
    U rounds to 1 and E to infinity, or U to 0 and log E to -infinity.)
    """
    noise: NDArray[np.float64] = -np.log1p(-(words.astype(np.float64) + 0.5) * 2.0**-32)
    return noise


def exponential_noise(
    seed: int, choice: int, position: int, token_ids: NDArray[np.integer]
) -> NDArray[np.float64]:
    """Draw the exponential noise of each token id at one absolute position.

    argmax(log p - log E) over this noise samples p exactly; with the same noise the draft's
    argmax(log q - log E) often picks the same token (Daliri et al., 2024, arXiv:2408.07978).

    Returns:
        [n] finite values > 0.
    """
    return exponential_from_words(noise_words(seed, choice, position, token_ids))
