"""What Ray Serve is told about the application: per deployment, and as a whole config file.

The application builder and the rendered file both take their options from here, so that the two
cannot differ. Knows Serve's words; imports no Ray.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specserve.autoscaling import LOAD_POLICY
from specserve.serve_args import AutoscalingOptions, Pool, ServeArgs

APP_NAME = "specserve"

BUILDER = "specserve.app:build_app"

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


def deployment_options(args: ServeArgs, role: Pool, env: Mapping[str, str]) -> dict[str, Any]:
    """Return one deployment's options, by the names that a Serve config file has for them.

    Args:
        env: variables that its replicas need and that their nodes do not have.
    """
    pool = args.pool(role)
    actor: dict[str, Any] = {"num_cpus": pool.num_cpus, "num_gpus": pool.num_gpus}
    if pool.node_group is not None:
        actor["label_selector"] = {NODE_GROUP_LABEL: pool.node_group}
    variables = dict(env)
    if pool.autoscaling is not None and role != "gateway":
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
    if pool.autoscaling is None:
        options["num_replicas"] = pool.num_replicas
    else:
        options["autoscaling_config"] = _autoscaling(pool.autoscaling, pool.num_replicas, role)
    if pool.max_replicas_per_node is not None:
        options["max_replicas_per_node"] = pool.max_replicas_per_node
    return options


def _autoscaling(scaling: AutoscalingOptions, initial: int, role: Pool) -> dict[str, Any]:
    config: dict[str, Any] = {
        "min_replicas": scaling.min_replicas,
        "initial_replicas": initial,
        "max_replicas": scaling.max_replicas,
        "target_ongoing_requests": scaling.target_load,
        "upscale_delay_s": scaling.upscale_delay_s,
        "downscale_delay_s": scaling.downscale_delay_s,
    }
    if role != "gateway":  # its HTTP requests do pass through Serve, whose own policy counts them
        config["policy"] = {"policy_function": LOAD_POLICY}
    return config


def serve_config(args: ServeArgs) -> dict[str, Any]:
    """Return the whole Serve config: what `serve deploy` and RayService's serveConfigV2 take.

    Raises:
        ConfigurationError: a method with a draft model, without a model.
    """
    deployments = [
        {
            "name": role,
            **deployment_options(
                args, role, {**REPLICA_ENV, "OTEL_SERVICE_NAME": service_name(role)}
            ),
        }
        for role in args.roles
    ]
    # Each number stands once: pools are in the deployments, and not in the builder's args again.
    values = args.model_dump(mode="json", exclude_unset=True)
    for role in ("gateway", "orchestrator", "target", "draft"):
        values.pop(f"{role}_pool", None)
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
                "deployments": deployments,
            }
        ],
    }


def service_name(role: Pool) -> str:
    """Return the name that a deployment's spans carry."""
    return f"{APP_NAME}-{role}"
