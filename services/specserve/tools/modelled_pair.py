"""A draft and a target engine on modelled devices: real engines, real rounds, time by formula.

Each device has a clock of its own that only its forwards move, so figures do not depend on the
machine that computes them, and what Python costs is not in them. Requests follow the orchestrator's
own bookkeeping. Knows engines and calls; knows no process and no network: a message takes `hop_s`.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from specserve.config import EngineConfig
from specserve.errors import PeerUnavailable
from specserve.model.engine import Engine
from specserve.model.messages import (
    Arrived,
    Message,
    ModelInfo,
    ProposeCall,
    ProposeReply,
    Release,
    Reply,
    Role,
    SessionOpening,
    VerifyCall,
    VerifyReply,
)
from specserve.model.runner import Runner, SequenceSlice
from specserve.model.toy_runner import ToyRunner
from specserve.orchestrator.request_state import CacheView, CallPlan, RequestState
from specserve.speculation.acceptance import accept
from specserve.speculation.digest import TokenChain
from specserve.speculation.randomness import Purpose, uniforms
from specserve.speculation.types import Proposal, SamplingParams, TargetScores

_MAX_APPEND_TOKENS = 1 << 16
_LEAST_S = 1e-9


@dataclass(frozen=True, slots=True)
class DeviceTimes:
    """What a forward takes."""

    step_s: float
    free_tokens: int = 1 << 30
    """Tokens of a forward that cost nothing beside the step."""
    token_s: float = 0.0
    """Each token beyond."""

    def of(self, num_tokens: int) -> float:
        """Return the seconds of a forward."""
        return self.step_s + self.token_s * max(0, num_tokens - self.free_tokens)


class ModelledDevice:
    """An engine whose forwards take modelled time."""

    def __init__(
        self, model: str, role: Role, times: DeviceTimes, num_cached_outcomes: int
    ) -> None:
        self.now = 0.0
        config = EngineConfig(model=model)
        self._times = times
        self._runner: Runner = ToyRunner.from_spec(config)
        self.engine = Engine(
            self,
            config,
            role=role,
            num_cached_outcomes=num_cached_outcomes,
            clock=lambda: self.now,
        )
        self.inbox: list[tuple[float, int, Message]] = []
        """Messages by arrival."""

    @property
    def info(self) -> ModelInfo:
        """What was loaded."""
        return self._runner.info

    @property
    def logit_token_ids(self) -> torch.Tensor | None:
        """None: the head is whole."""
        return self._runner.logit_token_ids

    def forward(self, batch: Sequence[SequenceSlice]) -> torch.Tensor:
        """Run a forward, and let its time pass."""
        self.now += self._times.of(sum(len(item.token_ids) for item in batch))
        return self._runner.forward(batch)

    def copy_block(self, source: int, destination: int) -> None:
        """Copy one block, in no time."""
        self._runner.copy_block(source, destination)

    def next_at(self) -> float | None:
        """Return when this device next does something; None while it waits for ever."""
        wait_s = self.engine.wait_s()
        # A little later than it says: times are sums of floats, and a wait must end.
        due = [] if wait_s is None else [self.now + (wait_s and wait_s + _LEAST_S)]
        if self.inbox:
            due.append(max(self.now, self.inbox[0][0]))
        return min(due, default=None)

    def act(self, at: float) -> Sequence[Reply]:
        """Take what has come by `at` and run an iteration; return its replies, due at `now`."""
        self.now = max(self.now, at)
        while self.inbox and self.inbox[0][0] <= self.now:
            arrived_at, _, message = heapq.heappop(self.inbox)
            self.engine.submit(Arrived(arrived_at))
            self.engine.submit(message)
        output = self.engine.step()
        return () if output is None else output.replies


@dataclass(slots=True)
class Request:
    """One choice, and where it is in its round."""

    state: RequestState
    began_at: float
    draft_plan: CallPlan | None = None
    target_plan: CallPlan | None = None
    proposal: Proposal = field(default_factory=lambda: Proposal((), None))
    proposed: ProposeReply | None = None
    """The last reply, to the call of draft_plan; None while that call is in flight."""
    waits_for_proposal: bool = False
    num_rounds: int = 0
    ended_at: float | None = None


class ModelledPair:
    """Requests over a modelled draft and target."""

    def __init__(
        self,
        target: str,
        draft: str,
        target_times: DeviceTimes,
        draft_times: DeviceTimes,
        *,
        num_cached_outcomes: int,
        num_speculative_tokens: int,
        hop_s: float = 3e-4,
        jitter_s: float = 0.0,
    ) -> None:
        """Load both toys.

        Args:
            hop_s: from a service to another, one way.
        """
        self.target = ModelledDevice(target, "target", target_times, 0)
        self.draft = ModelledDevice(draft, "draft", draft_times, num_cached_outcomes)
        self._num_speculative_tokens = num_speculative_tokens
        self._hop_s = hop_s
        self._jitter_s = jitter_s
        self._random = random.Random(0)
        self._numbers = itertools.count(1)
        self._requests: dict[str, Request] = {}

    @property
    def now(self) -> float:
        """When the last device stopped."""
        return max(self.target.now, self.draft.now)

    def run(
        self, prompts: Sequence[tuple[Sequence[int], SamplingParams]], max_tokens: int, width: int
    ) -> list[Request]:
        """Decode all prompts, `width` at a time; return them in their order."""
        waiting = list(reversed(prompts))
        done: list[Request] = []
        began = self.now
        running = 0
        while waiting or running:
            while waiting and running < width:
                done.append(self._start(*waiting.pop(), max_tokens, began))
                running += 1
            device, at = self._next_device()
            for reply in device.act(at):
                request = self._requests.get(reply.session_id)
                if request is not None and self._take(request, reply, device.now + self._hop_s):
                    running -= 1
                    began = device.now + self._hop_s
        return done

    def _next_device(self) -> tuple[ModelledDevice, float]:
        due = [(device, device.next_at()) for device in (self.target, self.draft)]
        found = [(device, at) for device, at in due if at is not None]
        if not found:
            raise PeerUnavailable("modelled pair", "nothing is left to do, and requests wait")
        return min(found, key=lambda item: item[1])

    def _start(
        self, prompt: Sequence[int], sampling: SamplingParams, max_tokens: int, at: float
    ) -> Request:
        name = f"request-{next(self._numbers)}"
        state = RequestState(
            name,
            name,
            sampling,
            len(prompt),
            max_tokens,
            self.target.info.max_model_len,
            self._num_speculative_tokens,
            TokenChain(prompt),
        )
        request = self._requests[name] = Request(state, at)
        self._propose(request, 0, at)
        self._verify(request, at)
        return request

    def _plan(self, request: Request, view: CacheView) -> tuple[CallPlan, SessionOpening | None]:
        plan = request.state.plan_call(view, _MAX_APPEND_TOKENS)
        return plan, SessionOpening(request.state.sampling) if plan.opens else None

    def _propose(self, request: Request, num_tokens: int, at: float) -> None:
        state = request.state
        plan, opening = self._plan(request, state.draft)
        request.draft_plan, request.proposed = plan, None
        call = ProposeCall(
            next(self._numbers),
            state.session_id,
            plan.epoch,
            plan.step,
            plan.keep_length,
            plan.keep_digest,
            plan.append_token_ids,
            opening,
            num_tokens,
        )
        self._send(self.draft, call, at)

    def _verify(self, request: Request, at: float) -> None:
        state = request.state
        plan, opening = self._plan(request, state.target)
        request.target_plan = plan
        call = VerifyCall(
            next(self._numbers),
            state.session_id,
            plan.epoch,
            plan.step,
            plan.keep_length,
            plan.keep_digest,
            plan.append_token_ids,
            opening,
            request.proposal.draft_token_ids,
            request.proposal.draft_probs,
        )
        self._send(self.target, call, at)

    def _send(self, device: ModelledDevice, message: Message, at: float) -> None:
        heapq.heappush(
            device.inbox, (at + self._hop_s + self._jitter(), next(self._numbers), message)
        )

    def _jitter(self) -> float:
        return self._random.expovariate(1 / self._jitter_s) if self._jitter_s else 0.0

    def _take(self, request: Request, reply: Reply, at: float) -> bool:
        """Go on with a request; True when it has ended."""
        state = request.state
        if isinstance(reply, ProposeReply) and request.draft_plan is not None:
            request.proposed = reply
            self._settle(request)
            if request.waits_for_proposal:
                request.waits_for_proposal = False
                request.proposal = Proposal(reply.draft_token_ids, reply.draft_probs)
                self._verify(request, at)
            return False
        if not isinstance(reply, VerifyReply) or request.target_plan is None:
            raise PeerUnavailable("modelled pair", f"an engine answered {reply}")
        proposal = request.proposal
        sampling, num_draft_tokens = state.sampling, len(proposal.draft_token_ids)
        draws = uniforms(
            sampling.seed,
            sampling.choice,
            state.committed_length,
            num_draft_tokens,
            Purpose.ACCEPT,
        )
        scores = TargetScores(reply.target_probs, reply.replacement_token_ids)
        verdict = accept(proposal, scores, draws, sampling.rule)
        state.commit(proposal, verdict)
        state.absorb(
            state.target, request.target_plan, reply.cached_length, proposal.draft_token_ids
        )
        self._settle(request)
        request.num_rounds += 1
        if state.num_remaining_tokens <= 0:
            request.ended_at = at
            for device in (self.target, self.draft):
                self._send(device, Release(state.session_id), at)
            del self._requests[state.session_id]
            return True
        k = state.plan_num_speculative_tokens(self.draft.info.max_model_len)
        if k > 0 and request.proposed is not None:
            request.waits_for_proposal = True
            self._propose(request, k, at)
        else:
            # The last token, or the draft still appends the prompt.
            request.proposal = Proposal((), None)
            self._verify(request, at)
        return False

    def _settle(self, request: Request) -> None:
        reply, plan = request.proposed, request.draft_plan
        if reply is not None and plan is not None:
            request.state.absorb(
                request.state.draft, plan, reply.cached_length, reply.draft_token_ids
            )
