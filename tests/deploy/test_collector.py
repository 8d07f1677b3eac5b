"""The collector's configuration is right, and its check finds the faults that it is for."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.manifests.collector import problems

PATH = Path(__file__).parents[2] / "deploy" / "compose" / "collector.yaml"


@pytest.fixture(scope="module")
def config() -> Any:
    return yaml.safe_load(PATH.read_text(encoding="utf-8"))


def _pipeline(config: Any, name: str) -> Any:
    return config["service"]["pipelines"][name]


def test_the_configuration_is_right(config: Any) -> None:
    assert list(problems(config)) == []


@pytest.mark.parametrize(
    ("words", "spoil"),
    [
        ("exporter: no section", lambda c: c.update(exporter={})),
        ("receivers.oltp: unknown", lambda c: c["receivers"].update(oltp={})),
        ("'protocols' is a required", lambda c: c["receivers"]["otlp"].clear()),
        ("protocols", lambda c: c["receivers"]["otlp"].update(protocols={})),
        (
            "'gprc' was unexpected",
            lambda c: c["receivers"]["otlp"]["protocols"].update(gprc={"endpoint": "0.0.0.0:1"}),
        ),
        (
            "'0.0.0.0' does not match",
            lambda c: c["exporters"]["prometheus"].update(endpoint="0.0.0.0"),
        ),
        (
            "limit_mib",
            lambda c: c["processors"]["memory_limiter"].update(limit_mib="256Mi"),
        ),
        (
            "'1' does not match",
            lambda c: c["processors"]["memory_limiter"].update(check_interval="1"),
        ),
        ("'low' is not one of", lambda c: c["exporters"]["debug"].update(verbosity="low")),
        (
            "'20' does not match",
            lambda c: c["connectors"]["spanmetrics"]["histogram"]["explicit"].update(
                buckets=["20"]
            ),
        ),
        ("service.pipelines: none", lambda c: c["service"].pop("pipelines")),
        ("trace: no such signal", lambda c: c["service"]["pipelines"].update(trace={})),
        ("unknown key exporter", lambda c: _pipeline(c, "traces").update(exporter=[])),
        ("no receivers", lambda c: _pipeline(c, "traces").update(receivers=[])),
        ("exporters debugg is not", lambda c: _pipeline(c, "traces")["exporters"].append("debugg")),
        ("processors b is not", lambda c: _pipeline(c, "traces")["processors"].append("b")),
        (
            "prometheus takes no traces",
            lambda c: _pipeline(c, "traces")["exporters"].append("prometheus"),
        ),
        (
            "spanmetrics takes no metrics",
            lambda c: _pipeline(c, "metrics")["exporters"].append("spanmetrics"),
        ),
        (
            "not its first processor",
            lambda c: _pipeline(c, "traces")["processors"].reverse(),
        ),
        ("processors.batch: no pipeline", lambda c: _pipeline(c, "traces")["processors"].pop()),
        ("must end one pipeline", lambda c: _pipeline(c, "traces")["exporters"].pop(0)),
    ],
)
def test_a_fault_is_found(config: Any, words: str, spoil: Callable[[Any], object]) -> None:
    spoilt = copy.deepcopy(config)
    spoil(spoilt)

    found = list(problems(spoilt))

    assert any(words in problem for problem in found), found
