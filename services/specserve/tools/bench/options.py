"""What a run of the serving suites is asked to do; checked values, no flags and no services."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from specserve.config import EngineConfig, SpeculativeConfig
from specserve.errors import ConfigurationError
from specserve.rpc.tls import MutualTls
from specserve.tools.bench.clients import RequestSettings
from specserve.tools.bench.deployment import Deployment
from specserve.tools.bench.thresholds import Thresholds
from specserve.tools.load.arrivals import Pacing
from specserve.tools.models import ModelPair, require_fitting, resolve_pair

AUTO_CONFIG = '{"num_speculative_tokens_schedule": "auto"}'
"""Keys of the speculative configuration that make K dynamic, as JSON."""

STATIC_CONFIG = '{"num_speculative_tokens_schedule": "constant"}'
"""Keys of the speculative configuration that keep K fixed, as JSON."""


@dataclass(frozen=True, slots=True)
class PeerOptions:
    """Which other engines run beside ours."""

    names: tuple[str, ...] = ()
    vllm_python: str | None = None
    vllm_arguments: dict[str, object] | None = None


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What to measure, and how."""

    target: str | None
    """None is the embedded pair."""
    speculative: SpeculativeConfig | None
    """None is the default of the embedded pair, and target-only for a named target."""
    engine: EngineConfig
    """Of the target; its model is filled in when the pair is resolved."""
    engine_flags: tuple[str, ...]
    """The same, as flags for target and draft."""
    cache_dir: str | None
    settings: RequestSettings
    pacings: tuple[Pacing, ...]
    thresholds: Thresholds
    prompts: str | None = None
    num_prompts: int | None = None
    num_pairs: int | None = None
    """None: every prompt once."""
    requests_per_wave: int | None = None
    orchestrator_address: str | None = None
    """An orchestrator that runs already; None starts the services."""
    tls: MutualTls | None = None
    """How it is dialled; None speaks clear text."""
    url: str | None = None
    """A gateway that runs already."""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """What requests to it carry: its key."""
    padding: bool = True
    """Also time padded steps of the target alone."""
    peers: PeerOptions = PeerOptions()
    methods: tuple[str, ...] = ()
    """acceptance: methods, or JSON objects as for --speculative-config."""
    k_values: tuple[int, ...] = ()
    """sweep: fixed K to try."""
    auto_config: str = AUTO_CONFIG
    """JSON keys that make K dynamic, over the speculative configuration."""
    static_config: str = STATIC_CONFIG
    """JSON keys that keep K fixed, over the speculative configuration."""

    @property
    def starts_services(self) -> bool:
        """The system under measurement is ours to start and stop."""
        return self.url is None and self.orchestrator_address is None

    def pair(self, speculative: SpeculativeConfig | None = None) -> ModelPair:
        """Resolve the models, and refuse vocabularies that differ.

        Raises:
            ConfigurationError: a model is missing.
            VocabularyMismatch: naming the first token id that differs.
        """
        chosen = speculative if speculative is not None else self.speculative
        pair = resolve_pair(self.target, chosen, self.cache_dir)
        require_fitting(pair, self.engine.model_copy(update={"model": pair.target}))
        return pair

    def deployment(
        self,
        name: str,
        speculative: SpeculativeConfig | None = None,
        orchestrator_flags: tuple[str, ...] = (),
    ) -> Deployment:
        """Describe what to start.

        Raises:
            ConfigurationError: there is nothing to speculate with.
        """
        pair = self.pair(speculative)
        if pair.speculative is None or pair.speculative.num_speculative_tokens == 0:
            raise ConfigurationError(
                "--speculative-config: it leaves speculation off, and there is nothing to compare"
            )
        return Deployment(
            name, pair.target, pair.speculative, self.engine_flags, orchestrator_flags
        )
