"""The scripted pair speaks the real contract, and what it does wrong costs what it should."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from helpers.double import (
    ALWAYS_WRONG,
    PERFECT,
    Script,
    Trouble,
    double_draft,
    double_target,
)
from helpers.pair import TARGET, Pair, make_request, running_pair
from helpers.waiting import eventually

K = 4
NUM_TOKENS = 32
RULES = ("greedy", "coupled", "standard")
TROUBLED_PROMPT = (9, 9, 9)

DRAFT_TROUBLE = [
    pytest.param(Script(trouble=Trouble.LATE), id="late"),
    pytest.param(Script(trouble=Trouble.LOST), id="silence"),
    pytest.param(Script(trouble=Trouble.NAN), id="q of NaN"),
    pytest.param(Script(trouble=Trouble.INF), id="q of inf"),
    pytest.param(Script(trouble=Trouble.NO_TOKEN), id="always empty"),
    pytest.param(Script(trouble=Trouble.NO_TOKEN, every=2), id="empty every other step, B119"),
    pytest.param(Script(trouble=Trouble.STRAY_ID), id="ids outside the vocabulary"),
    pytest.param(Script(trouble=Trouble.ODD_BYTES), id="no array"),
]


async def plain_tokens(pair: Pair, rule: str) -> list[int]:
    """Decode without speculation."""
    return (await pair.generate(make_request(rule=rule, max_tokens=NUM_TOKENS, k=0))).token_ids


@pytest.mark.parametrize("rule", RULES)
async def test_a_scripted_target_says_what_the_real_one_says(rule: str) -> None:
    """Token for token, without draft tokens and with the same ones, under every rule.

    The standard rule too: its draws are keyed, so equal scores and proposals give equal texts.
    """
    texts = []
    async with double_draft(TARGET, Script("110")) as (_, draft), double_target(TARGET) as (_, own):
        for addresses in (None, (own,)):
            async with running_pair(
                draft=None, draft_addresses=(draft,), target_addresses=addresses, k=K
            ) as pair:
                answer = await pair.generate(make_request(rule=rule, max_tokens=NUM_TOKENS))
                assert answer.record is not None
                assert answer.record.num_draft_tokens > 0
                texts.append((answer.token_ids, await plain_tokens(pair, rule)))

    assert texts[0] == texts[1]


@pytest.mark.parametrize("rule", ["greedy", "coupled"])
@pytest.mark.parametrize(
    ("script", "num_accepted"),
    [(PERFECT, K), (ALWAYS_WRONG, 0), (Script("1101"), 2), (Script("10"), 1)],
    ids=["perfect", "always wrong, B115", "two of four", "every other"],
)
async def test_as_many_tokens_are_accepted_as_the_script_says(
    rule: str, script: Script, num_accepted: int
) -> None:
    """Each full round accepts so many, and the text is that of K = 0."""
    async with (
        double_draft(TARGET, script) as (_, address),
        running_pair(draft=None, draft_addresses=(address,), k=K) as pair,
    ):
        plain = await plain_tokens(pair, rule)
        answer = await pair.generate(make_request(rule=rule, max_tokens=NUM_TOKENS))
    assert answer.token_ids == plain
    record = answer.record
    assert record is not None
    full = [
        accepted
        for drafted, accepted in zip(record.per_step_drafted, record.per_step_accepted, strict=True)
        if drafted == K
    ]
    assert full
    assert set(full) == {num_accepted}


async def test_a_draft_of_the_targets_own_law_is_always_accepted() -> None:
    """q = p: the standard rule accepts every token of a perfect draft."""
    async with (
        double_draft(TARGET, PERFECT) as (_, address),
        running_pair(draft=None, draft_addresses=(address,), k=K) as pair,
    ):
        answer = await pair.generate(make_request(rule="standard", max_tokens=NUM_TOKENS))
    assert answer.record is not None
    assert answer.record.num_draft_tokens > 0
    assert answer.record.num_recovered_tokens == 0


@pytest.mark.parametrize("script", DRAFT_TROUBLE)
async def test_trouble_of_a_draft_costs_no_token(script: Script) -> None:
    """B035, B077: all rules end with valid tokens, the exact ones where they are."""
    async with (
        double_draft(TARGET, script) as (draft, address),
        running_pair(
            draft=None,
            draft_addresses=(address,),
            k=K,
            draft_timeout_s=0.05,
            draft_catch_up_timeout_s=0.0,
        ) as pair,
    ):
        for rule in RULES:
            plain, before = await plain_tokens(pair, rule), draft.num_troubled
            for _ in range(20):  # on a busy machine a short text may end before it is drafted for
                answer = await pair.generate(make_request(rule=rule, max_tokens=NUM_TOKENS))
                assert len(answer.token_ids) == NUM_TOKENS
                assert all(0 <= token < 48 for token in answer.token_ids)
                if rule != "standard":
                    assert answer.token_ids == plain
                if draft.num_troubled > before:
                    break
            assert draft.num_troubled > before
        await pair.until_idle()
        await eventually(lambda: not draft.sessions, "every session was released")


TARGET_TROUBLE = {
    Trouble.LATE: grpc.StatusCode.UNAVAILABLE,
    Trouble.LOST: grpc.StatusCode.UNAVAILABLE,
    Trouble.NAN: grpc.StatusCode.UNAVAILABLE,
    Trouble.INF: grpc.StatusCode.UNAVAILABLE,
    Trouble.NAN_ROW: grpc.StatusCode.INTERNAL,
    Trouble.NO_TOKEN: grpc.StatusCode.UNAVAILABLE,
    Trouble.STRAY_ID: grpc.StatusCode.UNAVAILABLE,
    Trouble.ODD_BYTES: grpc.StatusCode.UNAVAILABLE,
}


@pytest.mark.slow
@pytest.mark.parametrize("trouble", TARGET_TROUBLE)
async def test_trouble_of_a_target_fails_only_the_request_that_it_befalls(trouble: Trouble) -> None:
    """B037, B038: no token, NaN or a stray id ends one request with an error; the others go on.

    A target that answers one session with nonsense is left like one that is lost; with no other to
    go to, the request ends once its time to reopen is over.
    """
    script = Script(trouble=trouble, prompt=TROUBLED_PROMPT)
    async with (
        double_draft(TARGET, PERFECT) as (_, draft),
        double_target(TARGET, script) as (target, address),
        running_pair(
            draft=None,
            draft_addresses=(draft,),
            target_addresses=(address,),
            k=K,
            target_timeout_s=0.2,
            reopen_timeout_s=0.5,
        ) as pair,
    ):
        plain = await plain_tokens(pair, "greedy")
        others = [pair.generate(make_request(max_tokens=NUM_TOKENS)) for _ in range(3)]
        befallen = pair.generate(make_request(TROUBLED_PROMPT, max_tokens=NUM_TOKENS))
        failed, *answers = await asyncio.gather(befallen, *others, return_exceptions=True)
        if trouble in (Trouble.NAN, Trouble.INF):
            # The prompt's own round has no draft token, and so no number to be wrong.
            assert target.num_troubled > 1
        assert isinstance(failed, grpc.aio.AioRpcError), failed
        assert failed.code() is TARGET_TROUBLE[trouble]
        for answer in answers:
            assert not isinstance(answer, BaseException), answer
            assert answer.token_ids == plain
        assert pair.orchestrator.servicer.num_running == 0


@pytest.mark.slow
@pytest.mark.parametrize("trouble", [Trouble.LATE, Trouble.LOST, Trouble.NO_TOKEN, Trouble.NAN])
async def test_an_answer_that_is_none_is_asked_for_again(trouble: Trouble) -> None:
    """Every fifth answer is late, lost or nonsense: the text is the same, token for token."""
    rule = "coupled"
    async with (
        double_draft(TARGET, Script("10")) as (_, draft),
        double_target(TARGET, Script(trouble=trouble, every=5)) as (target, address),
        double_target(TARGET) as (_, sound),
    ):
        texts = []
        for target_address in (sound, address):
            async with running_pair(
                draft=None,
                draft_addresses=(draft,),
                target_addresses=(target_address,),
                k=K,
                target_timeout_s=0.2,
                reopen_timeout_s=5.0,
            ) as pair:
                answer = await pair.generate(make_request(rule=rule, max_tokens=NUM_TOKENS))
                texts.append(answer.token_ids)
    assert texts[0] == texts[1]
    assert target.num_troubled > 0
