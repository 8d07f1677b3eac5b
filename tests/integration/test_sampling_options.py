"""Penalties, biases and bans through the whole stack: tokens equal a slow recount, for every K."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import httpx
import pytest

from helpers.pair import Generated, Pair, greedy_tokens, make_request, make_target, port_of
from helpers.pair import running_pair as running_default_pair
from specserve.gateway.config import GatewayConfig
from specserve.gateway.grpc_backend import GrpcBackend
from specserve.gateway.http import create_http_app
from specserve.model.session import KvSession
from specserve.model.target_calls import VerifyState
from specserve.model.toy import ToySpec
from specserve.model.toy_tokenizer import ToyTokenizer
from specserve.speculation.row_edits import RowEdits
from support.constrained import Wanted, slow_decode
from unit.gateway.fakes import events_of

# A long memory keeps greedy text from running in a circle after a few tokens.
TARGET = "toy:vocab_size=48,seed=7,order=8"
DRAFT = f"{TARGET},noise=0.7,noise_seed=1"
running_pair = partial(running_default_pair, TARGET)

KS = (0, 1, 3, 4, 8)
PROMPT = (5, 6, 7, 5, 6)
NUM_TOKENS = 40
TOKENIZER = ToyTokenizer(ToySpec.parse(TARGET))
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


def options(truth: Sequence[int]) -> dict[str, Wanted]:
    """Every option, aimed at what the target would say without it."""
    late = next(token for i, token in enumerate(truth) if i >= 21 and truth.index(token) == i)
    wanted = {
        "repetition_penalty": Wanted(repetition_penalty=1.4),
        "presence_penalty": Wanted(presence_penalty=1.5),
        "frequency_penalty": Wanted(frequency_penalty=0.6),
        "rewards": Wanted(repetition_penalty=0.5, frequency_penalty=-1.0, presence_penalty=-2.0),
        "logit_bias": Wanted(logit_bias={truth[3]: -100.0, truth[9]: -100.0, 11: 2.5}),
        "bad_word": Wanted(bad_words=[(truth[2],), (truth[8],)]),
        "bad_phrases": Wanted(bad_words=[truth[4:6], truth[7:10], truth[12:14]]),
        "allowed_token_ids": Wanted(allowed_token_ids=range(5, 47, 3)),
        "min_tokens": Wanted(
            min_tokens=22, stop_token_ids=[truth[3]], ignore_eos=False, logit_bias={0: 6.0}
        ),
        "stop_token_ids": Wanted(stop_token_ids=[late]),
        "eos": Wanted(logit_bias={0: 2.0}, ignore_eos=False, min_tokens=21),
        "ignore_eos": Wanted(logit_bias={0: 3.0}),
    }
    wanted["all"] = Wanted(
        repetition_penalty=1.1,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        logit_bias={truth[3]: -2.0, 11: 1.0},
        bad_words=[truth[4:6], (truth[8],)],
        allowed_token_ids=[i for i in range(1, 48) if i % 5],
        min_tokens=30,
        stop_token_ids=[truth[1], 12],
    )
    return wanted


def body_of(wanted: Wanted) -> dict[str, Any]:
    """Say it as a client does."""
    table = TOKENIZER.token_table().token_bytes
    return {
        "repetition_penalty": wanted.repetition_penalty,
        "presence_penalty": wanted.presence_penalty,
        "frequency_penalty": wanted.frequency_penalty,
        "logit_bias": {str(token): bias for token, bias in wanted.logit_bias.items()},
        "bad_words": [b"".join(table[i] for i in word).decode() for word in wanted.bad_words],
        **({"allowed_token_ids": [*wanted.allowed_token_ids]} if wanted.allowed_token_ids else {}),
        "min_tokens": wanted.min_tokens,
        "stop_token_ids": [*wanted.stop_token_ids],
        "ignore_eos": wanted.ignore_eos,
    }


@dataclass(frozen=True, slots=True)
class Answer:
    """What one request got."""

    token_ids: list[int]
    finish_reason: str
    num_draft_tokens: int
    num_accepted: int


@asynccontextmanager
async def served(
    pair: Pair, tokenizer: ToyTokenizer = TOKENIZER
) -> AsyncIterator[httpx.AsyncClient]:
    """Put a gateway before the pair's orchestrator."""
    backend = GrpcBackend([pair.orchestrator.address])
    app = create_http_app(backend, tokenizer, GatewayConfig())
    transport = httpx.ASGITransport(app)
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            yield client
    finally:
        await backend.close()


async def ask(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], *, stream: bool
) -> Answer:
    """Ask for a text, whole or as a stream; both are read into the same answer."""
    fixed = {"return_token_ids": True, "speculation_metrics": "summary", "stream": stream}
    answer = await client.post(path, content=json.dumps({**body, **fixed}))
    assert answer.status_code == 200, answer.text
    chunks = [e for e in events_of(answer.text) if e != "[DONE]"] if stream else [answer.json()]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    record = next(c["metrics"] for c in reversed(chunks) if c.get("metrics"))
    return Answer(
        [token for choice in choices for token in choice.get("token_ids") or ()],
        next(c["finish_reason"] for c in reversed(choices) if c["finish_reason"]),
        record["speculative_decoding"]["num_draft_tokens"],
        record["speculative_decoding"]["num_accepted_draft_tokens"],
    )


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["greedy", "coupled"])
async def test_every_option_gives_the_slow_recount_s_tokens_for_every_k(
    rule: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """B022, B025, B026, B034, B049, B053: options x K x {stream, whole} x {alone, mixed}, pairwise.

    Tokens equal the brute force of `support/constrained.py`, and so those of K = 0.
    """
    seed = None if rule == "greedy" else 11
    temperature = 0.0 if rule == "greedy" else 0.9
    truth = slow_decode(TARGET, PROMPT, Wanted(), NUM_TOKENS, seed, temperature or 1.0)
    num_requests = num_drafted = num_accepted = 0
    async with running_pair(draft=DRAFT, k=8) as pair, served(pair) as client:

        async def check(name: str, wanted: Wanted, k: int, *, stream: bool) -> None:
            nonlocal num_requests, num_drafted, num_accepted
            sampling = {"temperature": temperature, **({} if seed is None else {"seed": seed})}
            body = {"prompt": [*PROMPT], "max_tokens": NUM_TOKENS, "num_speculative_tokens": k}
            answer = await ask(
                client, COMPLETIONS, {**body, **sampling, **body_of(wanted)}, stream=stream
            )
            expected = slow_decode(TARGET, PROMPT, wanted, NUM_TOKENS, seed, temperature or 1.0)
            assert answer.token_ids == expected, (name, k, stream)
            ended = "length" if len(expected) == NUM_TOKENS else "stop"
            assert answer.finish_reason == ended or expected[-1] in wanted.stop_token_ids
            assert (answer.num_draft_tokens > 0) == (k > 0), (name, k)
            num_requests += 1
            num_drafted += answer.num_draft_tokens
            num_accepted += answer.num_accepted

        every = {"none": Wanted(), **options(truth)}
        for name, wanted in every.items():
            expected = slow_decode(TARGET, PROMPT, wanted, NUM_TOKENS, seed, temperature or 1.0)
            assert len(expected) > 20
            assert (expected == truth) == (name == "none"), "an option that does not bite"
            for index, k in enumerate(KS):
                await check(name, wanted, k, stream=index % 2 == 0)
        for index, k in enumerate(KS):
            # All options beside one another in one batch, and beside requests with none.
            await asyncio.gather(
                *(
                    check(name, wanted, k, stream=index % 2 == 1)
                    for name, wanted in every.items()
                    for _ in range(1 + (name == "none"))
                )
            )
        await pair.until_idle()
    with capsys.disabled():
        print(
            f"\n{rule}: {num_requests} requests, {num_drafted} draft tokens, "
            f"{num_accepted} accepted"
        )
    assert num_requests == len(KS) * (2 * len(every) + 1)
    assert num_accepted > num_drafted // 3


@pytest.mark.slow
async def test_chats_take_the_same_options() -> None:
    """The other endpoint, stream and whole: the same recount over the template's prompt."""
    messages = [{"role": "user", "content": "hello"}]
    prompt = TOKENIZER.apply_chat_template(messages)
    truth = greedy_tokens(TARGET, prompt, 24)
    async with running_pair(draft=DRAFT) as pair, served(pair) as client:
        for index, (name, wanted) in enumerate(options([*truth, *truth]).items()):
            wanted = replace(wanted, min_tokens=min(wanted.min_tokens, 24))
            body = {"messages": messages, "temperature": 0, "max_tokens": 24, **body_of(wanted)}
            answer = await ask(client, CHAT, body, stream=index % 2 == 0)
            assert answer.token_ids == slow_decode(TARGET, prompt, wanted, 24), name


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ngram", "suffix", "cascade", "draft_model"])
async def test_no_proposer_brings_a_banned_token_in(method: str) -> None:
    """B025: guesses from the text propose what is banned; the target commits none of it."""
    truth = greedy_tokens(TARGET, PROMPT, NUM_TOKENS)
    async with running_pair(draft=DRAFT) as pair:
        for name, wanted in options(truth).items():
            answer = await pair.generate(
                make_request(
                    PROMPT * 3,
                    method=method,
                    max_tokens=NUM_TOKENS,
                    ignore_eos=wanted.ignore_eos,
                    stop_token_ids=wanted.stop_token_ids,
                    constraints=wanted.constraints(0),
                )
            )
            assert answer.token_ids == slow_decode(TARGET, PROMPT * 3, wanted, NUM_TOKENS), name


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["greedy", "coupled"])
async def test_a_draft_that_equals_the_target_is_accepted_whole(rule: str) -> None:
    """The draft applies the same constraints at the same place: nothing of it is rejected."""
    truth = greedy_tokens(TARGET, PROMPT, NUM_TOKENS)
    async with running_pair(draft=TARGET, k=4) as pair:
        for name, wanted in options(truth).items():
            answer = await pair.generate(
                make_request(
                    PROMPT, rule=rule, max_tokens=NUM_TOKENS, constraints=wanted.constraints(0)
                )
            )
            assert answer.record is not None
            assert answer.record.num_draft_tokens > 0
            assert answer.record.num_recovered_tokens == 0, name


@pytest.mark.slow
@pytest.mark.parametrize("cut", [8, 20])
async def test_a_draft_with_a_cut_head_proposes_among_the_tokens_it_has(cut: int) -> None:
    """Other tokens beyond its head than the text's own are the target's to say first."""
    truth = greedy_tokens(TARGET, PROMPT, NUM_TOKENS)
    async with running_pair(draft=DRAFT, draft_fields={"draft_vocab_size": cut}) as pair:
        for name, wanted in options(truth).items():
            answer = await pair.generate(
                make_request(
                    PROMPT,
                    max_tokens=NUM_TOKENS,
                    ignore_eos=wanted.ignore_eos,
                    stop_token_ids=wanted.stop_token_ids,
                    constraints=wanted.constraints(0),
                )
            )
            assert answer.token_ids == slow_decode(TARGET, PROMPT, wanted, NUM_TOKENS), name
        beyond = Wanted(allowed_token_ids=range(30, 40))
        answer = await pair.generate(
            make_request(PROMPT, max_tokens=20, constraints=beyond.constraints(0))
        )
        assert answer.token_ids == slow_decode(TARGET, PROMPT, beyond, 20)
        assert answer.record is not None
        assert answer.record.num_draft_tokens > 0  # those that were said already
        assert answer.record.num_late_proposals == 0


async def test_a_carried_over_prefix_counts_as_output() -> None:
    """Another orchestrator's committed tokens are penalised as if they had been said here."""
    wanted = options(greedy_tokens(TARGET, PROMPT, NUM_TOKENS))["all"]
    truth = slow_decode(TARGET, PROMPT, wanted, NUM_TOKENS)
    async with running_pair(draft=DRAFT) as pair:
        for cut in (1, 7, 23):
            answer = await pair.generate(
                make_request(
                    PROMPT,
                    max_tokens=NUM_TOKENS,
                    committed=truth[:cut],
                    stop_token_ids=wanted.stop_token_ids,
                    constraints=wanted.constraints(0),
                )
            )
            assert answer.token_ids == truth[cut:]


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["greedy", "coupled"])
async def test_a_target_that_was_lost_rebuilds_the_state_from_the_tokens(rule: str) -> None:
    """The session is opened anew from token ids alone; prompt and output keep their border."""
    wanted = options(greedy_tokens(TARGET, PROMPT, NUM_TOKENS))["all"]
    slow = f"{TARGET},step_ms=4"
    async with running_default_pair(slow, DRAFT) as pair:
        request = make_request(
            PROMPT,
            rule=rule,
            max_tokens=NUM_TOKENS,
            stop_token_ids=wanted.stop_token_ids,
            constraints=wanted.constraints(0),
        )
        call, generated = pair.blocks(request), Generated()
        await pair.take(call, generated, 12)
        await pair.target.stop()
        pair.owned.append(await make_target(slow, port=port_of(pair.target.address)))
        await pair.finish(call, generated)
    assert generated.record is not None
    assert generated.record.num_target_reopens >= 1
    seed = None if rule == "greedy" else 5
    assert generated.token_ids == slow_decode(TARGET, PROMPT, wanted, NUM_TOKENS, seed)


async def test_stop_strings_wait_for_min_tokens_with_speculation_on_and_off_B050() -> None:
    """A stop that comes early ends nothing; without min_tokens it ends the text there."""
    text = greedy_tokens(TARGET, PROMPT, 24)
    table = TOKENIZER.token_table().token_bytes
    stop = b"".join(table[token] for token in text[4:6])
    async with running_pair(draft=DRAFT) as pair:
        for k in (0, 1, 4):
            for min_tokens, num_tokens in ((0, 6), (5, 6), (6, 24), (20, 24)):
                wanted = Wanted(min_tokens=min_tokens, eos_token_ids=())
                answer = await pair.generate(
                    make_request(
                        PROMPT,
                        k=k,
                        max_tokens=24,
                        stop=[stop],
                        constraints=wanted.constraints(0),
                    )
                )
                assert len(answer.token_ids) == num_tokens, (k, min_tokens)


@pytest.mark.slow
async def test_constraints_cross_the_pipe_to_a_device_s_own_process() -> None:
    """Options and the prompt's border are the device's too, where it runs apart."""
    wanted = options(greedy_tokens(TARGET, PROMPT, NUM_TOKENS))["all"]
    async with running_pair(draft=DRAFT, target_fields={"device_mode": "process"}) as pair:
        answer = await pair.generate(
            make_request(
                PROMPT,
                max_tokens=NUM_TOKENS,
                stop_token_ids=wanted.stop_token_ids,
                constraints=wanted.constraints(0),
            )
        )
    assert answer.token_ids == slow_decode(TARGET, PROMPT, wanted, NUM_TOKENS)


async def test_constraints_that_leave_nothing_end_the_request_with_their_names() -> None:
    """A phrase ban that bites only in mid-text: an error that says what was wanted, and no more."""
    wanted = Wanted(allowed_token_ids=[9], bad_words=[(9, 9, 9)])
    async with running_pair(draft=DRAFT) as pair, served(pair) as client:
        for k in (0, 4):
            body = {"prompt": [*PROMPT], "temperature": 0, "num_speculative_tokens": k}
            answer = await client.post(COMPLETIONS, json={**body, **body_of(wanted)})
            assert answer.status_code == 400
            assert "allowed_token_ids" in answer.json()["error"]["message"]
        await pair.until_idle()


async def test_a_banned_token_that_only_a_rejected_draft_leads_to_costs_nothing() -> None:
    """The draft may run into rows that allow no token; they are not reached and nothing fails."""
    truth = greedy_tokens(TARGET, PROMPT, 20)
    other = next(i for i in range(1, 48) if i not in truth)
    # Behind `other` everything is banned; the target never says it.
    bad_words = [(other, token) for token in range(48)]
    wanted = Wanted(bad_words=bad_words)
    async with running_pair(draft=f"{DRAFT.replace('0.7', '40')}", k=8) as pair:
        answer = await pair.generate(
            make_request(PROMPT, max_tokens=20, constraints=wanted.constraints(0), num_logprobs=2)
        )
    assert answer.token_ids == truth
    assert len(answer.logprobs) == 20


def one_position_late(session: KvSession, length: int, then: Sequence[int] = ()) -> RowEdits | None:
    """The fault: the newest token before the row is not counted yet."""
    if then:
        return ROW_EDITS(session, length, then[:-1])
    return ROW_EDITS(session, max(length - 1, session.opening.sampling.constraints.prompt_length))


def state_of_the_block_s_start(call: VerifyState) -> list[Any]:
    """The fault: every row of a block sees the committed tokens only."""
    rows = TARGET_ROWS(call)
    first = call.session.row_edits(call.committed_length)
    return [replace(row, edits=first) for row in rows]


ROW_EDITS = KvSession.row_edits
TARGET_ROWS = VerifyState.target_rows


@pytest.mark.parametrize(
    ("owner", "name", "fault", "caught_without_speculation"),
    [
        (KvSession, "row_edits", one_position_late, True),
        (VerifyState, "target_rows", state_of_the_block_s_start, False),
    ],
)
async def test_a_planted_fault_of_one_position_is_caught(
    owner: type, name: str, fault: Any, caught_without_speculation: bool
) -> None:
    """The comparison above can fail: penalties one row late, or not advanced inside a block."""
    # A token that is said until its penalties have grown: one row early or late shows at once.
    wanted = Wanted(repetition_penalty=1.4, frequency_penalty=0.6, logit_bias={11: 6.0})
    truth = slow_decode(TARGET, PROMPT, wanted, NUM_TOKENS)
    async with running_pair(draft=DRAFT) as pair:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, fault)
            for k, is_caught in ((0, caught_without_speculation), (4, True)):
                answer = await pair.generate(
                    make_request(
                        PROMPT, k=k, max_tokens=NUM_TOKENS, constraints=wanted.constraints(0)
                    )
                )
                assert (answer.token_ids != truth) == is_caught
        answer = await pair.generate(
            make_request(PROMPT, max_tokens=NUM_TOKENS, constraints=wanted.constraints(0))
        )
        assert answer.token_ids == truth
