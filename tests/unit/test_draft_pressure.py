"""A draft that cannot keep up is asked for less, and for more again once it can."""

from __future__ import annotations

from specserve.speculation.draft_pressure import LEAST_QUEUE_S, LEAST_WAITING, PressedLength

STEP_S = 0.05


def lengths(*queues: tuple[float, int], k: int = 8) -> list[int]:
    pressed = PressedLength()
    return [pressed.length(k, queue_s=q, num_waiting=n, step_s=STEP_S) for q, n in queues]


def test_k_falls_with_the_queue_and_reaches_none() -> None:
    """In proportion to how many of the target's steps a proposal waits."""
    many = LEAST_WAITING
    assert lengths((STEP_S, many)) == [8]
    assert lengths((2 * STEP_S, many)) == [4]
    assert lengths((4 * STEP_S, many)) == [2]
    assert lengths((9 * STEP_S, many)) == [0]


def test_k_comes_back_step_by_step() -> None:
    """Sessions that left the queue together do not all come back in one round."""
    calm = [(0.0, 0)] * 9
    assert lengths((9 * STEP_S, 9), *calm) == [0, 1, 2, 3, 4, 5, 6, 7, 8, 8]
    assert lengths((9 * STEP_S, 9), (0.0, 0), (9 * STEP_S, 9), (2 * STEP_S, 9)) == [0, 1, 0, 0]


def test_a_few_calls_or_milliseconds_are_no_pressure() -> None:
    """A small or fast deployment keeps the K that was chosen for it."""
    assert lengths((9 * STEP_S, LEAST_WAITING - 1)) == [8]
    pressed = PressedLength()
    assert pressed.length(8, queue_s=LEAST_QUEUE_S, num_waiting=99, step_s=1e-4) == 8
    assert pressed.length(8, queue_s=9.0, num_waiting=99, step_s=0.0) == 8
