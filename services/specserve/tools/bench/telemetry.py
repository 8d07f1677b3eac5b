"""What records, metrics and traces cost: three deployments of one pair, asked in turn.

One keeps and exports nothing, one keeps records and samples one request in a hundred, one exports
every span. Their processes' time per round, less that of the first, is what these take; what is
noted and counted of every round whatever is kept is timed here and added. The receiver of the
spans is in this process and not counted. Knows plain processes and a clock.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import psutil

from specserve.orchestrator.recent_requests import RecentRequests
from specserve.orchestrator.request_trace import RequestTrace
from specserve.orchestrator.round_counts import RoundCounts
from specserve.orchestrator.round_note import RoundNote
from specserve.rpc.v1 import common_pb2, requests_pb2
from specserve.speculation.length_choice import Choice, Reason
from specserve.speculation.types import AcceptanceRule, SamplingParams
from specserve.telemetry import RoundMetrics, TraceContext
from specserve.telemetry.tracing import ENDPOINT, SAMPLE_RATIO
from specserve.tools.generation_client import GenerationClient, Job
from specserve.tools.local import LocalPair, PairSpec
from specserve.tools.terminal import say, table

TARGET = "toy:vocab_size=96,seed=7,order=1,step_ms=20"
DRAFT = "toy:vocab_size=96,seed=7,order=1,noise=0.7,noise_seed=1,step_ms=2"
"""A round takes some 30 ms, as the embedded pair's does on two cores."""

NUM_SESSIONS = 16
NUM_TOKENS = 160
NUM_WAVES = 5

LIMITS = {"0.01": 0.01, "1.0": 0.05}
"""{sampled share: most processor time, as a share of a round's wall time}."""

_SERVICES = (
    "opentelemetry.proto.collector.trace.v1.TraceService",
    "opentelemetry.proto.collector.metrics.v1.MetricsService",
)


@dataclass(slots=True)
class Measured:
    """One deployment's waves."""

    name: str
    local: LocalPair
    client: GenerationClient
    cpu_s: list[float] = field(default_factory=list)
    """Processor seconds per round of a session, wave by wave."""
    wall_s: list[float] = field(default_factory=list)
    """Wall seconds of a session's round."""


async def run_telemetry_suite() -> dict[str, float]:
    """Measure, print, and return figures."""
    with _receiving() as (endpoint, num_exports):
        async with AsyncExitStack() as stack:
            deployments = [
                await _start(stack, "off", {}, ("--num-recent-requests=0",)),
                *[
                    await _start(stack, share, {ENDPOINT: endpoint, SAMPLE_RATIO: share}, ())
                    for share in LIMITS
                ],
            ]
            for wave in range(-1, NUM_WAVES):
                for deployment in deployments:
                    await _wave(deployment, wave)
        figures = _report(deployments)
        say(f"the receiver was given {num_exports()} exports")
    return figures


async def _start(
    stack: AsyncExitStack, name: str, env: dict[str, str], flags: Sequence[str]
) -> Measured:
    spec = PairSpec(TARGET, DRAFT, num_gateways=0, env=env, orchestrator_flags=tuple(flags))
    local = await stack.enter_async_context(LocalPair(spec))
    client = await stack.enter_async_context(GenerationClient(local.orchestrators[0].address))
    await client.wait_ready()
    return Measured(name, local, client)


async def _wave(deployment: Measured, wave: int) -> None:
    """Run some sessions at once; the first wave of each deployment only warms it."""
    greedy = SamplingParams(AcceptanceRule.GREEDY, seed=0, choice=0, temperature=0.0)
    jobs = [
        Job(f"w{wave}-{i}", (5, 6, 7, 3 + i), greedy, NUM_TOKENS, ignore_eos=True)
        for i in range(NUM_SESSIONS)
    ]
    before = _cpu_s(deployment.local)
    done = await deployment.client.generate_all(jobs, NUM_SESSIONS)
    cpu_s = _cpu_s(deployment.local) - before
    if wave >= 0:
        num_rounds = sum(one.num_rounds for one in done)
        deployment.cpu_s.append(cpu_s / num_rounds)
        deployment.wall_s.append(sum(one.total_s for one in done) / num_rounds)


def _cpu_s(local: LocalPair) -> float:
    """Add up the processor time of a deployment's processes, device processes included."""
    total = 0.0
    for service in local.services:
        process = psutil.Process(service.pid)
        for each in (process, *process.children(recursive=True)):
            times = each.cpu_times()
            total += times.user + times.system
    return total


def extra_shares(off_s: Sequence[float], on_s: Sequence[float], wall_s: Sequence[float]) -> float:
    """Return the median extra processor time of a round, as a share of its wall time.

    Args:
        off_s: processor seconds per round without telemetry, wave by wave.
        on_s: the same with it, in the waves right after those.
        wall_s: wall seconds of a round.
    """
    extra = [on - off for off, on in zip(off_s, on_s, strict=True)]
    return statistics.median(extra) / statistics.median(wall_s)


def noted_s(num_rounds: int = 3000) -> float:
    """Time what is noted and counted of every round, in processor seconds a round."""
    timing = common_pb2.CallTiming(queue_s=0.001, forward_s=0.02, batch_size=16, rows=80)
    peer = _Peer(common_pb2.GetModelResponse(replica_id="target-0123456789ab", revision="main"))
    counts, ring = RoundCounts(RoundMetrics()), RecentRequests(8, 1 << 24)
    kept = ring.begin("request", "trace", requests_pb2.RequestRecord)
    context = TraceContext(1, 1, is_sampled=False)

    def on_round(note: RoundNote) -> None:
        counts.on_round(note, context)
        ring.add_round(kept, note.record().SerializeToString())

    trace = RequestTrace(context, on_round)
    choice = Choice(4, Reason.STATIC)
    began = time.process_time()
    for number in range(num_rounds):
        trace.begin_round()
        for service in ("draft", "target"):
            trace.note_call(service, peer, trace.clock(), epoch=1, timing=timing)
        trace.note_commit(choice, "draft_model", 4, 2, 3, (number, number, number))
    trace.end()
    return (time.process_time() - began) / num_rounds


@dataclass(frozen=True, slots=True)
class _Peer:
    model: common_pb2.GetModelResponse | None
    address: str = "127.0.0.1:7002"


def _report(deployments: Sequence[Measured]) -> dict[str, float]:
    off, *others = deployments
    always_s = statistics.median(noted_s() for _ in range(3))
    figures = {"telemetry.noted_us": 1e6 * always_s}
    rows = [("off", f"{1e6 * statistics.median(off.cpu_s):.0f}", "", "", "")]
    for one in others:
        share = extra_shares(off.cpu_s, one.cpu_s, one.wall_s)
        share += always_s / statistics.median(one.wall_s)
        limit = LIMITS[one.name]
        extra_us = 1e6 * share * statistics.median(one.wall_s)
        figures[f"telemetry.{one.name}.extra_us"] = extra_us
        figures[f"telemetry.{one.name}.share_of_round"] = share
        rows.append(
            (
                one.name,
                f"{1e6 * statistics.median(one.cpu_s):.0f}",
                f"{extra_us:.0f}",
                f"{100 * share:.2f} %",
                f"{'within' if share <= limit else 'ABOVE'} {100 * limit:.0f} %",
            )
        )
    wall_ms = 1e3 * statistics.median(off.wall_s)
    say(f"a round of one session takes {wall_ms:.1f} ms; {NUM_SESSIONS} sessions, {TARGET}")
    say(f"of every round {1e6 * always_s:.0f} us to note and count it, part of the extra below")
    header = ("sampled", "cpu us per round", "extra us", "share of a round", "limit")
    say(table(header, rows))
    return figures


@contextmanager
def _receiving() -> Iterator[tuple[str, Callable[[], int]]]:
    """Take every export, and count them."""
    counts = [0]

    def export(request: bytes, context: grpc.ServicerContext) -> bytes:
        counts[0] += 1
        return b""  # an empty response

    server = grpc.server(futures.ThreadPoolExecutor(2))
    handler: Any = grpc.unary_unary_rpc_method_handler(export)
    server.add_generic_rpc_handlers(
        tuple(grpc.method_handlers_generic_handler(name, {"Export": handler}) for name in _SERVICES)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"http://127.0.0.1:{port}", lambda: counts[0]
    finally:
        server.stop(None)
