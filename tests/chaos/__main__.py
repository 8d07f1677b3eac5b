"""`make chaos`: break things for ten minutes, and check every token that comes out.

Prints a table for each stage and exits non-zero when one did not pass.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import logging
import random
import sys
import time
from collections.abc import Iterable

from chaos.client import Client, toy_truth
from chaos.cluster import TARGET, VOCAB_SIZE, Shape, running_cluster
from chaos.embedded import embedded
from chaos.faults import FAULTS
from chaos.members import Timing
from chaos.plan import draw
from chaos.served import SERVE_FAULTS, run_served, served_cluster
from chaos.stage import requests_from, run_stage
from chaos.tally import Tally
from chaos.workload import make_request
from specserve.rpc.link import RECONNECT_TIMEOUT_S

DEFAULT_S = 600.0
PLAIN_SHARE, RAY_SHARE = 0.65, 0.22
"""Of the time: plain processes, Ray; the embedded pair has the rest. Starts are not counted."""
PLAIN_REQUESTS, PLAIN_FAULTS = 5000, 100
RAY_REQUESTS = 300
"""Wanted in the default time; a shorter run is to do its share."""


TARGET_LOSSES = (
    "target killed",
    "target device killed",
    "target ended by SIGTERM",
    "target hangs",
    "target device hangs",
    "target back with old sessions",
)
LOSSES_IN_A_ROW = 3
"""Targets that a stream may lose one after the other before it goes on: all there are."""
PREFILL_S = 3.0
"""To read the longest prompt of the load anew, and to be served among the others that do."""


def pause_bound_s(timing: Timing) -> float:
    """Return the longest pause after a target's loss: found out, and read anew elsewhere.

    As often as losses may follow one another: the next target may be lost as well.
    """
    return LOSSES_IN_A_ROW * (timing.hang_s + RECONNECT_TIMEOUT_S + PREFILL_S)


async def plain(seconds: float, seed: int, share: float) -> Tally:
    """Break plain processes of a toy pair."""
    tally = Tally(
        "plain processes, toy pair",
        num_requests_wanted=round(PLAIN_REQUESTS * share),
        num_faults_wanted=round(PLAIN_FAULTS * share),
        kinds=tuple(fault.kind for fault in FAULTS) if share >= 0.5 else (),
        bounds=dict.fromkeys(TARGET_LOSSES, pause_bound_s(Timing())),
    )
    chance = random.Random(seed)
    async with running_cluster(Shape()) as cluster:
        client = Client(cluster.urls, toy_truth(TARGET))
        try:
            await run_stage(
                cluster,
                client,
                requests_from(lambda c: make_request(c, VOCAB_SIZE), random.Random(seed + 1)),
                draw(FAULTS, chance),
                tally,
                seconds=seconds,
                per_s=1.4 * PLAIN_REQUESTS / (DEFAULT_S * PLAIN_SHARE),
                pause_s=0.65 * DEFAULT_S * PLAIN_SHARE / PLAIN_FAULTS,
                chance=chance,
            )
        finally:
            await client.close()
    return tally


async def served(seconds: float, seed: int, share: float) -> Tally:
    """Break a toy pair under Ray Serve: each kind once, and more of them while there is time."""
    tally = Tally(
        "Ray Serve, toy pair",
        num_requests_wanted=max(1, round(RAY_REQUESTS * min(share, 1.0))),
        num_faults_wanted=len(SERVE_FAULTS),
        kinds=tuple(fault.kind for fault in SERVE_FAULTS),
    )
    faults = itertools.islice(draw(SERVE_FAULTS, random.Random(seed)), len(SERVE_FAULTS))
    async with served_cluster() as cluster:
        await run_served(cluster, faults, tally, seed, RAY_REQUESTS / seconds)
    return tally


STAGES = {"plain": plain, "ray": served, "embedded": embedded}
SHARES = {
    "plain": PLAIN_SHARE,
    "ray": RAY_SHARE,
    "embedded": 1 - PLAIN_SHARE - RAY_SHARE,
}


def main(arguments: Iterable[str]) -> int:
    """Run the stages that were asked for."""
    parser = argparse.ArgumentParser(prog="chaos", description=__doc__)
    parser.add_argument("--seconds", type=float, default=DEFAULT_S, help="of all stages together")
    parser.add_argument("--seed", type=int, default=1, help="of the plan and of the load")
    parser.add_argument("--stage", action="append", choices=STAGES, help="default: all of them")
    parser.add_argument("--verbose", action="store_true", help="say each fault as it happens")
    args = parser.parse_args(list(arguments))
    logging.basicConfig(
        level=logging.INFO if args.verbose else logging.WARNING,
        format="%(asctime)s %(name)s: %(message)s",
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)
    share = args.seconds / DEFAULT_S
    found = []
    for name in args.stage or STAGES:
        began = time.monotonic()
        tally = asyncio.run(STAGES[name](args.seconds * SHARES[name], args.seed, share))
        print(*tally.lines(), sep="\n")
        print(f"  {'seconds':<34} {time.monotonic() - began:>7.0f}", flush=True)
        found += [f"{tally.name}: {what}" for what in tally.faults_found()]
    for what in found:
        print(f"chaos: {what}")
    print("chaos: failed" if found else "chaos: passed")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
