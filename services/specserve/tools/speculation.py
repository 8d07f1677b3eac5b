"""`specserve speculation [off|on|auto]`: turn speculation in running orchestrators, or look at it.

Goes straight to the orchestrators' gRPC ports, which only the cluster reaches: the port that
clients have is no place for a switch. Knows addresses and the admin service; knows no request.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING

from specserve.config_parsing import did_you_mean
from specserve.errors import ConfigurationError
from specserve.speculation.length_choice import SpeculationMode
from specserve.tools.client_access import add_tls_flags, tls_of
from specserve.tools.terminal import say, table, warn

if TYPE_CHECKING:
    from specserve.rpc.tls import MutualTls
    from specserve.rpc.v1 import admin_pb2

TIMEOUT_S = 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `specserve speculation`."""
    parser.add_argument(
        "mode",
        nargs="?",
        metavar="off|on|auto",
        help="off: K = 0 for new rounds; on: the configured K; auto: the K that promises the most "
        "tokens per second; without it the present state is printed",
    )
    parser.add_argument(
        "--orchestrator-address",
        metavar="HOST:PORT",
        action="append",
        default=[],
        help="an orchestrator, as `specserve serve` prints it; give it once per orchestrator, or "
        "name a host that stands for all of them",
    )
    add_tls_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Ask every orchestrator; 0 if all of them answered."""
    mode = _mode(args.mode)
    if not args.orchestrator_address:
        raise ConfigurationError(
            "--orchestrator-address: missing; `specserve serve` prints it when it is ready"
        )
    addresses = [one for given in args.orchestrator_address for one in resolve(given)]
    answers = asyncio.run(ask_all(addresses, mode, tls_of(args)))
    rows = []
    for address, answer in zip(addresses, answers, strict=True):
        if isinstance(answer, str):
            warn(f"specserve speculation: {address}: {answer}")
        else:
            rows.append(_row(address, answer))
    if rows:
        say(table(("orchestrator", "mode", "configured", "K", "running", "expected"), rows))
    return int(len(rows) < len(addresses))


def _mode(word: str | None) -> SpeculationMode | None:
    if word is None:
        return None
    try:
        return SpeculationMode(word)
    except ValueError as error:
        raise ConfigurationError(
            f"mode: found {word!r}, wanted off, on or auto{did_you_mean(word, SpeculationMode)}"
        ) from error


def resolve(address: str) -> list[str]:
    """Return every host:port that an address stands for: a service's name has one per replica.

    Raises:
        ConfigurationError: it is no HOST:PORT, or nobody knows the host.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigurationError(f"--orchestrator-address: found {address!r}, wanted HOST:PORT")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except (OSError, OverflowError) as error:
        raise ConfigurationError(f"--orchestrator-address: {address}: {error}") from error
    # One family: where a host has both, they lead to the same processes.
    family = found[0][0]
    hosts = dict.fromkeys(str(entry[4][0]) for entry in found if entry[0] == family)
    return [f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host in hosts]


async def ask_all(
    addresses: Sequence[str],
    mode: SpeculationMode | None,
    tls: MutualTls | None = None,
) -> list[admin_pb2.SpeculationState | str]:
    """Change or read the state of each; what went wrong instead of an answer, where it did."""
    return await asyncio.gather(*(_ask(address, mode, tls) for address in addresses))


async def _ask(
    address: str, mode: SpeculationMode | None, tls: MutualTls | None
) -> admin_pb2.SpeculationState | str:
    import grpc

    from specserve.rpc import codec
    from specserve.rpc.channel import open_channel
    from specserve.rpc.v1 import admin_pb2, admin_pb2_grpc

    async with open_channel(address, tls) as channel:
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        try:
            if mode is None:
                state: admin_pb2.SpeculationState = await stub.GetSpeculation(
                    admin_pb2.GetSpeculationRequest(), timeout=TIMEOUT_S
                )
            else:
                state = await stub.SetSpeculation(
                    admin_pb2.SetSpeculationRequest(mode=codec.pack_mode(mode)), timeout=TIMEOUT_S
                )
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"
    return state


def _row(address: str, state: admin_pb2.SpeculationState) -> tuple[str, ...]:
    from specserve.rpc import codec

    expected = ", ".join(
        f"K={k}: {one.num_tokens / one.seconds:.1f}/s"
        for k, one in enumerate(state.estimates)
        if one.seconds > 0
    )
    return (
        address,
        codec.unpack_mode(state.mode).value,
        codec.unpack_mode(state.configured_mode).value,
        str(state.num_speculative_tokens),
        str(state.num_running),
        expected or "nothing measured yet",
    )
