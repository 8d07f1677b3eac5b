"""Pools that follow their load under Ray: targets 1 to 4 to 1, drafts 0 to 4 to 1, nothing fails.

`make scale`. The application is deployed from the rendered configuration, with its own policy; what
changes is the load.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import httpx
import pytest
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema

from rehearsal.load import Load
from specserve.app import LocalRay
from specserve.serve_args import ServeArgs
from specserve.serve_config import APP_NAME, serve_config
from specserve.tools.held_port import HeldPort

pytestmark = pytest.mark.slow

TARGET = "toy:vocab_size=96,seed=7,step_ms=20"
DRAFT = "toy:vocab_size=96,seed=7,noise=0.7,noise_seed=1,step_ms=1"
MANY = 7
"""Streams at once that four replicas of each pool are wanted for."""

TIMEOUT_S = 150.0


def settings(port: int) -> ServeArgs:
    """Return pools that follow their load within seconds."""
    scaled = {"max_replicas": 4, "upscale_delay_s": 0, "downscale_delay_s": 2, "target_load": 1.9}
    return ServeArgs.model_validate(
        {
            "target": {"model": TARGET},
            "speculative": {"model": DRAFT, "num_speculative_tokens": 3},
            "gateway": {"port": port},
            "server": {"drain_deadline_s": 20},
            "target_pool": {"num_cpus": 0.05, "autoscaling": scaled},
            "draft_pool": {
                "num_replicas": 0,
                "num_cpus": 0.05,
                "autoscaling": {**scaled, "min_replicas": 0},
            },
        }
    )


def running(role: str) -> int:
    """Count a deployment's running replicas."""
    deployment = serve.status().applications[APP_NAME].deployments[role]
    return deployment.replica_states.get("RUNNING", 0)


def until(condition: Callable[[], bool], what: str, load: Load) -> float:
    """Wait; returns the seconds it took."""
    began = time.monotonic()
    while not condition():
        assert not load.failures, load.failures
        found = {role: running(role) for role in ("target", "draft")}
        assert time.monotonic() - began < TIMEOUT_S, f"{what} did not come: {found}"
        time.sleep(0.5)
    return time.monotonic() - began


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Deploy the rendered configuration on a Ray of its own."""
    monkeypatch.setenv("RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S", "1")
    with HeldPort() as port:
        args = settings(port.number)
        with LocalRay(args):
            serve.start(http_options=serve.HTTPOptions(host="127.0.0.1", port=port.number))
            _get_global_client().deploy_apps(ServeDeploySchema.model_validate(serve_config(args)))
            url = f"http://127.0.0.1:{port.number}"
            began = time.monotonic()
            while not _is_ready(url):
                assert time.monotonic() - began < TIMEOUT_S, serve.status()
                time.sleep(0.5)
            yield url


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready", timeout=5, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def test_pools_follow_their_load_and_nothing_fails(url: str) -> None:
    """Ready without a draft; more load brings both pools to four, less takes them back to one, and
    none takes the drafts to none (B155). Every stream is whole, its text that of its prompt."""
    assert (running("target"), running("draft")) == (1, 0)
    load = Load(url)
    try:
        load.keep(MANY)
        up_s = until(lambda: running("target") == running("draft") == 4, "four of each", load)
        num_before = load.num_draft_tokens
        until(lambda: load.num_draft_tokens > num_before, "draft tokens", load)
        load.keep(1)
        down_s = until(lambda: running("target") == running("draft") == 1, "one of each", load)
    finally:
        load.stop()
    until(lambda: running("draft") == 0, "no draft", load)
    print(
        f"\n1 to 4 targets and 0 to 4 drafts in {up_s:.0f} s, back to 1 and 1 in {down_s:.0f} s: "
        f"{load.num_done} requests, {len(load.failures)} failed or other, "
        f"{load.num_draft_tokens} draft tokens"
    )
    assert load.failures == []
    assert load.num_done > MANY
