"""What an engine's replica makes of its place: a port of its own, as many threads as it was given.

Draft and target share it. Knows configurations; who says where the replica is, is not its business.
"""

from __future__ import annotations

import os
from typing import TypeVar

from specserve.config import DraftConfig, ServerConfig, TargetConfig

ConfigT = TypeVar("ConfigT", DraftConfig, TargetConfig)


def threads_per_engine() -> int:
    """Return how many threads an engine gets where a draft and a target share a machine.

    Half of the processors each: threads that wait for one another at every matrix product must
    not also wait for the other engine's to be done.
    """
    return max(1, len(os.sched_getaffinity(0)) // 2)


def placed_server(server: ServerConfig, local_rank: int) -> ServerConfig:
    """Give replicas that share a node neighbouring ports, which network policies can name.

    Ports that the system chooses, and those not asked for, stay so.
    """
    ports = {"port": server.port, "metrics_port": server.metrics_port}
    return server.model_copy(
        update={name: port + local_rank if port else port for name, port in ports.items()}
    )


def placed(config: ConfigT, local_rank: int, num_cpus: float) -> ConfigT:
    """Fit a configuration that every replica was given to one of them.

    Args:
        config: as configured; what it says itself about threads stays.
        local_rank: number of this replica among those of its pool on the node, from 0.
        num_cpus: processors that were set aside for it; a fraction stands for a share of them all.
    """
    server, engine = placed_server(config.server, local_rank), config.engine
    if engine.num_threads is None:
        # OMP_NUM_THREADS is set from num_cpus, too, and for a fraction to 1: say it ourselves.
        threads = int(num_cpus) if num_cpus >= 1 else threads_per_engine()
        engine = engine.model_copy(update={"num_threads": threads})
    return config.model_copy(update={"server": server, "engine": engine})
