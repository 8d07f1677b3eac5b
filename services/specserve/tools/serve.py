"""`specserve serve`: target and draft under a Ray of its own, behind an OpenAI endpoint.

Refuses what cannot work before anything is started, is up only when the pair is ready, lets live
streams finish when it is told to stop, and stops everything it started. Knows processes and the
terminal; knows Ray only as `LocalRay`.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from specserve.config import EngineConfig, OrchestratorConfig, ServerConfig, TlsSettings
from specserve.errors import ConfigurationError
from specserve.gateway.api_keys import load_keys
from specserve.gateway.config import GatewayConfig
from specserve.rpc.tls import load_certificates
from specserve.serve_args import PoolOptions, ServeArgs
from specserve.tools.config_file import load_serve_args
from specserve.tools.flags import add_model_flags, as_flag, config_from_flags
from specserve.tools.held_port import HeldPort
from specserve.tools.interrupts import Interrupts, stop_signals_interrupt
from specserve.tools.models import CACHE_HELP, ModelPair, require_fitting, resolve_pair
from specserve.tools.process import SPECULATIVE_HELP, speculative_from
from specserve.tools.terminal import say, say_event, warn

if TYPE_CHECKING:
    from specserve.app import LocalRay
    from specserve.rpc.serve_hooks import ReplicaDescription

TlsT = TypeVar("TlsT", bound=TlsSettings)

READY_TIMEOUT_S = 300.0
"""Longest wait for a pair that has started to become ready."""

DRAIN_DEADLINE_S = 2.0
"""How long replicas wait for their sessions at the end. Short, for the gateways have let every live
stream finish or given it up by then, and all must be over within 20 s of a stop signal."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `specserve serve`."""
    parser.add_argument(
        "target",
        nargs="?",
        help="target model: directory, hub id or toy:...; without it the embedded pair is served",
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="YAML file with all settings (see docs/kubernetes.md), instead of target and flags",
    )
    parser.add_argument("--speculative-config", metavar="JSON", help=SPECULATIVE_HELP)
    add_model_flags(
        parser, EngineConfig, "engine", leave_out=("model", "draft_vocab_size", "quantization")
    )
    add_model_flags(parser, GatewayConfig, "gateway", leave_out=TlsSettings.model_fields)
    add_model_flags(parser, TlsSettings, "gRPC between the services")
    group = parser.add_argument_group("replicas")
    for pool in ("target", "draft"):
        group.add_argument(
            f"--num-{pool}-replicas", metavar="N", help=f"{pool} replicas (default: 1)"
        )
    group.add_argument("--cache-dir", metavar="DIR", help=CACHE_HELP)
    add_model_flags(
        parser,
        OrchestratorConfig,
        "verification",
        leave_out=set(OrchestratorConfig.model_fields) - {"require_verified", "verified_dir"},
    )


def run(args: argparse.Namespace) -> int:
    """Serve until a signal comes."""
    named = args.config is not None
    serve_args, pair = _serve_args_from_file(args) if named else serve_args_from(args)
    with stop_signals_interrupt() as interrupts:
        try:
            with serving(serve_args, pair, interrupts) as (base_url, replicas):
                announce(base_url, replicas)
                while True:
                    signal.pause()
        except KeyboardInterrupt:
            say("specserve: stopped")
    return 0


def serve_args_from(args: argparse.Namespace) -> tuple[ServeArgs, ModelPair]:
    """Turn flags into the application's arguments, pulling the embedded pair when needed.

    Raises:
        ConfigurationError: a flag is wrong, or the port is taken.
        VocabularyMismatch: draft and target differ; the first differing id is named.
    """
    tls = _with_certificates(config_from_flags(args, TlsSettings))
    of_gateway = {k: v for k, v in vars(args).items() if k not in TlsSettings.model_fields}
    gateway = config_from_flags(argparse.Namespace(**of_gateway), GatewayConfig)
    gateway = _with_keys(gateway)
    config_from_flags(args, EngineConfig, model="")  # a wrong flag is told before models are pulled
    pools = {
        pool: config_from_flags(
            argparse.Namespace(num_replicas=getattr(args, f"num_{pool}_replicas")), PoolOptions
        )
        for pool in ("target", "draft")
    }
    require_free_port(gateway.host, gateway.port)
    pair = resolve_pair(args.target, speculative_from(args), args.cache_dir)
    engine = config_from_flags(args, EngineConfig, model=pair.target)
    require_fitting(pair, engine)
    serve_args = ServeArgs(
        target=engine,
        speculative=pair.speculative,
        gateway=gateway,
        orchestrator=config_from_flags(args, OrchestratorConfig),
        target_pool=pools["target"],
        draft_pool=pools["draft"],
        server=ServerConfig(drain_deadline_s=DRAIN_DEADLINE_S, **tls.model_dump()),
        # What is wrong on the user's own machine stays wrong: say so at once.
        max_start_attempts=1,
    )
    return serve_args, pair


def _serve_args_from_file(args: argparse.Namespace) -> tuple[ServeArgs, ModelPair]:
    given = [name for name, value in vars(args).items() if value is not None and name != "config"]
    if given:
        names = ", ".join(name if name == "target" else as_flag(name) for name in given)
        raise ConfigurationError(f"--config: the file has all settings; leave out {names}")
    serve_args = load_serve_args(args.config)
    secured = {
        "gateway": _with_keys(serve_args.gateway),
        "server": _with_certificates(serve_args.server),
    }
    serve_args = serve_args.model_copy(
        update={
            name: value for name, value in secured.items() if value != getattr(serve_args, name)
        }
    )
    require_free_port(serve_args.gateway.host, serve_args.gateway.port)
    pair = ModelPair(serve_args.target.model, serve_args.speculative, is_embedded=False)
    require_fitting(pair, serve_args.target)
    return serve_args, pair


def _with_certificates(settings: TlsT) -> TlsT:
    """Refuse certificates that are wrong before anything starts, and name them for replicas.

    They need not run where this does. Links stay: behind them a Secret may be swapped.

    Raises:
        ConfigurationError: they are missing or do not fit together.
    """
    if settings.tls_dir is None:
        return settings
    load_certificates(Path(settings.tls_dir))
    return settings.model_copy(update={"tls_dir": os.path.abspath(settings.tls_dir)})


def _with_keys(gateway: GatewayConfig) -> GatewayConfig:
    """Do the same for the file of API keys.

    Raises:
        ConfigurationError: it cannot be read, or a line of it is no key.
    """
    if gateway.api_key_file is None:
        return gateway
    load_keys(gateway.api_key_file)
    path = os.path.abspath(gateway.api_key_file)
    return gateway.model_copy(update={"api_key_file": path})


def require_free_port(host: str, port: int) -> None:
    """Refuse a port that cannot be listened on, before anything is started.

    Raises:
        ConfigurationError: naming the port.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise ConfigurationError(
            f"--port: cannot listen on {host}:{port} ({error.strerror or error})"
        ) from error


@contextmanager
def serving(
    args: ServeArgs, pair: ModelPair, interrupts: Interrupts
) -> Iterator[tuple[str, list[ReplicaDescription]]]:
    """Serve while inside: yields the base URL and the replicas once the pair is ready.

    At the end new requests are refused while live ones may go on for the gateway's grace; a stop
    signal cuts that short. No signal disturbs what follows.

    Raises:
        ConfigurationError: the application does not start.
    """
    started = time.monotonic()
    say(f"specserve: target {pair.target}")
    speculative = pair.speculative
    if speculative is None:
        say("specserve: no draft (see --speculative-config): the target is served alone")
    else:
        say(
            f"specserve: {speculative.method} {speculative.model or ''} "
            f"num_speculative_tokens={speculative.num_speculative_tokens}"
        )
    say("specserve: starting Ray")
    from specserve.app import LocalRay

    interrupts.allow(1)  # what a signal begins to clean up, the next must not leave half done
    with _with_a_port(args) as placed, LocalRay(placed) as local:
        interrupts.install()
        try:
            say("specserve: loading models")
            local.deploy()
            base_url = url_of(placed.gateway)
            if reason := wait_ready(base_url):
                warn(f"specserve: {reason}")
            replicas = local.describe()
            say(f"specserve: ready after {time.monotonic() - started:.1f} s")
            try:
                yield base_url, replicas
            finally:
                _drain(local, args.gateway.shutdown_grace_s, interrupts)
        finally:
            interrupts.allow(0)


@contextmanager
def _with_a_port(args: ServeArgs) -> Iterator[ServeArgs]:
    """Choose the port that was left to choice: Ray Serve's proxy does not tell which it took."""
    if args.gateway.port != 0:
        yield args
        return
    with HeldPort() as port:
        gateway = args.gateway.model_copy(update={"port": port.number})
        yield args.model_copy(update={"gateway": gateway})


def _drain(local: LocalRay, grace_s: float, interrupts: Interrupts) -> None:
    say(f"specserve: stopping; live requests have {grace_s:g} s, another signal hurries")
    try:
        interrupts.allow(1)
        local.drain(grace_s)
    except KeyboardInterrupt:
        say("specserve: hurrying")
        local.drain(0)


def url_of(gateway: GatewayConfig) -> str:
    """Return the base URL that this machine reaches the gateway by."""
    everywhere = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - dialled, not bound
    host = everywhere.get(gateway.host, gateway.host)
    return f"http://[{host}]:{gateway.port}" if ":" in host else f"http://{host}:{gateway.port}"


def announce(base_url: str, replicas: list[ReplicaDescription]) -> None:
    """Say where everything is: for people, and in one line for programs."""
    say(f"specserve: OpenAI API at {base_url}/v1")
    for replica in replicas:
        say(f"specserve: {replica.role:<12} pid {replica.pid:<8} grpc {replica.address}")
    say_event("ready", {"service": "specserve", "pid": os.getpid(), "address": base_url})


def wait_ready(base_url: str) -> str:
    """Wait until /ready answers 200; return what it says beside, such as why nothing speculates.

    Raises:
        ConfigurationError: the pair is not compatible, or not ready in READY_TIMEOUT_S.
    """
    import httpx

    deadline = time.monotonic() + READY_TIMEOUT_S
    reason = told = "no answer yet"
    with httpx.Client(base_url=base_url, timeout=10.0) as client:
        while time.monotonic() < deadline:
            try:
                answer = client.get("/ready")
                reason = str(answer.json().get("reason", answer.text))
                if answer.status_code == 200:
                    return reason
            except (httpx.HTTPError, ValueError, AttributeError) as error:
                reason = str(error)
            if "vocabular" in reason:
                raise ConfigurationError(reason)
            if reason != told:
                warn(f"specserve: not ready: {reason}")
                told = reason
            time.sleep(0.1)
    raise ConfigurationError(f"not ready after {READY_TIMEOUT_S:.0f} s: {reason}")
