"""`specserve bench`: what speculation gains, and what the system costs.

serving     speculation against target-only in alternating pairs, other engines beside them if
            wanted; thresholds declared before the run lead to `enable` or `keep target-only`
acceptance  mean acceptance length by category for some methods; counts, needs no quiet machine
auto        automatic length control against the better of always on and always off
sweep       concurrency, then fixed K, then dynamic K, one step at a time
overhead    wall and processor time per round, toy pair with step time 0, plain processes
engine      K = 0 through the whole system against the bare engine decoding in one process
steps       one forward at several row counts against eager transformers
speedup     tokens/s with and without speculation on real prompts, by category
overlap     the draft's outcome cache off and on, on modelled devices
pools       tokens/s with 1 to 8 targets, against so many times one, on modelled devices
telemetry   processor time of records, metrics and traces per round, nothing and everything sampled

Exit code: 0 done (serving, sweep: enable), 1 a problem, 2 wrong usage, 3 keep target-only, 4 not
comparable, 130 interrupted, with what was measured kept. Ratios are taken within one run.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from specserve.speculation.types import AcceptanceRule
from specserve.tools.bench import flag_values, flags
from specserve.tools.bench.agreement import compare_records, read_record
from specserve.tools.bench.options import BenchOptions
from specserve.tools.bench.record import Record, require_writable
from specserve.tools.bench.report import text_of, write_html
from specserve.tools.bench.signals import cancelled_by_signals
from specserve.tools.bench.thresholds import Thresholds
from specserve.tools.terminal import Progress, say, table

Figures = dict[str, float]

FIGURE_SUITES = ("overhead", "engine", "steps", "speedup", "overlap", "pools", "telemetry")
RECORD_SUITES = ("serving", "acceptance", "auto", "sweep")
SUITES = (*RECORD_SUITES, *FIGURE_SUITES)

EXIT_CODES = {"enable": 0, "keep target-only": 3, "not comparable": 4}
EXIT_INTERRUPTED = 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `specserve bench`."""
    parser.description = __doc__
    parser.add_argument(
        "--suite",
        action="append",
        choices=SUITES,
        help="which to run; may be given again (default: serving with --report, else overhead and "
        "engine)",
    )
    parser.add_argument("--report", metavar="FILE", help="also write one self-contained HTML file")
    parser.add_argument("--json", metavar="FILE", help="also write the record as JSON")
    parser.add_argument(
        "--compare", metavar="FILE", help="an earlier run's JSON: says whether the two agree"
    )
    parser.add_argument("--toy-only", action="store_true", help="engine: without the embedded one")
    parser.add_argument("--num-speculative-tokens", type=int, metavar="K", help="most draft tokens")
    flags.add_arguments(parser)
    flags.add_overlap_arguments(parser)
    flags.add_steps_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Run the chosen suites and write what was asked for."""
    chosen: list[str] = list(dict.fromkeys(args.suite or _default_suites(args)))
    # Everything that can be wrong about the flags is told before anything is started.
    options = {name: flag_values.bench_options(args, name) for name in chosen}
    json_path, html_path = _path(args.json), _path(args.report)
    require_writable(json_path, "--json")
    require_writable(html_path, "--report")
    before = None if args.compare is None else read_record(Path(args.compare))
    record = Record(command=shlex.join(["specserve", *sys.argv[1:]]), path=json_path)
    code = 0
    try:
        for name in chosen:
            say(f"== {name}")
            if name in RECORD_SUITES:
                code = max(code, asyncio.run(_run_suite(name, options[name], record)))
            else:
                code = max(code, _run_figures(name, args, options[name], record.figures))
            if code == EXIT_INTERRUPTED:
                break
    finally:
        say(text_of(record))
        record.save()
        if html_path is not None:
            write_html(record, html_path)
    if before is not None and code != EXIT_INTERRUPTED:
        code = max(code, _say_repeat(before, record, flag_values.thresholds_of(args)))
    return code


def _default_suites(args: argparse.Namespace) -> list[str]:
    return ["serving"] if args.report else ["overhead", "engine"]


async def _run_suite(name: str, options: BenchOptions, record: Record) -> int:
    """Run one suite; return its exit code. A stop signal ends it, and what it measured is kept."""
    from specserve.tools.bench.acceptance import run_acceptance
    from specserve.tools.bench.auto import run_auto
    from specserve.tools.bench.serving import run_serving
    from specserve.tools.bench.sweep import run_sweep

    suites: dict[str, Callable[[BenchOptions, Record, Progress], Awaitable[None]]] = {
        "serving": run_serving,
        "acceptance": run_acceptance,
        "auto": run_auto,
        "sweep": run_sweep,
    }
    progress = Progress()
    running = asyncio.ensure_future(suites[name](options, record, progress))
    with cancelled_by_signals(running) as interrupted:
        try:
            await running
        except asyncio.CancelledError:
            if not interrupted():
                raise
            return EXIT_INTERRUPTED
        finally:
            progress.close()
    decision = record.sections[-1].decision
    return 0 if decision is None else EXIT_CODES[decision.verdict]


def _run_figures(
    name: str, args: argparse.Namespace, options: BenchOptions, figures: Figures
) -> int:
    if name == "steps":
        from specserve.tools.bench import steps

        figures |= steps.run(args)
    elif name == "overlap":
        from specserve.tools.bench.overlap import NUM_PAIRS, OverlapOptions, run_overlap_suite

        overlap = OverlapOptions(
            num_cached_outcomes=args.num_cached_outcomes,
            rules=[AcceptanceRule(rule) for rule in args.rules],
            num_pairs=args.pairs or NUM_PAIRS,
        )
        figures |= asyncio.run(run_overlap_suite(overlap))
    elif name == "pools":
        from specserve.tools.bench.pools import run_pools_suite

        figures |= asyncio.run(run_pools_suite())
    elif name == "telemetry":
        from specserve.tools.bench.telemetry import run_telemetry_suite

        figures |= asyncio.run(run_telemetry_suite())
    elif name == "overhead":
        from specserve.tools.bench.overhead import run_overhead_suite

        figures |= asyncio.run(run_overhead_suite())
    elif name == "engine":
        from specserve.tools.bench.engine import run_engine_suite

        figures |= asyncio.run(run_engine_suite(args.cache_dir, toy_only=args.toy_only))
    else:
        from specserve.tools.bench.speedup import SpeedupOptions, run_speedup_suite

        k = args.num_speculative_tokens
        figures |= asyncio.run(
            run_speedup_suite(
                SpeedupOptions(
                    prompts=_path(args.prompts),
                    num_prompts=args.num_prompts,
                    max_tokens=args.max_tokens or 128,
                    num_speculative_tokens=flag_values.DEFAULT_K if k is None else k,
                    temperature=args.temperature,
                    concurrency=options.pacings[0].concurrency or 1,
                    cache_dir=args.cache_dir,
                )
            )
        )
    return 0


def _say_repeat(before: dict[str, Any], record: Record, thresholds: Thresholds) -> int:
    """Say whether a run agrees with an earlier one; 4 when it does not."""
    repeat = compare_records(before, record, thresholds.max_half_difference)
    for each in repeat.differing_conditions:
        say(f"not alike: {each}")
    rows = [
        (each.figure, f"{each.before:.3f}", f"{each.now:.3f}", "yes" if each.agrees else "no")
        for each in repeat.agreements
    ]
    say(table(("figure", "before", "now", "agrees"), rows))
    say("the two runs agree" if repeat.agrees else "the two runs do not agree")
    return 0 if repeat.agrees else EXIT_CODES["not comparable"]


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)
