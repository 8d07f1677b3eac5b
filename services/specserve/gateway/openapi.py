"""The OpenAPI document: every route, every field with its range, every error.

Bodies are read by `requests.py`, so that their size is bounded and errors have OpenAI's shape: the
framework knows nothing of them, and they are described here. Limits are those of this gateway.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

from specserve.gateway.answers import ErrorAnswer
from specserve.gateway.config import GatewayConfig
from specserve.gateway.errors import codes_of_status
from specserve.gateway.requests import NEUTRAL, ChatRequest, CompletionRequest

JsonSchema = dict[str, Any]

_REFERENCE = "#/components/schemas/{model}"

_MEANINGS = {
    400: "A field is wrong; `param` names it.",
    404: "Another model was asked for.",
    408: "The body came too slowly.",
    413: "The body is too large.",
    429: "Too much at present: of this tenant, or of all.",
    500: "Something failed inside.",
    503: "Not at present: try again.",
    504: "Too late.",
}

REQUEST_ID = {
    "name": "X-Request-Id",
    "in": "header",
    "required": False,
    "description": "Id of the request in answer, traces and logs; one is made without it.",
    "schema": {"type": "string", "pattern": "^[A-Za-z0-9._:-]{1,128}$"},
}


def request_body(kind: type[BaseModel]) -> JsonSchema:
    """Return a route's `openapi_extra` for a body of this kind."""
    schema = {"$ref": _REFERENCE.format(model=kind.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def generation_body(kind: type[BaseModel]) -> JsonSchema:
    """Return the same for a route whose requests have an id."""
    return {**request_body(kind), "parameters": [REQUEST_ID]}


def streamed(chunk: type[BaseModel]) -> JsonSchema:
    """Return the content of an answer as server-sent events."""
    return {
        "text/event-stream": {
            "schema": {"$ref": _REFERENCE.format(model=chunk.__name__)},
            "description": "With `stream`: events `data: {this}`, `data: [DONE]` at the end. What "
            "goes wrong in between is one event with an `error`, and the end.",
        }
    }


def errors(*statuses: int) -> dict[int | str, JsonSchema]:
    """Return a route's `responses` for these errors."""
    return {status: _error(status) for status in statuses}


def _error(status: int) -> JsonSchema:
    codes = codes_of_status(status)
    told = f" Codes: {', '.join(f'`{code}`' for code in codes)}." if codes else ""
    answer: JsonSchema = {"model": ErrorAnswer, "description": _MEANINGS[status] + told}
    if status in (429, 503):
        header = {"description": "Seconds to wait.", "schema": {"type": "integer"}}
        answer["headers"] = {"Retry-After": header}
    return answer


def complete_document(
    app: FastAPI,
    bodies: Sequence[type[BaseModel]],
    chunks: Sequence[type[BaseModel]],
    config: GatewayConfig,
    open_paths: Collection[str] | None = None,
) -> None:
    """Add what the framework does not see to the document, which is made when first asked for.

    Args:
        bodies: kinds of bodies that routes read themselves.
        chunks: kinds of events that routes write themselves.
        open_paths: those that need no API key; None where none does.
    """
    make_document = app.openapi

    def document() -> JsonSchema:
        whole = make_document()
        schemas = whole.setdefault("components", {}).setdefault("schemas", {})
        for kind in bodies:
            _add(schemas, kind, kind.model_json_schema(ref_template=_REFERENCE))
        for kind in chunks:
            shown = kind.model_json_schema(ref_template=_REFERENCE, mode="serialization")
            _add(schemas, kind, shown)
        for kind in bodies:
            _say_null_is_absent(schemas[kind.__name__])
        for generation in (CompletionRequest, ChatRequest):
            _add_neutral(schemas[generation.__name__], generation)
            _add_limits(schemas[generation.__name__]["properties"], config)
        _drop_framework_errors(whole)
        if open_paths is not None:
            _close_all_but(whole, open_paths)
        return whole

    app.openapi = document  # type: ignore[method-assign]


def _add(schemas: JsonSchema, kind: type[BaseModel], schema: JsonSchema) -> None:
    schemas.update(schema.pop("$defs", {}))
    schemas[kind.__name__] = schema


def _say_null_is_absent(schema: JsonSchema) -> None:
    for name, field in schema["properties"].items():
        kinds = field.get("anyOf", [field])
        if name in schema.get("required", ()) or {"type": "null"} in kinds or "type" not in field:
            continue
        told = {key: field.pop(key) for key in ("title", "description", "default") if key in field}
        schema["properties"][name] = {"anyOf": [field, {"type": "null"}], **told}


def _add_neutral(schema: JsonSchema, kind: type[BaseModel]) -> None:
    """Tell the fields that are known and not honoured, with the values that are taken."""
    for name, values in NEUTRAL.items():
        if name not in kind.model_fields:
            schema["properties"][name] = {
                "enum": [*values, None],
                "description": "Not supported: taken where it asks for nothing.",
            }


def _add_limits(properties: JsonSchema, config: GatewayConfig) -> None:
    """Tell the limits of this gateway's configuration."""
    limits: Mapping[str, tuple[str, str, int]] = {
        "n": ("integer", "maximum", config.max_n),
        "logprobs": ("integer", "maximum", config.max_logprobs),
        "top_logprobs": ("integer", "maximum", config.max_logprobs),
        "prompt_logprobs": ("integer", "maximum", config.max_logprobs),
        "stop": ("array", "maxItems", config.max_stops),
        "prompt": ("array", "maxItems", config.max_prompts),
    }
    for name, (kind, word, most) in limits.items():
        for field in properties.get(name, {}).get("anyOf", ()):
            ids_of_one_prompt = field.get("items", {}).get("type") == "integer"
            if field.get("type") == kind and not ids_of_one_prompt:
                field[word] = most


def _close_all_but(whole: JsonSchema, open_paths: Collection[str]) -> None:
    """Tell that paths want an API key, and how one is refused."""
    scheme = {"type": "http", "scheme": "bearer"}
    whole["components"]["securitySchemes"] = {"apiKey": scheme}
    content = {"application/json": {"schema": {"$ref": _REFERENCE.format(model="ErrorAnswer")}}}
    for path, item in whole["paths"].items():
        if path not in open_paths:
            for operation in item.values():
                operation["security"] = [{"apiKey": []}]
                operation["responses"]["401"] = {
                    "description": "No API key, or a wrong one.",
                    "content": content,
                }


def _drop_framework_errors(whole: JsonSchema) -> None:
    """Drop the framework's own 422: nothing here answers it."""
    for path in whole["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)
    for name in ("HTTPValidationError", "ValidationError"):
        whole["components"]["schemas"].pop(name, None)
