"""One configuration for all replicas of a pool; each makes its own of it."""

import os

import pytest

from specserve.config import DraftConfig, EngineConfig, ServerConfig, TargetConfig
from specserve.rpc.placement import placed, placed_server, threads_per_engine

ENGINE = EngineConfig(model="toy:vocab_size=16")


@pytest.mark.parametrize("kind", [TargetConfig, DraftConfig])
def test_replicas_of_one_node_take_neighbouring_ports_and_the_threads_they_were_given(kind):
    config = kind(engine=ENGINE, server=ServerConfig(port=7000, lease_s=3.0))

    first, third = placed(config, 0, 2.0), placed(config, 2, 3.5)

    assert (first.server.port, third.server.port) == (7000, 7002)
    assert (first.engine.num_threads, third.engine.num_threads) == (2, 3)
    assert third.server.lease_s == 3.0
    assert third.engine.model == ENGINE.model
    assert config.server.port == 7000, "what was configured is as it was"


def test_free_port_stays_free_of_choice():
    """Port 0 takes any port, whatever the rank."""
    assert placed(TargetConfig(engine=ENGINE), 5, 1.0).server.port == 0


def test_share_of_a_processor_means_half_of_the_machine():
    """A fraction lets draft and target share a node: neither takes it for one thread."""
    config = TargetConfig(engine=ENGINE)

    assert placed(config, 0, 0.5).engine.num_threads == threads_per_engine()
    assert threads_per_engine() == max(1, len(os.sched_getaffinity(0)) // 2)


def test_configured_threads_win():
    config = TargetConfig(engine=ENGINE.model_copy(update={"num_threads": 7}))

    assert placed(config, 0, 2.0).engine.num_threads == 7


def test_ports_of_a_server_move_with_its_rank_and_only_those_that_were_chosen():
    """Orchestrators share nodes, too; so do the /metrics of all of them."""
    chosen = placed_server(ServerConfig(port=21300, metrics_port=9100), 2)
    free = placed_server(ServerConfig(port=0, metrics_port=None), 2)
    any_port = placed_server(ServerConfig(metrics_port=0), 2)

    assert (chosen.port, chosen.metrics_port) == (21302, 9102)
    assert (free.port, free.metrics_port) == (0, None)
    assert any_port.metrics_port == 0
