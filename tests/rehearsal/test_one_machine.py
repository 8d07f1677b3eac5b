"""The settings of a cluster on one machine: `specserve serve --config`. `make rehearsal`."""

from __future__ import annotations

import signal
from pathlib import Path

import httpx
import pytest

from helpers.processes import CommandLine, left_running
from rehearsal.cluster import PROMPT, START_TIMEOUT_S, settings
from specserve.tools.held_port import HeldPort

pytestmark = pytest.mark.slow


def test_clusters_settings_serve_on_one_machine(tmp_path: Path) -> None:
    """The file of an overlay, its models and port apart, is served without groups, and stops."""
    path = tmp_path / "specserve.yaml"
    port = HeldPort()
    text = settings().replace("port: 8000", f"port: {port.number}")
    path.write_text(text.replace("num_cpus: 1,", "num_cpus: 0.5,"))  # for a machine of two
    command = CommandLine(["serve", "--config", str(path)])
    try:
        ready = command.wait_event("ready", START_TIMEOUT_S)
        processes = command.descendants()
        with httpx.Client(base_url=str(ready["address"]), timeout=60, trust_env=False) as client:
            body = {**PROMPT, "max_tokens": 32, "speculation_metrics": "summary"}
            answer = client.post("/v1/completions", json=body).json()
        assert answer["usage"]["completion_tokens"] == 32
        assert answer["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0
        command.process.send_signal(signal.SIGINT)
        assert command.wait(60) == 0, command.output
        assert left_running(processes) == []
    finally:
        command.kill()
        port.release()
