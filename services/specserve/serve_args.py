"""Everything that one Serve application is made of, as one typed value.

Knows how the four services' settings follow from the user's few; imports no Ray and no torch, so
that a bad setting is refused in milliseconds.
"""

from typing import Literal

from pydantic import Field

from specserve.config import (
    Config,
    DraftConfig,
    EngineConfig,
    OrchestratorConfig,
    ServerConfig,
    SpeculativeConfig,
    TargetConfig,
    TlsSettings,
)
from specserve.config_parsing import check_speculative
from specserve.errors import ConfigurationError
from specserve.gateway.config import GatewayConfig

Pool = Literal["draft", "target", "orchestrator", "gateway"]
"""The four deployments."""


class AutoscalingOptions(Config):
    """How one pool follows its load."""

    min_replicas: int = Field(1, ge=0)
    """Fewest replicas; 0 for drafts only: targets go on alone while none is worth its place."""
    max_replicas: int = Field(ge=1)
    """Most replicas."""
    target_load: float = Field(gt=0)
    """Sessions (draft, target) or requests (orchestrator, gateway) per replica to aim at. Fewer
    where calls were seen to queue at so many. For drafts: sessions that could use one."""
    target_kv_usage: float = Field(0.7, gt=0, le=1)
    """Share of KV blocks in use to aim at (draft, target)."""
    target_queue_s: float = Field(0.5, gt=0)
    """Longest mean wait of calls for their first forward to put up with (draft, target)."""
    upscale_delay_s: float = Field(10.0, ge=0)
    """How long more must be wanted before there are more."""
    downscale_delay_s: float = Field(300.0, ge=0)
    """How long fewer must be wanted before there are fewer."""


class PoolOptions(Config):
    """How many replicas one deployment has, and what each of them holds."""

    num_replicas: int = Field(1, ge=0)
    """Replicas from the start; a Serve config may scale them afterwards. 0 for drafts only, and
    where they are scaled, for Serve keeps no deployment at 0."""
    autoscaling: AutoscalingOptions | None = None
    """How the number follows the load; None keeps it."""
    num_cpus: float = Field(0.1, ge=0)
    """Processors that Ray reserves per replica; 1 or more also sets the engine's threads."""
    num_gpus: float = Field(0.0, ge=0)
    """GPUs per replica; a fraction shares one."""
    node_group: str | None = Field(None, min_length=1)
    """Replicas go only to nodes of this group: under KubeRay, the worker group of this name."""
    max_replicas_per_node: int | None = Field(None, ge=1, le=100)
    """Most replicas on one node; None sets no limit."""

    @property
    def min_replicas(self) -> int:
        """Fewest replicas that there may ever be."""
        return self.num_replicas if self.autoscaling is None else self.autoscaling.min_replicas

    @property
    def max_replicas(self) -> int:
        """Most replicas that there may ever be."""
        return self.num_replicas if self.autoscaling is None else self.autoscaling.max_replicas


class ServeArgs(Config):
    """The arguments of `specserve.app:build_app`."""

    target: EngineConfig
    """The target's engine."""
    draft: EngineConfig | None = None
    """The draft's engine; None derives it from the target's."""
    speculative: SpeculativeConfig | None = None
    """None serves the target alone."""
    server: ServerConfig = ServerConfig()
    """The gRPC servers of draft, target and orchestrator; their ports are set per pool below. Its
    `tls_*` hold for every gRPC link, the gateway's too."""
    draft_port: int = Field(0, ge=0, le=65535)
    """First draft port of a node, counted up by local rank; 0 takes free ones."""
    target_port: int = Field(0, ge=0, le=65535)
    """First target port of a node, counted up by local rank; 0 takes free ones."""
    orchestrator_port: int = Field(0, ge=0, le=65535)
    """First orchestrator port of a node, counted up by local rank; 0 takes free ones."""
    draft_metrics_port: int | None = Field(None, ge=0, le=65535)
    """First /metrics port of drafts on a node, counted up by local rank; None serves none."""
    target_metrics_port: int | None = Field(None, ge=0, le=65535)
    """First /metrics port of targets on a node, counted up by local rank; None serves none."""
    orchestrator_metrics_port: int | None = Field(None, ge=0, le=65535)
    """First /metrics port of orchestrators on a node, counted up by local rank; None: none."""
    orchestrator: OrchestratorConfig = OrchestratorConfig()
    """Timeouts and limits; its `speculative` and `server` are filled in from here."""
    gateway: GatewayConfig = GatewayConfig()
    """Limits of the HTTP API; under Serve, host and port are those of its proxy."""
    max_start_attempts: int = Field(3, ge=1)
    """Failed starts of a replica after which the application is given up."""
    draft_pool: PoolOptions = PoolOptions()
    target_pool: PoolOptions = PoolOptions()
    orchestrator_pool: PoolOptions = PoolOptions()
    gateway_pool: PoolOptions = PoolOptions()

    def pool(self, role: Pool) -> PoolOptions:
        """Return one deployment's pool."""
        pools: dict[Pool, PoolOptions] = {
            "draft": self.draft_pool,
            "target": self.target_pool,
            "orchestrator": self.orchestrator_pool,
            "gateway": self.gateway_pool,
        }
        return pools[role]

    @property
    def roles(self) -> tuple[Pool, ...]:
        """The deployments that there are: no draft where none is asked.

        Raises:
            ConfigurationError: a method with a draft model, without a model.
        """
        roles: tuple[Pool, ...] = ("gateway", "orchestrator", "target")
        return roles if self.draft_config() is None else (*roles, "draft")

    def target_config(self) -> TargetConfig:
        """Return one target replica's configuration."""
        return TargetConfig(
            engine=self.target, server=self._server(self.target_port, self.target_metrics_port)
        )

    def draft_config(self) -> DraftConfig | None:
        """Return one draft replica's configuration; None when no draft service is needed.

        Raises:
            ConfigurationError: a method with a draft model, without a model.
        """
        if self.speculative is None or not self.speculative.needs_draft_model:
            return None
        return DraftConfig(
            engine=self.draft or draft_engine(self.target, self.speculative),
            speculative=self.speculative,
            server=self._server(self.draft_port, self.draft_metrics_port),
        )

    def orchestrator_config(self) -> OrchestratorConfig:
        """Return one orchestrator replica's configuration."""
        server = self._server(self.orchestrator_port, self.orchestrator_metrics_port)
        return self.orchestrator.model_copy(
            update={
                "speculative": self.speculative,
                "server": server,
                "drafts_optional": self.drafts_optional,
            }
        )

    def gateway_config(self) -> GatewayConfig:
        """Return one gateway replica's configuration."""
        tls = {name: getattr(self.server, name) for name in TlsSettings.model_fields}
        return self.gateway.model_copy(update=tls)

    @property
    def drafts_optional(self) -> bool:
        """Whether the application serves without a draft, by its settings or its pool's bounds."""
        return self.orchestrator.drafts_optional or self.draft_pool.min_replicas == 0

    def _server(self, port: int, metrics_port: int | None) -> ServerConfig:
        return self.server.model_copy(update={"port": port, "metrics_port": metrics_port})


def draft_engine(target: EngineConfig, speculative: SpeculativeConfig) -> EngineConfig:
    """Make the draft's engine: the target's settings with another model.

    The draft gets as many KV blocks as the target, so that both can hold the same sessions.

    Raises:
        ConfigurationError: there is no model, or the method has none.
    """
    if not speculative.needs_draft_model:
        raise ConfigurationError(
            f"--speculative-config: {speculative.method} runs in the orchestrator, without a draft"
        )
    if speculative.model is None:
        raise ConfigurationError(
            f"--speculative-config: {speculative.method} needs the key 'model'"
        )
    return target.model_copy(
        update={
            "model": speculative.model,
            "revision": speculative.revision,
            "max_model_len": speculative.max_model_len,
            "draft_vocab_size": speculative.draft_vocab_size,
            "quantization": speculative.quantization,
        }
    )


def check_serve_args(args: ServeArgs, what: str = "ServeArgs") -> None:
    """Check what only fits together, so that no setting is ignored in silence.

    Args:
        what: where the arguments came from, put before the complaint.

    Raises:
        ConfigurationError: settings contradict one another; each is named.
    """
    if args.speculative is not None:
        check_speculative(args.speculative, f"{what}: speculative")
        if args.speculative.needs_draft_model and args.speculative.model is None:
            raise ConfigurationError(
                f"{what}: speculative: {args.speculative.method} needs the key 'model'"
            )
    for name in ("port", "metrics_port"):
        if name in args.server.model_fields_set:
            raise ConfigurationError(
                f"{what}: server.{name} would be one for all; set draft_{name}, target_{name} and "
                f"orchestrator_{name}"
            )
    for name in TlsSettings.model_fields:
        if name in args.gateway.model_fields_set:
            raise ConfigurationError(
                f"{what}: gateway.{name} is filled in from `server`; set server.{name} alone"
            )
    for name in ("speculative", "server"):
        if name in args.orchestrator.model_fields_set:
            raise ConfigurationError(
                f"{what}: orchestrator.{name} is filled in from `{name}`; set that alone"
            )
    has_draft = args.draft_config() is not None
    for name in ("draft", "draft_pool", "draft_port", "draft_metrics_port"):
        if name in args.model_fields_set and not has_draft and getattr(args, name) is not None:
            raise ConfigurationError(
                f"{what}: {name} is set, and nothing asks a draft; name a method with a draft "
                "model in `speculative`"
            )
    for role in args.roles:
        pool = args.pool(role)
        if role != "draft" and min(pool.num_replicas, pool.min_replicas) == 0:
            raise ConfigurationError(
                f"{what}: {role}_pool has 0 replicas; only drafts can be done without"
            )
        scaling = pool.autoscaling
        if pool.num_replicas == 0 and scaling is None:
            raise ConfigurationError(
                f"{what}: {role}_pool.num_replicas is 0 without autoscaling, so that it could only "
                "stay 0; name a method without a draft model instead"
            )
        if scaling and not scaling.min_replicas <= pool.num_replicas <= scaling.max_replicas:
            raise ConfigurationError(
                f"{what}: {role}_pool.num_replicas {pool.num_replicas} is outside autoscaling's "
                f"{scaling.min_replicas} to {scaling.max_replicas}"
            )
