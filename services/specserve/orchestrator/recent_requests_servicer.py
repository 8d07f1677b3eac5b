"""RecentRequestsService: the ring of recent requests over gRPC. Knows the contract and the ring."""

from __future__ import annotations

from typing import Any

import grpc

from specserve.errors import InvalidRequest
from specserve.orchestrator.recent_requests import RecentRequests
from specserve.rpc.v1 import requests_pb2, requests_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]

DEFAULT_LIMIT = 20
MAX_LIMIT = 1000


class RecentRequestsServicer(requests_pb2_grpc.RecentRequestsServiceServicer):
    """The gRPC face of one orchestrator's ring."""

    def __init__(self, ring: RecentRequests) -> None:
        self._ring = ring

    async def ListRequests(  # noqa: N802 - the contract's name
        self, request: requests_pb2.ListRequestsRequest, context: Context
    ) -> requests_pb2.ListRequestsResponse:
        """Give the latest requests, newest first."""
        limit = min(request.limit or DEFAULT_LIMIT, MAX_LIMIT)
        return requests_pb2.ListRequestsResponse(requests=self._ring.latest(limit))

    async def GetRequests(  # noqa: N802 - the contract's name
        self, request: requests_pb2.GetRequestsRequest, context: Context
    ) -> requests_pb2.GetRequestsResponse:
        """Give every choice of one request."""
        if not request.id:
            raise InvalidRequest("id", "empty")
        return requests_pb2.GetRequestsResponse(requests=self._ring.find(request.id))
