"""AdminService: the switch that an operator turns. Knows the contract and the length control."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc

from specserve.orchestrator.length_control import LengthControl
from specserve.rpc import codec, status
from specserve.rpc.v1 import admin_pb2, admin_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """The gRPC face of one orchestrator's switches."""

    def __init__(
        self, length: LengthControl, orchestrator_id: str, num_running: Callable[[], int]
    ) -> None:
        self._length = length
        self._orchestrator_id = orchestrator_id
        self._num_running = num_running

    async def GetSpeculation(  # noqa: N802 - the contract's name
        self, request: admin_pb2.GetSpeculationRequest, context: Context
    ) -> admin_pb2.SpeculationState:
        """Say whether rounds speculate, and what was learned about it."""
        return self._state()

    async def SetSpeculation(  # noqa: N802 - the contract's name
        self, request: admin_pb2.SetSpeculationRequest, context: Context
    ) -> admin_pb2.SpeculationState:
        """Choose K otherwise from now on."""
        async with status.errors_as_status(context):
            self._length.switch(codec.unpack_mode(request.mode))
        return self._state()

    def _state(self) -> admin_pb2.SpeculationState:
        length = self._length
        return admin_pb2.SpeculationState(
            mode=codec.pack_mode(length.mode),
            configured_mode=codec.pack_mode(length.configured_mode),
            num_speculative_tokens=length.speculative.num_speculative_tokens,
            orchestrator_id=self._orchestrator_id,
            num_running=self._num_running(),
            estimates=(
                admin_pb2.LengthEstimate(seconds=option.seconds, num_tokens=option.num_tokens)
                for option in length.estimates(length.speculative.method)
            ),
        )
