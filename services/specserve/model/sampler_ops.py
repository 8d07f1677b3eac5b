"""Tensor operations of the sampler: whole rows of logits reduced to little, on any device.

Each takes [R, V] logits of finite rows and leaves a few numbers a row. Results agree with
`speculation/` (numpy, the reference) up to the last bits of float64 sums. Knows no request.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from specserve.speculation.philox import MASK, MULTIPLIERS, NUM_ROUNDS, WEYL
from specserve.speculation.randomness import (
    exponential_from_words,
    exponential_noise,
    leading_noise_words,
)


def row_argmax(logits: torch.Tensor) -> tuple[NDArray[np.floating], NDArray[np.int64]]:
    """Return each row's largest logit (NaN if the row holds one) and its lowest index; [R] both."""
    if logits.device.type == "cpu":
        # numpy's argmax is ten times as fast as torch's here; NaN wins in both.
        array = as_array(logits)
        columns = array.argmax(axis=1)
        return array[np.arange(len(columns)), columns], columns
    values, indices = logits.max(dim=1)
    # One transfer, and one wait for the device: float64 holds either exactly.
    both = as_array(torch.stack((values.double(), indices.double())))
    return both[0], both[1].astype(np.int64)


def as_array(tensor: torch.Tensor) -> NDArray[np.floating]:
    """Return a tensor of numbers as numpy, without a copy where it lies in CPU memory."""
    array: NDArray[np.floating] = tensor.detach().cpu().numpy()
    return array


def as_ids(tensor: torch.Tensor) -> NDArray[np.int64]:
    """Return a tensor of ids as numpy, without a copy where it lies in CPU memory."""
    array: NDArray[np.int64] = tensor.detach().cpu().numpy()
    return array


def log_weights(
    logits: torch.Tensor, largest: NDArray[np.floating], temperatures: NDArray[np.float64]
) -> torch.Tensor:
    """Return (logit - largest) / temperature in float64, [R, V]."""
    shifted = logits.to(torch.float64, copy=True)
    shifted -= column_of(largest, logits.device)
    shifted /= column_of(temperatures, logits.device)
    return shifted


def column_of(values: NDArray[np.floating], device: torch.device) -> torch.Tensor:
    """Return [R] numbers as an [R, 1] float64 tensor."""
    return torch.from_numpy(np.asarray(values, np.float64)).to(device)[:, None]


def residual_draws(
    logits: torch.Tensor,
    largest: NDArray[np.floating],
    temperatures: NDArray[np.float64],
    draft_token_ids: NDArray[np.int64],
    q_rows: NDArray[np.int64],
    q_token_ids: NDArray[np.int64],
    q: NDArray[np.float64],
    uniforms: NDArray[np.float64],
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Score unfiltered rows: p of the draft token, and a draw from the residual (p - q)+.

    Args:
        draft_token_ids: [R] column of each row's draft token, -1 for none or out of range.
        q_rows, q_token_ids, q: [N] all rows' q, flattened; columns in range.
        uniforms: [R] in [0, 1).

    Returns:
        [R] p and [R] columns; -1 where rounding left nothing to draw from (ask the reference).
    """
    device, vocab_size = logits.device, logits.shape[1]
    weights = log_weights(logits, largest, temperatures).exp_()
    totals = weights.sum(dim=1)  # [R]
    rows = torch.arange(len(weights), device=device)
    drafted = torch.from_numpy(draft_token_ids).to(device)
    target_probs = weights[rows, drafted.clamp(min=0)] / totals * (drafted >= 0)
    if q.size:
        of_row = torch.from_numpy(q_rows).to(device)
        flat = of_row * vocab_size + torch.from_numpy(q_token_ids).to(device)
        weights.view(-1).index_add_(0, flat, -torch.from_numpy(q).to(device) * totals[of_row])
        weights.view(-1)[flat] = weights.view(-1)[flat].clamp(min=0.0)
    cdf = weights.cumsum(dim=1)
    thresholds = column_of(uniforms, device) * cdf[:, -1:]
    columns = torch.searchsorted(cdf, thresholds, right=True)[:, 0]
    # A parallel scan may round out of order, and u * total up to total: never return a weight of 0.
    safe = columns.clamp(max=vocab_size - 1)
    valid = (columns < vocab_size) & (weights[rows, safe] > 0.0)
    columns = torch.where(valid, columns, -1)
    return as_array(target_probs).astype(np.float64), as_ids(columns)


def philox_noise_words(
    keys: NDArray[np.uint64], vocab_size: int, device: torch.device
) -> torch.Tensor:
    """Draw the noise words of ids 0..V-1 for many rows; equal to randomness.noise_words.

    Args:
        keys: [R, 3] of (seed, choice, position).

    Returns:
        [R, V] int64 below 2^32.
    """
    # int64 products wrap to the right 64 bits; the mask after an arithmetic shift makes it logical.
    words = keys.astype(np.int64)  # a seed above 2^63 keeps its bits
    seed, choice, position = (torch.from_numpy(words[:, i]).to(device)[:, None] for i in range(3))
    k0, k1 = seed & MASK, (seed >> 32) & MASK
    x0 = torch.arange((vocab_size + 3) >> 2, device=device)[None, :].repeat(len(words), 1)
    x1, x2 = position.expand_as(x0), choice.expand_as(x0)
    x3 = torch.zeros_like(x0)
    for _ in range(NUM_ROUNDS):
        product0, product1 = x0 * MULTIPLIERS[0], x2 * MULTIPLIERS[1]
        x0 = ((product1 >> 32) & MASK) ^ x1 ^ k0
        x2 = ((product0 >> 32) & MASK) ^ x3 ^ k1
        x1, x3 = product1 & MASK, product0 & MASK
        k0, k1 = (k0 + WEYL[0]) & MASK, (k1 + WEYL[1]) & MASK
    return torch.stack((x0, x1, x2, x3), dim=2).view(len(words), -1)[:, :vocab_size]


def coupled_draws(
    logits: torch.Tensor,
    largest: NDArray[np.floating],
    temperatures: NDArray[np.float64],
    keys: NDArray[np.uint64],
) -> NDArray[np.int64]:
    """Return argmax(log p - log E) over the whole vocabulary of each row; [R] columns."""
    words = philox_noise_words(keys, logits.shape[1], logits.device)
    noise = torch.log1p(words.to(torch.float64).add_(0.5).mul_(-(2.0**-32))).neg_()
    scores = log_weights(logits, largest, temperatures) - noise.log_()
    return as_ids(scores.argmax(dim=1))


def coupled_draw_on_cpu(
    logits: NDArray[np.floating], top_token_id: int, temperature: float, key: tuple[int, int, int]
) -> int:
    """Return argmax(log p - log E) of one row, taking logarithms only where they can matter.

    The most likely token scores b = -log E of its own. Because E >= U, another can win only if
    U * exp(b) <= p / p_max: one float32 pass leaves a handful of candidates, scored in float64.
    """
    seed, choice, position = key
    largest = logits[top_token_id]
    bound = 1.0 / float(exponential_noise(seed, choice, position, np.array([top_token_id]))[0])
    words = leading_noise_words(seed, choice, position, logits.size)
    with np.errstate(over="ignore"):  # far below the largest: -inf is as good
        weights = np.exp((logits - largest) / np.float32(temperature))
    # The factor covers float32 rounding; what matters has weights above e^-26, far from underflow.
    weights *= np.float32(1.0001)
    candidates = np.flatnonzero(words.astype(np.float32) * np.float32(bound * 2.0**-32) <= weights)
    exact = (logits[candidates].astype(np.float64) - float(largest)) / temperature
    noise = exponential_from_words(words[candidates])
    return int(candidates[(exact - np.log(noise)).argmax()])
