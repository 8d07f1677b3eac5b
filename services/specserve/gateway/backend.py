"""What the gateway asks of whatever decodes: one seam, so that tests need no network.

Knows the contract's messages; knows no transport and no HTTP.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol

from specserve.rpc.v1.generation_pb2 import (
    GenerateRequest,
    GenerateResponse,
    GetPairResponse,
    GetStatusResponse,
)
from specserve.rpc.v1.requests_pb2 import RequestRecord


class GenerationBackend(Protocol):
    """Decodes choices. Two implementations: `GrpcBackend`, and fakes in tests."""

    def generate(
        self, request: GenerateRequest, traceparent: str = ""
    ) -> AsyncGenerator[GenerateResponse, None]:
        """Decode one choice; the last response carries `finish_reason`, and a record of them all.

        Closing the generator, or cancelling the task that waits on it, gives the choice up and
        frees what it held.

        Raises:
            SpecServeError: the choice cannot be decoded, or cannot go on.
        """
        ...

    async def get_pair(self) -> GetPairResponse:
        """Say what is served, and whether it is ready.

        Raises:
            SpecServeError: nobody could be asked.
        """
        ...

    async def get_status(self) -> list[GetStatusResponse]:
        """Return the live state of every orchestrator that answers in time."""
        ...

    async def get_requests(self, name: str) -> list[RequestRecord]:
        """Return every remembered choice of one request, with its rounds, of all orchestrators.

        Args:
            name: a choice's id, that of its body, the client's own X-Request-Id or a trace id.
        """
        ...

    async def list_requests(self, limit: int) -> list[RequestRecord]:
        """Return the latest requests without rounds, newest first."""
        ...

    async def close(self) -> None:
        """Let go of connections. Idempotent."""
        ...
