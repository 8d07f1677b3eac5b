"""How a request's record says that it ended."""

from __future__ import annotations

import asyncio

import pytest

from specserve.orchestrator.request_log import LoggedRequest
from specserve.orchestrator.request_trace import RequestTrace
from specserve.rpc.v1 import generation_pb2, requests_pb2

CANCELLED = requests_pb2.REQUEST_STATE_CANCELLED
FINISHED = requests_pb2.REQUEST_STATE_FINISHED
STOP = generation_pb2.FINISH_REASON_STOP
NONE = generation_pb2.FINISH_REASON_UNSPECIFIED


@pytest.mark.parametrize(("reason", "state"), [(STOP, FINISHED), (NONE, CANCELLED)])
def test_who_has_the_last_block_and_hangs_up_has_not_cancelled(reason: int, state: int) -> None:
    trace = RequestTrace()
    logged = LoggedRequest(trace, requests_pb2.RequestRecord())
    logged.note_record(generation_pb2.SpeculationRecord(), reason)
    logged.end(asyncio.CancelledError())
    assert logged.summary().state == state
