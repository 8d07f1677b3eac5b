"""`specserve bench`: what speculation gains, and what the system costs.

serving     speculation against target-only in alternating pairs, other engines beside them if
            wanted; thresholds declared before the run lead to `enable` or `keep target-only`
acceptance  mean acceptance length by category for some methods; counts, needs no quiet machine
auto        automatic length control against the better of always on and always off
sweep       concurrency, then fixed K, then dynamic K, one step at a time
overhead    wall and processor time per round, toy pair with step time 0, plain processes
engine      K = 0 through the whole system against the bare engine decoding in one process
steps       one forward at several row counts against eager transformers
overlap     the draft's outcome cache off and on, on modelled devices
pools       tokens/s with 1 to 8 targets, against so many times one, on modelled devices
telemetry   processor time of records, metrics and traces per round, nothing and everything sampled

Exit code: 0 done (serving, sweep: enable; auto: at least min_dynamic_ratio everywhere), 1 a problem
(acceptance: more requests failed than max_failed_share), 2 wrong usage, 3 keep target-only (auto:
below its threshold), 4 not comparable, 130 interrupted, with what was measured kept. Ratios are
taken within one run.
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
from specserve.tools.bench.decision import failed_share
from specserve.tools.bench.options import BenchOptions
from specserve.tools.bench.record import Record, Section, require_writable
from specserve.tools.bench.report import text_of, write_html
from specserve.tools.bench.signals import cancelled_by_signals
from specserve.tools.bench.thresholds import Thresholds
from specserve.tools.terminal import Progress, say, table

Figures = dict[str, float]

FIGURE_SUITES = ("overhead", "engine", "steps", "overlap", "pools", "telemetry")
RECORD_SUITES = ("serving", "acceptance", "auto", "sweep")
SUITES = (*RECORD_SUITES, *FIGURE_SUITES)

EXIT_PROBLEM = 1
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
                code = max(code, _run_figures(name, args, record.figures))
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
    return exit_code(record.sections[-1], options.thresholds)


def exit_code(section: Section, thresholds: Thresholds) -> int:
    """Return the exit code of a suite that has run to its end."""
    if section.decision is not None:
        return EXIT_CODES[section.decision.verdict]
    if section.suite == "sweep":
        if section.chosen is None:
            return EXIT_CODES["not comparable"]
        is_on = section.chosen.num_speculative_tokens > 0
        return EXIT_CODES["enable" if is_on else "keep target-only"]
    if section.suite == "auto":
        ratios = [None if each.ratio is None else each.ratio.value for each in section.auto]
        if None in ratios:
            return EXIT_CODES["not comparable"]
        is_kept = all(
            ratio >= thresholds.min_dynamic_ratio for ratio in ratios if ratio is not None
        )
        return EXIT_CODES["enable" if is_kept else "keep target-only"]
    most = 1.0 if thresholds.max_failed_share is None else thresholds.max_failed_share
    shares = [failed_share(each.summary) for each in section.methods]
    return EXIT_PROBLEM if any(share > most or share == 1.0 for share in shares) else 0


def _run_figures(name: str, args: argparse.Namespace, figures: Figures) -> int:
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
    else:
        from specserve.tools.bench.engine import run_engine_suite

        figures |= asyncio.run(run_engine_suite(args.cache_dir, toy_only=args.toy_only))
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
