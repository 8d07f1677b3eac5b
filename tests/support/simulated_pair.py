"""Requests over a modelled target and draft: rounds without devices, in no time.

Requests decide by the real controller, or by a fixed K; acceptance is drawn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import dataclass, field

from specserve.speculation.acceptance_rates import PoolAcceptance
from specserve.speculation.cost_model import Load, PlainTiming, RoundTiming
from specserve.speculation.length_choice import Choice, Reason, Standing
from specserve.speculation.length_controller import SHORT_STEPS, LengthController
from specserve.speculation.length_pool import LengthPool
from support.simulated_device import Call, Clock, Curve, Device

MAX_BEHIND = 8
CATCH_UP_SHARE = 0.25
TAIL = 3

Acceptance = Callable[[int], float]
"""Tokens that a request has -> chance that the next draft token is accepted."""

_Wait = Callable[[Callable[[], None]], None]
"""Told what to call when it is over."""


@dataclass(frozen=True, slots=True)
class SimulatedPair:
    """What is modelled."""

    target: Curve
    draft: Curve
    acceptance: Acceptance
    k: int = 4
    num_steps: int = 64
    transport_s: float = 0.0003
    """One way."""
    host_s: float = 0.0002
    """The orchestrator's own time per call."""
    noise: float = 0.02
    pause_chance: float = 0.0
    draft_pauses_until: float = 0.0
    """Modelled time before which every draft forward takes fifty times as long."""


@dataclass(slots=True)
class Outcome:
    """What a run gave."""

    num_tokens: int = 0
    reasons: Counter[Reason] = field(default_factory=Counter)
    rounds_by_k: Counter[int] = field(default_factory=Counter)
    tokens_at: list[tuple[float, int]] = field(default_factory=list)
    """(time since the start, tokens) of each commit."""

    def tokens_between(self, start: float, end: float) -> int:
        return sum(count for at, count in self.tokens_at if start <= at < end)


class Simulation:
    """Runs requests for a stretch of modelled time."""

    def __init__(self, pair: SimulatedPair, seed: int = 0) -> None:
        self.pair = pair
        self.clock = Clock(seed)
        self.target = self._device(pair.target)
        self.draft = self._device(self._draft_curve)
        self.outcome = Outcome()
        self.pool = LengthPool(self.clock.now)
        self.acceptance = PoolAcceptance()
        self.controllers: list[LengthController] = []
        self.num_sessions = 0
        self._began = self.clock.now

    @property
    def standing(self) -> Standing:
        """The choice that the requests share."""
        return self.pool.standing(self.acceptance, self.pair.k)

    @property
    def ks(self) -> list[int]:
        """The K that stands for each request that lives."""
        return [controller.standing_k for controller in self.controllers]

    def run(self, num_requests: int, seconds: float, fixed_k: int | None = None) -> Outcome:
        """Decode more endless requests, for so long; fixed_k None asks the controller."""
        for _ in range(num_requests):
            self.start(fixed_k)
        self.clock.run_until(self.clock.now + seconds)
        return self.outcome

    def start(self, fixed_k: int | None = None, num_tokens: int | None = None) -> None:
        """Begin a request within the next tenth of a second."""
        request = _Request(self, fixed_k, num_tokens)
        self.num_sessions += 1
        process = request.decode()
        self.clock.at(self.clock.random.random() * 0.1, lambda: self._advance(process))

    def commit(self, num_tokens: int) -> None:
        self.outcome.num_tokens += num_tokens
        self.outcome.tokens_at.append((self.clock.now - self._began, num_tokens))

    def _advance(self, process: Generator[_Wait, None, None]) -> None:
        try:
            wait = next(process)
        except StopIteration:
            self.num_sessions -= 1
            return
        wait(lambda: self._advance(process))

    def _device(self, curve: Curve) -> Device:
        pair = self.pair
        return Device(self.clock, curve, noise=pair.noise, pause_chance=pair.pause_chance)

    def _draft_curve(self, rows: int) -> float:
        is_slow = self.clock.now - self._began < self.pair.draft_pauses_until
        return self.pair.draft(rows) * (50 if is_slow else 1)


class _Request:
    def __init__(self, sim: Simulation, fixed_k: int | None, num_tokens: int | None) -> None:
        self._sim = sim
        self._fixed_k = fixed_k
        self._num_wanted = num_tokens
        self._num_tokens = 0
        self._num_behind = 0
        self._is_probe = False
        self._caught_up: list[Call] = []
        self._next: Choice | None = None
        """Chosen while the devices were busy with the last round."""
        self._controller: LengthController | None = None
        if fixed_k is None:
            self._controller = sim.pool.open(sim.acceptance, SHORT_STEPS, sim.pair.k, sim.clock.now)
            sim.controllers.append(self._controller)

    def decode(self) -> Generator[_Wait, None, None]:
        """Run rounds until there are enough tokens."""
        sim = self._sim
        while self._num_wanted is None or self._num_tokens < self._num_wanted:
            choice, catches_up = self._choose()
            sim.outcome.reasons[choice.reason] += 1
            sim.outcome.rounds_by_k[choice.num_speculative_tokens] += 1
            if self._controller is not None:
                sim.pool.note(self._controller, choice.num_speculative_tokens, sim.clock.now)
            if choice.num_speculative_tokens == 0:
                yield from self._decode_ahead(choice.num_steps, catches_up)
            else:
                yield from self._round(choice.num_speculative_tokens)
        if self._controller is not None:
            sim.pool.close(self._controller)
            sim.controllers.remove(self._controller)

    def _choose(self) -> tuple[Choice, bool]:
        """As `RequestLength` does: the choice, and whether the draft is caught up beside it."""
        most, controller = self._sim.pair.num_steps, self._controller
        if controller is None:
            return Choice(self._fixed_k or 0, Reason.STATIC, most), False
        choice = self._next or self._choose_now(controller)
        self._next, self._is_probe = None, choice.reason is Reason.PROBE
        if self._caught_up and controller.standing_k == 0:
            slowed_s = self._caught_up[0].forward_s * self._sim.num_sessions
            self._sim.pool.budget.spend(CATCH_UP_SHARE * slowed_s)
        self._caught_up.clear()
        steps = min(choice.num_steps or most, most)
        if choice.num_speculative_tokens and self._num_behind > MAX_BEHIND:
            steps = SHORT_STEPS if controller.standing_k else controller.calm_steps
            return Choice(0, Reason.CATCH_UP, steps), True
        return Choice(choice.num_speculative_tokens, choice.reason, steps), False

    def _choose_now(self, controller: LengthController) -> Choice:
        sim = self._sim
        load = self._load(controller)
        return sim.pool.choose(controller, load, sim.pair.k, sim.pair.num_steps, sim.clock.now)

    def _decode_ahead(self, num_steps: int, catches_up: bool) -> Generator[_Wait, None, None]:
        sim = self._sim
        began = sim.clock.now
        yield self._sleep(sim.pair.host_s)
        times: list[float] = []
        forwards: list[tuple[int, float]] = []

        def token(rows: int, seconds: float) -> None:
            times.append(sim.clock.now)
            forwards.append((rows, seconds))
            self._commit(1)
            if catches_up and len(forwards) == max(1, num_steps - TAIL):
                missing = self._num_behind + len(forwards)
                self._call(sim.draft, 1, missing, missing, self._caught_up)(lambda: None)

        yield self._call(sim.target, num_steps, 1, 1, [], token)
        self._num_behind = TAIL if catches_up else self._num_behind + num_steps
        if self._controller is not None:
            first_s = times[0] + sim.pair.transport_s - began
            timing = PlainTiming(num_steps, sim.clock.now - began, first_s, tuple(forwards))
            sim.pool.observe_plain(
                self._controller, timing, 0.0, sim.clock.now, is_probe=self._is_probe
            )

    def _round(self, k: int) -> Generator[_Wait, None, None]:
        sim, pair = self._sim, self._sim.pair
        began, is_probe = sim.clock.now, self._is_probe
        if self._controller is not None and sim.num_sessions == 1 and not is_probe:
            self._next = self._choose_now(self._controller)
        drafted: list[Call] = []
        yield self._call(sim.draft, k, 1, 1 + self._num_behind, drafted)
        draft_wait_s = sim.clock.now - began
        yield self._sleep(pair.host_s)
        verified: list[Call] = []
        yield self._call(sim.target, 1, k + 1, k + 1, verified)
        accepted = 0
        chance = pair.acceptance(self._num_tokens)
        while accepted < k and sim.clock.random.random() < chance:
            accepted += 1
        self._num_behind = int(accepted == k)
        self._commit(accepted + 1)
        if self._controller is None:
            return
        draft, verify = drafted[0], verified[0]
        timing = RoundTiming(
            num_draft_tokens=k,
            wall_s=sim.clock.now - began,
            draft_wait_s=draft_wait_s,
            draft_queue_s=draft.queue_s,
            draft_forward_s=draft.forward_s,
            draft_rows=draft.last_rows,
            num_hidden_tokens=0,
            verify_queue_s=verify.queue_s,
            verify_forward_s=verify.forward_s,
            verify_rows=verify.last_rows,
        )
        load = self._load(self._controller)
        sim.pool.observe_round(
            self._controller, timing, k, accepted, load, sim.clock.now, is_probe=is_probe
        )

    def _load(self, controller: LengthController) -> Load:
        sim = self._sim
        return sim.pool.load(controller, sim.num_sessions, sim.num_sessions, sim.clock.now)

    def _commit(self, num_tokens: int) -> None:
        self._num_tokens += num_tokens
        self._sim.commit(num_tokens)

    def _sleep(self, seconds: float) -> _Wait:
        return lambda resume: self._sim.clock.at(seconds, resume)

    def _call(
        self,
        device: Device,
        num_forwards: int,
        rows: int,
        first_rows: int,
        box: list[Call],
        forwarded: Callable[[int, float], None] = lambda rows, seconds: None,
    ) -> _Wait:
        """Send a call; the call itself lies in `box` when the wait is over."""
        clock, transport_s = self._sim.clock, self._sim.pair.transport_s

        def wait(resume: Callable[[], None]) -> None:
            def answered(call: Call) -> None:
                box.append(call)
                clock.at(transport_s, resume)

            def arrive() -> None:
                device.submit(
                    Call(self, clock.now, num_forwards, rows, first_rows, answered, forwarded)
                )

            clock.at(transport_s, arrive)

        return wait
