"""`specserve bench`: the figures of `docs/benchmarks.md`, each printed by one suite.

overhead  wall and processor time per round, toy pair with step time 0, plain processes
engine    K = 0 through the whole system against the bare engine decoding in one process
steps     one forward at several row counts against eager transformers
speedup   tokens/s with and without speculation on real prompts

Knows the suites by name; ratios are taken within one run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

from specserve.tools import bench_steps
from specserve.tools.bench_engine import run_engine_suite
from specserve.tools.bench_overhead import run_overhead_suite
from specserve.tools.bench_speedup import SpeedupOptions, run_speedup_suite
from specserve.tools.models import CACHE_HELP
from specserve.tools.terminal import say
from specserve.tools.verify import PROMPTS_HELP

Figures = dict[str, float]

SUITES = ("overhead", "engine", "steps", "speedup")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `specserve bench`."""
    parser.add_argument(
        "--suite", action="append", choices=SUITES, help="which to run; may be given again"
    )
    parser.add_argument("--cache-dir", metavar="DIR", help=CACHE_HELP)
    parser.add_argument("--toy-only", action="store_true", help="engine: without the embedded one")
    parser.add_argument("--prompts", metavar="FILE", help=PROMPTS_HELP)
    parser.add_argument("--num-prompts", type=int, metavar="N", help="speedup: first N prompts")
    parser.add_argument("--max-tokens", type=int, default=128, metavar="N", help="speedup")
    parser.add_argument("--num-speculative-tokens", type=int, default=4, metavar="K")
    parser.add_argument("--temperature", type=float, default=0.0, help="speedup")
    parser.add_argument("--concurrency", type=int, default=1, metavar="N", help="speedup")
    parser.add_argument("--json", metavar="FILE", help="also write the figures as JSON")
    bench_steps.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Run the chosen suites, all but speedup and steps when none is named."""
    chosen: list[str] = args.suite or ["overhead", "engine"]
    suites: dict[str, Callable[[], Awaitable[Figures]]] = {
        "overhead": run_overhead_suite,
        "engine": lambda: run_engine_suite(args.cache_dir, toy_only=args.toy_only),
        "speedup": lambda: run_speedup_suite(
            SpeedupOptions(
                prompts=None if args.prompts is None else Path(args.prompts),
                num_prompts=args.num_prompts,
                max_tokens=args.max_tokens,
                num_speculative_tokens=args.num_speculative_tokens,
                temperature=args.temperature,
                concurrency=args.concurrency,
                cache_dir=args.cache_dir,
            )
        ),
    }
    figures: Figures = {}
    code = 0
    for name in chosen:
        say(f"== {name}")
        if name == "steps":
            code = max(code, bench_steps.run(args))
        else:
            figures |= asyncio.run(_await(suites[name]))
    if args.json:
        Path(args.json).write_text(json.dumps(figures, indent=2) + "\n")
    return code


async def _await(suite: Callable[[], Awaitable[Figures]]) -> Figures:
    return await suite()
