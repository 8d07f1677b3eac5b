"""Sending a wave: closed loop, open loop, and what becomes of requests that fail or wait."""

import asyncio
import time
from itertools import pairwise

import pytest

from helpers.waiting import eventually
from specserve.errors import CapacityExhausted
from specserve.tools.bench.pacing import attempt, run_due, run_wave
from specserve.tools.bench.sample import Sample
from specserve.tools.load.arrivals import Pacing, arrival_offsets, offsets_within
from support.bench_samples import prompt, sample

PROMPTS = [prompt(number) for number in range(6)]


class Gate:
    """A server that answers when the test says so, and knows how many wait."""

    def __init__(self, *, open_at: int = 10**9) -> None:
        self.running = self.most = 0
        self.order = []
        self._open_at = open_at
        self._open = asyncio.Event()

    async def decode(self, each):
        self.running += 1
        self.most = max(self.most, self.running)
        self.order.append(each.prompt_id)
        if self.running >= self._open_at:
            self._open.set()
        await self._open.wait()
        self.running -= 1
        return sample(int(each.prompt_id[1:]))


async def test_a_closed_loop_keeps_so_many_at_once_and_answers_in_order():
    gate = Gate(open_at=3)

    wave = await run_wave(gate.decode, PROMPTS, Pacing(concurrency=3))

    assert gate.most == 3
    assert [each.prompt_id for each in wave.samples] == [each.prompt_id for each in PROMPTS]
    assert wave.num_tokens == 36


async def test_an_open_loop_does_not_wait_for_answers():
    """All six are in flight before the first is answered: a closed loop would hang here."""
    gate = Gate(open_at=6)

    wave = await run_wave(gate.decode, PROMPTS, Pacing(arrival_rate=1000.0), seed=1)

    assert gate.most == 6
    assert len(wave.late_s) == 6


async def test_times_count_from_when_a_request_was_due():
    """A request that could only be sent late is late, though its answer came at once."""

    async def decode(each):
        return Sample("p", "c", 3, block_at_s=(0.25,), block_sizes=(1,), e2e_s=0.5)

    due = time.perf_counter() - 2.0
    made = await attempt(decode, PROMPTS[0], due)

    assert made.ttft_s == pytest.approx(2.25, abs=0.2)
    assert made.e2e_s == pytest.approx(2.5, abs=0.2)


async def test_a_refused_request_is_a_sample_with_its_error():
    async def decode(each):
        if each.prompt_id == "p2":
            raise CapacityExhausted("KV blocks", 3, 1)
        return sample(int(each.prompt_id[1:]))

    wave = await run_wave(decode, PROMPTS, Pacing(concurrency=2))

    assert [each.prompt_id for each in wave.samples if each.error] == ["p2"]
    assert "KV blocks: 3 wanted" in wave.samples[2].error
    assert len(wave.good) == 5


async def test_cancelling_a_wave_cancels_its_requests():
    gate = Gate()
    cancelled = []

    async def decode(each):
        try:
            return await gate.decode(each)
        except asyncio.CancelledError:
            cancelled.append(each.prompt_id)
            raise

    task = asyncio.create_task(run_wave(decode, PROMPTS, Pacing(concurrency=2)))
    await eventually(lambda: gate.running == 2)
    task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await task
    assert sorted(cancelled) == ["p0", "p1"]


async def test_samples_are_told_as_they_come():
    told = []

    async def decode(each):
        return sample(int(each.prompt_id[1:]))

    await run_due(decode, PROMPTS, [0.0] * 6, on_sample=told.append)

    assert len(told) == 6


def test_arrivals_are_the_same_for_the_same_seed_and_have_their_rate():
    """Both sides of a pair meet the same arrivals."""
    offsets = arrival_offsets(50.0, 2001, seed=3)

    assert offsets == arrival_offsets(50.0, 2001, seed=3)
    assert offsets != arrival_offsets(50.0, 2001, seed=4)
    assert offsets[0] == 0.0
    assert offsets == sorted(offsets)
    # 2,000 exponential gaps: the mean has a standard error of 2.2 %; seeded, 4 of them.
    assert offsets[-1] / 2000 == pytest.approx(1 / 50, rel=0.09)


def test_constant_arrivals_are_even():
    assert arrival_offsets(4.0, 3, seed=0, process="constant") == [0.0, 0.25, 0.5]


@pytest.mark.parametrize(("burstiness", "spread"), [(0.25, 2.0), (1.0, 1.0), (16.0, 0.25)])
def test_burstiness_is_the_shape_of_the_gaps(burstiness, spread):
    """Coefficient of variation of gamma gaps is 1 / sqrt(shape)."""
    offsets = arrival_offsets(10.0, 4001, seed=9, process="gamma", burstiness=burstiness)
    gaps = [b - a for a, b in pairwise(offsets)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5

    assert deviation / mean == pytest.approx(spread, rel=0.15)


def test_arrivals_fill_a_duration():
    for process in ("poisson", "constant", "gamma"):
        offsets = offsets_within(20.0, 5.0, seed=2, process=process)
        assert offsets[0] == 0.0
        assert offsets[-1] < 5.0
        assert 60 < len(offsets) < 150
    assert offsets_within(0.01, 1.0, seed=0) == [0.0]
