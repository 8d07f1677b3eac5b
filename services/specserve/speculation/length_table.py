"""K by the number of sessions, as configured. Knows numbers alone."""

from __future__ import annotations

from collections.abc import Sequence


def length_by_batch_size(
    table: Sequence[tuple[int, int, int]], num_sessions: int, max_k: int
) -> int | None:
    """Return the K that a table of [from, to, K] names for so many sessions, `max_k` at most.

    Returns:
        None where the table names none.
    """
    for first, last, k in table:
        if first <= num_sessions <= last:
            return min(k, max_k)
    return None
