"""`specserve load`: open-loop load on a running system, and whether it keeps its objectives.

Requests go out when they are due, whatever the answers before them do, so that a server that falls
behind is seen to. Every time counts from when its request was due. Several rates run one after the
other; the report names the highest that kept the objectives.

Exit code: 0 kept at every rate (without objectives: requests ended well), 1 a problem, 2 wrong
usage, 3 not kept, 4 the client itself was too slow, 130 interrupted, with what was measured kept.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import sys
from pathlib import Path
from typing import get_args

from specserve.config import EngineConfig
from specserve.errors import ConfigurationError
from specserve.tools.bench.clients import RequestSettings
from specserve.tools.bench.conditions import Conditions
from specserve.tools.bench.deployment import reached
from specserve.tools.bench.flags import PROMPTS_HELP
from specserve.tools.bench.host import describe_hardware, describe_versions
from specserve.tools.bench.http import reached_by_url
from specserve.tools.bench.record import require_writable
from specserve.tools.bench.signals import cancelled_by_signals
from specserve.tools.bench.workload import load_workload
from specserve.tools.client_access import (
    add_key_flag,
    add_tls_flags,
    check_access,
    key_headers,
    tls_of,
)
from specserve.tools.load.arrivals import ArrivalProcess
from specserve.tools.load.report import LoadRecord
from specserve.tools.load.run import Generator, LoadPlan
from specserve.tools.load.slo import Objectives, read_objectives
from specserve.tools.terminal import Progress, say

EXIT_NOT_KEPT = 3
EXIT_SLOW_CLIENT = 4
EXIT_INTERRUPTED = 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `specserve load`."""
    parser.description = __doc__
    group = parser.add_argument_group("where to")
    group.add_argument("--url", metavar="URL", help="a gateway, such as http://127.0.0.1:8000")
    add_key_flag(group)
    group.add_argument("--orchestrator-address", metavar="HOST:PORT", help="or an orchestrator")
    group.add_argument("--target", metavar="MODEL", help="its tokenizer, for an orchestrator")
    add_tls_flags(parser)
    group = parser.add_argument_group("load")
    group.add_argument("--rate", type=float, nargs="+", metavar="R", help="requests/s; some levels")
    group.add_argument("--duration-s", type=float, default=60.0, metavar="S", help="of each rate")
    group.add_argument(
        "--arrivals",
        choices=get_args(ArrivalProcess),
        default="poisson",
        help="how requests are spread over a rate's time",
    )
    group.add_argument(
        "--burstiness",
        type=float,
        default=1.0,
        metavar="B",
        help="gamma: below 1 comes in bursts, above 1 is more even, 1 is poisson",
    )
    group.add_argument("--max-in-flight", type=int, metavar="N", help="more are failed, unsent")
    group.add_argument("--timeout-s", type=float, metavar="S", help="a slower request has failed")
    group.add_argument(
        "--warm-up", type=int, default=1, metavar="N", help="requests before the load"
    )
    group = parser.add_argument_group("requests")
    group.add_argument("--prompts", metavar="FILE", help=PROMPTS_HELP)
    group.add_argument("--num-prompts", type=int, metavar="N", help="N prompts, categories in turn")
    group.add_argument("--unique", action="store_true", help="let no prefix cache help")
    group.add_argument(
        "--max-tokens", type=int, default=128, metavar="N", help="most tokens of an answer"
    )
    group.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy")
    group.add_argument("--ignore-eos", action="store_true", help="decode to --max-tokens")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of sampling and arrivals")
    group.add_argument("--num-speculative-tokens", type=int, metavar="K", help="0 is target-only")
    group = parser.add_argument_group("objectives")
    group.add_argument(
        "--slo",
        metavar="NAME=MS",
        action="append",
        default=[],
        help=f"of each request, in milliseconds: {', '.join(Objectives.model_fields)}",
    )
    group.add_argument(
        "--attainment", type=float, default=0.95, metavar="SHARE", help="that must meet all of them"
    )
    group = parser.add_argument_group("report")
    group.add_argument("--report", metavar="FILE", help="one self-contained HTML file")
    group.add_argument("--json", metavar="FILE", help="the record as JSON")


def run(args: argparse.Namespace) -> int:
    """Send the load and report."""
    check(args)
    objectives = read_objectives(args.slo)
    record = LoadRecord(
        command=shlex.join(["specserve", *sys.argv[1:]]),
        objectives=objectives,
        wanted_share=args.attainment,
        path=None if args.json is None else Path(args.json),
    )
    html_path = None if args.report is None else Path(args.report)
    require_writable(record.path, "--json")
    require_writable(html_path, "--report")
    if objectives.any:
        told = ", ".join(f"{k} {v:g}" for k, v in objectives.model_dump().items() if v is not None)
        say(f"declared before the run: {100 * args.attainment:g} % of requests within {told}")
    try:
        interrupted = asyncio.run(_run(args, record))
    finally:
        if record.steps:
            say(record.text())
        record.save()
        if html_path is not None:
            record.write_html(html_path)
    if interrupted:
        return EXIT_INTERRUPTED
    if not any(step.summary.num_output_tokens for step in record.steps):
        return 1
    if not all(step.client_kept_up for step in record.steps):
        return EXIT_SLOW_CLIENT
    return 0 if all(record.keeps(step) for step in record.steps) else EXIT_NOT_KEPT


def check(args: argparse.Namespace) -> None:
    """Refuse flags that cannot be meant.

    Raises:
        ConfigurationError: naming the flag.
    """
    if args.url is None and args.orchestrator_address is None:
        raise ConfigurationError("--url or --orchestrator-address: one of the two was wanted")
    check_access(args)
    if args.orchestrator_address is not None and args.target is None:
        raise ConfigurationError("--target: missing; its tokenizer makes the prompts' token ids")
    if args.orchestrator_address is not None and args.unique:
        raise ConfigurationError("--unique: it changes texts, and an orchestrator takes token ids")
    if not args.rate:
        raise ConfigurationError("--rate: missing; requests per second were wanted")
    above_zero = {
        "--rate": args.rate,
        "--duration-s": [args.duration_s],
        "--burstiness": [args.burstiness],
        "--max-tokens": [args.max_tokens],
        "--max-in-flight": [args.max_in_flight],
        "--timeout-s": [args.timeout_s],
        "--num-prompts": [args.num_prompts],
    }
    for flag, values in above_zero.items():
        for value in values:
            if value is not None and value <= 0:
                raise ConfigurationError(f"{flag}: found {value:g}, wanted above 0")
    if not 0 < args.attainment <= 1:
        raise ConfigurationError(f"--attainment: found {args.attainment:g}, wanted 0 to 1")
    if not 0 <= args.temperature <= 2:
        raise ConfigurationError(f"--temperature: found {args.temperature:g}, wanted 0 to 2")


async def _run(args: argparse.Namespace, record: LoadRecord) -> bool:
    """Send every rate; say whether a signal cut it short."""
    sending = asyncio.ensure_future(_send(args, record))
    with cancelled_by_signals(sending) as interrupted:
        try:
            await sending
        except asyncio.CancelledError:
            if not interrupted():
                raise
            return True
    return False


async def _send(args: argparse.Namespace, record: LoadRecord) -> None:
    settings = RequestSettings(args.max_tokens, args.temperature, args.ignore_eos, args.seed)
    plan = LoadPlan(
        duration_s=args.duration_s,
        process=args.arrivals,
        burstiness=args.burstiness,
        settings=settings,
        num_speculative_tokens=args.num_speculative_tokens,
        timeout_s=args.timeout_s,
        max_in_flight=args.max_in_flight,
        unique=args.unique,
    )
    tokenizer_of = None if args.target is None else EngineConfig(model=args.target)
    workload = load_workload(
        args.prompts, args.num_prompts, tokenizer_of if args.url is None else None
    )
    way = (
        reached_by_url("system", args.url, key_headers(args.api_key_from))
        if args.url is not None
        else reached("system", args.orchestrator_address, tls_of(args))
    )
    progress = Progress()
    async with way as system:
        record.conditions = Conditions(
            hardware=describe_hardware(),
            versions=describe_versions(),
            deployments=(system.facts,),
            prompts=workload.facts,
            sampling=settings,
            warm_up=f"{args.warm_up} requests before the load",
        )
        record.plan = plan
        for number in range(args.warm_up):
            prompt = workload.prompts[number % len(workload.prompts)]
            await system.client.decode(prompt, settings, f"load-warm-{number}", None)
        generator = Generator(system.client, workload.prompts, plan)
        for rate in args.rate:
            await generator.step(rate, record.objectives, record.add, progress)
    progress.close()
