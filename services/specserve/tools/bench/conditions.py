"""The conditions of a run: everything a second run must have alike for its figures to compare.

Values, and reading them off a running pair. Two runs compare when `fingerprint` is equal.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from specserve.rpc.v1 import common_pb2, generation_pb2
from specserve.tools.bench.clients import RequestSettings
from specserve.tools.bench.host import Hardware
from specserve.tools.bench.sample import BenchPrompt

SYNCHRONISATION = (
    "Every time is taken by the client when a block of tokens arrives, from when its request was "
    "due; a run ends with its last block, so that no work is left out of it. Sides of a pair take "
    "turns: while one is measured the others wait."
)


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """One served model."""

    role: str
    """target or draft."""
    model_id: str
    revision: str
    weights_fingerprint: str
    vocab_size: int
    dtype: str
    device: str
    max_model_len: int
    weights_bytes: int
    kv_cache_bytes: int
    num_kv_blocks: int
    block_size: int


@dataclass(frozen=True, slots=True)
class DeploymentFacts:
    """One running system, or a peer."""

    name: str
    address: str
    """Where it was reached when it was running before; empty when this run started it."""
    speculative_config: str
    """JSON; empty when the target is served alone or nobody says."""
    engine_flags: tuple[str, ...]
    models: tuple[ModelFacts, ...]
    versions: dict[str, str]
    """Of a peer's own environment; empty for ours, which the run as a whole has."""
    resident_bytes: int | None = None
    """Memory of its processes once warm; None when they are not ours to see."""


@dataclass(frozen=True, slots=True)
class PromptFacts:
    """The prompts."""

    source: str
    """File name, or `shipped`."""
    sha256: str
    """Of all prompts' token ids, or of their texts, in order."""
    count: int
    categories: dict[str, int]
    num_tokens: int
    """Of all prompts; 0 when only the server has the tokenizer."""


@dataclass(frozen=True, slots=True)
class Conditions:
    """What was fixed for the whole run."""

    hardware: Hardware
    versions: dict[str, str]
    deployments: tuple[DeploymentFacts, ...]
    prompts: PromptFacts
    sampling: RequestSettings
    warm_up: str
    synchronisation: str = SYNCHRONISATION

    @property
    def fingerprint(self) -> str:
        """Hex SHA-256 over all that must be alike; memory in use and addresses are not part."""
        values = dataclasses.asdict(self)
        for deployment in values["deployments"]:
            del deployment["resident_bytes"], deployment["address"]
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()

    def with_deployments(self, deployments: Sequence[DeploymentFacts]) -> Conditions:
        """Return the same with other deployments: those that came one after the other."""
        return dataclasses.replace(self, deployments=tuple(deployments))


def model_facts(pair: generation_pb2.GetPairResponse) -> tuple[ModelFacts, ...]:
    """Read what a pair serves; without a draft model there is one entry."""
    models = [("target", pair.target)]
    if pair.HasField("draft") and pair.draft.model_id:
        models.append(("draft", pair.draft))
    return tuple(_facts(role, model) for role, model in models)


def _facts(role: str, model: common_pb2.GetModelResponse) -> ModelFacts:
    return ModelFacts(
        role=role,
        model_id=model.model_id,
        revision=model.revision,
        weights_fingerprint=model.weights_fingerprint,
        vocab_size=model.vocab_size,
        dtype=model.dtype,
        device=model.device,
        max_model_len=model.max_model_len,
        weights_bytes=model.weights_bytes,
        kv_cache_bytes=model.kv_cache_bytes,
        num_kv_blocks=model.num_blocks,
        block_size=model.block_size,
    )


def prompt_facts(source: str, prompts: Sequence[BenchPrompt]) -> PromptFacts:
    """Describe prompts."""
    digest = hashlib.sha256()
    for prompt in prompts:
        ids = prompt.token_ids
        digest.update(struct.pack(f"<{len(ids) + 1}i", len(ids), *ids))
        if not ids:
            digest.update(prompt.text.encode())
    return PromptFacts(
        source=source,
        sha256=digest.hexdigest(),
        count=len(prompts),
        categories=dict(Counter(prompt.category for prompt in prompts)),
        num_tokens=sum(len(prompt.token_ids) for prompt in prompts),
    )
