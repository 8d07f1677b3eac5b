"""Every field is right, or gets a 400 that names it, before a backend hears of the request."""

from __future__ import annotations

import json
import re
import threading
from typing import Any

import pytest

from specserve.config import SpeculativeMethod
from specserve.gateway import endpoints, plan
from specserve.rpc.codec import pack_method, unpack_ids, unpack_method
from specserve.rpc.constraints_codec import unpack_constraints
from specserve.speculation.constraints import TokenConstraints
from unit.gateway.fakes import (
    EOS,
    MAX_MODEL_LEN,
    MODEL,
    VOCAB_SIZE,
    Exchange,
    FakeBackend,
    make_app,
    make_client,
    pair,
)

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


def body_for(path: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Return a right body with these fields in it."""
    start: dict[str, Any] = {"prompt": "hi"} if path == COMPLETIONS else {"messages": MESSAGES}
    return {**start, **fields}


def schema_format(schema: dict[str, Any]) -> dict[str, Any]:
    """Ask for JSON of a schema."""
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


SHARED_WRONG: list[tuple[str, Any]] = [
    ("model", 5),
    ("stream", "yes"),
    ("stream", 1),
    ("stream_options", {"include_usage": True}),
    ("n", 0),
    ("n", -1),
    ("n", 129),
    ("n", 5_000_000),
    ("n", True),
    ("n", 1.5),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", 2**31),
    ("max_tokens", 2**63),
    ("max_tokens", "12"),
    ("temperature", -0.1),
    ("temperature", 2.1),
    ("temperature", "hot"),
    ("temperature", True),
    ("temperature", 10**400),
    ("temperature", float("nan")),
    ("temperature", float("inf")),
    ("top_p", 0),
    ("top_p", 1.01),
    ("top_p", -1),
    ("top_p", float("nan")),
    ("top_k", -2),
    ("top_k", 2**63),
    ("top_k", 1.5),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("seed", 2**64),
    ("seed", 2**200),
    ("seed", -(2**63) - 1),
    ("seed", "x"),
    ("seed", 1.5),
    ("stop", ""),
    ("stop", [""]),
    ("stop", ["a", 1]),
    ("stop", 5),
    ("stop", [str(i) for i in range(17)]),
    ("stop", "x" * 1025),
    ("stop", ["x", "y" * 1025]),
    ("stop_token_ids", [1] * 129),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [VOCAB_SIZE]),
    ("stop_token_ids", [10**12]),
    ("stop_token_ids", [1.5]),
    ("stop_token_ids", 5),
    ("repetition_penalty", 0),
    ("repetition_penalty", -1),
    ("repetition_penalty", 2.01),
    ("repetition_penalty", "1"),
    ("repetition_penalty", True),
    ("repetition_penalty", float("nan")),
    ("repetition_penalty", 10**400),
    ("presence_penalty", 2.1),
    ("presence_penalty", -2.1),
    ("presence_penalty", float("inf")),
    ("frequency_penalty", 3),
    ("frequency_penalty", "0"),
    ("frequency_penalty", float("nan")),
    ("logit_bias", {"5": 1e308}),
    ("logit_bias", {"5": 101}),
    ("logit_bias", {"5": 10**400}),
    ("logit_bias", {"5": True}),
    ("logit_bias", {"5": "1"}),
    ("logit_bias", {"191222": -100}),
    ("logit_bias", {str(VOCAB_SIZE): 1}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {"AI": -100}),
    ("logit_bias", {"": 1}),
    ("logit_bias", {"1" * 5000: 1}),
    ("logit_bias", {"5": 1, "05": 2}),
    ("logit_bias", {"5": float("nan")}),
    ("logit_bias", {str(i): 1 for i in range(301)}),
    ("logit_bias", [1]),
    ("logit_bias", 5),
    ("bad_words", "x"),
    ("bad_words", [""]),
    ("bad_words", [5]),
    ("bad_words", ["x" * 257]),
    ("bad_words", ["x"] * 129),
    ("allowed_token_ids", []),
    ("allowed_token_ids", [-1]),
    ("allowed_token_ids", [1, VOCAB_SIZE]),
    ("allowed_token_ids", [10**1000]),
    ("allowed_token_ids", ["1"]),
    ("allowed_token_ids", 1),
    ("allowed_token_ids", [1] * (VOCAB_SIZE + 1)),
    ("min_tokens", -1),
    ("min_tokens", 1.5),
    ("min_tokens", True),
    ("min_tokens", MAX_MODEL_LEN),
    ("ignore_eos", "no"),
    ("skip_special_tokens", 0),
    ("return_token_ids", 1),
    ("prompt_logprobs", -1),
    ("prompt_logprobs", 21),
    ("prompt_logprobs", True),
    ("prompt_logprobs", "1"),
    ("prompt_logprobs", 2_000_000_000),
    ("num_speculative_tokens", -1),
    ("num_speculative_tokens", 5),
    ("num_speculative_tokens", 2**80),
    ("speculative_method", "eagle"),
    ("speculative_method", "cascade"),
    ("speculative_method", 1),
    ("rejection_sample_method", "block"),
    ("rejection_sample_method", 1),
    ("speculation_metrics", "all"),
    ("response_format", "json"),
    ("response_format", {"type": "xml"}),
    ("response_format", {"type": "json_schema"}),
    ("response_format", {"type": "json_object", "json_schema": {"name": "a", "schema": {}}}),
    ("response_format", {"type": "json_schema", "json_schema": {"schema": {}}}),
    ("response_format", schema_format({"type": "number", "unevaluatedProperties": False})),
    ("response_format", schema_format({"type": "objekt"})),
    ("response_format", schema_format({"$ref": "https://example.com/schema"})),
    ("response_format", schema_format({"enum": ["x" * 70_000]})),
    ("structured_outputs", {}),
    ("structured_outputs", {"regex": "(a"}),
    ("structured_outputs", {"regex": "(?=a)a"}),
    ("structured_outputs", {"regex": "(a)\\1"}),
    ("structured_outputs", {"regex": "a" * 9000}),
    ("structured_outputs", {"regex": "a", "choice": ["b"]}),
    ("structured_outputs", {"regex": "a", "backtracking": True}),
    ("structured_outputs", {"choice": []}),
    ("structured_outputs", {"choice": ["a", 1]}),
    ("structured_outputs", {"json": "{"}),
    ("structured_outputs", {"json": "[]"}),
    ("structured_outputs", {"json": {}, "whitespace_pattern": "(("}),
    ("structured_outputs", {"regex": "a", "whitespace_pattern": " "}),
    ("structured_outputs", {"choice": ["a"], "disable_any_whitespace": True}),
    ("structured_outputs", {"whitespace_pattern": " "}),
    ("structured_outputs", {"grammar": "start: x"}),
    ("structured_outputs", {"grammar": "root ::= [0-9]"}),
    ("structured_outputs", {"grammar": '%llguidance {}\nstart: "a"'}),
    ("structured_outputs", {"json_object": False}),
    ("guided_json", {"type": 5}),
    ("guided_regex", "[a"),
    ("guided_regex", "a" * 8193),
    ("guided_json", {"description": "x" * 65_536}),
    ("guided_json", " " * 65_536 + "{}"),
    ("guided_grammar", 'start: "a"' + " " * 65_536),
    ("guided_choice", [str(number) for number in range(1025)]),
    ("guided_choice", ["x" * 65_536, "y"]),
    ("guided_choice", "a"),
    ("guided_grammar", " "),
]

SHARED_UNHONOURED: list[tuple[str, Any]] = [
    ("best_of", 2),
    ("suffix", "end"),
    ("include_stop_str_in_output", True),
    ("add_generation_prompt", False),
    ("chat_template_kwargs", {"a": 1}),
    ("priority", 0.5),
    ("priority", 2**31),
    ("tools", [{"type": "function"}]),
    ("tool_choice", "required"),
    ("logprob_token_ids", [1, 2]),
    ("promt", "x"),
    ("", 1),
]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(("field", "value"), SHARED_WRONG + SHARED_UNHONOURED)
async def test_a_wrong_field_gets_a_400_that_names_it(path: str, field: str, value: Any) -> None:
    """B059, B226, B227, B229, B230, B232, B233: 400 with the field, and nothing is decoded."""
    backend = FakeBackend()
    async with make_client(backend) as client:
        answer = await client.post(path, content=json.dumps(body_for(path, {field: value})))
        error = answer.json()["error"]

        assert answer.status_code == 400
        assert error["type"] == "invalid_request_error"
        assert field == re.split(r"[.\[]", error["param"] or "")[0]
        assert field in error["message"]
        assert backend.requests == []
        assert (await client.post(path, json=body_for(path, {}))).status_code == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt"),
        ({"prompt": [[1], []]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [[1], "a"]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [1.0]}, "prompt"),
        ({"prompt": {}}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"prompt": ["a"] * 3, "n": 100}, "n"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": 2_000_000_000}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"echo": 1}, "echo"),
        ({"echo": "yes"}, "echo"),
        ({"echo": True, "max_tokens": -1}, "max_tokens"),
        ({"echo": True, "max_tokens": 0, "min_tokens": 1}, "min_tokens"),
        ({"max_completion_tokens": 5}, "max_completion_tokens"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"messages": MESSAGES}, "messages"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"other": True}}, "stream_options"),
        ({"stream": True, "n": 0}, "n"),
    ],
)
async def test_what_is_wrong_with_a_completion_is_named(fields: dict[str, Any], param: str) -> None:
    """B259: with stream too, a wrong field is an ordinary 400 before the stream."""
    backend = FakeBackend()
    async with make_client(backend) as client:
        answer = await client.post(COMPLETIONS, json=body_for(COMPLETIONS, fields))

    assert answer.status_code == 400
    assert answer.headers["content-type"] == "application/json"
    assert answer.json()["error"]["param"].split("[")[0].split(".")[0] == param
    assert backend.requests == []


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content",
        ),
        (
            {"messages": [*MESSAGES, {"role": "user", "content": [{"type": "text"}]}]},
            "messages[1].content",
        ),
        (
            {"messages": [{"role": "user", "content": "x", "tool_calls": []}]},
            "messages[0].tool_calls",
        ),
        ({"logprobs": 3}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 1_000_000_000}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"echo": True}, "echo"),
        ({"prompt": "x"}, "prompt"),
    ],
)
async def test_what_is_wrong_with_a_chat_is_named(fields: dict[str, Any], param: str) -> None:
    """The path to the fault is told, and nothing is decoded."""
    backend = FakeBackend()
    async with make_client(backend) as client:
        answer = await client.post(CHAT, json=body_for(CHAT, fields))

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert backend.requests == []


@pytest.mark.parametrize("token_id", [-1, VOCAB_SIZE, 4294967295, 2**31 - 1, 2**63, 10**1000])
@pytest.mark.parametrize("nested", [False, True])
async def test_an_id_outside_the_vocabulary_is_refused(token_id: int, nested: bool) -> None:
    """B104: both bounds are checked, and the backend never sees the id."""
    backend = FakeBackend()
    prompt = [[1], [token_id]] if nested else [token_id]
    async with make_client(backend) as client:
        answer = await client.post(COMPLETIONS, json={"prompt": prompt})

    assert answer.status_code == 400
    assert "out of vocabulary" in answer.json()["error"]["message"]
    assert backend.requests == []


@pytest.mark.parametrize("prompt", [[0], [[0]], [0, 0], [[0], [0]]])
async def test_id_zero_is_a_token(prompt: Any) -> None:
    """B103: [0] is not empty."""
    async with make_client(FakeBackend()) as client:
        answer = await client.post(COMPLETIONS, json={"prompt": prompt, "max_tokens": 1})

    assert answer.status_code == 200


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_null_is_absent_in_every_field(path: str) -> None:
    """B107: null is the same as not saying it, honoured or not."""
    names = {name for name, _ in SHARED_WRONG} | {name for name, _ in SHARED_UNHONOURED}
    names = (names | {"echo"}) - {"promt", "logprob_token_ids", ""}
    backend = FakeBackend()
    async with make_client(backend) as client:
        answer = await client.post(path, json=body_for(path, dict.fromkeys(names)))
        plain = await client.post(path, json=body_for(path, {}))

    assert answer.status_code == plain.status_code == 200
    for request in backend.requests:
        request.request_id = ""
        request.sampling.seed = 0
    assert backend.requests[0] == backend.requests[1]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_inert_fields_and_values_that_change_nothing_are_taken(path: str) -> None:
    """B257: what clients send as a matter of course works."""
    inert = {"user": "u", "metadata": {"a": None}, "store": True, "service_tier": "auto"}
    neutral = {
        "frequency_penalty": 0.0,
        "presence_penalty": 0,
        "repetition_penalty": 1.0,
        "logit_bias": {},
        "bad_words": [],
        "min_tokens": 0,
        "best_of": 1,
        "echo": False,
        "tools": [],
        "parallel_tool_calls": True,
        "response_format": {"type": "text"},
    }
    async with make_client(FakeBackend()) as client:
        answer = await client.post(path, json=body_for(path, {**inert, **neutral, "model": MODEL}))

    assert answer.status_code == 200


async def test_a_misspelt_field_is_told_the_nearest_right_one() -> None:
    """The hint is in the message."""
    async with make_client(FakeBackend()) as client:
        answer = await client.post(COMPLETIONS, json={"prompt": "x", "temprature": 1})

    assert "did you mean temperature?" in answer.json()["error"]["message"]


async def test_another_model_is_not_found() -> None:
    """404 with OpenAI's code, and the served name."""
    async with make_client(FakeBackend()) as client:
        answer = await client.post(COMPLETIONS, json={"prompt": "x", "model": "gpt-4"})

    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"
    assert MODEL in answer.json()["error"]["message"]


@pytest.mark.parametrize("length", [MAX_MODEL_LEN, MAX_MODEL_LEN + 1, 5000])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_a_prompt_that_fills_the_context_is_refused_with_both_numbers(
    path: str, length: int
) -> None:
    """The long ones are tokenised in a worker thread, with the same answer."""
    text = "x" * (length - (len("user:|") if path == CHAT else 0))
    message = {"messages": [{"role": "user", "content": text}]}
    backend = FakeBackend()
    async with make_client(backend) as client:
        answer = await client.post(path, json=message if path == CHAT else {"prompt": text})
    error = answer.json()["error"]

    assert answer.status_code == 400
    assert error["code"] == "context_length_exceeded"
    assert str(length) in error["message"]
    assert str(MAX_MODEL_LEN) in error["message"]
    assert backend.requests == []


async def test_a_prompt_that_leaves_one_place_is_taken() -> None:
    """max_tokens is cut to what the context holds."""
    backend = FakeBackend()
    async with make_client(backend) as client:
        answer = await client.post(COMPLETIONS, json={"prompt": "x" * (MAX_MODEL_LEN - 1)})

    assert answer.status_code == 200
    assert backend.requests[0].max_tokens == 1


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"x"',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": ' + b"[" * 100_000,
        b'{"prompt": "x", "seed": ' + b"9" * 100_000 + b"}",
    ],
    ids=range(9),
)
async def test_what_is_no_json_object_gets_a_400(raw: bytes) -> None:
    """Whatever the bytes, the answer has OpenAI's shape and the server lives on."""
    async with make_client(FakeBackend()) as client:
        answer = await client.post(COMPLETIONS, content=raw)
        after = await client.post(COMPLETIONS, json={"prompt": "x"})

    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert after.status_code == 200


async def test_a_hundred_thousand_faults_cost_no_more_than_one() -> None:
    """B253: the first fault is told; listing them all would hold the event loop for seconds."""
    async with make_client(FakeBackend()) as client:
        answer = await client.post(COMPLETIONS, json={"prompt": "x", "stop": [""] * 100_000})

    assert answer.status_code == 400
    assert len(answer.content) < 1000


async def test_the_configured_model_name_is_served() -> None:
    """--served-model-name replaces the target's id."""
    async with make_client(FakeBackend(), served_model_name="alias") as client:
        listed = (await client.get("/v1/models")).json()["data"]
        answer = await client.post(COMPLETIONS, json={"prompt": "x", "model": "alias"})

    assert [card["id"] for card in listed] == ["alias"]
    assert answer.json()["model"] == "alias"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, ("STANDARD", 1.0)),
        ({"seed": 0}, ("COUPLED", 1.0)),
        ({"temperature": 0}, ("GREEDY", 0.0)),
        ({"temperature": 9e-6, "seed": 5}, ("GREEDY", 0.0)),
        ({"temperature": 0.5, "rejection_sample_method": "coupled"}, ("COUPLED", 0.5)),
        ({"seed": 1, "rejection_sample_method": "standard"}, ("STANDARD", 1.0)),
        ({"temperature": 0, "rejection_sample_method": "standard"}, ("GREEDY", 0.0)),
    ],
)
async def test_the_acceptance_rule_follows_the_request(
    fields: dict[str, Any], expected: tuple[str, float]
) -> None:
    """auto is coupled for requests that name a seed, 0 included, else standard."""
    backend = FakeBackend()
    async with make_client(backend) as client:
        await client.post(COMPLETIONS, json={"prompt": "x", **fields})
    sampling = backend.requests[0].sampling
    names = type(sampling).DESCRIPTOR.fields_by_name["rule"].enum_type.values_by_number

    assert names[sampling.rule].name == f"ACCEPTANCE_RULE_{expected[0]}"
    assert sampling.temperature == expected[1]


async def test_the_pair_s_own_rule_holds_where_the_request_names_none() -> None:
    """A configured rule is no auto."""
    backend = FakeBackend()
    backend.pair = pair(rejection_sample_method="standard")
    async with make_client(backend) as client:
        await client.post(COMPLETIONS, json={"prompt": "x", "seed": 1})
        await client.post(
            COMPLETIONS, json={"prompt": "x", "seed": 1, "rejection_sample_method": "auto"}
        )
    rules = [request.sampling.rule for request in backend.requests]

    assert rules == [2, 3]


async def test_a_synthetic_deployment_follows_no_rule_that_a_request_names() -> None:
    """It is no rule to ask for; where it is configured, no other is obeyed, and /ready says so."""
    backend = FakeBackend()
    async with make_client(backend) as client:
        asked = await client.post(
            COMPLETIONS, json={"prompt": "x", "rejection_sample_method": "synthetic"}
        )
        lossless = (await client.get("/ready")).json()["lossless"]
        backend.pair = pair(
            rejection_sample_method="synthetic", synthetic_acceptance_rates=[0.9, 0.8, 0.7, 0.6]
        )
        still = (await client.get("/ready")).json()["lossless"]
    async with make_client(backend) as client:
        named = await client.post(
            COMPLETIONS, json={"prompt": "x", "rejection_sample_method": "standard"}
        )
        served = await client.post(COMPLETIONS, json={"prompt": "x"})

    assert (asked.status_code, named.status_code, served.status_code) == (400, 400, 200)
    assert "synthetic rates" in named.json()["error"]["message"]
    assert (lossless, still) == (True, False)
    assert [request.sampling.rule for request in backend.requests] == [2]


@pytest.mark.parametrize(
    ("methods", "told"),
    [(("ngram", "suffix"), "ngram or suffix"), ((), "none, for speculation is off")],
)
async def test_a_method_that_is_not_offered_is_answered_with_those_that_are(
    methods: tuple[SpeculativeMethod, ...], told: str
) -> None:
    """A 400 that names the field, and no orchestrator sees the request."""
    backend = FakeBackend()
    backend.pair = pair(speculative_methods=map(pack_method, methods))
    async with make_client(backend) as client:
        answer = await client.post(
            COMPLETIONS, json={"prompt": "x", "speculative_method": "cascade"}
        )
    error = answer.json()["error"]

    assert answer.status_code == 400
    assert error["param"] == "speculative_method"
    assert f"this deployment offers {told}" in error["message"]
    assert backend.requests == []


@pytest.mark.parametrize(
    ("seed", "sent"), [(0, 0), (-1, 2**64 - 1), (2**63, 2**63), (2**64 - 1, 2**64 - 1), (7, 7)]
)
async def test_seeds_are_taken_modulo_two_to_the_64(seed: int, sent: int) -> None:
    """B232: as documented on the field."""
    backend = FakeBackend()
    async with make_client(backend) as client:
        await client.post(COMPLETIONS, json={"prompt": "x", "seed": seed})

    assert backend.requests[0].sampling.seed == sent


async def test_a_missing_seed_is_drawn_anew_for_each_body() -> None:
    """B011: no two bodies share it, all choices of one do. False alarm: 2^-64."""
    backend = FakeBackend()
    async with make_client(backend) as client:
        for _ in range(2):
            await client.post(COMPLETIONS, json={"prompt": "x", "n": 2})
    seeds = [request.sampling.seed for request in backend.requests]

    assert seeds[0] == seeds[1] != seeds[2] == seeds[3]


async def test_every_field_reaches_the_request() -> None:
    """What the contract says is what the body said."""
    backend = FakeBackend()
    body = {
        "prompt": "hi",
        "max_tokens": 7,
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 9,
        "min_p": 0.125,
        "seed": 3,
        "stop": ["é", "b"],
        "stop_token_ids": [0, 5],
        "ignore_eos": True,
        "skip_special_tokens": False,
        "num_speculative_tokens": 0,
        "speculative_method": "suffix",
        "logprobs": 3,
        "speculation_metrics": "detailed",
        "repetition_penalty": 1.5,
        "presence_penalty": -0.25,
        "frequency_penalty": 2,
        "logit_bias": {"7": -100, "012": 2.5},
        "bad_words": ["ab", " é"],
        "allowed_token_ids": [9, 7, 0, 7, 9],
        "min_tokens": 3,
    }
    async with make_client(backend, request_timeout_s=12) as client:
        await client.post(COMPLETIONS, json=body)
    request = backend.requests[0]
    sampling = request.sampling

    assert unpack_ids(request.prompt_token_ids, "") == (104, 105)
    assert request.max_tokens == 7
    assert (sampling.top_p, sampling.top_k, sampling.min_p) == (0.25, 9, 0.125)
    assert sampling.num_logprobs_plus_one == 4
    assert list(request.stop) == ["é".encode(), b"b"]
    assert unpack_ids(request.stop_token_ids, "") == (0, 5)
    assert request.ignore_eos
    assert request.include_special_tokens
    assert request.include_origins
    assert request.num_speculative_tokens_plus_one == 1
    assert unpack_method(request.speculative_method) == "suffix"
    assert request.timeout_s == 12
    assert unpack_constraints(sampling.constraints) == TokenConstraints(
        prompt_length=2,
        repetition_penalty=1.5,
        presence_penalty=-0.25,
        frequency_penalty=2.0,
        logit_bias=((7, -100.0), (12, 2.5)),
        bad_words=(tuple(b"ab"), tuple(b" ab"), tuple(" é".encode())),
        allowed_token_ids=(0, 7, 9),
        min_tokens=3,
        end_token_ids=(0, 5, EOS),
    )
    assert request.committed_token_ids == b""


@pytest.mark.parametrize(
    ("path", "fields", "expected"),
    [
        (COMPLETIONS, {}, 16),
        (COMPLETIONS, {"max_tokens": 5}, 5),
        (COMPLETIONS, {"max_tokens": 1000}, MAX_MODEL_LEN - 2),
        (CHAT, {}, MAX_MODEL_LEN - len("user:hi|")),
        (CHAT, {"max_tokens": 5}, 5),
        (CHAT, {"max_completion_tokens": 6}, 6),
        (CHAT, {"max_completion_tokens": 6, "max_tokens": 5}, 6),
    ],
)
async def test_max_tokens_has_each_endpoint_s_default(
    path: str, fields: dict[str, Any], expected: int
) -> None:
    """B257: 16 for completions, to the context's end for chats; the newer name works."""
    backend = FakeBackend()
    async with make_client(backend) as client:
        await client.post(path, json=body_for(path, fields))

    assert backend.requests[0].max_tokens == expected


async def test_text_parts_are_joined_and_developers_are_the_system() -> None:
    """Templates see plain text and the roles that they know."""
    backend = FakeBackend()
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "be"}, {"role": "user", "content": parts}]
    async with make_client(backend) as client:
        await client.post(CHAT, json={"messages": messages})

    prompt = bytes(unpack_ids(backend.requests[0].prompt_token_ids, ""))
    assert prompt == b"system:be|user:ab|"


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_options_that_ask_for_nothing_send_nothing(path: str) -> None:
    """Defaults, and min_tokens 0, cost a request no constraints on the wire."""
    backend = FakeBackend()
    neutral = {"repetition_penalty": 1, "presence_penalty": 0, "logit_bias": {}, "min_tokens": 0}
    async with make_client(backend) as client:
        await client.post(path, json=body_for(path, neutral))

    assert not backend.requests[0].sampling.HasField("constraints")


@pytest.mark.parametrize(
    ("fields", "param", "told"),
    [
        ({"min_tokens": 17}, "min_tokens", "17, at most max_tokens was wanted, here 16"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens", "here 4"),
        ({"allowed_token_ids": [EOS], "min_tokens": 1}, "allowed_token_ids", f"[{EOS}]"),
        ({"allowed_token_ids": [120], "bad_words": ["x"]}, "allowed_token_ids", "bad_words"),
        ({"presence_penalty": 2.5}, "presence_penalty", "2.5: Input should be less than or equal"),
        ({"logit_bias": {"5": 101}}, "logit_bias", "101 for token 5; a number in [-100, 100]"),
        ({"logit_bias": {"299": 1, "300": 1}}, "logit_bias", "300 is out of vocabulary; 0 to 299"),
    ],
)
async def test_a_wrong_option_is_told_with_its_value_and_what_was_wanted(
    fields: dict[str, Any], param: str, told: str
) -> None:
    """Field, value, range; also where the fault lies between two fields."""
    backend = FakeBackend()
    async with make_client(backend) as client:
        answer = await client.post(COMPLETIONS, json={"prompt": "x", **fields})
    error = answer.json()["error"]

    assert answer.status_code == 400
    assert error["param"] == param
    assert told in error["message"]
    assert backend.requests == []


async def test_top_k_minus_one_keeps_all() -> None:
    """As other servers of this field have it."""
    backend = FakeBackend()
    async with make_client(backend) as client:
        await client.post(COMPLETIONS, json={"prompt": "x", "top_k": -1})

    assert backend.requests[0].sampling.top_k == 0


async def test_constraints_are_completed_and_packed_once_for_all_choices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They may be as large as the vocabulary; only where the output starts is each prompt's own."""
    made: list[str] = []

    def watch(name: str) -> None:
        make = getattr(plan, name)

        def noted(*arguments: Any, **named: Any) -> Any:
            made.append(name)
            return make(*arguments, **named)

        monkeypatch.setattr(plan, name, noted)

    watch("complete_constraints")
    watch("pack_sampling")
    backend = FakeBackend()
    body = {"prompt": ["hi", "hey"], "n": 3, "allowed_token_ids": [7, 9], "seed": 5}
    async with make_client(backend) as client:
        assert (await client.post(COMPLETIONS, json=body)).status_code == 200

    assert sorted(made) == ["complete_constraints", "pack_sampling"]
    for index, request in enumerate(backend.requests):
        constraints = unpack_constraints(request.sampling.constraints)
        assert constraints.allowed_token_ids == (7, 9)
        assert constraints.prompt_length == len(body["prompt"][index // 3])
        assert constraints.prompt_length == len(unpack_ids(request.prompt_token_ids, ""))
        assert (request.sampling.choice, request.sampling.seed) == (index, 5)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_a_body_of_many_ids_is_planned_off_the_event_loop(
    monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """B254: checking and packing half a million of them takes long."""
    threads: list[int] = []
    make = endpoints.make_plan

    def noted(*arguments: Any) -> Any:
        threads.append(threading.get_ident())
        return make(*arguments)

    monkeypatch.setattr(endpoints, "make_plan", noted)
    async with make_client(FakeBackend()) as client:
        await client.post(path, json=body_for(path, {}))
        monkeypatch.setattr(endpoints, "LONG_PLAN_IDS", 1)
        await client.post(path, json=body_for(path, {}))

    here, elsewhere = threads
    assert here == threading.get_ident() != elsewhere


LONG = "x" * 100_000
HUGE = int("9" * 4000)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        *((path, {"model": LONG}) for path in (COMPLETIONS, CHAT)),
        *((path, {LONG: 1}) for path in (COMPLETIONS, CHAT)),
        *((path, {"n": HUGE}) for path in (COMPLETIONS, CHAT)),
        *((path, {"num_speculative_tokens": HUGE}) for path in (COMPLETIONS, CHAT)),
        *((path, {"rejection_sample_method": LONG}) for path in (COMPLETIONS, CHAT)),
        *((path, {"speculative_method": LONG}) for path in (COMPLETIONS, CHAT)),
        *((path, {"stop_token_ids": [HUGE]}) for path in (COMPLETIONS, CHAT)),
        *((path, {"temperature": HUGE}) for path in (COMPLETIONS, CHAT)),
        *((path, {"seed": LONG}) for path in (COMPLETIONS, CHAT)),
        *((path, {"stream": True, "stream_options": {LONG: 1}}) for path in (COMPLETIONS, CHAT)),
        (COMPLETIONS, {"logprobs": HUGE}),
        (COMPLETIONS, {"prompt": [HUGE]}),
        (CHAT, {"logprobs": True, "top_logprobs": HUGE}),
        (CHAT, {"messages": [{"role": LONG, "content": "x"}]}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": LONG, "text": "x"}]}]}),
        (CHAT, {"messages": [{"role": "user", "content": "x", LONG: 1}]}),
    ],
)
async def test_an_error_repeats_no_more_than_the_beginning_of_a_value(
    path: str, fields: dict[str, Any]
) -> None:
    """However long the value, and the field is named all the same."""
    backend = FakeBackend()
    async with make_client(backend) as client:
        answer = await client.post(path, json=body_for(path, fields))

    assert answer.status_code == (404 if "model" in fields else 400)
    assert answer.json()["error"]["param"]
    assert len(answer.content) < 600
    assert backend.requests == []


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", f"/v1/models/{LONG}"),
        ("GET", f"/{LONG}"),
        ("DELETE", f"/v1/models/{LONG}"),
        ("X" * 1000, "/v1/models"),
    ],
)
async def test_an_error_repeats_no_more_than_the_beginning_of_a_path(
    method: str, path: str
) -> None:
    """Paths and methods are a client's values too."""
    exchange = Exchange(make_app(FakeBackend()), path, {}, method=method)
    exchange.read_all()
    await exchange.start()

    assert exchange.status in (404, 405)
    assert len(exchange.body) < 600
