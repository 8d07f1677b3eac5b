"""The Ray Serve application, and a Ray of one's own to run it on one machine.

`build_app` is a typed application builder: a Serve config file names it by
`import_path: specserve.app:build_app` and gives the fields of `ServeArgs` as `args`. Knows no
token and no HTTP. No postponed annotations here: Serve reads `build_app`'s to validate `args`.
"""

import contextlib
import io
import logging
import os
import re
import shutil
import tempfile
import threading
from typing import Any, Self, cast

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve import Application, Deployment
from ray.serve.exceptions import RayServeException

from specserve.draft.deployment import DraftDeployment
from specserve.errors import ConfigurationError
from specserve.gateway.deployment import GatewayDeployment
from specserve.one_machine import place_on_gpus, place_on_one_machine
from specserve.orchestrator.deployment import OrchestratorDeployment
from specserve.rpc.serve_hooks import ReplicaDescription
from specserve.serve_args import Pool, ServeArgs, check_serve_args
from specserve.serve_config import (
    APP_NAME,
    LOGGING,
    REPLICA_ENV,
    SHUTDOWN_MARGIN_S,
    deployment_options,
    service_name,
)
from specserve.target.deployment import TargetDeployment
from specserve.telemetry.serve_export import EXPORTER, serve_environment

logger = logging.getLogger(__name__)

DESCRIBE_TIMEOUT_S = 10.0

DRAIN_MARGIN_S = 2.0
"""How much longer than their grace gateways may take to say that they have drained."""


def build_app(args: ServeArgs) -> Application:
    """Bind the four deployments: gateway → orchestrator → draft and target.

    Raises:
        ConfigurationError: draft_model without a model, or settings that contradict one another.
    """
    check_serve_args(args)
    target = _bind(TargetDeployment, _options(args, "target"), args.target_config())
    draft_config = args.draft_config()
    draft = None
    if draft_config is not None:
        draft = _bind(DraftDeployment, _options(args, "draft"), draft_config)
    orchestrator = _bind(
        OrchestratorDeployment,
        _options(args, "orchestrator"),
        args.orchestrator_config(),
        target,
        draft,
    )
    return _bind(
        GatewayDeployment,
        _options(args, "gateway"),
        args.gateway_config(),
        args.target,
        orchestrator,
    )


def _bind(deployment: object, options: dict[str, Any], *args: object) -> Application:
    # To the type checker Serve's decorator returns the class that it was given.
    return cast("Deployment", deployment).options(**options).bind(*args)


def _options(args: ServeArgs, role: Pool) -> dict[str, Any]:
    env = {name: value for name, value in REPLICA_ENV.items() if os.environ.get(name) != value}
    if os.environ.get(EXPORTER):
        # Serve traces too: its spans know no other name of the deployment.
        env["OTEL_SERVICE_NAME"] = service_name(role)
    return {
        **deployment_options(args, role, env),
        "max_constructor_retry_count": args.max_start_attempts,
    }


class LocalRay:
    """A Ray cluster of one node that belongs to this process, with the application on it.

    Use as a context manager: leaving it stops everything that was started, whatever happened.
    """

    def __init__(self, args: ServeArgs) -> None:
        self._args = args
        self._directory = ""

    def __enter__(self) -> Self:
        # Ray's processes inherit these. Nobody is told about this user's cluster.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.update(REPLICA_ENV | serve_environment())
        for name in ("ray", "ray.serve"):
            logging.getLogger(name).setLevel(logging.ERROR)
        # Unix socket paths end at 107 bytes, and Ray's are long: a short directory of our own.
        self._directory = tempfile.mkdtemp(prefix="specserve-", dir="/tmp")
        try:
            ray.init(
                address="local",
                include_dashboard=False,
                num_cpus=max(2, os.cpu_count() or 2),
                object_store_memory=100 << 20,
                log_to_driver=False,
                logging_level=logging.ERROR,
                _temp_dir=self._directory,
            )
            resources = ray.cluster_resources()
            args = place_on_gpus(self._args, int(resources.get("GPU", 0)))
            self._args = place_on_one_machine(
                args, resources.get("CPU", 0.0), resources.get("GPU", 0.0)
            )
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    @property
    def logs(self) -> str:
        """Directory of the replicas' logs, gone after a clean stop."""
        return f"{self._directory}/session_latest/logs/serve"

    def deploy(self) -> None:
        """Start Serve and the application; return when every replica has started.

        Raises:
            ConfigurationError: a replica does not start; the message carries its error.
        """
        gateway = self._args.gateway
        # What is no HTTP at all Serve's proxy refuses in plain text; its parser takes none of ours.
        serve.start(
            http_options=serve.HTTPOptions(host=gateway.host, port=gateway.port),
            logging_config=LOGGING,
        )
        try:
            serve.run(build_app(self._args), name=APP_NAME, route_prefix="/")
        except RuntimeError as error:
            raise ConfigurationError(f"the application does not start: {_reason(error)}") from error

    def describe(self) -> list[ReplicaDescription]:
        """Ask every draft, target and orchestrator replica who and where it is."""
        found: list[ReplicaDescription] = []
        for role in ("orchestrator", "draft", "target"):
            if role == "draft" and self._args.draft_config() is None:
                continue
            handle = serve.get_deployment_handle(role, APP_NAME)
            found += handle.broadcast("describe").results(timeout_s=DESCRIBE_TIMEOUT_S)
        return found

    def drain(self, grace_s: float) -> None:
        """Have every gateway refuse new requests; return when no request is left.

        Serve itself would not wait: its shutdown ends the proxies first, and with them every open
        stream. After `grace_s` seconds the gateways give up what still runs, and say so to the
        clients. Gateways that do not answer are past waiting for.
        """
        try:
            handle = serve.get_deployment_handle("gateway", APP_NAME)
            draining = handle.broadcast("drain", grace_s)
            draining.results(timeout_s=grace_s + DRAIN_MARGIN_S, return_exceptions=True)
        except (RayServeException, RayError, TimeoutError) as error:
            logger.warning("gateways did not drain: %s", error)

    def stop(self) -> None:
        """Stop the application, Serve and Ray. Idempotent."""
        if ray.is_initialized():
            # Ray tells stdout, in colour, that the controller it was asked to end has ended.
            with contextlib.redirect_stdout(io.StringIO()):
                stopping = threading.Thread(target=serve.shutdown, daemon=True)
                stopping.start()
                # Serve itself waits longer than anybody at a terminal should have to.
                stopping.join(self._args.server.drain_deadline_s + SHUTDOWN_MARGIN_S + 1.0)
                ray.shutdown()
        shutil.rmtree(self._directory, ignore_errors=True)


def _reason(error: RuntimeError) -> str:
    """Find what a replica said when it did not start: one of our errors, else the last line."""
    application = serve.status().applications.get(APP_NAME)
    deployments = application.deployments.values() if application is not None else ()
    messages = [deployment.message for deployment in deployments] + [str(error)]
    for message in messages:
        if ours := re.findall(r"specserve\.errors\.\w+: (.+)", message):
            return str(ours[-1])
    lines = [line.strip() for line in "\n".join(messages).splitlines() if line.strip()]
    return lines[-1] if lines else repr(error)
