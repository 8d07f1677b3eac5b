"""`specserve doctor --running URL`: why a pair that runs is slow or wrong.

Reads what the gateway tells, asks a few requests of its own where that was allowed, and puts checks
and figures together. Knows the parts: facts, figures, prediction, verdict, symptoms.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import httpx

from specserve.errors import ConfigurationError, SpecServeError
from specserve.rpc.request_view import RequestView
from specserve.speculation.length_choice import Reason
from specserve.tools.doctor.figures import figures_of, reasons_without
from specserve.tools.doctor.gateway_checks import check_gateway, check_pool
from specserve.tools.doctor.gateway_facts import GatewayFacts, read_facts
from specserve.tools.doctor.prediction import predict
from specserve.tools.doctor.report import Report
from specserve.tools.doctor.status import Check, Status
from specserve.tools.doctor.symptoms import Probes, Symptoms, law_check
from specserve.tools.doctor.verdict import judge, what_would_pay
from specserve.tools.prompts import read_prompts
from specserve.tools.verify.gateway_client import GatewayClient

UNWANTED = frozenset(
    {Reason.DRAFT_LOST, Reason.DRAFT_LATE, Reason.DRAFT_PRESSURE, Reason.UNVERIFIED}
)
"""Why rounds are without a draft that nobody chose to leave out."""

PROBE_TIMEOUT_S = 120.0
"""Longest that one request of the doctor's own may take."""


def examine_running(url: str, headers: Mapping[str, str], num_probes: int) -> Report:
    """Look at a running pair.

    Args:
        url: of its gateway.
        headers: what requests carry: the key.
        num_probes: prompts to decode; 0 sends no request for text.

    Raises:
        PeerUnavailable: nobody answers there, or no specserve.
        ConfigurationError: a key is wanted.
    """

    async def reached() -> Report:
        async with client:
            return await examine(client, num_probes)

    try:
        client = httpx.AsyncClient(base_url=url, headers=headers, timeout=PROBE_TIMEOUT_S)
    except httpx.InvalidURL as error:
        raise ConfigurationError(f"--running: {url}: {error}") from error
    return asyncio.run(reached())


async def examine(client: httpx.AsyncClient, num_probes: int) -> Report:
    """Look at the pair behind a client's gateway; as `examine_running` does."""
    facts = await read_facts(client)
    checks = [*check_gateway(facts), *check_pool(facts)]
    if not num_probes:
        found = "greedy, seeded, ends, streams, top-p: not tried; --probe does, with requests"
        checks.append(Check("symptoms", Status.NOTE, found))
    elif facts.ready.get("ready"):
        try:
            probes = await _probe(client, num_probes)
            checks += probes.checks
            facts = await read_facts(client, probes.ids)
        except SpecServeError as error:
            checks.append(Check("probes", Status.PROBLEM, str(error)))
    checks.append(law_check(str(client.base_url).rstrip("/")))
    return _with_speed(checks, facts)


async def _probe(client: httpx.AsyncClient, num_prompts: int) -> Probes:
    gateway = GatewayClient(client)
    prompts = read_prompts(None, num_prompts)
    ids = [(prompt.prompt_id, await gateway.token_ids(prompt.text)) for prompt in prompts]
    return await Symptoms(gateway, ids).run()


def _with_speed(checks: list[Check], facts: GatewayFacts) -> Report:
    if facts.requests is None:
        found = "recent requests are not shown (--no-show-recent-requests): no speed can be told"
        return Report([*checks, Check("speed", Status.NOTE, found)], None, None, [])
    figures = figures_of(facts.requests)
    if figures is None:
        return Report([*checks, _without_drafts(facts.requests)], None, None, [])
    prediction = predict(facts.requests, figures)
    checks = [*checks, *judge(figures, prediction)]
    return Report(checks, figures, prediction, what_would_pay(figures, prediction))


def _without_drafts(requests: Sequence[RequestView]) -> Check:
    if not requests:
        return Check("speed", Status.NOTE, "no request is remembered: send some, or give --probe")
    reasons = reasons_without(requests)
    why = ", ".join(f"{reason} {count}" for reason, count in reasons.items()) or "too short texts"
    found = f"no draft token was verified in the latest requests; rounds were without for: {why}"
    return Check("speed", Status.PROBLEM if UNWANTED & set(reasons) else Status.NOTE, found)
