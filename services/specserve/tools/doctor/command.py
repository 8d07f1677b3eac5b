"""`specserve doctor`: what would keep a pair from being served, or what ails one that runs.

Prints a table, or JSON; leaves with 1 when there is a problem. Knows how checks are shown; what
is checked is in `checks.py`, and in `running.py` for a pair that runs.
"""

from __future__ import annotations

import argparse
import json
import sys

from specserve.config import EngineConfig
from specserve.errors import ConfigurationError
from specserve.gateway.config import GatewayConfig
from specserve.tools.client_access import add_key_flag, key_headers
from specserve.tools.doctor.status import Check, Status
from specserve.tools.flags import add_model_flags, as_flag, config_from_flags, given_values
from specserve.tools.models import CACHE_HELP
from specserve.tools.process import SPECULATIVE_HELP, speculative_from
from specserve.tools.terminal import GREEN, RED, YELLOW, paint, say, wants_colour

VERIFIED_DIR_HELP = "folder of the records of verification (default: ~/.cache/specserve/verified)"

NUM_PROBES = 3

_MARKS = {Status.OK: ("ok", GREEN), Status.NOTE: ("note", YELLOW), Status.PROBLEM: ("PROBLEM", RED)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `specserve doctor`: those of `serve` that it can judge."""
    parser.add_argument("target", nargs="?", help="target model; the embedded pair without it")
    parser.add_argument("--speculative-config", metavar="JSON", help=SPECULATIVE_HELP)
    parser.add_argument("--json", action="store_true", help="write JSON instead of a table")
    parser.add_argument("--host", help="address that serve would listen on (default: 127.0.0.1)")
    parser.add_argument(
        "--port",
        metavar="PORT",
        help=f"port that serve would listen on (default: {GatewayConfig().port})",
    )
    parser.add_argument("--cache-dir", metavar="DIR", help=CACHE_HELP)
    parser.add_argument("--verified-dir", metavar="DIR", help=VERIFIED_DIR_HELP)
    add_model_flags(
        parser, EngineConfig, "engine", leave_out=("model", "draft_vocab_size", "quantization")
    )
    running = parser.add_argument_group("a pair that runs")
    running.add_argument(
        "--running",
        metavar="URL",
        help="look at the pair behind this gateway, and say what it lacks",
    )
    running.add_argument(
        "--probe",
        type=int,
        nargs="?",
        const=NUM_PROBES,
        metavar="N",
        help="also decode N prompts with and without speculation, nine short requests each, and "
        f"try the field's symptoms of wrong text on them (N without a number: {NUM_PROBES})",
    )
    add_key_flag(running)


def run(args: argparse.Namespace) -> int:
    """Examine everything; return 1 when there is a problem."""
    if args.running is not None:
        return _run_running(args)
    for name in ("probe", "api_key_from"):
        if getattr(args, name) is not None:
            raise ConfigurationError(f"{as_flag(name)}: goes with --running")
    from specserve.tools.doctor.checks import examine

    given = argparse.Namespace(host=args.host or "127.0.0.1", port=args.port)
    gateway = config_from_flags(given, GatewayConfig)
    engine = config_from_flags(args, EngineConfig, model=args.target or "")
    checks = examine(engine, speculative_from(args), gateway, args.cache_dir, args.verified_dir)
    if args.json:
        say(json.dumps([check.as_json() for check in checks], indent=2))
    else:
        _show(checks)
    return 1 if any(check.status is Status.PROBLEM for check in checks) else 0


def _run_running(args: argparse.Namespace) -> int:
    own = ("target", "speculative_config", "host", "port", "cache_dir", "verified_dir")
    named = [as_flag(name) if name != "target" else "TARGET" for name in own if getattr(args, name)]
    for name in (*named, *map(as_flag, given_values(args, EngineConfig))):
        raise ConfigurationError(f"{name}: what runs at --running has its own; leave it out")
    if args.probe is not None and args.probe < 1:
        raise ConfigurationError(f"--probe: found {args.probe}, wanted at least 1")
    from specserve.tools.doctor.running import examine_running

    report = examine_running(args.running, key_headers(args.api_key_from), args.probe or 0)
    if args.json:
        say(json.dumps(report.as_json(), indent=2))
    else:
        for line in report.lines():
            say(line)
        _show(report.checks)
    return 0 if report.is_well else 1


def _show(checks: list[Check]) -> None:
    colour = wants_colour(sys.stdout)
    width = max(len(check.name) for check in checks)
    for check in checks:
        mark, shade = _MARKS[check.status]
        say(f"{paint(mark.ljust(7), shade, colour)}  {check.name.ljust(width)}  {check.found}")
    problems = sum(check.status is Status.PROBLEM for check in checks)
    say(f"{problems} problem{'' if problems == 1 else 's'}")
