"""One call to a target: how it is written, and what its replies say.

Knows the target's messages; knows no replica and no retry.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from specserve.errors import InvalidRequest, PeerUnavailable
from specserve.orchestrator.request_state import CallPlan, RequestState
from specserve.rpc import codec
from specserve.rpc.pending import PendingCall
from specserve.rpc.v1 import common_pb2, target_pb2
from specserve.speculation.types import Proposal, TargetScores

MAX_PROB = 1.0 + 1e-6
"""Sums round: a probability may be this large."""


class Scored(NamedTuple):
    """What a round, or one token of decode-ahead, got from its target."""

    scores: TargetScores
    logprobs: target_pb2.RowLogprobs | None
    timing: common_pb2.CallTiming
    more_follows: bool
    wait_s: float
    opened_epoch: int
    """The epoch whose session this answer was the first of; 0 when it was not the first."""


@dataclass(slots=True)
class TargetCall:
    """A call that was sent, and as much as its replies have said."""

    plan: CallPlan
    pending: PendingCall[target_pb2.VerifyCall, target_pb2.VerifyReply]
    draft_token_ids: tuple[int, ...]
    began_at: float
    """When it was sent."""
    sent_at: float
    """Or when its last reply came."""
    decoded_token_ids: tuple[int, ...] = ()
    """What decode-ahead has answered so far."""
    cached_length: int | None = None
    """Tokens that the target holds, by its last reply; None before the first."""
    held_token_ids: tuple[int, ...] = ()
    """Those of them beyond the committed tokens of the call: the draft tokens, or with
    decode-ahead what the target has fed back to itself."""
    is_open: bool = True
    """Replies are still due."""
    num_replies: int = 0
    timing: common_pb2.CallTiming | None = None
    """Of its last reply; None before the first."""
    is_written_down: bool = False
    """It is in the request's trace."""
    append_only: bool = False
    """No row is scored."""

    def is_repeat(self, reply: target_pb2.VerifyReply) -> bool:
        """Say whether a token of decode-ahead has been read before.

        Raises:
            PeerUnavailable: the token before it is missing: it came out of order, or was lost.
        """
        if self.draft_token_ids or not reply.replacement_token_ids:
            return False
        # Each token of decode-ahead feeds the one before it: its place is the length it names.
        due = self.plan.committed_length + len(self.decoded_token_ids)
        if reply.cached_length > due:
            raise PeerUnavailable(
                "target", f"a token for length {reply.cached_length} came before that for {due}"
            )
        return reply.cached_length < due

    def read(self, reply: target_pb2.VerifyReply, now: float, vocab_size: int) -> Scored:
        """Take in a reply without error.

        Args:
            vocab_size: of the replica; 0 where it did not say.

        Raises:
            PeerUnavailable: it is no answer to this call; nothing of it was taken in.
        """
        scores = self._scores(reply, vocab_size)
        opened_epoch = self.plan.epoch if self.plan.opens and self.cached_length is None else 0
        self.is_open = reply.more_follows
        self.num_replies += 1
        replacement = scores.replacement_token_ids
        self.cached_length = reply.cached_length
        self.held_token_ids = self.draft_token_ids or self.decoded_token_ids
        self.decoded_token_ids = (*self.decoded_token_ids, *replacement)
        # Of decode-ahead each reply waited since the one before it, not since the call.
        wait_s, self.sent_at = now - self.sent_at, now
        return Scored(
            scores,
            reply.logprobs if reply.HasField("logprobs") else None,
            reply.timing,
            reply.more_follows,
            wait_s,
            opened_epoch,
        )

    def _scores(self, reply: target_pb2.VerifyReply, vocab_size: int) -> TargetScores:
        """Check what a round is decided by: a wrong answer must cost the replica, never the law."""
        try:
            probs = codec.unpack_doubles(reply.target_probs, "target_probs")
            ids = codec.unpack_ids(reply.replacement_token_ids, "replacement_token_ids")
        except InvalidRequest as error:
            raise PeerUnavailable("target", f"its answer cannot be read: {error}") from error
        num_drafted = len(self.draft_token_ids)
        num_rows = 0 if self.append_only else num_drafted + 1
        if len(probs) != num_drafted or len(ids) != num_rows:
            raise PeerUnavailable(
                "target",
                f"it answered {len(probs)} probabilities and {len(ids)} tokens to {num_drafted} "
                f"draft tokens and {num_rows} rows",
            )
        # A NaN fails the comparison too.
        for p in probs:
            if not 0.0 <= p <= MAX_PROB:
                raise PeerUnavailable("target", f"it answered probabilities of {list(probs)}")
        if vocab_size and ids and max(ids) >= vocab_size:
            raise PeerUnavailable("target", f"it answered the token {max(ids)} of {vocab_size}")
        return TargetScores(probs, ids)


def pack_verify_call(
    call_id: int,
    state: RequestState,
    plan: CallPlan,
    proposal: Proposal,
    opening: common_pb2.SessionOpening,
    *,
    num_decode_steps: int,
    append_only: bool,
    timeout_s: float,
    traceparent: str,
) -> target_pb2.VerifyCall:
    """Write a call; `opening` travels with the first one of an epoch."""
    size, ids, weights = codec.pack_probs(proposal.draft_probs)
    return target_pb2.VerifyCall(
        session=common_pb2.SessionCall(
            call_id=call_id,
            session_id=state.session_id,
            epoch=plan.epoch,
            step=plan.step,
            keep_length=plan.keep_length,
            keep_digest=plan.keep_digest,
            append_token_ids=codec.pack_ids(plan.append_token_ids),
            opening=opening if plan.opens else None,
            timeout_s=timeout_s,
            traceparent=traceparent,
            alone=state.target_deaths.runs_alone,
        ),
        draft_token_ids=codec.pack_ids(proposal.draft_token_ids),
        support_size=size,
        support_token_ids=ids,
        support_weights=weights,
        num_decode_steps=num_decode_steps,
        append_only=append_only,
    )
