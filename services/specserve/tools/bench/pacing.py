"""Sends one wave of requests, closed or open loop, and watches the system meanwhile.

Knows an event loop and a clock; knows no service and no wire.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace

from specserve.errors import SpecServeError
from specserve.tools.bench.sample import BenchPrompt, Reading, Sample, Wave, checked, failed
from specserve.tools.load.arrivals import Pacing, arrival_offsets

READ_INTERVAL_S = 0.25
"""Between two looks at the running system: seldom enough to cost it nothing that shows."""

CUT_SHORT = "not answered when the run was cut short"
"""Error of such a request."""

Decode = Callable[[BenchPrompt], Awaitable[Sample]]
"""Sends one prompt; times count from the call. Raises SpecServeError when it is refused."""

Read = Callable[[], Awaitable[Reading | None]]
"""Looks at the running system; None where nothing can be seen."""


async def run_wave(
    decode: Decode,
    prompts: Sequence[BenchPrompt],
    pacing: Pacing,
    *,
    read: Read | None = None,
    seed: int = 0,
) -> Wave:
    """Send the prompts and wait for all answers.

    A request that fails is a sample with its error; it ends no other. Cancelling the wave cancels
    its requests.
    """
    if pacing.arrival_rate is not None:
        offsets = arrival_offsets(pacing.arrival_rate, len(prompts), seed)
        return await run_due(decode, prompts, offsets, read=read)
    slots = asyncio.Semaphore(pacing.concurrency or 1)

    async def one(prompt: BenchPrompt) -> Sample:
        async with slots:
            return await attempt(decode, prompt, time.perf_counter())

    began = time.perf_counter()
    readings, samples = await _watched(read, [one(prompt) for prompt in prompts])
    return Wave(tuple(samples), time.perf_counter() - began, readings)


async def run_due(
    decode: Decode,
    prompts: Sequence[BenchPrompt],
    offsets: Sequence[float],
    *,
    read: Read | None = None,
    on_sample: Callable[[Sample], None] = lambda _: None,
    on_sent: Callable[[float], None] = lambda _: None,
) -> Wave:
    """Send each prompt when it is due, whatever the answers before it do.

    Args:
        on_sample: told of each request that has ended, in a run that is cancelled those that were
            under way among them, as failed: were they left out, an overloaded system would seem to
            keep up.
        on_sent: told of each request that is sent how late it is, in seconds.
    """
    began = time.perf_counter()
    late: list[float] = []

    async def one(prompt: BenchPrompt, offset: float) -> Sample:
        due = began + offset
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        late.append(time.perf_counter() - due)
        on_sent(late[-1])
        try:
            sample = await attempt(decode, prompt, due)
        except asyncio.CancelledError:
            on_sample(failed(_unanswered(prompt), CUT_SHORT))
            raise
        on_sample(sample)
        return sample

    readings, samples = await _watched(
        read, [one(prompt, offset) for prompt, offset in zip(prompts, offsets, strict=True)]
    )
    return Wave(tuple(samples), time.perf_counter() - began, readings, tuple(late))


async def attempt(decode: Decode, prompt: BenchPrompt, due: float) -> Sample:
    """Send one prompt; its times count from when it was due (perf_counter), sent or not."""
    late = time.perf_counter() - due
    try:
        sample = await decode(prompt)
    except SpecServeError as error:
        return failed(_unanswered(prompt), f"{type(error).__name__}: {error}")
    return checked(
        replace(
            sample,
            block_at_s=tuple(at + late for at in sample.block_at_s),
            e2e_s=sample.e2e_s + late,
        )
    )


def _unanswered(prompt: BenchPrompt) -> Sample:
    return Sample(prompt.prompt_id, prompt.category, len(prompt.token_ids))


async def _watched(
    read: Read | None, requests: Sequence[Coroutine[object, object, Sample]]
) -> tuple[tuple[Reading, ...], list[Sample]]:
    """Run all requests, looking at the system from time to time."""
    readings: list[Reading] = []

    async def watch() -> None:
        while read is not None:
            await asyncio.sleep(READ_INTERVAL_S)
            reading = await read()
            if reading is not None:
                readings.append(reading)

    watching = asyncio.create_task(watch())
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(request) for request in requests]
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    return tuple(readings), [task.result() for task in tasks]
