"""Schemas: Kubernetes' own kinds in five versions, and KubeRay's RayService.

Stricter than a cluster is where it only drops: an unknown field is an error.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.protocols import Validator
from referencing import Registry, Resource

from support.manifests.documents import Document, Manifests, load, name_of

KUBERNETES_VERSIONS = ("1.30", "1.31", "1.32", "1.33", "1.34")

FOREIGN_GROUPS = ("ray.io/", "monitoring.coreos.com/", "cert-manager.io/")
"""Kinds that Kubernetes does not know: RayService has a schema of its own below; PodMonitor and
cert-manager's have none here, and rules instead."""

CRD_FILE = "ray.io_rayservices.yaml"


def kubernetes_problems(documents: list[Document]) -> Iterator[str]:
    """Check documents, and the pods inside a RayService, against every version's strict schemas."""
    found: dict[str, list[str]] = {}
    for version in KUBERNETES_VERSIONS:
        for document in _with_pods(documents):
            for problem in _problems(document, version):
                found.setdefault(problem, []).append(version)
    for problem, versions in found.items():
        yield f"{problem} (Kubernetes {', '.join(versions)})"


def _with_pods(documents: list[Document]) -> Iterator[Document]:
    for document in documents:
        if document.get("kind") == "RayService":
            for group in Manifests([document]).groups:
                template = group.spec.get("template") or {}
                pod = {"metadata": template.get("metadata") or {}, "spec": template.get("spec")}
                yield {"apiVersion": "v1", "kind": "Pod", **_named(pod, group.name)}
        elif not str(document.get("apiVersion", "")).startswith(FOREIGN_GROUPS):
            yield document


def _named(pod: Document, name: str) -> Document:
    return {**pod, "metadata": {**pod["metadata"], "name": name}}


def _problems(document: Document, version: str) -> Iterator[str]:
    validator = _validator(version, str(document.get("apiVersion")), str(document.get("kind")))
    if validator is None:
        yield f"{name_of(document)}: no kind {document.get('apiVersion')} {document.get('kind')}"
        return
    for error in validator.iter_errors(document):
        yield f"{name_of(document)}: {error.json_path}: {error.message[:200]}"


@cache
def _validator(version: str, api_version: str, kind: str) -> Validator | None:
    folder = resources.files("kubernetes_validate") / (
        f"kubernetes-json-schema/v{version}.0-local-strict"
    )
    group, _, rest = api_version.rpartition("/")
    prefix = f"{group.partition('.')[0]}-" if group else ""
    schema = folder / f"{kind.lower()}-{prefix}{rest}.json"
    if not schema.is_file():
        return None
    contents: dict[str, Any] = json.loads(schema.read_text(encoding="utf-8"))
    return Draft202012Validator(contents, registry=_definitions(version))


@cache
def _definitions(version: str) -> Registry[Any]:
    folder = resources.files("kubernetes_validate") / (
        f"kubernetes-json-schema/v{version}.0-local-strict"
    )
    text = (folder / "_definitions.json").read_text(encoding="utf-8")
    registry: Registry[Any] = Resource.from_contents(json.loads(text)) @ Registry()
    return registry


def ray_service_problems(documents: list[Document], crds: Path) -> Iterator[str]:
    """Check every RayService against KubeRay's v1 schema, its defaults applied."""
    schema, validator = _ray_service_schema(crds / CRD_FILE)
    for document in documents:
        if document.get("kind") != "RayService":
            continue
        if document.get("apiVersion") != "ray.io/v1":
            yield f"{name_of(document)}: apiVersion {document.get('apiVersion')}, wanted ray.io/v1"
        complete = with_defaults(without_nulls(document), schema)
        for error in validator.iter_errors(complete):
            yield f"{name_of(document)}: {error.json_path}: {error.message[:200]}"
        for problem in repeated_keys(complete, schema, "$"):
            yield f"{name_of(document)}: {problem}"


@cache
def _ray_service_schema(path: Path) -> tuple[Document, Validator]:
    definition = load(path.read_text(encoding="utf-8"))
    (version,) = [v for v in definition["spec"]["versions"] if v["name"] == "v1"]
    schema = closed(version["schema"]["openAPIV3Schema"])
    return schema, Draft202012Validator(schema)


def closed(schema: Any) -> Any:
    """Turn a CRD's schema into a JSON schema that refuses fields it does not name."""
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: closed(part) for key, part in schema.items()}
    # `properties` may itself be the name of a property: only a schema has its type beside it.
    is_object = made.get("type") == "object" and isinstance(made.get("properties"), dict)
    if is_object and not made.get("x-kubernetes-preserve-unknown-fields"):
        made.setdefault("additionalProperties", False)
    if made.get("nullable") is True and isinstance(made.get("type"), str):
        made["type"] = [made["type"], "null"]
    return made


def with_defaults(value: Any, schema: Any) -> Any:
    """Fill in what the API server would."""
    if isinstance(value, list):
        return [with_defaults(item, schema.get("items") or {}) for item in value]
    if not isinstance(value, dict):
        return value
    properties = schema.get("properties") or {}
    rest = schema.get("additionalProperties")
    filled = {
        key: with_defaults(part, properties.get(key) or (rest if isinstance(rest, dict) else {}))
        for key, part in value.items()
    }
    for key, part in properties.items():
        if key not in filled and "default" in part:
            filled[key] = part["default"]
    return filled


def without_nulls(value: Any) -> Any:
    """Drop nulls, as the API server does."""
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    if isinstance(value, dict):
        return {key: without_nulls(part) for key, part in value.items() if part is not None}
    return value


def repeated_keys(value: Any, schema: Any, path: str) -> Iterator[str]:
    """Find entries of a keyed list that have the same key: the API server refuses them."""
    if isinstance(value, list):
        items = schema.get("items") or {}
        keys = schema.get("x-kubernetes-list-map-keys") or []
        seen = [tuple(str(item.get(key)) for key in keys) for item in value] if keys else []
        for key in sorted({key for key in seen if seen.count(key) > 1}):
            yield f"{path}: {', '.join(key)} is there twice"
        for number, item in enumerate(value):
            yield from repeated_keys(item, items, f"{path}[{number}]")
    elif isinstance(value, dict):
        for key, part in value.items():
            inner = (schema.get("properties") or {}).get(key) or {}
            yield from repeated_keys(part, inner, f"{path}.{key}")
