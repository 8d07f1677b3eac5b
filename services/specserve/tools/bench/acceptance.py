"""`specserve bench --suite acceptance`: mean acceptance length by category, for some methods.

It counts tokens and needs no quiet machine: each method is deployed in turn, all prompts run at
once as often as asked for, and no proposal is ever too late.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

from specserve.config import SpeculativeConfig
from specserve.config_parsing import parse_speculative_config
from specserve.errors import ConfigurationError
from specserve.tools.bench.auto import changed
from specserve.tools.bench.clients import RequestSettings, ServingClient
from specserve.tools.bench.conditions import DeploymentFacts
from specserve.tools.bench.deployment import SystemArm
from specserve.tools.bench.level import Notify
from specserve.tools.bench.options import BenchOptions
from specserve.tools.bench.record import MethodResult, Record
from specserve.tools.bench.sample import BenchPrompt, Reading, Sample
from specserve.tools.bench.stage import up
from specserve.tools.bench.summary import summarise

PATIENT = ("--draft-timeout-s=60",)
"""A draft that shares its processors with others must not lose proposals to the clock."""


async def run_acceptance(options: BenchOptions, record: Record, notify: Notify) -> None:
    """Decode every prompt with every method."""
    if not options.starts_services:
        raise ConfigurationError(
            "--suite acceptance: it starts services of its own; leave out --url"
        )
    methods = [read_method(text, options.speculative) for text in options.methods]
    deployments = [
        (name, options.deployment(name, changed(config, options.static_config), PATIENT))
        for name, config in methods
    ]
    section = record.section("acceptance")
    pacing = options.pacings[0]
    facts: list[DeploymentFacts] = []
    for name, deployment in deployments:
        async with up(options, [deployment], notify, warm=False) as stage:
            prompts = stage.workload.prompts
            system = stage.systems[0]
            client = _Counted(system.client, len(prompts), name, notify)
            arm = SystemArm(name, replace(system, client=client), options.settings, None)
            wave = await arm.run(prompts, pacing, "acceptance")
            facts += stage.conditions.deployments
            section.conditions = stage.conditions
        section.methods.append(MethodResult(name, deployment.speculative_json, summarise([wave])))
        record.save()
    if section.conditions is not None:
        section.conditions = section.conditions.with_deployments(facts)
    section.complete = True


@dataclass(slots=True)
class _Counted:
    """A client that tells how many of its requests are done."""

    client: ServingClient
    num_requests: int
    label: str
    notify: Notify
    num_done: int = 0

    async def decode(
        self,
        prompt: BenchPrompt,
        settings: RequestSettings,
        request_id: str,
        num_speculative_tokens: int | None,
    ) -> Sample:
        """Decode one prompt."""
        try:
            return await self.client.decode(prompt, settings, request_id, num_speculative_tokens)
        finally:
            self.num_done += 1
            self.notify(self.label, self.num_done / self.num_requests)

    async def read(self) -> Reading | None:
        """Look at the running system."""
        return await self.client.read()


def read_method(text: str, base: SpeculativeConfig | None) -> tuple[str, SpeculativeConfig]:
    """Read one `--methods` word: a method's name, or a JSON object as for --speculative-config.

    A name takes the other keys from `base`: its K, and its draft model where the method has one.

    Returns:
        What the report calls it, and its configuration.

    Raises:
        ConfigurationError: there is no such method or key.
    """
    if text.lstrip().startswith("{"):
        config = parse_speculative_config(text)
        values = config.model_dump(exclude_defaults=True)
        rest = {key: value for key, value in values.items() if key not in ("method", "model")}
        return f"{config.method} {json.dumps(rest)}" if rest else config.method, config
    shared = {} if base is None else base.model_dump(exclude_unset=True, exclude={"method"})
    config = parse_speculative_config(json.dumps({**shared, "method": text}))
    return text, config if config.needs_draft_model else config.model_copy(update={"model": None})
