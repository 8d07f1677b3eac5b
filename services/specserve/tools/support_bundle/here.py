"""What a bundle takes from this machine: versions, hardware, environment, settings, doctor.

Reads a file of settings strictly, and of keys and certificates only whether they are right.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from specserve.config import EngineConfig, SpeculativeConfig
from specserve.errors import ConfigurationError, SpecServeError
from specserve.gateway.config import GatewayConfig
from specserve.serve_args import ServeArgs
from specserve.tools.support_bundle.redaction import ENVIRONMENT


def versions() -> dict[str, Any]:
    """Describe software and hardware."""
    from specserve.rpc.codec import PROTOCOL_VERSION
    from specserve.tools.bench.host import describe_hardware, describe_versions

    return {
        "protocol": PROTOCOL_VERSION,
        "versions": describe_versions(),
        "hardware": asdict(describe_hardware()),
        "packages": sorted(f"{one.name}=={one.version}" for one in metadata.distributions()),
    }


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the list that are set."""
    return {name: environ[name] for name in ENVIRONMENT if name in environ}


def settings(path: str) -> ServeArgs:
    """Read a file of settings.

    Raises:
        ConfigurationError: it is wrong. What the complaint would repeat of it stays here.
    """
    from specserve.tools.config_file import load_serve_args

    try:
        return load_serve_args(path)
    except ConfigurationError as error:
        if not os.access(path, os.R_OK):
            raise
        raise ConfigurationError(
            f"{path} is wrong: `specserve config check --config {path}` says how"
        ) from error


def shown(args: ServeArgs) -> dict[str, Any]:
    """Return the settings as they are told."""
    return args.model_dump(mode="json")


def secret_files(args: ServeArgs) -> dict[str, str]:
    """Say whether keys and certificates are right, and nothing of what they hold."""
    found: dict[str, str] = {}
    if args.gateway.api_key_file is not None:
        found[args.gateway.api_key_file] = _judge(_keys, args.gateway.api_key_file)
    if args.server.tls_dir is not None:
        found[args.server.tls_dir] = _judge(_certificates, args.server.tls_dir)
    return found


def _judge(look: Callable[[str], str], path: str) -> str:
    try:
        return look(path)
    except SpecServeError as error:
        return str(error)


def _keys(path: str) -> str:
    from specserve.gateway.api_keys import load_keys

    keys = load_keys(path).keys
    return f"{len(keys)} keys of {len({key.tenant for key in keys})} tenants"


def _certificates(path: str) -> str:
    from specserve.rpc.tls import load_certificates

    load_certificates(Path(path))
    return "certificate, key and authority are there, and key and certificate fit"


def doctor(args: ServeArgs | None) -> list[dict[str, str]]:
    """Examine the pair of the settings, or the embedded one."""
    from specserve.tools.doctor.checks import examine

    if args is None:
        checks = examine(EngineConfig(model=""), None, GatewayConfig(), None)
    else:
        speculative: SpeculativeConfig | None = args.speculative
        checks = examine(args.target, speculative, args.gateway, None)
    return [check.as_json() for check in checks]
