"""A greedy guess in one compiled call: the most likely token of a row, its forward, and so on.

Between the small forwards of a draft, what an interpreter does on its way to the next one takes a
third of the time. Knows arrays; knows no session, and no request but a greedy one without edits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from specserve.model.compiled.attention import INFINITY, ordered
from specserve.model.compiled.forward import run
from specserve.model.compiled.operations import OPTIONS, exp, f32, i32, i64


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def most_likely(row: Any) -> Any:
    """Return a row's most likely column, the first of equals, and its probability.

    Args:
        row: [V'] float32.

    Returns:
        Column -1 where some logit is no number.
    """
    bits = row.view(np.int32)
    top, most = i32(-(1 << 31)), i32(0)
    for i in range(len(bits)):
        key = ordered(bits[i])
        size = i32(bits[i] & i32(0x7FFFFFFF))
        top = key if key > top else top
        most = size if size > most else most
    if most >= i32(INFINITY):
        return i64(-1), f32(0)
    largest = ordered(top).view(f32)
    total = f32(0)
    for i in range(len(row)):
        total += exp(row[i] - largest)
    column = i64(0)
    while row[column] != largest:
        column += 1
    return column, f32(1) / total


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def most_likely_of(row: Any, ids: Any, others: Any, other_ids: Any) -> Any:
    """Return the most likely id of a row in two parts, the lowest of equals, and its probability.

    Args:
        row: [V'] float32.
        ids: [V'] of the columns; empty where they are the same.
        others, other_ids: [E] the other part; may be empty.

    Returns:
        Id -1 where some logit is no number.
    """
    column, confidence = most_likely(row)
    if column < 0:
        return i64(-1), confidence
    token_id = ids[column] if len(ids) else column
    if not len(others):
        return token_id, confidence
    other, share = most_likely(others)
    if other < 0:
        return i64(-1), share
    above = others[other] - row[column]
    if above > 0 or (above == 0 and other_ids[other] < token_id):
        return other_ids[other], f32(1) / (f32(1) / share + exp(-above) / confidence)
    return token_id, f32(1) / (f32(1) / confidence + exp(above) / share)


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def guess(
    row: Any,
    row_ids: Any,
    column_ids: Any,
    position: Any,
    table: Any,
    least_confidence: Any,
    kernels: Any,
    weights: Any,
    element_bytes: Any,
    norms: Any,
    biases: Any,
    eps: Any,
    embedding: Any,
    cos: Any,
    sin: Any,
    block_size: Any,
    windows: Any,
    scale: Any,
    keys: Any,
    values: Any,
    scratch: Any,
    head: Any,
    final_norm: Any,
    logits: Any,
    head_weights: Any,
    context_ids: Any,
    context_logits: Any,
    guessed: Any,
    confidences: Any,
) -> Any:
    """Guess tokens until `guessed` is full, the guess is unsure, or a row has no number.

    Args:
        row: [V'] the logits that the first token is read from.
        row_ids: [V'] token id of each of its columns; empty where they are the same.
        column_ids: [C] token id of each column of the head; empty where they are the same.
        position: where the first token goes in its sequence.
        table: [1, blocks] of that sequence.
        least_confidence: the last token is the one that takes the product below this.
        logits: [1, head rows], written.
        head_weights, context_ids: what further columns the later rows have; see `run`.
        context_logits: [1, E], written.
        guessed, confidences: [K] int64 and float64, written.

    Returns:
        The number of tokens guessed. All but the last of them have been fed.
    """
    one = np.ones(1, np.int64)
    num_columns = len(row) - len(context_ids)
    product = 1.0
    for j in range(len(guessed)):
        if j == 0:
            token_id, confidence = most_likely_of(row, row_ids, context_logits[0, :0], context_ids)
        else:
            token_id, confidence = most_likely_of(
                logits[0, :num_columns], column_ids, context_logits[0], context_ids
            )
        if token_id < 0:
            return j
        guessed[j] = token_id
        confidences[j] = confidence
        product *= confidences[j]
        if product < least_confidence or j + 1 == len(guessed):
            return j + 1
        batch = (guessed[j : j + 1], one * (position + j), one, one, table)
        run(
            kernels,
            weights,
            element_bytes,
            norms,
            biases,
            eps,
            embedding,
            batch,
            cos,
            sin,
            block_size,
            windows,
            scale,
            keys,
            values,
            scratch,
            head,
            final_norm,
            logits,
            head_weights,
            context_ids,
            context_logits,
        )
    return len(guessed)
