"""Ray Serve's own tracing follows ours: exporter, ratio and name, where anything is exported."""

from __future__ import annotations

import importlib
import inspect

import pytest

from specserve.errors import ConfigurationError
from specserve.telemetry import serve_export
from specserve.telemetry.serve_export import serve_environment

NAMES = (serve_export.EXPORTER, serve_export.RATIO, serve_export.SERVICE_NAME)


@pytest.fixture(autouse=True)
def _nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*NAMES, serve_export.ENDPOINT, serve_export.SAMPLE_RATIO):
        monkeypatch.delenv(name, raising=False)


def test_without_an_endpoint_serve_traces_nothing() -> None:
    assert serve_environment() == {}
    assert serve_export.span_processors() == []


def test_serve_samples_as_we_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve's own default of 0.01 would decide for everything behind its proxy."""
    monkeypatch.setenv(serve_export.ENDPOINT, "http://127.0.0.1:4317")
    default = serve_environment()
    monkeypatch.setenv(serve_export.SAMPLE_RATIO, "0.25")
    quarter = serve_environment()
    monkeypatch.setenv(serve_export.RATIO, "0.5")

    assert default[serve_export.RATIO] == "1"
    assert quarter[serve_export.RATIO] == "0.25"
    assert serve_export.RATIO not in serve_environment()


def test_the_exporter_is_what_serve_can_call() -> None:
    """A function without arguments, found by its path."""
    module, _, name = serve_export.EXPORTER_PATH.partition(":")
    function = getattr(importlib.import_module(module), name)

    assert inspect.isfunction(function)
    assert not inspect.signature(function).parameters


@pytest.mark.parametrize("ratio", ["x", "-1", "1.5", "nan"])
def test_a_wrong_ratio_is_named(monkeypatch: pytest.MonkeyPatch, ratio: str) -> None:
    monkeypatch.setenv(serve_export.ENDPOINT, "http://127.0.0.1:4317")
    monkeypatch.setenv(serve_export.SAMPLE_RATIO, ratio)

    with pytest.raises(ConfigurationError, match=r"SPECSERVE_TRACE_SAMPLE_RATIO: .* \[0, 1\]"):
        serve_environment()
