"""What Ray Serve is told about the application: per deployment, and as a whole config file.

The application builder and the rendered file both take their options from here, so that the two
cannot differ. Knows Serve's words; imports no Ray.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specserve.autoscaling.serve_policy import LOAD_POLICY, POOLS_POLICY
from specserve.serve_args import AutoscalingOptions, Pool, ServeArgs

APP_NAME = "specserve"

BUILDER = "specserve.app:build_app"

LOOK_BACK_S = 20.0
"""Time that reports are averaged over; replicas push them every 10 s."""

SHUTDOWN_MARGIN_S = 3.0
"""Serve kills a replica this long after its drain deadline."""

NODE_GROUP_LABEL = "ray.io/node-group"
"""Ray's label for the worker group of a node; KubeRay sets it to the group's name."""

REPLICA_ENV = {
    # One event loop per replica. By default Serve runs user code on a loop beside the one that
    # its own gRPC server lives on, and grpc.aio in two loops of one process is known for
    # BlockingIOError noise. One loop was also faster: 0.48 against 0.56 ms per call of ours.
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
}

LOGGING = {"log_level": "WARNING", "enable_access_log": False}


def deployment_options(
    args: ServeArgs, role: Pool, env: Mapping[str, str], *, has_policy: bool = False
) -> dict[str, Any]:
    """Return one deployment's options, by the names that a Serve config file has for them.

    Args:
        env: variables that its replicas need and that their nodes do not have.
        has_policy: the application has a policy for all pools, and deployments need none.
    """
    pool = args.pool(role)
    scaling = scaling_of(args, role)
    actor: dict[str, Any] = {"num_cpus": pool.num_cpus, "num_gpus": pool.num_gpus}
    if pool.node_group is not None:
        actor["label_selector"] = {NODE_GROUP_LABEL: pool.node_group}
    variables = dict(env)
    if scaling is not None and role != "gateway":
        # Read by nobody: it differs where scaling is switched on, so that Serve replaces replicas
        # that run. Those would go on reporting no load, for Serve asks it only of replicas that
        # were scaled when they started.
        variables["SPECSERVE_AUTOSCALED"] = "1"
    if variables:
        # Left out where every process has it already: a replica with an environment of its own
        # cannot use one of the workers that Ray has started ahead.
        actor["runtime_env"] = {"env_vars": variables}
    live_s = args.server.drain_deadline_s
    if role == "gateway":
        # Before a gateway replica ends, Serve waits for its HTTP requests this long.
        live_s = max(live_s, args.gateway.shutdown_grace_s)
    options: dict[str, Any] = {
        # Serve's default of 5 would make a sixth stream wait. Our own limits lie behind.
        "max_ongoing_requests": 4096,
        "health_check_period_s": 2.0,
        "graceful_shutdown_wait_loop_s": 0.25,
        "graceful_shutdown_timeout_s": live_s + SHUTDOWN_MARGIN_S,
        "logging_config": LOGGING,
        "ray_actor_options": actor,
    }
    if scaling is None:
        options["num_replicas"] = pool.num_replicas
    else:
        options["autoscaling_config"] = _autoscaling(
            scaling, pool.num_replicas, role, has_policy=has_policy
        )
    if pool.max_replicas_per_node is not None:
        options["max_replicas_per_node"] = pool.max_replicas_per_node
    return options


def scaling_of(args: ServeArgs, role: Pool) -> AutoscalingOptions | None:
    """Return how a pool is scaled.

    Orchestrators know what drafts are wanted for, and Serve asks only scaled deployments for their
    statistics: where drafts are scaled, orchestrators are too, if need be to the number they have.
    """
    pool = args.pool(role)
    if pool.autoscaling is None and role == "orchestrator" and args.draft_pool.autoscaling:
        number = pool.num_replicas
        return AutoscalingOptions(
            min_replicas=number,
            max_replicas=number,
            target_load=float(args.orchestrator.max_num_requests),
        )
    return pool.autoscaling


def _autoscaling(
    scaling: AutoscalingOptions, initial: int, role: Pool, *, has_policy: bool
) -> dict[str, Any]:
    config: dict[str, Any] = {
        "min_replicas": scaling.min_replicas,
        "initial_replicas": initial,
        "max_replicas": scaling.max_replicas,
        "target_ongoing_requests": scaling.target_load,
        # The application's policy has delays of its own, which know what was wanted meanwhile.
        "upscale_delay_s": 0.0 if has_policy else scaling.upscale_delay_s,
        "downscale_delay_s": 0.0 if has_policy else scaling.downscale_delay_s,
        "look_back_period_s": LOOK_BACK_S,
    }
    # A gateway's HTTP requests do pass through Serve, whose own policy counts them.
    if role != "gateway" and not has_policy:
        config["policy"] = {"policy_function": LOAD_POLICY}
    return config


def pools_policy(args: ServeArgs) -> dict[str, Any] | None:
    """Return the application's policy for all of its scaled pools; None where none is."""
    pools: dict[str, dict[str, float]] = {}
    for role in args.roles:
        scaling = scaling_of(args, role)
        if scaling is not None:
            pools[role] = scaling.model_dump(mode="json")
    if not pools:
        return None
    return {"policy_function": POOLS_POLICY, "policy_kwargs": pools}


def serve_config(args: ServeArgs) -> dict[str, Any]:
    """Return the whole Serve config: what `serve deploy` and RayService's serveConfigV2 take.

    Raises:
        ConfigurationError: a method with a draft model, without a model.
    """
    policy = pools_policy(args)
    deployments = [
        {
            "name": role,
            **deployment_options(
                args,
                role,
                {**REPLICA_ENV, "OTEL_SERVICE_NAME": service_name(role)},
                has_policy=policy is not None,
            ),
        }
        for role in args.roles
    ]
    # Each number stands once: pools are in the deployments, and not in the builder's args again.
    values = args.model_dump(mode="json", exclude_unset=True)
    for role in ("gateway", "orchestrator", "target", "draft"):
        values.pop(f"{role}_pool", None)
    if args.draft_config() is not None and args.drafts_optional:
        # The builder does not see the pools that this follows from.
        values["orchestrator"] = {**values.get("orchestrator", {}), "drafts_optional": True}
    return {
        # A proxy on every node with a replica: no request hangs on the head node.
        "proxy_location": "EveryNode",
        "http_options": {"host": args.gateway.host, "port": args.gateway.port},
        "logging_config": LOGGING,
        "applications": [
            {
                "name": APP_NAME,
                "route_prefix": "/",
                "import_path": BUILDER,
                "args": values,
                **({"autoscaling_policy": policy} if policy is not None else {}),
                "deployments": deployments,
            }
        ],
    }


def service_name(role: Pool) -> str:
    """Return the name that a deployment's spans carry."""
    return f"{APP_NAME}-{role}"
