"""Leaving a target that drains: between rounds, for another, and back if the other has no room.

The old replica keeps the session until the new one has answered, so that trying costs nothing.
Knows when to leave and what was left; knows no message.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from specserve.errors import SpecServeError
from specserve.orchestrator.pool import Pool, TargetLink
from specserve.orchestrator.request_state import CacheView, RequestState
from specserve.orchestrator.target_attachment import TargetAttachment
from specserve.rpc.v1 import target_pb2

logger = logging.getLogger(__name__)

STAY_S = 1.0
"""How long a session stays on a draining replica after another has refused it."""


class TargetDeparture:
    """One request's moves away from draining replicas, one at a time."""

    def __init__(
        self,
        state: RequestState,
        pool: Pool[target_pb2.VerifyCall, target_pb2.VerifyReply],
        clock: Callable[[], float],
    ) -> None:
        self._state = state
        self._pool = pool
        self._clock = clock
        self._left: tuple[TargetAttachment, CacheView] | None = None
        """The replica that is being left, and what it holds; None between moves."""
        self._stay_until = 0.0

    @property
    def is_on(self) -> bool:
        """A replica is being left, and another has not answered yet."""
        return self._left is not None

    def successor(self, attachment: TargetAttachment | None) -> TargetLink | None:
        """Name the replica to move to; None where there is nothing to leave, or nowhere to go."""
        if attachment is None or not attachment.link.draining or self._clock() < self._stay_until:
            return None
        return self._pool.successor(attachment.link, self._state.demand)

    def begin(self, attachment: TargetAttachment) -> None:
        """Leave a replica that still holds the session; the next call opens it elsewhere."""
        address = attachment.link.address
        logger.info("request %s moves from target %s", self._state.request_id, address)
        self._left = (attachment, self._state.target.leave())

    def undo(self, error: SpecServeError) -> TargetAttachment | None:
        """Give back what was left, to go on there; None when nothing was, or it is gone.

        Args:
            error: why the move failed.
        """
        if self._left is None:
            return None
        (attachment, view), self._left = self._left, None
        if not attachment.is_held:
            attachment.close()
            return None
        address = attachment.link.address
        logger.info("request %s stays on target %s: %s", self._state.request_id, address, error)
        self._state.target.return_to(view)
        self._stay_until = self._clock() + STAY_S
        return attachment

    def finish(self) -> None:
        """Free the session where it was left. Idempotent."""
        if self._left is not None:
            self._left[0].close()
            self._left = None
