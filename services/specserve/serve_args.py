"""Everything that one Serve application is made of, as one typed value.

Knows how the four services' settings follow from the user's few; imports no Ray and no torch, so
that a bad setting is refused in milliseconds.
"""

from pydantic import Field

from specserve.config import (
    Config,
    DraftConfig,
    EngineConfig,
    OrchestratorConfig,
    ServerConfig,
    SpeculativeConfig,
    TargetConfig,
)
from specserve.errors import ConfigurationError
from specserve.gateway.config import GatewayConfig

TARGET_SHARE = 0.75
"""Of the memory of a GPU that a target shares with a draft, what the target may use."""


class PoolOptions(Config):
    """How many replicas one deployment has, and what each of them holds."""

    num_replicas: int = Field(1, ge=1)
    """Replicas from the start; a Serve config may scale them afterwards."""
    num_cpus: float = Field(0.1, ge=0)
    """Processors that Ray reserves per replica; 1 or more also sets the engine's threads."""
    num_gpus: float = Field(0.0, ge=0)
    """GPUs per replica; a fraction shares one."""


class ServeArgs(Config):
    """The arguments of `specserve.app:build_app`."""

    target: EngineConfig
    """The target's engine."""
    draft: EngineConfig | None = None
    """The draft's engine; None derives it from the target's."""
    speculative: SpeculativeConfig | None = None
    """None serves the target alone."""
    server: ServerConfig = ServerConfig()
    """The gRPC servers of draft, target and orchestrator; `port` is set per pool below."""
    draft_port: int = Field(0, ge=0, le=65535)
    """First draft port of a node, counted up by local rank; 0 takes free ones."""
    target_port: int = Field(0, ge=0, le=65535)
    """First target port of a node, counted up by local rank; 0 takes free ones."""
    orchestrator_port: int = Field(0, ge=0, le=65535)
    """First orchestrator port of a node, counted up by local rank; 0 takes free ones."""
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

    def target_config(self) -> TargetConfig:
        """Return one target replica's configuration."""
        return TargetConfig(engine=self.target, server=self._server(self.target_port))

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
            server=self._server(self.draft_port),
        )

    def orchestrator_config(self) -> OrchestratorConfig:
        """Return one orchestrator replica's configuration."""
        server = self._server(self.orchestrator_port)
        return self.orchestrator.model_copy(
            update={"speculative": self.speculative, "server": server}
        )

    def _server(self, port: int) -> ServerConfig:
        return self.server.model_copy(update={"port": port})


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
