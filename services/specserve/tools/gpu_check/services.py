"""The services of a check: plain processes with dummy weights on one device.

Knows their flags, and what they log when CUDA graphs fail.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from specserve.model.cuda_graphs import EAGER_FROM_NOW_ON
from specserve.tools.gpu_check.stages import CheckFailed
from specserve.tools.local import LocalPair, PairSpec

OFFLINE = {"HF_HUB_OFFLINE": "1"}
"""Everything lies in folders; nothing may be looked for elsewhere."""

_CPU_FLAGS = ("--num-threads=1", "--device-mode=thread")
"""On a CPU only the check itself is tried: half the processes start in half the time."""


def pair_spec(
    models: Mapping[str, Path],
    speculative: Mapping[str, object],
    *,
    device: str,
    dtype: str,
    num_kv_blocks: int,
    enforce_eager: bool,
) -> PairSpec:
    """Return the processes of a pair: target, draft and orchestrator.

    Args:
        models: folders by role, target and draft.
    """
    draft = str(models["draft"])
    flags = (
        "--load-format=dummy",
        f"--device={device}",
        f"--dtype={dtype}",
        f"--num-kv-blocks={num_kv_blocks}",
        "--max-num-batched-tokens=1024",
        *(_CPU_FLAGS if device == "cpu" else ()),
        "--enforce-eager" if enforce_eager else "--no-enforce-eager",
    )
    return PairSpec(
        target=str(models["target"]),
        draft=draft,
        speculative_config=json.dumps({**speculative, "model": draft}),
        num_gateways=0,
        engine_flags=flags,
        # The first forwards on a GPU load kernels: late proposals would be counted as misses.
        orchestrator_flags=("--draft-timeout-s=20", "--device-hang-s=60"),
        env=OFFLINE,
    )


def require_graphs(pair: LocalPair) -> None:
    """Refuse figures of a pair that has given up its CUDA graphs: they would be eager ones.

    Raises:
        CheckFailed: a target or draft says so in its log.
    """
    for service in (*pair.targets, *pair.drafts):
        for line in service.log_tail().splitlines():
            if EAGER_FROM_NOW_ON in line:
                raise CheckFailed(f"{service.role}: {line}")
