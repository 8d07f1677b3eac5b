"""`specserve draft|target|orchestrator`: one service as a plain process, peers given by address.

Each prints one JSON line with pid and address once it serves, and stops, drained, on SIGINT or
SIGTERM; a second signal ends it at once. Knows flags and configurations; knows no Ray.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from specserve.config import (
    DRAFT_MODEL_METHODS,
    DraftConfig,
    EngineConfig,
    OrchestratorConfig,
    ServerConfig,
    SpeculativeConfig,
    TargetConfig,
)
from specserve.config_parsing import parse_speculative_config
from specserve.errors import ConfigurationError
from specserve.serve_args import draft_engine
from specserve.tools.flags import add_model_flags, config_from_flags, given_values
from specserve.tools.running import add_common_flags, run_service

if TYPE_CHECKING:
    from specserve.rpc.server import RunningService

SPECULATIVE_HELP = (
    'JSON object, e.g. \'{"method": "draft_model", "model": "DIRECTORY", '
    '"num_speculative_tokens": 4}\''
)


def add_target_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `specserve target`."""
    parser.add_argument("model", help="model directory, hub id, or toy:...")
    add_model_flags(
        parser, EngineConfig, "engine", leave_out=("model", "draft_vocab_size", "quantization")
    )
    _add_process_flags(parser)


def run_target(args: argparse.Namespace) -> int:
    """Serve a target until a signal comes."""
    engine = config_from_flags(args, EngineConfig, model=args.model)
    config = TargetConfig(engine=engine, server=config_from_flags(args, ServerConfig))

    async def start() -> RunningService:
        from specserve.target.server import start_target

        return await start_target(config)

    return run_service("target", start, config.server.drain_deadline_s, args)


def add_draft_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `specserve draft`."""
    parser.add_argument("model", nargs="?", help="draft model; or name it in the config below")
    parser.add_argument("--speculative-config", metavar="JSON", help=SPECULATIVE_HELP)
    add_model_flags(
        parser, EngineConfig, "engine", leave_out=("model", "draft_vocab_size", "quantization")
    )
    _add_process_flags(parser)


def run_draft(args: argparse.Namespace) -> int:
    """Serve a draft model until a signal comes."""
    speculative = speculative_from(args) or SpeculativeConfig()
    if args.model is not None:
        speculative = speculative.model_copy(update={"model": args.model})
    values = given_values(args, EngineConfig)
    engine = config_from_flags(args, EngineConfig, model=speculative.model or "")
    # A flag of this process's own wins over what the shared config says.
    derived = draft_engine(engine, speculative).model_copy(
        update={key: getattr(engine, key) for key in values if key != "model"}
    )
    server = config_from_flags(args, ServerConfig)
    config = DraftConfig(engine=derived, speculative=speculative, server=server)

    async def start() -> RunningService:
        from specserve.draft.server import start_draft

        return await start_draft(config)

    return run_service("draft", start, server.drain_deadline_s, args)


def add_orchestrator_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `specserve orchestrator`."""
    for pool in ("target", "draft"):
        parser.add_argument(
            f"--{pool}-address",
            metavar="HOST:PORT",
            action="append",
            default=[],
            help=f"a {pool} replica; give it once per replica",
        )
    parser.add_argument("--speculative-config", metavar="JSON", help=SPECULATIVE_HELP)
    add_model_flags(
        parser,
        OrchestratorConfig,
        "orchestrator",
        leave_out=("speculative", "target_addresses", "draft_addresses", "server"),
    )
    _add_process_flags(parser)


def run_orchestrator(args: argparse.Namespace) -> int:
    """Orchestrate the named replicas until a signal comes."""
    if not args.target_address:
        raise ConfigurationError("--target-address: missing; name at least one target replica")
    speculative = speculative_from(args)
    if speculative is None and args.draft_address:
        speculative = SpeculativeConfig()
    if args.draft_address and speculative is not None and not speculative.needs_draft_model:
        raise ConfigurationError(
            f"--draft-address: {speculative.method} asks no draft; leave the address out, or name "
            f"a method with a draft model ({' or '.join(DRAFT_MODEL_METHODS)})"
        )
    config = config_from_flags(
        args,
        OrchestratorConfig,
        speculative=speculative,
        target_addresses=tuple(args.target_address),
        draft_addresses=tuple(args.draft_address),
        server=config_from_flags(args, ServerConfig),
    )

    async def start() -> RunningService:
        from specserve.orchestrator.server import start_orchestrator

        return await start_orchestrator(config)

    return run_service("orchestrator", start, config.server.drain_deadline_s, args)


def speculative_from(args: argparse.Namespace) -> SpeculativeConfig | None:
    """Read `--speculative-config`; None when it was not given."""
    text: str | None = args.speculative_config
    return None if text is None else parse_speculative_config(text)


def _add_process_flags(parser: argparse.ArgumentParser) -> None:
    add_model_flags(parser, ServerConfig, "server")
    add_common_flags(parser)
