"""docs/api.md says what the gateway publishes: it cannot drift from the request models."""

from __future__ import annotations

import re

from specserve.gateway.errors import codes_of_status, statuses
from specserve.gateway.requests import ChatRequest, CompletionRequest
from support.api_reference import DOCUMENT, written


def test_the_tables_are_those_of_the_published_document() -> None:
    """`make reference` writes them anew."""
    assert DOCUMENT.read_text(encoding="utf-8") == written(), "run `make reference`"


def test_every_field_and_every_error_is_there() -> None:
    """No field of a body, no status and no code is missing, whatever the tables are made from."""
    text = DOCUMENT.read_text(encoding="utf-8")
    for kind in (CompletionRequest, ChatRequest):
        table = text.partition(f"<!-- table: {kind.__name__} -->")[2].partition("<!-- end -->")[0]
        fields = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
        assert fields == [*kind.model_fields]
    errors = text.partition("## Errors")[2]
    for status in statuses():
        (row,) = re.findall(rf"^\| {status} \|.*$", errors, re.MULTILINE)
        assert all(f"`{code}`" in row for code in codes_of_status(status)), status
