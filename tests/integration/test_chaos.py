"""Faults of all kinds once, under load, on plain processes; `make chaos` does so for minutes."""

from __future__ import annotations

import random

import pytest

from chaos.client import Client, toy_truth
from chaos.cluster import TARGET, VOCAB_SIZE, Shape, running_cluster
from chaos.faults import FAULTS
from chaos.members import Timing
from chaos.stage import named, requests_from, run_stage
from chaos.tally import Tally
from chaos.workload import make_request

# Of two targets one is always left alone, so that faults of targets come one after the other.
KINDS = (
    "target killed",
    "orchestrator hangs",
    "draft slow",
    "target frame twice",
    "target hangs",
    "draft frame twice",
    "orchestrator connection cut",
    "target frames swapped",
    "target connection cut",
    "draft killed",
    "target replies lost",
    "target device hangs",
    "orchestrator killed",
    "draft frames swapped",
    "target back with old sessions",
    "target frame lost and cut",
    "target ended by SIGTERM",
    "poison request",
)


@pytest.mark.slow
async def test_faults_of_all_kinds_cost_no_token() -> None:
    """Every stream is whole and right, whatever is killed, stopped, cut, lost, repeated or swapped;
    nothing is held in the end, and no process had to be killed to end.

    Cases from the field: B151 and B175 (a dead draft leaves the targets in use), B152 (a target
    that dies with calls in flight), B154 (a reply lost after the work), B161 (a target that is told
    to go), B176 (a device that dies inside its replica), B185 (a start beside live streams).
    """
    shape = Shape(
        num_targets=2, num_drafts=1, num_gateways=1, timing=Timing(lease_s=3.0, hang_s=1.5)
    )
    tally = Tally("short", kinds=KINDS)
    async with running_cluster(shape) as cluster:
        client = Client(cluster.urls, toy_truth(TARGET))
        try:
            await run_stage(
                cluster,
                client,
                requests_from(lambda c: make_request(c, VOCAB_SIZE), random.Random(3)),
                iter(named(FAULTS, KINDS)),
                tally,
                seconds=600,
                per_s=6.0,
                pause_s=0.2,
                chance=random.Random(4),
            )
        finally:
            await client.close()
    print(*tally.lines(), sep="\n")
    assert tally.faults_found() == []
    assert tally.num_requests > len(KINDS)
