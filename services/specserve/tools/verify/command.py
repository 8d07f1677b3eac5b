"""`specserve verify`: proves that speculation changes no token (parity) and no law (distribution).

Starts the services as plain processes, so that everything goes through the same binaries and the
same gRPC path as in production. Knows the suites by name; their maths is in `parity.py` and
`law.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path

from specserve.config_parsing import SUPPORTED_METHODS
from specserve.errors import ConfigurationError
from specserve.tools.models import CACHE_HELP
from specserve.tools.terminal import say
from specserve.tools.verify.parity import ParityOptions, run_parity_suite

PROMPTS_HELP = (
    "JSON lines with `turns` (as Spec-Bench has them); without it six shipped prompts are used"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `specserve verify`."""
    parser.add_argument(
        "--suite",
        choices=("parity", "distribution"),
        default="parity",
        help="parity: the same tokens with and without; distribution: the same law",
    )
    parser.add_argument("--target", metavar="MODEL", help="parity: target; default: embedded")
    parser.add_argument("--draft", metavar="MODEL", help="parity: draft; default: embedded")
    parser.add_argument(
        "--method",
        choices=SUPPORTED_METHODS,
        default="draft_model",
        help="parity: proposer; distribution tests all of them",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="parity: number type of both models",
    )
    parser.add_argument("--prompts", metavar="FILE", help=PROMPTS_HELP)
    parser.add_argument("--num-prompts", type=int, metavar="N", help="use the first N prompts")
    parser.add_argument(
        "--max-tokens", type=int, default=64, metavar="N", help="parity: tokens an answer"
    )
    parser.add_argument(
        "--num-speculative-tokens",
        type=int,
        default=4,
        metavar="K",
        help="parity: most draft tokens a round",
    )
    parser.add_argument("--concurrency", type=int, default=24, metavar="N", help="requests at once")
    parser.add_argument(
        "--num-draws", type=int, default=20_000, metavar="N", help="distribution: sequences"
    )
    parser.add_argument("--json", metavar="FILE", help="also write the record as JSON")
    parser.add_argument("--cache-dir", metavar="DIR", help=CACHE_HELP)


def run(args: argparse.Namespace) -> int:
    """Run one suite; 0 when the gate holds, 1 when it does not."""
    if args.suite == "parity":
        report = asyncio.run(
            run_parity_suite(
                ParityOptions(
                    target=args.target,
                    draft=args.draft,
                    dtype=args.dtype,
                    prompts=None if args.prompts is None else Path(args.prompts),
                    num_prompts=args.num_prompts,
                    max_tokens=args.max_tokens,
                    num_speculative_tokens=args.num_speculative_tokens,
                    method=args.method,
                    concurrency=args.concurrency,
                    cache_dir=args.cache_dir,
                )
            )
        )
        say(report.table())
        record: dict[str, object] = report.record()
        passed = report.passed
    else:
        # Its drawing is torch's, which the other suite leaves to its services.
        from specserve.tools.verify.law import LawOptions, run_law_suite

        if args.num_draws < 1000:
            raise ConfigurationError(f"--num-draws: {args.num_draws}, at least 1000 was wanted")
        law = asyncio.run(
            run_law_suite(LawOptions(num_draws=args.num_draws, concurrency=args.concurrency))
        )
        say(law.table())
        record, passed = law.record(), law.passed
    if args.json:
        Path(args.json).write_text(json.dumps(record, indent=2) + "\n")
    say("PASSED" if passed else "FAILED")
    return 0 if passed else 1
