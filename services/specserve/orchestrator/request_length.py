"""One request's K, round by round: what the next round does, and what the last one taught.

A K follows from committed tokens, from acceptance of verified ones and from clocks; a token that
was drawn and not verified is never looked at. Knows the proposer's and the target's state; the
choice itself is `speculation/length_controller.py`.
"""

from __future__ import annotations

from functools import partial

from specserve.orchestrator.length_control import LengthControl
from specserve.orchestrator.proposer import Drafted, Proposer
from specserve.orchestrator.request_state import RequestState
from specserve.orchestrator.round_clock import RoundClock
from specserve.orchestrator.target_call import Scored
from specserve.orchestrator.target_session import TargetSession
from specserve.speculation.cost_model import Load
from specserve.speculation.draft_pressure import PressedLength
from specserve.speculation.length_choice import Choice, Reason, SpeculationMode
from specserve.speculation.length_controller import SHORT_STEPS, LengthController
from specserve.speculation.length_pool import LengthPool
from specserve.speculation.length_table import length_by_batch_size

MAX_BEHIND = 8
"""Committed tokens that a draft may lack when it is asked: they cost it one forward."""

CATCH_UP_SHARE = 0.25
"""What a draft that reads takes, about, from a target on the same machine, of its time."""

TAIL = 3
"""Tokens before the end of a decode-ahead call at which a draft is caught up."""


class RequestLength:
    """Decides for one request; told what came of it."""

    def __init__(
        self,
        control: LengthControl,
        state: RequestState,
        tenant_salt: bytes,
        target: TargetSession,
        proposer: Proposer | None,
        *,
        for_verification: bool = False,
    ) -> None:
        """Begin; `for_verification` speculates although no record fits."""
        self.choice = Choice(0, Reason.SPECULATION_OFF)
        """What the present round does."""
        self._control = control
        self._state = state
        self._target = target
        self._proposer = proposer
        self._for_verification = for_verification
        self._controller: LengthController | None = None
        self._pool: LengthPool | None = None
        if proposer is not None and state.method is not None:
            self._controller = control.open(state, tenant_salt, proposer.num_steps_without)
            self._pool = control.pool(state.method)
        self._pressed = PressedLength()
        self._step_s = 0.0
        """The target's last forward for this request."""
        self._is_first = True
        self._catches_up_in_tail = False
        self._catching_up_from: int | None = None
        """Committed length that the proposer was last given to take in, while it does."""
        self._num_late = 0
        self._round: RoundClock | None = None
        self._is_probe = False
        self._next: tuple[Load, Choice] | None = None
        """What was chosen for the next round beforehand, and under which load."""

    async def caught_up(self) -> None:
        """Wait for a proposer that is still taking in the prompt, where that is configured."""
        timeout_s = self._control.config.draft_catch_up_timeout_s
        if timeout_s > 0 and self._proposer is not None:
            await self._proposer.caught_up(timeout_s)

    def plan(self, traceparent: str) -> Choice:
        """Decide the next round.

        For a lone session that drafts that was done, and the last but one learned from, while the
        devices were busy with the last one (`_look_ahead`).
        """
        now = self._control.clock()
        self._learn(now)
        self._is_probe = False
        choice = self._plan(now, traceparent)
        room = self._state.num_remaining_tokens
        steps = choice.num_steps or self._control.config.num_decode_steps
        steps = max(1, min(steps, self._control.config.num_decode_steps, room))
        self.choice = Choice(choice.num_speculative_tokens, choice.reason, steps)
        self._round = RoundClock(now, self.choice.num_speculative_tokens, self._control.clock)
        self._round.is_probe = self._is_probe
        self._round.is_measurable = not self._is_first
        self._is_first = False
        if self._pool is not None and self._controller is not None:
            self._pool.note(self._controller, self.choice.num_speculative_tokens, now)
            if self.choice.num_speculative_tokens > 0:
                self._state.trace.chores.add(self._look_ahead)
        return self.choice

    def proposed(self, drafted: Drafted) -> None:
        """Note what the proposer gave to a round with K > 0."""
        proposer = self._proposer
        if self._round is None or proposer is None:
            return
        self._round.drafted = drafted
        if drafted.proposal.draft_token_ids:
            return
        reason = Reason.NO_PROPOSAL
        if proposer.num_late > self._num_late:
            reason = Reason.DRAFT_LATE
        elif drafted.proposer == "draft_model" and drafted.timing is None:
            reason = Reason.DRAFT_LOST
        steps = min(proposer.num_steps_without, self.choice.num_steps)
        self.choice = Choice(self.choice.num_speculative_tokens, reason, max(1, steps))

    def scored(self, scored: Scored, num_accepted: int) -> None:
        """Note an answer of the target that was committed."""
        if self._round is None:
            return
        self._round.scored(scored, num_accepted)
        if not scored.opened_epoch:
            self._step_s = self._round.last_forward_s
        left = self.choice.num_steps - self._round.num_committed
        if self._catches_up_in_tail and left <= TAIL and self._proposer is not None:
            self._catches_up_in_tail = False
            self._begin_catch_up(self._proposer, "")

    def close(self) -> None:
        """End the request: others no longer count with it. Idempotent."""
        if self._pool is not None and self._controller is not None:
            self._learn(self._control.clock())
            self._state.trace.chores.run()
            self._pool.close(self._controller)

    def _plan(self, now: float, traceparent: str) -> Choice:
        proposer, control, state = self._proposer, self._control, self._state
        self._catches_up_in_tail = False
        if proposer is None or self._controller is None or control.mode is SpeculationMode.OFF:
            return self._resting(Reason.SPECULATION_OFF)
        self._num_late = proposer.num_late
        if self._is_refused(proposer):
            return self._resting(Reason.UNVERIFIED)
        if state.plan_num_speculative_tokens(0) == 0:
            at_end = state.num_output_tokens + 1 >= state.max_tokens
            return Choice(0, Reason.MAX_TOKENS if at_end else Reason.CONTEXT)
        if self._is_first:
            return self._plan_first(proposer, now, traceparent)
        if not proposer.ready():
            return self._without(proposer)
        # It may have attached to another draft just now.
        if self._is_refused(proposer):
            return self._resting(Reason.UNVERIFIED)
        has_caught_up = self._take_caught_up(proposer)
        limit = state.plan_num_speculative_tokens(proposer.max_model_len)
        if limit == 0:
            return self._resting(Reason.CONTEXT)
        choice = self._choose(now)
        if has_caught_up and self._controller.standing_k == 0 and self._pool is not None:
            # Where draft and target share a machine, all sessions were slowed by it.
            slowed_s = proposer.catch_up_s * self._load(now).num_sessions
            self._pool.budget.spend(CATCH_UP_SHARE * slowed_s)
        if choice.num_speculative_tokens == 0:
            return choice
        if proposer.num_behind > MAX_BEHIND and not has_caught_up:
            return self._catch_up(proposer, choice, traceparent)
        k = min(choice.num_speculative_tokens, limit)
        pressed = self._under_pressure(proposer, k)
        if pressed < k:
            steps = choice.num_steps if pressed else proposer.num_steps_without
            return Choice(pressed, Reason.DRAFT_PRESSURE, steps)
        return Choice(k, choice.reason, choice.num_steps)

    def _resting(self, reason: Reason) -> Choice:
        """Decode ahead; what a draft holds of the request is of no use meanwhile."""
        self._catching_up_from = None
        if self._proposer is not None:
            self._proposer.rest()
        return Choice(0, reason)

    def _without(self, proposer: Proposer) -> Choice:
        """Decode ahead while nobody can be asked."""
        if not proposer.is_busy:
            self._catching_up_from = None
        reason = Reason.DRAFT_LATE if proposer.is_busy else Reason.DRAFT_LOST
        if self._catching_up_from is not None:
            reason = Reason.CATCH_UP
        steps = proposer.num_steps_without
        is_auto = self._control.mode is SpeculationMode.AUTO
        if is_auto and self._controller is not None and self._controller.stands_plain:
            # Nobody would be asked if somebody were there: no need to look so often.
            steps = max(steps, self._controller.calm_steps)
        return Choice(0, reason, steps)

    def _begin_catch_up(self, proposer: Proposer, traceparent: str) -> bool:
        began = self._state.committed_length
        is_under_way = proposer.catch_up(traceparent)
        self._catching_up_from = began if is_under_way else None
        return is_under_way

    def _take_caught_up(self, proposer: Proposer) -> bool:
        """Say whether it has taken in what it was given.

        It then lacks no more than was committed meanwhile, and no need to go on so.
        """
        began, self._catching_up_from = self._catching_up_from, None
        return began is not None and proposer.num_behind <= self._state.committed_length - began

    def _under_pressure(self, proposer: Proposer, k: int) -> int:
        """Return the K that the draft's queue leaves; a cascade keeps one for its own guesses."""
        load = proposer.link.load if proposer.link is not None else None
        if load is None:
            return k
        pressed = self._pressed.length(
            k, queue_s=load.queue_s, num_waiting=load.num_waiting, step_s=self._step_s
        )
        return max(pressed, min(k, 1)) if self._state.method == "cascade" else pressed

    def _is_refused(self, proposer: Proposer) -> bool:
        refusal = self._control.refusal(self._state, self._target.link, proposer.link)
        return bool(refusal) and not self._for_verification

    def _plan_first(self, proposer: Proposer, now: float, traceparent: str) -> Choice:
        """Plan the prompt's round: a draft that is wanted takes the prompt in beside it."""
        choice = self._choose(now)
        if choice.num_speculative_tokens == 0:
            return choice
        is_under_way = self._begin_catch_up(proposer, traceparent)
        return Choice(0, Reason.FIRST_ROUND, 1 if is_under_way else proposer.num_steps_without)

    def _catch_up(self, proposer: Proposer, choice: Choice, traceparent: str) -> Choice:
        """Let the draft take in what it lacks while the target decodes ahead.

        At once where drafting is what stands; for a mere probe near the end of an ordinary call,
        for short calls cost the target's batch more than the probe itself.
        """
        is_probe = choice.reason is Reason.PROBE
        if is_probe and self._controller is not None and self._controller.standing_k == 0:
            self._catches_up_in_tail = True
            return Choice(0, Reason.CATCH_UP, self._controller.calm_steps)
        self._begin_catch_up(proposer, traceparent)
        return Choice(0, Reason.CATCH_UP, SHORT_STEPS)

    def _choose(self, now: float) -> Choice:
        control, state = self._control, self._state
        (foreseen, choice), self._next = self._next or (None, None), None
        table = control.speculative.num_speculative_tokens_per_batch_size
        is_tried = self._for_verification  # what is tried has to be what is configured
        if is_tried or (control.mode is SpeculationMode.ON and not table):
            return Choice(state.num_speculative_tokens, Reason.STATIC)
        load = self._load(now)
        k = length_by_batch_size(table, load.num_sessions, state.num_speculative_tokens)
        if k is not None:
            return Choice(k, Reason.BATCH_SIZE)
        if control.mode is SpeculationMode.ON or self._pool is None or self._controller is None:
            return Choice(state.num_speculative_tokens, Reason.STATIC)
        if choice is None or foreseen != load:
            choice = self._choose_by_costs(self._pool, self._controller, load, now)
        self._is_probe = choice.reason is Reason.PROBE
        return choice

    def _choose_by_costs(
        self,
        pool: LengthPool,
        controller: LengthController,
        load: Load,
        now: float,
        *,
        is_ahead: bool = False,
    ) -> Choice:
        return pool.choose(
            controller,
            load,
            self._state.num_speculative_tokens,
            self._control.config.num_decode_steps,
            now,
            is_first=self._is_first,
            is_ahead=is_ahead,
        )

    def _look_ahead(self) -> None:
        """Choose for the next round, from what was learned before the present one.

        Among others the devices do not wait for one request, and a choice a round old is worse;
        what follows a probe depends on what it shows, and a probe is chosen when it is made.
        """
        pool, controller = self._pool, self._controller
        has_table = bool(self._control.speculative.num_speculative_tokens_per_batch_size)
        if self._control.mode is not SpeculationMode.AUTO or self._is_probe or has_table:
            return
        if pool is None or controller is None:
            return
        now = self._control.clock()
        load = self._load(now)
        if load.num_sessions == 1:
            choice = self._choose_by_costs(pool, controller, load, now, is_ahead=True)
            self._next = None if choice.reason is Reason.PROBE else (load, choice)

    def _load(self, now: float) -> Load:
        target = self._target.link
        draft = self._proposer.link if self._proposer is not None else None
        num_sessions = num_drafting = 1
        if target is not None:
            held = target.load.num_sessions if target.load is not None else 0
            num_sessions = max(1, held, len(target.sessions))
        if draft is not None:
            held = draft.load.num_sessions if draft.load is not None else 0
            num_drafting = max(1, held, len(draft.sessions))
        if self._pool is None or self._controller is None:
            return Load(num_sessions, num_drafting)
        return self._pool.load(self._controller, num_sessions, num_drafting, now)

    def _learn(self, now: float) -> None:
        """Leave it for later to learn from the round that has ended, unless it was a probe."""
        done, self._round = self._round, None
        if done is not None and done.is_measurable:
            self._state.trace.chores.add(partial(self._learn_from, done, self.choice.reason, now))
            if done.is_probe:
                self._state.trace.chores.run()

    def _learn_from(self, done: RoundClock, reason: Reason, now: float) -> None:
        pool, controller = self._pool, self._controller
        if pool is None or controller is None:
            return
        if done.num_draft_tokens > 0:
            timing = done.round_timing(now)
            if timing is not None:
                pool.observe_round(
                    controller,
                    timing,
                    done.num_asked,
                    done.num_accepted,
                    self._load(now),
                    now,
                    is_probe=done.is_probe,
                )
            return
        plain = done.plain_timing(now)
        if plain is None:
            return
        is_missed = reason in (Reason.DRAFT_LATE, Reason.DRAFT_LOST)
        if done.num_asked > 0 and is_missed:
            pool.costs.draft.observe_late(done.waited_s, now)
            pool.costs.num_fruitless += 1
        if done.num_asked > 0 and not is_missed:
            pool.observe_empty(controller, plain, done.num_asked, now)
        else:
            pool.observe_plain(controller, plain, done.waited_s, now, is_probe=done.is_probe)
