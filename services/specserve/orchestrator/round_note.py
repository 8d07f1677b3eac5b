"""One round and its calls while they happen, and the records that are made of them afterwards.

Plain values: a message of the contract costs several times as much to fill in field by field, and a
round is on its way to the client. Knows no clock and no request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from specserve.config import SpeculativeMethod
from specserve.rpc import codec
from specserve.rpc.v1 import common_pb2, requests_pb2

NO_TIMING = common_pb2.CallTiming()
"""Of a call that no reply came to."""


@dataclass(slots=True)
class CallNote:
    """One call to a draft or target; its fields are those of `CallRecord`."""

    service: str
    address: str
    """host:port of the replica."""
    model: common_pb2.GetModelResponse | None
    """What the replica serves."""
    began_s: float
    wall_s: float
    timing: common_pb2.CallTiming
    """`NO_TIMING` where no reply came."""
    num_replies: int
    error: str
    is_background: bool
    epoch: int

    @property
    def revision(self) -> str:
        """The weights that the replica serves."""
        return "" if self.model is None else revision_of(self.model)

    def record(self) -> requests_pb2.CallRecord:
        """Write it down."""
        model = self.model
        return requests_pb2.CallRecord(
            service=self.service,
            replica_id=self.address if model is None else model.replica_id,
            revision=self.revision,
            began_s=self.began_s,
            wall_s=self.wall_s,
            timing=None if self.timing is NO_TIMING else self.timing,
            num_replies=self.num_replies,
            error=self.error,
            is_background=self.is_background,
            epoch=self.epoch,
        )


@dataclass(slots=True)
class RoundNote:
    """One round; its fields are those of `RoundRecord`."""

    began_s: float
    wall_s: float = 0.0
    num_speculative_tokens: int = 0
    reason: str = ""
    proposer: SpeculativeMethod | None = None
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_emitted_tokens: int = 0
    lengths: tuple[int, int, int] = (0, 0, 0)
    """Committed tokens, and those that draft and target are known to hold."""
    calls: list[CallNote] = field(default_factory=list)
    target_probs: Sequence[float] = ()
    draft_probs: Sequence[float] = ()

    def record(self) -> requests_pb2.RoundRecord:
        """Write it down."""
        committed, draft_cached, target_cached = self.lengths
        return requests_pb2.RoundRecord(
            began_s=self.began_s,
            wall_s=self.wall_s,
            num_speculative_tokens=self.num_speculative_tokens,
            reason=self.reason,
            proposer=codec.pack_method(self.proposer),
            num_draft_tokens=self.num_draft_tokens,
            num_accepted_tokens=self.num_accepted_tokens,
            num_emitted_tokens=self.num_emitted_tokens,
            committed_length=committed,
            draft_cached_length=draft_cached,
            target_cached_length=target_cached,
            calls=[call.record() for call in self.calls],
            target_probs=self.target_probs,
            draft_probs=self.draft_probs,
        )


def revision_of(model: common_pb2.GetModelResponse) -> str:
    """Name the weights that a replica serves: the hub's revision, else their fingerprint."""
    return model.revision or model.weights_fingerprint[:12]
