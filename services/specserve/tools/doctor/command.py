"""`specserve doctor`: says what would keep a pair from being served, before anything is started.

Prints a table, or JSON; leaves with 1 when there is a problem. Knows how checks are shown; what
is checked is in `checks.py`.
"""

from __future__ import annotations

import argparse
import json
import sys

from specserve.config import EngineConfig
from specserve.gateway.config import GatewayConfig
from specserve.tools.doctor.checks import Check, Status, examine
from specserve.tools.flags import add_model_flags, config_from_flags
from specserve.tools.models import CACHE_HELP
from specserve.tools.process import SPECULATIVE_HELP, speculative_from
from specserve.tools.terminal import GREEN, RED, YELLOW, paint, say, wants_colour

VERIFIED_DIR_HELP = "folder of the records of verification (default: ~/.cache/specserve/verified)"

_MARKS = {Status.OK: ("ok", GREEN), Status.NOTE: ("note", YELLOW), Status.PROBLEM: ("PROBLEM", RED)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `specserve doctor`: those of `serve` that it can judge."""
    parser.add_argument("target", nargs="?", help="target model; the embedded pair without it")
    parser.add_argument("--speculative-config", metavar="JSON", help=SPECULATIVE_HELP)
    parser.add_argument("--json", action="store_true", help="write JSON instead of a table")
    parser.add_argument("--host", default="127.0.0.1", help="address that serve would listen on")
    parser.add_argument(
        "--port",
        metavar="PORT",
        default=GatewayConfig().port,
        help="port that serve would listen on",
    )
    parser.add_argument("--cache-dir", metavar="DIR", help=CACHE_HELP)
    parser.add_argument("--verified-dir", metavar="DIR", help=VERIFIED_DIR_HELP)
    add_model_flags(
        parser, EngineConfig, "engine", leave_out=("model", "draft_vocab_size", "quantization")
    )


def run(args: argparse.Namespace) -> int:
    """Examine everything; return 1 when there is a problem."""
    gateway = config_from_flags(argparse.Namespace(host=args.host, port=args.port), GatewayConfig)
    engine = config_from_flags(args, EngineConfig, model=args.target or "")
    checks = examine(engine, speculative_from(args), gateway, args.cache_dir, args.verified_dir)
    if args.json:
        say(json.dumps([check.as_json() for check in checks], indent=2))
    else:
        _show(checks)
    return 1 if any(check.status is Status.PROBLEM for check in checks) else 0


def _show(checks: list[Check]) -> None:
    colour = wants_colour(sys.stdout)
    width = max(len(check.name) for check in checks)
    for check in checks:
        mark, shade = _MARKS[check.status]
        say(f"{paint(mark.ljust(7), shade, colour)}  {check.name.ljust(width)}  {check.found}")
    problems = sum(check.status is Status.PROBLEM for check in checks)
    say(f"{problems} problem{'' if problems == 1 else 's'}")
