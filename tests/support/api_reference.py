"""The tables of docs/api.md, made from the published document: `make reference` writes them.

What stands between them is written by hand.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from unit.gateway.fakes import FakeBackend, make_app

DOCUMENT = Path(__file__).parents[2] / "docs" / "api.md"
_TABLE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def written() -> str:
    """Return docs/api.md with its tables made anew."""
    published = make_app(FakeBackend()).openapi()
    text = DOCUMENT.read_text(encoding="utf-8")
    return _TABLE.sub(lambda found: found[1] + _table(published, found[2]) + found[3], text)


def _table(published: dict[str, Any], name: str) -> str:
    if name == "routes":
        return _routes(published)
    schema = published["components"]["schemas"][name]
    has_defaults = any("default" in field for field in schema["properties"].values())
    header = "| field | what it is | default | meaning |\n|---|---|---|---|\n"
    if not has_defaults:
        header = "| field | what it is | meaning |\n|---|---|---|\n"
    lines = []
    for field, shown in schema["properties"].items():
        if "Not supported" in shown.get("description", ""):
            continue
        cells = [f"`{field}`", _kind(published, shown)]
        if has_defaults:
            cells.append(_default(field, shown, schema))
        lines.append(" | ".join([*cells, _meaning(published, shown)]))
    if name in ("CompletionRequest", "ChatRequest"):
        return header + "".join(f"| {line} |\n" for line in lines) + _refused(schema)
    return header + "".join(f"| {line} |\n" for line in lines)


def _routes(published: dict[str, Any]) -> str:
    lines = [
        f"| `{method.upper()} {path}` | {operation['description']} | "
        f"{', '.join(operation['responses'])} |\n"
        for path, item in published["paths"].items()
        for method, operation in item.items()
    ]
    return "| route | what it does | statuses |\n|---|---|---|\n" + "".join(lines)


def _refused(schema: dict[str, Any]) -> str:
    taken = [
        f"`{field}` ({', '.join(_json(value) for value in shown['enum'])})"
        for field, shown in schema["properties"].items()
        if "Not supported" in shown.get("description", "")
    ]
    return f"\nKnown and refused, but for the values in brackets: {', '.join(taken)}.\n"


def _kind(published: dict[str, Any], shown: dict[str, Any]) -> str:
    forms = [form for form in shown.get("anyOf", [shown]) if form != {"type": "null"}]
    return " or ".join(dict.fromkeys(_form(published, form) for form in forms)) or "anything"


def _form(published: dict[str, Any], form: dict[str, Any]) -> str:
    if "$ref" in form:
        name = form["$ref"].rpartition("/")[2]
        return f"object ({name})"
    if "const" in form:
        return f"`{_json(form['const'])}`"
    if "enum" in form:
        return ", ".join(f"`{_json(value)}`" for value in form["enum"])
    kind = str(form.get("type", "anything"))
    if kind == "array":
        items = _kind(published, form.get("items", {}))
        return f"list of ({items})" + _range(form, "minItems", "maxItems")
    if kind == "string":
        return "string" + _range(form, "minLength", "maxLength", "characters ")
    return kind + _range(form, "minimum", "maximum")


def _range(form: dict[str, Any], least: str, most: str, unit: str = "") -> str:
    low, high = form.get(least), form.get(most)
    if (above := form.get("exclusiveMinimum")) is not None:
        return f", {unit}> {above}" + (f", <= {high}" if high is not None else "")
    if low is not None and high is not None:
        return f", {unit}{low} to {high}"
    if low is not None:
        return f", {unit}>= {low}"
    return f", {unit}<= {high}" if high is not None else ""


def _default(name: str, shown: dict[str, Any], schema: dict[str, Any]) -> str:
    if name in schema.get("required", ()):
        return "required"
    default = shown.get("default")
    return "" if default is None else f"`{_json(default)}`"


def _meaning(published: dict[str, Any], shown: dict[str, Any]) -> str:
    told = shown.get("description")
    if told is None and "$ref" in shown:
        told = published["components"]["schemas"][shown["$ref"].rpartition("/")[2]]["description"]
    return " ".join(str(told).split()).replace("|", "\\|")


def _json(value: object) -> str:
    return json.dumps(value)


if __name__ == "__main__":
    DOCUMENT.write_text(written(), encoding="utf-8")
