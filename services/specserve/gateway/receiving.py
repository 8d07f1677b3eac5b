"""What comes from the client: a body of bounded size, or the news that it has gone.

Knows ASGI's receive; knows no route.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from specserve.errors import InvalidRequest
from specserve.gateway.errors import BodyTooLarge, BodyTooSlow, ClientDisconnected, HttpError

MAX_DISCARD_BYTES = 64 * 1024 * 1024
"""Most bytes of a refused body that are read and thrown away."""

DISCARD_TIMEOUT_S = 5.0
"""Longest time spent on that, in seconds."""

T = TypeVar("T")


async def read_body(request: Request, limit_bytes: int, timeout_s: float) -> bytes:
    """Read the body.

    Raises:
        InvalidRequest: it is packed, and might be of any size inside.
        BodyTooSlow: it was not there in time; the rest is left unread.
        BodyTooLarge: it is, or says it is, longer than the limit; the rest is left unread.
        ClientDisconnected: the client went away in the middle of it.
    """
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise InvalidRequest("", "a body without content-encoding was wanted: none is unpacked")
    announced = request.headers.get("content-length", "")
    # isdecimal also takes digits of other scripts, but int() reads those too.
    if announced.isdecimal() and int(announced[:20]) > limit_bytes:
        raise BodyTooLarge(limit_bytes)
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            async for part in request.stream():
                body += part
                if len(body) > limit_bytes:
                    raise BodyTooLarge(limit_bytes)
    except ClientDisconnect:
        raise ClientDisconnected from None
    except TimeoutError:
        raise BodyTooSlow(timeout_s) from None
    return bytes(body)


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run the work, and cancel it as soon as the client goes away.

    The body must have been read whole: what else comes from the client is thrown away.
    Cancelling this cancels the work, and waits until it has cleaned up.

    Raises:
        ClientDisconnected: the client went away before the work was done.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnected
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Refusal:
    """The answer to a body that was not read.

    It is sent at once, and only then is the rest of the body read, and thrown away: closing a
    connection with unread bytes resets it, and the client would never see the answer.
    """

    def __init__(self, error: HttpError) -> None:
        self._status = error.status
        self._body = error.to_json()
        self._headers = [(name.encode(), value.encode()) for name, value in error.headers.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer, then let the client finish."""
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(self._body)).encode()),
            (b"connection", b"close"),
            *self._headers,
        ]
        await send({"type": "http.response.start", "status": self._status, "headers": headers})
        await send({"type": "http.response.body", "body": self._body, "more_body": True})
        with suppress(TimeoutError):
            await asyncio.wait_for(_discard(receive), DISCARD_TIMEOUT_S)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _discard(receive: Receive) -> None:
    discarded = 0
    while discarded < MAX_DISCARD_BYTES:
        message = await receive()
        discarded += len(message.get("body", b""))
        if message["type"] == "http.disconnect" or not message.get("more_body"):
            return
