"""`specserve gateway`: the HTTP front as a plain process, orchestrators given by address.

Prints one JSON line with pid and address once it listens; stops as the other services do.
"""

from __future__ import annotations

import argparse
import asyncio
import os

from specserve.config import EngineConfig
from specserve.errors import ConfigurationError
from specserve.gateway.config import GatewayConfig
from specserve.tools import event_loop
from specserve.tools.flags import add_model_flags, config_from_flags
from specserve.tools.running import add_common_flags, configure_logging, stop_signals
from specserve.tools.terminal import say_event


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `specserve gateway`."""
    parser.add_argument(
        "--orchestrator-address",
        metavar="HOST:PORT",
        action="append",
        default=[],
        help="an orchestrator; give it once per replica",
    )
    parser.add_argument(
        "--tokenizer", metavar="MODEL", required=True, help="the target: directory, hub id or toy:"
    )
    parser.add_argument("--revision", metavar="REVISION", help="hub revision of the target")
    parser.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="let the tokenizer run its own Python; off unless you have read that code",
    )
    add_model_flags(parser, GatewayConfig, "gateway")
    add_common_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Serve HTTP until a signal comes."""
    if not args.orchestrator_address:
        raise ConfigurationError("--orchestrator-address: missing; name at least one orchestrator")
    config = config_from_flags(args, GatewayConfig)
    target = EngineConfig(
        model=args.tokenizer, revision=args.revision, trust_remote_code=args.trust_remote_code
    )
    configure_logging(args.log_level, args.log_format)
    return event_loop.run(_serve(config, target, args.orchestrator_address, args.stop_on_eof))


async def _serve(
    config: GatewayConfig, target: EngineConfig, addresses: list[str], stop_on_eof: bool
) -> int:
    from specserve import telemetry
    from specserve.gateway.grpc_backend import GrpcBackend
    from specserve.gateway.metrics import GatewayMetrics
    from specserve.gateway.server import serve_gateway
    from specserve.model.tokenizer import load_tokenizer
    from specserve.rpc.tls import MutualTls

    tracing = telemetry.start_tracing("specserve-gateway")
    signals = stop_signals(stop_on_eof)
    tokenizer = await asyncio.to_thread(load_tokenizer, target)
    backend = GrpcBackend(
        addresses, config.failover_timeout_s, MutualTls.of(config), config.orchestrator_hang_s
    )
    metrics = GatewayMetrics()
    backend.on_failover = metrics.count_failover
    serving = asyncio.create_task(
        serve_gateway(config, backend, tokenizer, _say_ready, tracing, metrics)
    )
    stopping = asyncio.create_task(signals.get())
    await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
    if stopping.done():
        serving.cancel()
        stopping = asyncio.create_task(signals.get())
        await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
        serving.cancel()  # a second signal hurries; one that has ended cannot be cancelled
    stopping.cancel()
    try:
        await serving
    except asyncio.CancelledError:
        await asyncio.to_thread(tracing.shutdown)
    except OSError as error:
        raise ConfigurationError(
            f"cannot listen on {config.host}:{config.port}: {error.strerror or error}"
        ) from error
    return 0


def _say_ready(host: str, port: int) -> None:
    event_loop.settle()
    say_event(
        "ready",
        {
            "service": "gateway",
            "pid": os.getpid(),
            "address": f"{host}:{port}",
            "replica_id": f"gateway-{os.getpid()}",
        },
    )
