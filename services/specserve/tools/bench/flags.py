"""The flags of `specserve bench`, and the options they make. Knows flags; starts nothing."""

from __future__ import annotations

import argparse

from specserve.config import EngineConfig
from specserve.speculation.types import AcceptanceRule
from specserve.tools.bench.peer_spec import PEERS
from specserve.tools.bench.thresholds import Thresholds
from specserve.tools.client_access import add_key_flag, add_tls_flags
from specserve.tools.flags import add_model_flags
from specserve.tools.models import CACHE_HELP
from specserve.tools.process import SPECULATIVE_HELP

PROMPTS_HELP = (
    "JSON lines with `turns` (as Spec-Bench has them); default: the file that "
    "SPECSERVE_BENCH_PROMPTS names, else six shipped prompts"
)

K_VALUES = (1, 2, 3, 4, 6, 8)
METHODS = ("draft_model", "suffix", "ngram", "cascade")

NOT_FLAGS = ("model", "dtype", "revision", "draft_vocab_size", "quantization")
"""Fields of the engine that have a flag of their own here, or that are one model's alone."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the suites that measure a served pair."""
    group = parser.add_argument_group("what is measured")
    group.add_argument("--target", metavar="MODEL", help="default: the embedded pair")
    group.add_argument("--speculative-config", metavar="JSON", help=SPECULATIVE_HELP)
    group.add_argument("--cache-dir", metavar="DIR", help=CACHE_HELP)
    group.add_argument(
        "--dtype",
        default="bfloat16",
        choices=("auto", "float32", "bfloat16"),
        help="of every model, ours and other engines'",
    )
    group.add_argument("--url", metavar="URL", help="serving: a gateway that runs already")
    add_key_flag(group)
    group.add_argument(
        "--orchestrator-address",
        metavar="HOST:PORT",
        help="serving: an orchestrator that runs already; --target names its tokenizer",
    )
    group = parser.add_argument_group("load")
    group.add_argument("--prompts", metavar="FILE", help=PROMPTS_HELP)
    group.add_argument("--num-prompts", type=int, metavar="N", help="N prompts, categories in turn")
    group.add_argument("--max-tokens", type=int, metavar="N", help="tokens an answer (default: 96)")
    group.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy")
    group.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of sampling and of arrivals"
    )
    group.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="decode to --max-tokens, so that every side does the same work",
    )
    group.add_argument("--concurrency", type=int, nargs="+", metavar="N", help="levels to measure")
    group.add_argument(
        "--arrival-rate",
        type=float,
        nargs="+",
        default=[],
        metavar="R",
        help="serving: levels of R requests/s (poisson), besides those of --concurrency",
    )
    group.add_argument("--pairs", type=int, metavar="N", help="pairs a level; default: all prompts")
    group.add_argument(
        "--requests-per-wave",
        type=int,
        metavar="N",
        help="prompts a side runs in one pair (default: the concurrency; auto: a multiple of it, "
        "6 or more)",
    )
    group = parser.add_argument_group("judgement")
    group.add_argument("--thresholds", metavar="FILE", help="JSON object of thresholds")
    group.add_argument(
        "--threshold",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help=f"one threshold, over the file's; `none` leaves it unjudged; names: {_names()}",
    )
    group.add_argument(
        "--padding",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="serving: credit target-only with what padded steps would gain",
    )
    group = parser.add_argument_group("other engines")
    group.add_argument("--peer", action="append", choices=PEERS, default=[], help="serving")
    group.add_argument("--vllm-python", metavar="PYTHON", help="interpreter that has vLLM")
    group.add_argument(
        "--vllm-arg",
        metavar="KEY=JSON",
        action="append",
        default=[],
        help="handed on to vLLM's LLM, such as enforce_eager=true",
    )
    group = parser.add_argument_group("acceptance, auto, sweep")
    group.add_argument(
        "--methods",
        nargs="+",
        metavar="METHOD",
        default=list(METHODS),
        help="acceptance: names, or JSON objects as for --speculative-config",
    )
    group.add_argument(
        "--k-values",
        type=int,
        nargs="+",
        default=list(K_VALUES),
        metavar="K",
        help="sweep: fixed K to try",
    )
    group.add_argument(
        "--auto-config",
        metavar="JSON",
        help="sweep: keys that make K dynamic; auto: keys of the deployment, whose K is dynamic "
        "(default: the schedule auto)",
    )
    group.add_argument(
        "--static-config",
        metavar="JSON",
        help="acceptance, sweep: keys that keep K fixed (default: the schedule constant)",
    )
    add_model_flags(parser, EngineConfig, "engine", leave_out=NOT_FLAGS)
    add_tls_flags(parser)


def add_overlap_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the overlap suite."""
    group = parser.add_argument_group("overlap")
    group.add_argument(
        "--num-cached-outcomes", type=int, default=8, metavar="N", help="outcomes of a round"
    )
    group.add_argument(
        "--rules",
        nargs="+",
        choices=[str(rule) for rule in AcceptanceRule],
        default=[str(rule) for rule in AcceptanceRule],
        help="acceptance rules",
    )


def add_steps_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the steps suite."""
    group = parser.add_argument_group("steps")
    group.add_argument("--model", help="directory or hub id; without it the embedded target")
    group.add_argument("--threads", type=int, default=1, help="CPU threads of both")
    group.add_argument(
        "--rows", type=int, nargs="+", default=[1, 5, 8, 32], help="rows of one forward"
    )
    group.add_argument("--cached", type=int, default=128, help="tokens already in the cache")
    group.add_argument("--repeats", type=int, default=20, help="timed steps of each kind")
    group.add_argument(
        "--clock",
        default="wall",
        choices=("wall", "cpu"),
        help="cpu: processor time, which a busy machine disturbs less (one thread only)",
    )


def _names() -> str:
    return ", ".join(Thresholds.model_fields)
