"""Requests that real device processes die or hang of: `make faults`.

A fault of chaos, too; in `tests/integration/test_poison.py` the devices are threads.
"""

from __future__ import annotations

from collections.abc import Sequence

import grpc
import pytest

from helpers.pair import Generated, Pair, greedy_tokens, make_request, make_target, running_pair
from helpers.waiting import eventually
from specserve.errors import PoisonRequest
from specserve.rpc.status import ERROR_KEY

TOY = "toy:vocab_size=48,seed=7,eos_bias=-1000"
FATAL = TOY + ",fatal_token=0"
DEADLY, HANGING = (5, 0, 6), (5, 0, 0, 6)
NO_DRAFT: dict[str, object] = {"method": "ngram"}
MANY = 800

pytestmark = pytest.mark.slow


async def is_given_up(pair: Pair, prompt: Sequence[int]) -> None:
    """Send what devices are lost of: two of them, and it is told so."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await pair.generate(make_request(prompt, k=0))
    assert dict(caught.value.trailing_metadata() or ())[ERROR_KEY] == PoisonRequest.__name__
    assert "2 devices died or hung" in (caught.value.details() or "")


async def test_a_real_device_dies_twice_of_a_request_and_no_other_stream_pays() -> None:
    """The first death is anybody's, so each that was there goes on alone; the second one tells. A
    device process of its own dies of the token, and the streams beside it are whole."""
    async with running_pair(
        FATAL,
        draft=None,
        speculative=NO_DRAFT,
        target_fields={"device_mode": "process"},
        reopen_timeout_s=120.0,
    ) as pair:
        prompts = [(5, 6, 7), (9, 8), (3, 4, 3)]
        answers = [Generated() for _ in prompts]
        calls = [pair.blocks(make_request(p, k=0, max_tokens=MANY)) for p in prompts]
        for call, answer in zip(calls, answers, strict=True):
            await pair.take(call, answer, 5)
        await is_given_up(pair, DEADLY)
        for call, answer, prompt in zip(calls, answers, prompts, strict=True):
            await pair.finish(call, answer)
            assert answer.token_ids == greedy_tokens(TOY, prompt, MANY)
        assert pair.target.failure() is None
        await pair.until_idle()


async def test_a_request_that_two_devices_hang_of_is_given_up_and_both_are_ended() -> None:
    """Long before a device would be ended for standing still; the stream beside it is whole."""
    process = {"device_mode": "process"}
    async with running_pair(
        FATAL,
        draft=None,
        speculative=NO_DRAFT,
        target_fields=process,
        device_hang_s=2.0,
        reopen_timeout_s=120.0,
    ) as pair:
        other = await make_target(FATAL, **process)
        pair.owned.append(other)
        targets = [pair.target, other]
        devices = [target.replica.device for target in targets]
        pair.orchestrator.update_peers([target.address for target in targets], [])
        await eventually(lambda: len(pair.orchestrator.pair.targets.usable()) == 2, "both usable")
        beside = Generated()
        call = pair.blocks(make_request(k=0, max_tokens=MANY))
        await pair.take(call, beside, 5)
        await is_given_up(pair, HANGING)
        await pair.finish(call, beside)
        assert beside.token_ids == greedy_tokens(TOY, (5, 6, 7), MANY)
        for target, hung in zip(targets, devices, strict=True):
            await eventually(
                lambda t=target, d=hung: t.replica.device is not d and t.failure() is None,
                "another device",
                within_s=60,
            )
