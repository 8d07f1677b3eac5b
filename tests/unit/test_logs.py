"""Log lines carry the request and the trace they belong to, and no one else's."""

from __future__ import annotations

import asyncio
import json
import logging

import pytest

from specserve.errors import ConfigurationError
from specserve.telemetry import TraceContext
from specserve.telemetry.logs import (
    FORMAT,
    JsonFormatter,
    configure_from_environment,
    enter_request,
)


async def test_each_line_belongs_to_the_request_of_its_task() -> None:
    """Requests that run side by side, and tasks that they start; outside of them no id is told."""
    lines: list[dict[str, str]] = []

    def log(message: str) -> None:
        record = logging.LogRecord("specserve", logging.INFO, "", 0, "%s", (message,), None)
        lines.append(json.loads(JsonFormatter().format(record)))

    async def deeper(name: str) -> None:
        await asyncio.sleep(0)
        log(f"{name} deeper")

    async def serve(name: str, number: int) -> None:
        enter_request(name, TraceContext(number, number, is_sampled=False))
        await asyncio.sleep(0)
        await asyncio.create_task(deeper(name))
        log(f"{name} ends\nwith a second line")

    await asyncio.gather(serve("a", 10), serve("b", 11))
    log("outside")

    assert len(lines) == 5
    for line in lines:
        name = line["message"][0]
        if name in "ab":
            assert line["request_id"] == name
            assert line["trace_id"] == f"{10 + 'ab'.index(name):032x}"
            assert len(line["span_id"]) == 16
        else:
            assert "request_id" not in line
            assert "trace_id" not in line
        assert line["level"] == "INFO"


def test_a_replica_logs_as_its_environment_says(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """JSON once it is asked for, each line once; what else is asked for is refused by name."""
    logger = logging.getLogger("specserve")
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "propagate", True)
    configure_from_environment()
    assert logger.handlers == []
    monkeypatch.setenv(FORMAT, "json")
    for _ in range(2):
        configure_from_environment()
    logging.getLogger("specserve.somewhere").warning("the %s", "line")
    (line,) = capsys.readouterr().err.splitlines()
    assert json.loads(line)["message"] == "the line"
    monkeypatch.setenv(FORMAT, "yaml")
    with pytest.raises(ConfigurationError, match=FORMAT):
        configure_from_environment()
