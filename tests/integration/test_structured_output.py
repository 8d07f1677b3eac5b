"""Text that is held to a language, through the whole stack: whole, right, and alike for every K."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import grpc
import pytest

from helpers.pair import Generated, make_request, make_target, port_of
from helpers.pair import running_pair as running_default_pair
from integration.test_sampling_options import CHAT, COMPLETIONS, Answer, ask, served
from specserve.grammar.lark import json_grammar, lark_grammar, regex_grammar
from specserve.model.messages import VerifyReply
from specserve.model.target_calls import VerifyState
from specserve.model.toy import ToySpec
from specserve.model.toy_tokenizer import ToyTokenizer
from specserve.speculation.constraints import TokenConstraints
from support.constrained import Wanted, slow_decode
from support.engines import GREEDY, Caller, run, toy_engine

KS = (0, 1, 3, 5)
PROMPT = (5, 6, 7, 5, 6)
NUM_TOKENS = 32

# Letters alone: what a regular expression allows is told by trying letters.
TARGET = "toy:vocab_size=48,seed=7,order=8"
DRAFT = f"{TARGET},noise=0.7,noise_seed=1"
PIECES = ToyTokenizer(ToySpec.parse(TARGET)).token_table().token_bytes
running_pair = partial(running_default_pair, TARGET)

# Every byte: JSON.
BYTES_TARGET = "toy:vocab_size=257,seed=7,order=8"
BYTES_DRAFT = f"{BYTES_TARGET},noise=0.7,noise_seed=1"
BYTES = ToyTokenizer(ToySpec.parse(BYTES_TARGET))
CALM = {"logit_bias": {str(token): -100 for token in BYTES.encode(" \t\n\r", False)}}
"""Whitespace is as likely as anything else here, and a greedy toy may never leave it."""
running_bytes_pair = partial(running_default_pair, BYTES_TARGET, BYTES_DRAFT)

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6, "pattern": "^[a-z]*$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["x", "y"]}, "maxItems": 3},
        "none": {"const": None},
    },
    "required": ["name", "age", "tags", "none"],
    "additionalProperties": False,
}


def is_right(text: str) -> bool:
    """Check a text against SCHEMA, by hand."""
    value = json.loads(text)
    return (
        sorted(value) == ["age", "name", "none", "tags"]
        and re.fullmatch("[a-z]{0,6}", value["name"]) is not None
        and type(value["age"]) is int
        and 0 <= value["age"] <= 120
        and len(value["tags"]) <= 3
        and set(value["tags"]) <= {"x", "y"}
        and value["none"] is None
    )


def held_to(regex: str, letters: str, **more: Any) -> Wanted:
    """Ask for a regular expression; unless told otherwise, the text seldom ends."""
    more = {"logit_bias": {0: -4.0}, "ignore_eos": False, **more}
    return Wanted(regex=regex, letters=letters, token_bytes=PIECES, **more)


LANGUAGES = {
    "steps": held_to("(ab|c[de]?|f g)+", "abcdefg "),
    "any": held_to("[a-m ]*", "a"),
    "ends": held_to("((x|yy)z)*", "xyz", logit_bias={0: 1.0}),
    "short": held_to("[a-f][a-f]", "abcdef"),
    "penalised": held_to(
        "(ab|c[de]?|f g)+",
        "abcdefg ",
        frequency_penalty=0.6,
        repetition_penalty=1.2,
        bad_words=[(3, 4)],
    ),
    "listed": held_to("[a-m ]*", "a", allowed_token_ids=[0, *range(3, 48, 2)], min_tokens=9),
}


def text_of(token_ids: Sequence[int], table: Sequence[bytes] = PIECES) -> str:
    """Return the text of some tokens, EOS left out."""
    return b"".join(table[i] for i in token_ids if i).decode()


def asked(wanted: Wanted) -> dict[str, Any]:
    """Say it as a client does; bad_words are ids here, and are said as letters."""
    return {
        "structured_outputs": {"regex": wanted.regex},
        "repetition_penalty": wanted.repetition_penalty,
        "frequency_penalty": wanted.frequency_penalty,
        "logit_bias": {str(token): bias for token, bias in wanted.logit_bias.items()},
        "bad_words": [text_of(word) for word in wanted.bad_words],
        "min_tokens": wanted.min_tokens,
        **({"allowed_token_ids": [*wanted.allowed_token_ids]} if wanted.allowed_token_ids else {}),
    }


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["greedy", "coupled"])
async def test_a_regex_gives_the_slow_recount_s_tokens_for_every_k_b098(rule: str) -> None:
    """Alone and beside others, stream and whole: every row's mask is found by trying letters."""
    seed = None if rule == "greedy" else 11
    temperature = 0.0 if rule == "greedy" else 0.9
    num_drafted = num_accepted = num_whole = 0
    async with running_pair(DRAFT, k=5) as pair, served(pair) as client:

        async def check(name: str, wanted: Wanted, k: int, *, stream: bool) -> None:
            nonlocal num_drafted, num_accepted, num_whole
            sampling = {"temperature": temperature, **({} if seed is None else {"seed": seed})}
            body = {"prompt": [*PROMPT], "max_tokens": NUM_TOKENS, "num_speculative_tokens": k}
            fields = asked(wanted) if wanted.regex else {}
            answer = await ask(client, COMPLETIONS, {**body, **sampling, **fields}, stream=stream)
            expected = slow_decode(TARGET, PROMPT, wanted, NUM_TOKENS, seed, temperature or 1.0)
            assert answer.token_ids == expected, (name, k, stream)
            is_whole = expected[-1] == 0
            assert answer.finish_reason == ("stop" if is_whole else "length")
            if wanted.regex and is_whole:
                assert re.fullmatch(wanted.regex, text_of(expected))
                num_whole += 1
            num_drafted += answer.num_draft_tokens
            num_accepted += answer.num_accepted

        for name, wanted in LANGUAGES.items():
            for index, k in enumerate(KS):
                await check(name, wanted, k, stream=index % 2 == 0)
        every = {"plain": Wanted(ignore_eos=False), **LANGUAGES}
        for index, k in enumerate(KS):
            await asyncio.gather(
                *(check(name, each, k, stream=index % 2 == 1) for name, each in every.items())
            )
        await pair.until_idle()
    assert num_whole >= 2 * len(KS)
    assert num_accepted > num_drafted // 3


FORMS: dict[str, dict[str, Any]] = {
    "response_format": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "person", "schema": SCHEMA, "strict": True},
        }
    },
    "structured_outputs": {
        "structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True},
    },
    "guided_json": {"guided_json": json.dumps(SCHEMA)},
}


@pytest.mark.slow
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("rule", ["greedy", "coupled"])
async def test_a_schema_s_text_is_right_and_the_same_for_every_k(path: str, rule: str) -> None:
    """JSON that a reader takes, with every required key; a null in the schema is a value."""
    sampling = {"temperature": 0} if rule == "greedy" else {"temperature": 0.8, "seed": 3}
    start: dict[str, Any] = (
        {"prompt": "who"}
        if path == COMPLETIONS
        else {"messages": [{"role": "user", "content": "w"}]}
    )
    num_accepted = 0
    async with running_bytes_pair(k=5) as pair, served(pair, BYTES) as client:
        for form in FORMS.values():
            body = {**start, **sampling, **form, **CALM, "max_tokens": 200}
            answers = [
                await ask(client, path, {**body, "num_speculative_tokens": k}, stream=k == 3)
                for k in KS
            ]
            for answer in answers:
                assert answer.token_ids == answers[0].token_ids
                assert answer.finish_reason == "stop"
                num_accepted += answer.num_accepted
            assert is_right(text_of(answers[0].token_ids, BYTES.token_table().token_bytes))
    assert num_accepted > 50


@pytest.mark.slow
async def test_a_json_object_and_a_plain_request_after_it_b097() -> None:
    """Both are answered, and the second as if there had been no first."""
    plain = {"prompt": "x", "temperature": 0, "max_tokens": 12}
    held = {**plain, **CALM, "max_tokens": 60, "response_format": {"type": "json_object"}}
    async with running_bytes_pair() as pair, served(pair, BYTES) as client:
        before = await ask(client, COMPLETIONS, plain, stream=False)
        answer = await ask(client, COMPLETIONS, held, stream=False)
        after = await ask(client, COMPLETIONS, plain, stream=False)
        await pair.until_idle()
    text = text_of(answer.token_ids, BYTES.token_table().token_bytes)
    assert after.token_ids == before.token_ids
    assert text.startswith("{")
    if answer.finish_reason == "stop":
        assert isinstance(json.loads(text), dict)


@pytest.mark.slow
async def test_four_digits_are_four_digits_whatever_the_dice_say_b098() -> None:
    """K = 4 at temperature 1.5 under the standard rule: no text outside the language."""
    body = {
        "prompt": "year ",
        "temperature": 1.5,
        "num_speculative_tokens": 4,
        "guided_regex": "[0-9]{4}",
        "max_tokens": 16,
    }
    async with running_bytes_pair() as pair, served(pair, BYTES) as client:
        answers = await asyncio.gather(
            *(ask(client, COMPLETIONS, body, stream=i % 2 == 0) for i in range(40))
        )
    texts = [text_of(a.token_ids, BYTES.token_table().token_bytes) for a in answers]
    for text, answer in zip(texts, answers, strict=True):
        assert re.fullmatch("[0-9]{4}", text)
        assert answer.finish_reason == "stop"
    assert len(set(texts)) > 30
    assert sum(answer.num_accepted for answer in answers) > 20


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["greedy", "coupled"])
async def test_an_evicted_request_resumes_in_its_grammar_b100(rule: str) -> None:
    """Blocks for two of six: preempted sessions are opened anew, and match from their output."""
    wanted = LANGUAGES["steps"]
    fields = {"num_kv_blocks": 8, "block_size": 8}
    async with running_pair(DRAFT, target_fields=fields, draft_fields=fields) as pair:
        requests = [
            make_request(
                PROMPT,
                rule=rule,
                seed=seed,
                max_tokens=NUM_TOKENS,
                ignore_eos=False,
                constraints=wanted.constraints(0),
            )
            for seed in range(6)
        ]
        answers = await asyncio.gather(*map(pair.generate, requests))
        await pair.until_idle()
    reopened = 0
    for seed, answer in enumerate(answers):
        noise = None if rule == "greedy" else seed
        assert answer.token_ids == slow_decode(TARGET, PROMPT, wanted, NUM_TOKENS, noise)
        assert answer.record is not None
        reopened += answer.record.num_target_reopens
    assert reopened > 0


@pytest.mark.slow
async def test_penalties_a_format_and_plain_neighbours_in_one_batch_b101() -> None:
    """All are answered, each with its own rows."""
    held = {
        "prompt": "who",
        "temperature": 0,
        "num_speculative_tokens": 4,
        "frequency_penalty": 0.3,
        "max_tokens": 200,
        **CALM,
        **FORMS["response_format"],
    }
    plain = {"prompt": "x", "temperature": 0, "max_tokens": 40, "ignore_eos": True}
    async with running_bytes_pair() as pair, served(pair, BYTES) as client:
        alone = [await ask(client, COMPLETIONS, body, stream=False) for body in (held, plain)]
        together = await asyncio.gather(
            *(ask(client, COMPLETIONS, body, stream=False) for body in (held, plain, plain, plain))
        )

    def said(answers: Sequence[Answer]) -> list[list[int]]:
        return [answer.token_ids for answer in answers]

    assert said(together) == said([alone[0], alone[1], alone[1], alone[1]])
    assert is_right(text_of(alone[0].token_ids, BYTES.token_table().token_bytes))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ngram", "suffix", "cascade", "draft_model"])
async def test_no_proposer_brings_in_what_does_not_fit(method: str) -> None:
    """B098: guesses from the text know no grammar; the target commits none of them that errs."""
    async with running_pair(DRAFT) as pair:
        for name, wanted in LANGUAGES.items():
            answer = await pair.generate(
                make_request(
                    PROMPT * 3,
                    method=method,
                    max_tokens=NUM_TOKENS,
                    ignore_eos=False,
                    constraints=wanted.constraints(0),
                )
            )
            assert answer.token_ids == slow_decode(TARGET, PROMPT * 3, wanted, NUM_TOKENS), name


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["greedy", "coupled"])
async def test_a_draft_that_equals_the_target_is_accepted_whole(rule: str) -> None:
    """The draft masks the same rows the same way: acceptance does not suffer."""
    num_drafted = 0
    async with running_pair(TARGET, k=4) as pair:
        for name, wanted in LANGUAGES.items():
            answer = await pair.generate(
                make_request(
                    PROMPT,
                    rule=rule,
                    max_tokens=NUM_TOKENS,
                    ignore_eos=False,
                    constraints=wanted.constraints(0),
                )
            )
            assert answer.record is not None
            assert answer.record.num_recovered_tokens == 0, name
            num_drafted += answer.record.num_draft_tokens
    assert num_drafted > 40


@pytest.mark.slow
@pytest.mark.parametrize("cut", [8, 20])
async def test_a_draft_with_a_cut_head_proposes_among_what_it_has(cut: int) -> None:
    """Other tokens beyond its head than the text's own are the target's to say first."""
    async with running_pair(DRAFT, draft_fields={"draft_vocab_size": cut}) as pair:
        for name, wanted in LANGUAGES.items():
            answer = await pair.generate(
                make_request(
                    PROMPT,
                    max_tokens=NUM_TOKENS,
                    ignore_eos=False,
                    constraints=wanted.constraints(0),
                )
            )
            assert answer.token_ids == slow_decode(TARGET, PROMPT, wanted, NUM_TOKENS), name


@pytest.mark.slow
async def test_a_carried_over_prefix_is_matched_as_if_it_had_been_said_here() -> None:
    """Another orchestrator's committed tokens move the grammar; such that do not fit end it."""
    wanted = LANGUAGES["steps"]
    truth = slow_decode(TARGET, PROMPT, wanted, NUM_TOKENS)
    async with running_pair(DRAFT) as pair:
        ask_with = partial(
            make_request,
            PROMPT,
            max_tokens=NUM_TOKENS,
            ignore_eos=False,
            constraints=wanted.constraints(0),
        )
        for cut in (1, 2, 5):
            answer = await pair.generate(ask_with(committed=truth[:cut]))
            assert answer.token_ids == truth[cut:]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await pair.generate(ask_with(committed=[30]))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["greedy", "coupled"])
async def test_a_target_that_was_lost_matches_again_from_the_tokens(rule: str) -> None:
    """The session is opened anew from token ids alone, and the grammar with it."""
    wanted = replace(LANGUAGES["any"], logit_bias={0: -100.0})
    slow = f"{TARGET},step_ms=4"
    async with running_default_pair(slow, DRAFT) as pair:
        request = make_request(
            PROMPT,
            rule=rule,
            max_tokens=NUM_TOKENS,
            ignore_eos=False,
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


@pytest.mark.slow
async def test_a_grammar_crosses_the_pipe_to_a_device_s_own_process() -> None:
    """Where the device runs apart, it reads the vocabulary and the grammar itself."""
    wanted = LANGUAGES["steps"]
    async with running_pair(DRAFT, target_fields={"device_mode": "process"}) as pair:
        answer = await pair.generate(
            make_request(
                PROMPT, max_tokens=NUM_TOKENS, ignore_eos=False, constraints=wanted.constraints(0)
            )
        )
    assert answer.token_ids == slow_decode(TARGET, PROMPT, wanted, NUM_TOKENS)


async def test_a_text_that_can_only_go_on_with_tokens_there_are_not_ends_with_an_error() -> None:
    """Rather an error in mid-text than a text outside the language; nothing is left behind."""
    # No piece of this vocabulary holds a digit.
    constraints = TokenConstraints(grammar=regex_grammar("regex", "ab(1|2)"))
    async with running_pair(DRAFT) as pair:
        for k in (0, 4):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await pair.generate(
                    make_request(PROMPT, k=k, ignore_eos=False, constraints=constraints)
                )
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "a grammar" in (caught.value.details() or "")
        await pair.until_idle()


@pytest.mark.parametrize(
    ("grammar", "ignore_eos", "what"),
    [
        ("start: /(a/", False, "unclosed group"),
        ("start: /[0-9]/", False, "no token"),
        ('start: "a"', True, "ignore_eos"),
        ("#" * 200_000, False, "grammar"),
    ],
)
async def test_wrong_grammars_that_no_gateway_saw_are_refused(
    grammar: str, ignore_eos: bool, what: str
) -> None:
    """Whoever speaks to the orchestrator itself is told too, and the pair lives on."""
    async with running_pair(DRAFT) as pair:
        request = make_request(
            PROMPT, ignore_eos=ignore_eos, constraints=TokenConstraints(grammar=grammar)
        )
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await pair.generate(request)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert what in (caught.value.details() or "")
        answer = await pair.generate(make_request(PROMPT, max_tokens=4))
        assert len(answer.token_ids) == 4
        await pair.until_idle()


@pytest.mark.slow
async def test_grammars_and_objects_nest_over_every_k() -> None:
    """Recursion and any object: the state is a stack, and rejected tokens leave it as it was."""
    grammars = (
        lark_grammar("grammar", 'start: "(" (start | "x" | "y")* ")"'),
        json_grammar("json", {"type": "object"}, any_whitespace=False),
    )
    num_tokens = num_accepted = 0
    async with running_bytes_pair(k=5) as pair:
        for grammar, seed in itertools.product(grammars, range(4)):
            answers = [
                await pair.generate(
                    make_request(
                        PROMPT,
                        k=k,
                        rule="coupled",
                        seed=seed,
                        max_tokens=80,
                        ignore_eos=False,
                        constraints=TokenConstraints(grammar=grammar),
                    )
                )
                for k in KS
            ]
            for answer in answers:
                assert answer.token_ids == answers[0].token_ids
                assert answer.text == answers[0].text
            assert answers[-1].record is not None
            num_tokens += len(answers[0].token_ids)
            num_accepted += answers[-1].record.num_accepted_draft_tokens
    assert num_tokens > 100
    assert num_accepted > 20


def state_of_the_block_s_start(call: VerifyState) -> list[Any]:
    """The fault: every row of a block is masked by the committed tokens only."""
    first = call.session.row_edits(call.committed_length)
    return [replace(row, edits=first) for row in TARGET_ROWS(call)]


TARGET_ROWS = VerifyState.target_rows


def test_a_mask_that_does_not_move_inside_a_block_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The comparisons above can fail: five rows of one block, right and with the fault planted."""
    wanted = LANGUAGES["steps"]
    truth = slow_decode(TARGET, PROMPT, wanted, NUM_TOKENS)[:5]
    sampling = replace(GREEDY, constraints=wanted.constraints(len(PROMPT)))

    def rows(name: str) -> Sequence[int]:
        (reply,) = run(engine, Caller(name, PROMPT, sampling).verify(truth[:4]))
        assert isinstance(reply, VerifyReply)
        return reply.replacement_token_ids

    engine = toy_engine("target", TARGET)
    assert list(rows("right")) == truth
    monkeypatch.setattr(VerifyState, "target_rows", state_of_the_block_s_start)
    assert list(rows("wrong")) != truth
