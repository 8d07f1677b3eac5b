"""The OpenAPI document of bodies that the framework does not read itself.

Bodies are read by `requests.py`, so that their size is bounded and errors have OpenAI's shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

_REFERENCE = "#/components/schemas/{model}"


def request_body(kind: type[BaseModel]) -> dict[str, Any]:
    """Return a route's `openapi_extra` for a body of this kind."""
    schema = {"$ref": _REFERENCE.format(model=kind.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def describe_bodies(app: FastAPI, kinds: Sequence[type[BaseModel]]) -> None:
    """Add the kinds' schemas to the document, which is made when it is first asked for."""
    make_document = app.openapi

    def document() -> dict[str, Any]:
        whole = make_document()
        schemas = whole.setdefault("components", {}).setdefault("schemas", {})
        for kind in kinds:
            schema = kind.model_json_schema(ref_template=_REFERENCE)
            schemas.update(schema.pop("$defs", {}))
            schemas[kind.__name__] = schema
        return whole

    app.openapi = document  # type: ignore[method-assign]
