"""A pod that ends empties its Ray node first."""

from __future__ import annotations

import time

import pytest

from specserve import cli
from specserve.errors import ConfigurationError
from specserve.tools.drain_node import node_id_of, serving, wait_until_gone

RAYLET = ["/opt/ray/raylet", "--raylet_socket_name=x", "--node_id=ab12", "--node_ip_address=::1"]


def test_node_is_known_by_its_raylet() -> None:
    """The id is read off the one raylet here; none or several cannot be drained by guessing."""
    others = [["python", "--node_id=77"], [], ["ray::ServeReplica:specserve:target"]]

    assert node_id_of([*others, RAYLET]) == "ab12"
    with pytest.raises(ConfigurationError, match="found 0 Ray nodes"):
        node_id_of(others)
    with pytest.raises(ConfigurationError, match="found 2 Ray nodes"):
        node_id_of([RAYLET, [*RAYLET[:2], "--node_id=cd34"]])


def test_replicas_and_proxies_hold_requests() -> None:
    names = ["ray::ServeReplica:specserve:target", "ray::ProxyActor", "ray::IDLE", "gcs_server"]

    assert serving(names) == ["ray::ProxyActor", "ray::ServeReplica:specserve:target"]


def test_waiting_ends_with_the_last_or_with_the_deadline() -> None:
    assert wait_until_gone(list, time.monotonic() + 60) == []
    assert wait_until_gone(lambda: ["a"], time.monotonic() - 1) == ["a"]


def test_wrong_timeout_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["drain-node", "--timeout-s=0"]) == 2
    assert "--timeout-s: found 0" in capsys.readouterr().err
