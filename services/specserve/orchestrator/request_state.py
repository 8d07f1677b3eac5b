"""One request's bookkeeping: committed tokens, and what each service is believed to hold.

Knows lengths, epochs and steps; knows no model and no network. Only `commit` moves
committed_length, and only `absorb_*` (a service's own reply) moves that service's cached_length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from specserve.config import SpeculativeMethod
from specserve.orchestrator.device_deaths import DeviceDeaths
from specserve.orchestrator.request_trace import RequestTrace
from specserve.orchestrator.routing import Demand
from specserve.speculation.digest import TokenChain
from specserve.speculation.types import Proposal, SamplingParams, Verification


class CallPlan(NamedTuple):
    """The lengths of one call: what is kept, and the committed tokens that follow it."""

    epoch: int
    step: int
    keep_length: int
    keep_digest: int
    append_token_ids: tuple[int, ...]
    committed_length: int
    """keep_length + len(append_token_ids): every committed token at the time of the call."""
    opens: bool
    """The session's first call of this epoch: it must carry the opening."""


@dataclass(slots=True)
class CacheView:
    """The orchestrator's idea of what one service holds for a request."""

    epoch: int = 1
    step: int = 0
    cached_length: int = 0
    """Committed tokens whose KV the service is known to hold."""
    opened: bool = False
    last_epoch: int = 1
    """The highest epoch used on any replica: none is used twice, so that no stored reply of an
    older call is ever taken for an answer."""

    def reopen(self) -> None:
        """Forget the session: the next call opens it anew, on whatever replica."""
        self.last_epoch += 1
        self.epoch = self.last_epoch
        self.step = 0
        self.cached_length = 0
        self.opened = False

    def leave(self) -> CacheView:
        """Forget the session as `reopen` does; returns what `return_to` needs to take it up."""
        left = replace(self)
        self.reopen()
        return left

    def return_to(self, left: CacheView) -> None:
        """Take up a session that was left, on the replica that still holds it."""
        self.epoch, self.step = left.epoch, left.step
        self.cached_length, self.opened = left.cached_length, left.opened


@dataclass(slots=True)
class RequestState:
    """A choice being decoded."""

    request_id: str
    session_id: str
    """Names the sessions on draft and target. New with every Generate call: a request that is sent
    again must not meet what its first life left on a replica."""
    sampling: SamplingParams
    prompt_length: int
    max_tokens: int
    """Most output tokens, a carried-over prefix included."""
    max_model_len: int
    """Prompt and output together, in tokens."""
    num_speculative_tokens: int
    """K asked for; 0 switches speculation off."""
    chain: TokenChain
    """Every committed token, the prompt first."""
    method: SpeculativeMethod | None = None
    """How draft tokens are proposed; None proposes none."""
    prefix_key: bytes = b""
    """Of the prompt's beginning (`routing.py`); sessions with the same one go to one replica."""
    target: CacheView = field(default_factory=CacheView)
    draft: CacheView = field(default_factory=CacheView)
    target_deaths: DeviceDeaths = field(default_factory=DeviceDeaths)
    draft_deaths: DeviceDeaths = field(default_factory=DeviceDeaths)
    trace: RequestTrace = field(default_factory=RequestTrace)
    """Where its rounds and calls are written down."""

    @property
    def committed_length(self) -> int:
        """Committed tokens, the prompt included."""
        return len(self.chain)

    @property
    def num_output_tokens(self) -> int:
        """Committed output tokens."""
        return len(self.chain) - self.prompt_length

    @property
    def demand(self) -> Demand:
        """What a session of this request asks of a replica that it is opened on now."""
        return Demand(self.prefix_key, self.session_id, self.committed_length + 1)

    @property
    def num_remaining_tokens(self) -> int:
        """Output tokens that may still be committed before max_tokens or the context ends."""
        return min(
            self.max_tokens - self.num_output_tokens, self.max_model_len - self.committed_length
        )

    def plan_num_speculative_tokens(self, draft_max_model_len: int) -> int:
        """Give the K of the next round: never past max_tokens, the context or the draft's limit.

        Args:
            draft_max_model_len: longest sequence the draft takes, in tokens; 0 means no limit.
        """
        k = min(self.num_speculative_tokens, self.num_remaining_tokens - 1)
        if draft_max_model_len:
            k = min(k, draft_max_model_len - self.committed_length)
        return max(0, k)

    def plan_call(self, view: CacheView, limit: int) -> CallPlan:
        """Plan a call on one service; the caller sends it and reports the reply with `absorb_*`.

        Args:
            view: the service's view, `self.target` or `self.draft`.
            limit: most tokens to append in this call.
        """
        # The newest committed token is always sent: its row is what the call is for.
        keep = min(view.cached_length, self.committed_length - 1)
        append = tuple(self.chain.slice(keep, keep + limit))
        view.step += 1
        plan = CallPlan(
            epoch=view.epoch,
            step=view.step,
            keep_length=keep,
            keep_digest=self.chain.digest(keep),
            append_token_ids=append,
            committed_length=keep + len(append),
            opens=not view.opened,
        )
        return plan

    def absorb(
        self, view: CacheView, plan: CallPlan, reply_length: int, speculative: Sequence[int]
    ) -> None:
        """Move a service's cached_length on its reply.

        The service holds the committed tokens of the call, then `speculative` ones (draft tokens);
        of those only the part that was committed since stays valid.

        Args:
            view: the service's view.
            plan: the call that was answered.
            reply_length: tokens the service says it holds.
            speculative: tokens it holds after the committed ones of the call.
        """
        if (plan.epoch, plan.step) != (view.epoch, view.step):
            return  # a newer call has rolled the service back since
        valid = plan.committed_length
        committed = self.chain.slice(valid, valid + len(speculative))
        for ours, theirs in zip(committed, speculative, strict=False):
            if ours != theirs:
                break
            valid += 1
        view.cached_length = min(valid, reply_length, self.committed_length - 1)
        view.opened = True

    def correct(self, view: CacheView, matching_length: int) -> None:
        """Take a service's word (CacheMismatch) for how much of the committed tokens it holds."""
        view.cached_length = min(matching_length, view.cached_length)
        view.opened = True

    def commit(self, proposal: Proposal, verdict: Verification) -> tuple[int, ...]:
        """Commit a round: the accepted draft tokens, then the recovered or bonus token.

        Returns:
            The num_accepted + 1 tokens committed.
        """
        committed = (*proposal.draft_token_ids[: verdict.num_accepted], verdict.next_token_id)
        self.chain.append(committed)
        return committed
