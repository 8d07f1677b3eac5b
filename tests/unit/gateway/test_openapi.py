"""The published document says what the gateway takes and answers: every route, field and error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from fastapi.routing import APIRoute

from specserve.gateway.errors import codes_of_status, statuses
from specserve.gateway.requests import NEUTRAL, ChatRequest, CompletionRequest
from specserve.gateway.token_routes import BODIES
from unit.gateway.fakes import FakeBackend, make_app, make_client

KINDS = {kind.__name__: kind for kind in (CompletionRequest, ChatRequest, *BODIES)}


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    """Return the document of a gateway with limits of its own."""
    whole: dict[str, Any] = make_app(FakeBackend(), max_n=3, max_prompts=5, max_stops=4).openapi()
    return whole


def forms(field: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what a field may be, besides null."""
    return [form for form in field.get("anyOf", [field]) if form != {"type": "null"}]


def accepts(document: dict[str, Any], kind: str, body: dict[str, Any]) -> bool:
    """Say whether the document allows a body."""
    schema = {"$ref": f"#/components/schemas/{kind}", "components": document["components"]}
    validator = jsonschema.Draft202012Validator(schema)
    return bool(validator.is_valid(body))


def test_every_route_is_published_with_its_answers_and_errors(document: dict[str, Any]) -> None:
    """No route is hidden but the document itself and a page's files; each answer has a schema."""
    routes = {
        (route.path.replace(":path", ""), method.lower())
        for route in make_app(FakeBackend()).routes
        if isinstance(route, APIRoute) and not route.path.startswith("/console")
        for method in route.methods
    }
    published = {(path, method) for path, item in document["paths"].items() for method in item}

    assert published == routes
    for path, item in document["paths"].items():
        for operation in item.values():
            assert "422" not in operation["responses"]
            for status, answer in operation["responses"].items():
                assert answer["description"], (path, status)
                assert all(content["schema"] for content in answer["content"].values())
                if status in ("429", "503") and path != "/ready":
                    assert "Retry-After" in answer["headers"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_the_errors_of_an_endpoint_are_told_with_their_codes(
    document: dict[str, Any], path: str
) -> None:
    """Each status that `errors.py` can answer, and each code that tells its errors apart."""
    responses = document["paths"][path]["post"]["responses"]
    for status in statuses():
        error = responses[str(status)]
        reference = error["content"]["application/json"]["schema"]["$ref"]
        assert reference == "#/components/schemas/ErrorAnswer"
        assert all(f"`{code}`" in error["description"] for code in codes_of_status(status))
    assert {"application/json", "text/event-stream"} == responses["200"]["content"].keys()


def test_where_a_key_is_wanted_the_document_says_so(tmp_path: Path) -> None:
    """Every path but the probes has the scheme and the 401; without keys none has."""
    (tmp_path / "keys").write_text("", encoding="utf-8")
    closed = make_app(FakeBackend(), api_key_file=str(tmp_path / "keys")).openapi()
    plain = make_app(FakeBackend()).openapi()

    assert closed["components"]["securitySchemes"] == {
        "apiKey": {"type": "http", "scheme": "bearer"}
    }
    for path, item in closed["paths"].items():
        for operation in item.values():
            wanted = path not in ("/health", "/ready")
            assert ("security" in operation) == ("401" in operation["responses"]) == wanted
    assert "securitySchemes" not in plain["components"]
    assert "401" not in plain["paths"]["/v1/models"]["get"]["responses"]


@pytest.mark.parametrize("name", KINDS)
def test_every_field_is_published_with_words_for_it(document: dict[str, Any], name: str) -> None:
    """No more and no fewer; what is known and not honoured is there too, with what is taken."""
    published = document["components"]["schemas"][name]["properties"]
    kind = KINDS[name]
    neutral = (
        {other for other in NEUTRAL if other not in kind.model_fields}
        if kind in (CompletionRequest, ChatRequest)
        else set()
    )
    aliases = {field.alias or key for key, field in kind.model_fields.items()}

    assert published.keys() == aliases | neutral
    for schema in document["components"]["schemas"].values():
        for field, shown in schema.get("properties", {}).items():
            assert shown.get("description") or "$ref" in shown, field


def test_ranges_are_those_that_are_enforced(document: dict[str, Any]) -> None:
    """Of the API, and of this gateway's configuration."""
    published = document["components"]["schemas"]["CompletionRequest"]["properties"]

    def only(name: str) -> dict[str, Any]:
        return forms(published[name])[0]

    assert only("repetition_penalty")["exclusiveMinimum"] == 0
    assert only("repetition_penalty")["maximum"] == 2
    assert only("presence_penalty")["minimum"] == -2
    assert only("logit_bias")["additionalProperties"] == {
        "type": "number",
        "minimum": -100,
        "maximum": 100,
    }
    assert only("logit_bias")["maxProperties"] == 300
    assert only("bad_words")["maxItems"] == 128
    assert only("allowed_token_ids")["minItems"] == 1
    assert only("min_tokens")["minimum"] == 0
    assert only("n")["maximum"] == 3
    assert only("logprobs")["maximum"] == 20
    assert [form.get("maxItems") for form in forms(published["prompt"])] == [None, 5, None, 5]
    assert [form.get("maxItems") for form in forms(published["stop"])] == [None, 4]


BODIES_TO_COMPARE: list[tuple[dict[str, Any], bool]] = [
    ({}, True),
    ({"stop": "a"}, True),
    ({"stop": ["a", "b"]}, True),
    ({"stop": ""}, False),
    ({"n": 3}, True),
    ({"n": 4}, False),
    ({"temperature": None, "logit_bias": None, "stream_options": None}, True),
    ({"prompt": None}, False),
    ({"prompt": [[1], [2]]}, True),
    ({"prompt": 5}, False),
    ({"best_of": 1}, True),
    ({"best_of": 2}, False),
    ({"tools": []}, True),
    ({"tools": [1]}, False),
    ({"logprobs": 21}, False),
    ({"prompt_logprobs": 20}, True),
    ({"temprature": 1}, False),
    ({"response_format": {"type": "json_object"}}, True),
    ({"response_format": {"type": "xml"}}, False),
    ({"speculation_metrics": "all"}, False),
    ({"user": {"any": 1}}, True),
]


@pytest.mark.parametrize(("fields", "is_right"), BODIES_TO_COMPARE)
async def test_the_document_and_the_gateway_agree_on_a_body(
    document: dict[str, Any], fields: dict[str, Any], is_right: bool
) -> None:
    """What one takes the other takes; what is only wrong between two fields is beyond a schema."""
    body = {"prompt": "x", **fields}
    async with make_client(FakeBackend(), max_n=3, max_prompts=5, max_stops=4) as client:
        answer = await client.post("/v1/completions", content=json.dumps(body))

    assert accepts(document, "CompletionRequest", body) is is_right
    if "prompt_logprobs" not in fields:
        assert (answer.status_code == 200) is is_right
