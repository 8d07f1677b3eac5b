"""What a configuration of the OpenTelemetry collector must be, for the components used here.

The collector's own check needs its binary. Written down after the documentation of each component:
keys, and what a pipeline may hold. Another component wants its lines here first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jsonschema

Config = Mapping[str, Any]


def _keys(properties: Config, *required: str) -> dict[str, Any]:
    return {
        "type": ["object"] if required else ["object", "null"],
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


_DURATION = {"type": "string", "pattern": r"^(\d+(\.\d+)?(ms|s|m|h))+$"}
_ENDPOINT = {"type": "string", "pattern": r"^[\w.-]*:\d{1,5}$"}
_COUNT = {"type": "integer", "minimum": 1}
_SERVER = _keys({"endpoint": _ENDPOINT}, "endpoint")
_DIMENSION = _keys({"name": {"type": "string"}, "default": {"type": "string"}}, "name")
_BUCKETS = _keys({"buckets": {"type": "array", "items": _DURATION, "minItems": 1}})

RECEIVERS = {
    "otlp": _keys(
        {"protocols": {**_keys({"grpc": _SERVER, "http": _SERVER}), "minProperties": 1}},
        "protocols",
    )
}
PROCESSORS = {
    "batch": _keys({"timeout": _DURATION, "send_batch_size": _COUNT}),
    "memory_limiter": _keys(
        {"check_interval": _DURATION, "limit_mib": _COUNT, "spike_limit_mib": _COUNT},
        *("check_interval", "limit_mib"),
    ),
}
EXPORTERS = {
    "debug": _keys({"verbosity": {"enum": ["basic", "normal", "detailed"]}}),
    "prometheus": _SERVER,
}
CONNECTORS = {
    "spanmetrics": _keys(
        {
            "histogram": _keys({"explicit": _BUCKETS}),
            "dimensions": {"type": "array", "items": _DIMENSION},
        }
    )
}
_SECTIONS = {
    "receivers": RECEIVERS,
    "processors": PROCESSORS,
    "exporters": EXPORTERS,
    "connectors": CONNECTORS,
}
_SIGNALS = {"otlp": {"traces", "metrics", "logs"}, "prometheus": {"metrics"}}
"""Of receivers and exporters that do not take every signal."""

_CONNECTED = {"spanmetrics": ("traces", "metrics")}
"""{connector: (signal of the pipeline that it ends, of the one that it begins)}."""


def problems(config: Config) -> Iterator[str]:
    """Yield everything that the collector would refuse, or that does nothing."""
    for name in config.keys() - _SECTIONS.keys() - {"service"}:
        yield f"{name}: no section of ours"
    for section, known in _SECTIONS.items():
        for name, settings in (config.get(section) or {}).items():
            schema = known.get(_type(name))
            if schema is None:
                yield f"{section}.{name}: unknown"
                continue
            for error in jsonschema.Draft202012Validator(schema).iter_errors(settings):
                at = ".".join(map(str, (section, name, *error.absolute_path)))
                yield f"{at}: {error.message}"
    pipelines = (config.get("service") or {}).get("pipelines") or {}
    if not pipelines:
        yield "service.pipelines: none"
    for name, pipeline in pipelines.items():
        yield from _pipeline_problems(config, name, pipeline)
    yield from _unused(config, pipelines)


def _pipeline_problems(config: Config, name: str, pipeline: Config) -> Iterator[str]:
    signal = _type(name)
    if signal not in ("traces", "metrics", "logs"):
        yield f"pipeline {name}: no such signal"
    for key in pipeline.keys() - {"receivers", "processors", "exporters"}:
        yield f"pipeline {name}: unknown key {key}"
    for place, end in (("receivers", 1), ("exporters", 0)):
        if not pipeline.get(place):
            yield f"pipeline {name}: no {place}"
        for part in pipeline.get(place) or ():
            if part in (config.get("connectors") or {}):
                wanted = {_CONNECTED.get(_type(part), (signal, signal))[end]}
            elif part in (config.get(place) or {}):
                wanted = _SIGNALS.get(_type(part), {signal})
            else:
                yield f"pipeline {name}: {place} {part} is not defined"
                continue
            if signal not in wanted:
                yield f"pipeline {name}: {place} {part} takes no {signal}"
    processors = pipeline.get("processors") or []
    for part in processors:
        if part not in (config.get("processors") or {}):
            yield f"pipeline {name}: processors {part} is not defined"
    if not processors or _type(processors[0]) != "memory_limiter":
        yield f"pipeline {name}: memory_limiter is not its first processor"


def _unused(config: Config, pipelines: Config) -> Iterator[str]:
    uses = [
        (place, part)
        for pipeline in pipelines.values()
        for place in ("receivers", "processors", "exporters")
        for part in pipeline.get(place) or ()
    ]
    for section in ("receivers", "processors", "exporters"):
        for name in config.get(section) or {}:
            if (section, name) not in uses:
                yield f"{section}.{name}: no pipeline uses it"
    for name in config.get("connectors") or {}:
        if not {("receivers", name), ("exporters", name)} <= set(uses):
            yield f"connectors.{name}: it must end one pipeline and begin another"


def _type(name: str) -> str:
    """Return the type of a component or pipeline: `otlp/second` is an otlp."""
    return name.partition("/")[0]
