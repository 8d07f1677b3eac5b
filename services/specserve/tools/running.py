"""A service's life as a plain process: ready line, stop signals, drain, end.

Knows processes and signals; knows no particular service and no Ray.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from specserve.errors import ConfigurationError, quoted
from specserve.tools import event_loop
from specserve.tools.terminal import say_event, warn

if TYPE_CHECKING:
    from specserve.rpc.server import RunningService

TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

FAILURE_LIMIT_S = 60.0
"""A service that cannot serve for this long ends, so that its supervisor starts it anew."""


def add_common_flags(parser: argparse.ArgumentParser) -> None:
    """Add what every long-running command has."""
    group = parser.add_argument_group("process")
    group.add_argument("--log-level", metavar="LEVEL", default="warning", help="debug ... error")
    group.add_argument(
        "--log-format",
        choices=("text", "json"),
        default="text",
        help="json: one object a line, with the ids of request and trace",
    )
    group.add_argument(
        "--stop-on-eof",
        action="store_true",
        help="also stop when stdin ends, so that nothing outlives the program that started this",
    )


def configure_logging(level: str, form: str = "text") -> None:
    """Send log lines to stderr.

    Args:
        form: text, or json: one object a line.

    Raises:
        ConfigurationError: there is no such level.
    """
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise ConfigurationError(
            f"--log-level: found {quoted(level)}, wanted debug, info, warning, error"
        )
    handler = logging.StreamHandler(sys.stderr)
    if form == "json":
        from specserve.telemetry.logs import JsonFormatter

        handler.setFormatter(JsonFormatter())
    else:
        handler.setFormatter(logging.Formatter(TEXT_FORMAT))
    logging.basicConfig(level=number, handlers=[handler])


def run_service(
    role: str,
    start: Callable[[], Awaitable[RunningService]],
    drain_deadline_s: float,
    args: argparse.Namespace,
) -> int:
    """Start a service, say that it is ready, serve until told to stop; return the exit code."""
    configure_logging(args.log_level, args.log_format)
    return event_loop.run(_serve(role, start, drain_deadline_s, stop_on_eof=args.stop_on_eof))


async def _serve(
    role: str,
    start: Callable[[], Awaitable[RunningService]],
    drain_deadline_s: float,
    *,
    stop_on_eof: bool,
) -> int:
    signals = stop_signals(stop_on_eof)
    starting = asyncio.ensure_future(start())
    stopping = asyncio.create_task(signals.get())
    await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        return 0
    service = starting.result()
    event_loop.settle()
    say_event(
        "ready",
        {
            "service": role,
            "pid": os.getpid(),
            "address": service.address,
            "replica_id": service.replica_id,
        },
    )
    watching = asyncio.create_task(_watch(service))
    await asyncio.wait((watching, stopping), return_when=asyncio.FIRST_COMPLETED)
    if stopping.done():
        draining = asyncio.create_task(service.drain(drain_deadline_s))
        again = asyncio.create_task(signals.get())
        await asyncio.wait((draining, again), return_when=asyncio.FIRST_COMPLETED)
        draining.cancel()
        again.cancel()
    watching.cancel()
    stopping.cancel()
    await service.stop()
    if watching.done() and not watching.cancelled():
        warn(f"specserve {role}: {watching.result()}")
        return 1
    return 0


async def _watch(service: RunningService) -> str:
    """Return why the service cannot serve, once that has lasted for FAILURE_LIMIT_S."""
    loop = asyncio.get_running_loop()
    since: float | None = None
    while True:
        failure = service.failure()
        if failure is None:
            since = None
        elif since is None:
            since = loop.time()
        elif loop.time() - since > FAILURE_LIMIT_S:
            return failure
        await asyncio.sleep(1.0)


def stop_signals(stop_on_eof: bool) -> asyncio.Queue[str]:
    """Collect every reason to stop: SIGINT, SIGTERM, and the end of stdin if asked."""
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[str] = asyncio.Queue()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, queue.put_nowait, signal.Signals(number).name)
    if stop_on_eof:

        def read() -> None:
            if not os.read(0, 4096):
                loop.remove_reader(0)
                queue.put_nowait("EOF")

        loop.add_reader(0, read)
    return queue
