"""An application fitted to one machine: its GPUs shared out, and room for everything.

Knows what is reserved and what there is; imports no Ray.
"""

from __future__ import annotations

from collections.abc import Mapping

from specserve.errors import ConfigurationError
from specserve.serve_args import Pool, PoolOptions, ServeArgs

TARGET_SHARE = 0.75
"""Of the memory of a GPU that a target shares with a draft, what the target may use."""


def place_on_gpus(args: ServeArgs, num_gpus: int) -> ServeArgs:
    """Spread target and draft replicas over the GPUs of one machine.

    Each replica has a GPU of its own while they last; when there are fewer GPUs than replicas,
    the GPUs are shared evenly and the memory is divided, the target getting the larger part.
    Settings that name a device or a GPU count are left as they are.
    """
    draft = args.draft_config()
    engines = [args.target] + ([draft.engine] if draft is not None else [])
    pools = [args.target_pool, args.draft_pool][: len(engines)]
    on_cpu = any(engine.device == "cpu" or engine.model.startswith("toy:") for engine in engines)
    if num_gpus == 0 or on_cpu or any(pool.num_gpus for pool in pools):
        return args
    num_replicas = sum(pool.num_replicas for pool in pools)
    share = min(1.0, num_gpus / num_replicas)
    if 0.5 < share < 1.0:
        share = 0.5  # Ray packs fractions: two of 0.67 do not fit on one GPU.
    share = int(share * 100) / 100
    update: dict[str, object] = {
        "target_pool": args.target_pool.model_copy(update={"num_gpus": share})
    }
    if len(engines) == 2:
        update["draft_pool"] = args.draft_pool.model_copy(update={"num_gpus": share})
        if share < 1.0:
            target, drafting = engines
            use = target.gpu_memory_utilization * share * 2
            update["target"] = target.model_copy(
                update={"gpu_memory_utilization": use * TARGET_SHARE}
            )
            update["draft"] = drafting.model_copy(
                update={"gpu_memory_utilization": use * (1 - TARGET_SHARE)}
            )
    return args.model_copy(update=update)


def place_on_one_machine(args: ServeArgs, num_cpus: float, num_gpus: float) -> ServeArgs:
    """Fit an application to one machine: there are no node groups, and everything must have room.

    Args:
        num_cpus: processors that Ray may give out.
        num_gpus: GPUs that Ray may give out.

    Raises:
        ConfigurationError: more is reserved than there is, so that replicas would wait for ever;
            or two of them would take the same port.
    """
    pools = {role: args.pool(role) for role in args.roles}
    for what, reserved, there in (
        ("num_cpus", sum(p.num_cpus * p.num_replicas for p in pools.values()), num_cpus),
        ("num_gpus", sum(p.num_gpus * p.num_replicas for p in pools.values()), num_gpus),
    ):
        if reserved > there + 1e-6:
            raise ConfigurationError(
                f"the pools reserve {reserved:g} {what} and this machine has {there:g}; lower "
                f"{what} or num_replicas of {', '.join(f'{role}_pool' for role in pools)}"
            )
    _check_ports(args, pools)
    alone: dict[str, object] = {
        f"{role}_pool": pool.model_copy(update={"node_group": None, "max_replicas_per_node": None})
        for role, pool in pools.items()
    }
    return args.model_copy(update=alone)


def _check_ports(args: ServeArgs, pools: Mapping[Pool, PoolOptions]) -> None:
    taken = {args.gateway.port: "gateway.port"}
    for role, pool in pools.items():
        for name in (f"{role}_port", f"{role}_metrics_port"):
            first = getattr(args, name, None)
            for port in range(first, first + pool.num_replicas) if first else ():
                if port in taken:
                    raise ConfigurationError(
                        f"{name} {first}: port {port} is also taken by {taken[port]}; on one "
                        "machine each pool needs ports of its own"
                    )
                taken[port] = name
