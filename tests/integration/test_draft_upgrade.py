"""A draft upgraded on its own, to another vocabulary: target-only and an alert, no error."""

from __future__ import annotations

import logging

import pytest

from helpers.pair import (
    TARGET,
    Generated,
    Pair,
    greedy_tokens,
    make_draft,
    make_request,
    port_of,
    running_pair,
)
from helpers.waiting import eventually

OTHER_VOCABULARY = "toy:vocab_size=40,seed=7"
SLOW_TARGET = TARGET + ",step_ms=3"

pytestmark = pytest.mark.slow


def replicas(pair: Pair, pool: str, state: str) -> float | None:
    """Read the orchestrator's gauge."""
    return pair.orchestrator.registry.get_sample_value(
        "specserve_orchestrator_num_replicas", {"pool": pool, "state": state}
    )


async def test_one_sided_upgrade_means_target_only_and_an_alert_B095(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Under a live stream: its text goes on, new requests are answered, the gauge and the log say
    which draft is refused and why; a draft that fits again is used again."""
    async with running_pair(SLOW_TARGET) as pair:
        assert pair.draft is not None
        assert (replicas(pair, "target", "usable"), replicas(pair, "draft", "usable")) == (1, 1)
        answer, call = Generated(), pair.blocks(make_request(max_tokens=2000))
        await pair.take(call, answer, 10)
        port = port_of(pair.draft.address)
        await pair.draft.stop()
        with caplog.at_level(logging.ERROR, "specserve.orchestrator"):
            wrong = await make_draft(OTHER_VOCABULARY, port=port)
            await eventually(lambda: replicas(pair, "draft", "refused") == 1, "it is refused")
        assert "token id 40" in caplog.text
        assert replicas(pair, "draft", "usable") == 0

        whole = await pair.generate(make_request(max_tokens=40))
        assert whole.token_ids == greedy_tokens(TARGET, (5, 6, 7), 40)
        assert whole.record is not None
        assert whole.record.num_draft_tokens == 0
        await pair.take(call, answer, len(answer.token_ids) + 20)

        await wrong.stop()
        pair.owned.append(await make_draft(port=port))
        await eventually(lambda: replicas(pair, "draft", "usable") == 1, "one that fits is used")
        assert replicas(pair, "draft", "refused") == 0
        await pair.take(call, answer, len(answer.token_ids) + 20)
        call.cancel()
    assert answer.token_ids == greedy_tokens(TARGET, (5, 6, 7), len(answer.token_ids))
