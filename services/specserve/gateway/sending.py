"""What goes to the client: a reader who has stopped is given up like one who has gone.

Knows ASGI's send; knows no answer.
"""

from __future__ import annotations

import asyncio
import logging

from starlette.types import Message, Send

from specserve.gateway.errors import ClientDisconnected

SEND_SLACK_S = 30.0
"""How much longer than a request may take its answer may be read, in seconds."""

logger = logging.getLogger(__name__)


def bounded(send: Send, timeout_s: float) -> Send:
    """Return a `send` that waits for its reader up to a time, and no longer.

    It raises ClientDisconnected then; a reader who keeps up is never given up.

    Args:
        timeout_s: from now on, for all that is sent together.
    """
    ends_at = asyncio.get_running_loop().time() + timeout_s

    async def send_in_time(message: Message) -> None:
        try:
            async with asyncio.timeout_at(ends_at):
                await send(message)
        except TimeoutError:
            logger.warning("the client reads no more, and is given up after %g s", timeout_s)
            raise ClientDisconnected from None

    return send_in_time
