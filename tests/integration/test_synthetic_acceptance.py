"""Synthetic acceptance through a running pair: its rates, its warnings, and nothing hidden."""

from __future__ import annotations

import logging

import pytest

from helpers.pair import make_request, running_pair

RATES = [1.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize("rule", ["greedy", "standard", "coupled"])
async def test_drafts_are_accepted_by_the_rates_and_everybody_can_see_it(
    rule: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Rates of 1, 1, 0, 0 accept two of four every full round; log and GetPair say so."""
    speculative = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": RATES}
    with caplog.at_level(logging.WARNING, logger="specserve.orchestrator.server"):
        async with running_pair(speculative=speculative) as pair:
            said = pair.orchestrator.pair.describe(include_token_table=False)
            done = await pair.generate(make_request(rule=rule, max_tokens=31))
            await pair.until_idle()

    assert "NOT by the target" in caplog.text
    assert list(said.synthetic_acceptance_rates) == RATES
    assert said.rejection_sample_method == "synthetic"
    assert len(done.token_ids) == 31
    assert done.record is not None
    # Tokens come of the prompt alone until the draft has read it; then rounds of three tokens, the
    # last one cut by max_tokens.
    *full, last = done.record.per_step_accepted
    assert len(full) >= 4
    assert set(full) == {2}
    assert last <= 2


async def test_an_ordinary_deployment_says_that_the_target_decides() -> None:
    """No rates in GetPair, no warning."""
    async with running_pair() as pair:
        said = pair.orchestrator.pair.describe(include_token_table=False)

    assert not said.synthetic_acceptance_rates
