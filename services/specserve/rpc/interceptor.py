"""What every handler of every server of ours is wrapped in: errors end the call with their status.

A request that cannot be read is such an error: INVALID_ARGUMENT and one line in the log. Other
calls and streams of the server go on. Knows handlers; knows no service.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from specserve.errors import InvalidRequest
from specserve.rpc.garbled import Garbled, tolerant
from specserve.rpc.status import errors_as_status
from specserve.rpc.tls import Admit

logger = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]


_MAKERS: dict[str, Callable[..., Any]] = {
    "unary_unary": grpc.unary_unary_rpc_method_handler,
    "unary_stream": grpc.unary_stream_rpc_method_handler,
    "stream_unary": grpc.stream_unary_rpc_method_handler,
    "stream_stream": grpc.stream_stream_rpc_method_handler,
}


class StatusInterceptor(grpc.aio.ServerInterceptor):
    """Lets handlers just raise, and keeps from them what is no request."""

    def __init__(self, admit: Admit | None = None) -> None:
        """Make one.

        Args:
            admit: ends a call of somebody who may not call; None lets everybody in.
        """
        self._admit = admit

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wrap the handler of a call; an unknown method stays UNIMPLEMENTED."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        # One of the four is set: which one says how requests and responses go.
        kind = next(name for name in _MAKERS if getattr(handler, name) is not None)
        behaviour = getattr(handler, kind)
        if not _is_async(behaviour):
            # None of ours. Where not everybody may call, nobody may call what cannot ask.
            return handler if self._admit is None else None
        take = _read_all if handler.request_streaming else _read_one
        return _MAKERS[kind](
            _guard(behaviour, handler_call_details.method, take, self._admit),
            request_deserializer=tolerant(handler.request_deserializer),
            response_serializer=handler.response_serializer,
        )


def _is_async(behaviour: Any) -> bool:
    return inspect.iscoroutinefunction(behaviour) or inspect.isasyncgenfunction(behaviour)


def _guard(
    behaviour: Any, method: str, take: Callable[[Any, str, Context], Any], admit: Admit | None
) -> Any:
    # gRPC tells by the function's kind whether responses are yielded or written to the context.
    if inspect.isasyncgenfunction(behaviour):

        async def yielding(request: Any, context: Context) -> AsyncIterator[Any]:
            if admit is not None:
                await admit(context)
            async with errors_as_status(context):
                async for response in behaviour(take(request, method, context), context):
                    yield response

        return yielding

    async def answering(request: Any, context: Context) -> Any:
        if admit is not None:
            await admit(context)
        async with errors_as_status(context):
            return await behaviour(take(request, method, context), context)

    return answering


def _read_one(request: Any, method: str, context: Context) -> Any:
    if isinstance(request, Garbled):
        logger.warning("%s from %s: a request of %s", method, context.peer(), request)
        raise InvalidRequest("", f"a request of {request}")
    return request


async def _read_all(requests: Any, method: str, context: Context) -> AsyncIterator[Any]:
    async for request in requests:
        yield _read_one(request, method, context)
