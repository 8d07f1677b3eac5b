"""Each way to ask for a language reaches the orchestrator as one grammar, or is refused by name."""

from __future__ import annotations

import threading
from typing import Any

import httpx
import openai
import pytest

from specserve.grammar.compiler import Grammar, GrammarCompiler
from specserve.grammar.lark import (
    MAX_CHOICES,
    choice_grammar,
    json_grammar,
    lark_grammar,
    regex_grammar,
)
from unit.gateway.fakes import EOS, MODEL, FakeBackend, make_app, make_client

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", None]}, "b": {"const": None}}}
OBJECT = {"type": "object"}
LARK = 'start: "a" start "b" | "c"'

FORMS: list[tuple[dict[str, Any], str]] = [
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": SCHEMA, "strict": None, "description": "d"},
            }
        },
        json_grammar("", SCHEMA),
    ),
    ({"response_format": {"type": "json_object"}}, json_grammar("", OBJECT)),
    ({"structured_outputs": {"json": SCHEMA, "regex": None}}, json_grammar("", SCHEMA)),
    ({"structured_outputs": {"json": '{"type": "object"}'}}, json_grammar("", OBJECT)),
    (
        {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
        json_grammar("", SCHEMA, any_whitespace=False),
    ),
    (
        {"structured_outputs": {"json_object": True, "whitespace_pattern": " ?"}},
        json_grammar("", OBJECT, whitespace_pattern=" ?"),
    ),
    ({"structured_outputs": {"regex": "a/b+"}}, regex_grammar("", "a/b+")),
    ({"structured_outputs": {"choice": ["a", "\n"]}}, choice_grammar("", ["a", "\n"])),
    ({"structured_outputs": {"grammar": LARK}}, lark_grammar("", LARK)),
    ({"guided_json": SCHEMA}, json_grammar("", SCHEMA)),
    ({"guided_regex": "[0-9]{4}"}, regex_grammar("", "[0-9]{4}")),
    ({"guided_choice": ["yes", "no"]}, choice_grammar("", ["yes", "no"])),
    ({"guided_grammar": LARK}, lark_grammar("", LARK)),
    ({"response_format": {"type": "text"}}, ""),
    ({"response_format": {"type": "text"}, "guided_regex": "a"}, regex_grammar("", "a")),
    ({"structured_outputs": None, "guided_choice": None, "response_format": None}, ""),
]


def body_for(path: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Return a right body with these fields in it."""
    start: dict[str, Any] = {"prompt": "hi"}
    if path == CHAT:
        start = {"messages": [{"role": "user", "content": "hi"}]}
    return {**start, **fields}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(("fields", "grammar"), FORMS)
async def test_a_form_is_one_grammar(path: str, fields: dict[str, Any], grammar: str) -> None:
    """With EOS beside it for its end; a null inside a schema stays a value."""
    backend = FakeBackend()
    async with make_client(backend) as client:
        answer = await client.post(path, json=body_for(path, fields))

    assert answer.status_code == 200, answer.text
    (request,) = backend.requests
    constraints = request.sampling.constraints
    assert constraints.grammar == grammar
    assert constraints.eos_token_ids == (EOS.to_bytes(4, "little") if grammar else b"")
    if "const" in grammar:
        assert '"const": null' in grammar
        assert '["x", null]' in grammar


@pytest.mark.parametrize(
    ("fields", "named", "told"),
    [
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "guided_regex"),
        (
            {"guided_regex": "a", "response_format": {"type": "json_object"}},
            "guided_regex",
            "response_format",
        ),
        (
            {"structured_outputs": {"regex": "a", "choice": ["b"]}},
            "structured_outputs.choice",
            "structured_outputs.regex",
        ),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex", "unclosed group"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"type": "odd"}},
                }
            },
            "response_format.json_schema.schema",
            "Invalid type: odd",
        ),
        (
            {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
            "structured_outputs.whitespace_pattern",
            "only together with json",
        ),
        (
            {"structured_outputs": {"choice": ["a"], "disable_any_whitespace": True}},
            "structured_outputs.disable_any_whitespace",
            "only together with json",
        ),
        (
            {
                "structured_outputs": {
                    "json_object": True,
                    "disable_any_whitespace": True,
                    "whitespace_pattern": " ",
                }
            },
            "structured_outputs.whitespace_pattern",
            "disable_any_whitespace",
        ),
        ({"guided_grammar": "start: x"}, "guided_grammar", "unknown name"),
        ({"guided_choice": ["x"] * (MAX_CHOICES + 1)}, "guided_choice", str(MAX_CHOICES)),
        ({"guided_json": "x" * 70_000}, "guided_json", "65536"),
    ],
)
async def test_what_cannot_be_is_a_400_that_names_the_field_and_the_fault(
    fields: dict[str, Any], named: str, told: str
) -> None:
    """The library's own words where it refuses; nothing is decoded."""
    backend = FakeBackend()
    async with make_client(backend) as client:
        answer = await client.post(COMPLETIONS, json=body_for(COMPLETIONS, fields))

    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == named
    assert told in error["message"]
    assert backend.requests == []


@pytest.mark.parametrize(("method", "told"), [("auto", "end-of-text"), ("synthetic", "rates")])
async def test_b098_a_pair_that_cannot_hold_a_text_to_anything_says_so(
    method: str, told: str
) -> None:
    """No EOS, or draft tokens accepted by rates: rather a 400 than a text outside the language."""
    backend = FakeBackend()
    backend.pair.rejection_sample_method = method
    if method == "auto":
        backend.pair.target.eos_token_ids = b""
    async with make_client(backend) as client:
        answer = await client.post(COMPLETIONS, json={"prompt": "x", "guided_regex": "a"})

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "guided_regex"
    assert told in answer.json()["error"]["message"]


async def test_grammars_are_compiled_off_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large one may take long; other requests must not wait for it."""
    threads: list[threading.Thread] = []
    compile_it = GrammarCompiler.compile

    def watched(self: GrammarCompiler, text: str, tenant_salt: bytes = b"") -> Grammar:
        threads.append(threading.current_thread())
        return compile_it(self, text, tenant_salt)

    monkeypatch.setattr(GrammarCompiler, "compile", watched)
    async with make_client(FakeBackend()) as client:
        await client.post(COMPLETIONS, json={"prompt": "x", "guided_regex": "a"})

    (thread,) = threads
    assert thread is not threading.current_thread()


async def test_openai_s_own_client_asks_for_a_schema() -> None:
    """`response_format` as the client types it."""
    backend = FakeBackend()
    transport = httpx.ASGITransport(make_app(backend))
    async with openai.AsyncOpenAI(
        api_key="none",
        base_url="http://gateway/v1",
        max_retries=0,
        http_client=httpx.AsyncClient(transport=transport),
    ) as client:
        await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "hi"}],
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "object"}, "strict": True},
            },
        )

    assert backend.requests[0].sampling.constraints.grammar == json_grammar("", OBJECT)
