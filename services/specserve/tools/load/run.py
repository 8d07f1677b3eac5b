"""Open-loop load on a running system: requests go out when they are due, answered or not.

A slow server is so measured as its users would see it: a request that waits is late from when it
was due, never left unsent. Knows clients and arrivals; knows no flags and no reports.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from specserve.errors import CapacityExhausted, DeadlineExpired
from specserve.tools.bench.clients import RequestSettings, ServingClient
from specserve.tools.bench.pacing import run_due
from specserve.tools.bench.sample import BenchPrompt, Sample, Wave
from specserve.tools.bench.statistics import Quantiles, quantiles
from specserve.tools.bench.summary import Summary, summarise
from specserve.tools.load.arrivals import ArrivalProcess, offsets_within
from specserve.tools.load.slo import Attainment, Objectives, attainment

MAX_CLIENT_LATE_S = 0.1
"""A client that sends its requests later than this (p99) measures itself."""


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What is sent."""

    duration_s: float
    """Requests are due for so long; their answers may take longer."""
    process: ArrivalProcess
    burstiness: float
    """Shape of gamma arrivals."""
    settings: RequestSettings
    num_speculative_tokens: int | None
    timeout_s: float | None
    """A request that takes longer has failed."""
    max_in_flight: int | None
    """A request due while so many are under way has failed, unsent; None sends all."""
    unique: bool
    """Begin each text with a number of its own, so that no prefix cache helps."""


@dataclass(frozen=True, slots=True)
class LoadStep:
    """What one rate showed."""

    arrival_rate: float
    """Requests per second that were due."""
    summary: Summary
    attainment: Attainment
    goodput: float
    """Requests per second that met every objective."""
    max_in_flight: int
    client_late_s: Quantiles | None
    """How late the client sent its requests."""
    complete: bool

    @property
    def client_kept_up(self) -> bool:
        """The client itself was on time; else its own slowness is in every figure."""
        return self.client_late_s is None or self.client_late_s.p99 <= MAX_CLIENT_LATE_S


class Generator:
    """Sends load to one system."""

    def __init__(
        self, client: ServingClient, prompts: Sequence[BenchPrompt], plan: LoadPlan
    ) -> None:
        self._client = client
        self._prompts = prompts
        self._plan = plan
        self._numbers = itertools.count()
        self._ids = itertools.count()
        self._in_flight = 0
        self._most_in_flight = 0

    async def step(
        self,
        rate: float,
        objectives: Objectives,
        keep: Callable[[LoadStep], None],
        notify: Callable[[str, float], None],
    ) -> None:
        """Run one rate.

        Args:
            keep: given what it showed, also when it is cut short.
        """
        plan = self._plan
        offsets = offsets_within(
            rate, plan.duration_s, plan.settings.seed, plan.process, plan.burstiness
        )
        prompts = [self._prompt(next(self._numbers)) for _ in offsets]
        self._most_in_flight = 0
        come: list[Sample] = []
        late: list[float] = []
        loop = asyncio.get_running_loop()
        began = loop.time()
        wave: Wave | None = None

        def on_sample(sample: Sample) -> None:
            come.append(sample)
            notify(f"{rate:g} requests/s", len(come) / len(offsets))

        try:
            wave = await run_due(
                self._decode,
                prompts,
                offsets,
                read=self._client.read,
                on_sample=on_sample,
                on_sent=late.append,
            )
        finally:
            partial = Wave(tuple(come), loop.time() - began, late_s=tuple(late))
            got = partial if wave is None else wave
            keep(self._step_of(rate, got, objectives, complete=wave is not None))

    def _step_of(
        self, rate: float, wave: Wave, objectives: Objectives, *, complete: bool
    ) -> LoadStep:
        met = attainment(wave.samples, objectives)
        return LoadStep(
            arrival_rate=rate,
            summary=summarise([wave]),
            attainment=met,
            goodput=met.num_met / wave.wall_s if wave.wall_s > 0 else 0.0,
            max_in_flight=self._most_in_flight,
            client_late_s=quantiles(wave.late_s),
            complete=complete,
        )

    def _prompt(self, number: int) -> BenchPrompt:
        prompt = self._prompts[number % len(self._prompts)]
        if not self._plan.unique:
            return prompt
        return replace(prompt, text=f"[{number}] {prompt.text}")

    async def _decode(self, prompt: BenchPrompt) -> Sample:
        plan = self._plan
        limit = plan.max_in_flight
        if limit is not None and self._in_flight >= limit:
            raise CapacityExhausted("requests in flight", self._in_flight + 1, limit)
        self._in_flight += 1
        self._most_in_flight = max(self._most_in_flight, self._in_flight)
        try:
            async with asyncio.timeout(plan.timeout_s):
                return await self._client.decode(
                    prompt,
                    plan.settings,
                    f"load-{os.getpid()}-{next(self._ids)}",
                    plan.num_speculative_tokens,
                )
        except TimeoutError:
            raise DeadlineExpired("the request", plan.timeout_s or 0.0) from None
        finally:
            self._in_flight -= 1
