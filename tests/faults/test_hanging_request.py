"""A request that devices hang of, on real device processes: found out as one that they die of."""

from __future__ import annotations

import grpc
import pytest

from helpers.pair import Generated, greedy_tokens, make_request, make_target, running_pair
from helpers.waiting import eventually
from specserve.errors import PoisonRequest
from specserve.rpc.status import ERROR_KEY

TOY = "toy:vocab_size=48,seed=7,eos_bias=-1000"
FATAL = TOY + ",fatal_token=0"
POISON = (5, 0, 0, 6)
MANY = 800

pytestmark = pytest.mark.slow


async def test_a_request_that_two_devices_hang_of_is_given_up_and_both_are_ended() -> None:
    """Long before a device would be ended for standing still; the stream beside it is whole."""
    process = {"device_mode": "process"}
    async with running_pair(
        FATAL,
        draft=None,
        speculative={"method": "ngram"},
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
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await pair.generate(make_request(POISON, k=0))
        assert dict(caught.value.trailing_metadata() or ())[ERROR_KEY] == PoisonRequest.__name__
        await pair.finish(call, beside)
        assert beside.token_ids == greedy_tokens(TOY, (5, 6, 7), MANY)
        for target, hung in zip(targets, devices, strict=True):
            await eventually(
                lambda t=target, d=hung: t.replica.device is not d and t.failure() is None,
                "another device",
                within_s=60,
            )
