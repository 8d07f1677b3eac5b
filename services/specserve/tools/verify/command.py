"""`specserve verify`: proves that speculation changes no token and no law, and keeps the record.

Three parts, each through the same binaries and the same gRPC path as in production: parity and
prefixes on the pair itself, distribution on an enumerable one. Knows the parts by name; what each
proves is in their modules, and in docs/verify.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specserve.config import SpeculativeConfig
from specserve.config_parsing import SUPPORTED_METHODS, build, check_speculative
from specserve.errors import ConfigurationError
from specserve.rpc.verified_records import folder_of
from specserve.tools.client_access import (
    add_key_flag,
    add_tls_flags,
    check_access,
    key_headers,
    tls_of,
)
from specserve.tools.flags import as_flag
from specserve.tools.models import CACHE_HELP
from specserve.tools.process import SPECULATIVE_HELP, speculative_from
from specserve.tools.terminal import Progress, say
from specserve.tools.verify.pairs import PairOptions, VerifiedPair, reached
from specserve.tools.verify.parity import TIE_MARGIN, ParityReport, compare_modes

if TYPE_CHECKING:
    from specserve.rpc.v1.generation_pb2 import GetPairResponse
    from specserve.tools.verify.distribution import DistributionReport
    from specserve.tools.verify.outcome import Verification
    from specserve.tools.verify.prefixes import PrefixesReport

PROMPTS_HELP = (
    "JSON lines with `turns` (as Spec-Bench has them); without it six shipped prompts are used"
)
NUM_LAW_PROMPTS = 2
"""Prompts of the prefixes part: more would leave each of them fewer texts."""

MIN_SEQUENCES = 1000
"""Fewer show no bias in a whole text that long texts would not show."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `specserve verify`."""
    parser.add_argument(
        "--suite",
        choices=("all", "parity", "prefixes", "distribution"),
        default="all",
        help="parity: the same tokens with and without; prefixes: the pair's own law after fixed "
        "prompts; distribution: an enumerable pair's law; all: the three, and a record",
    )
    pair = parser.add_argument_group("pair")
    pair.add_argument(
        "--orchestrator-address", metavar="HOST:PORT", help="verify the pair that runs there"
    )
    pair.add_argument(
        "--url",
        metavar="URL",
        help="verify the pair behind this gateway; keeps no record, for a gateway tells no weights",
    )
    add_key_flag(pair)
    pair.add_argument("--target", metavar="MODEL", help="start this target; default: embedded")
    pair.add_argument("--draft", metavar="MODEL", help="start this draft; default: embedded")
    pair.add_argument("--speculative-config", metavar="JSON", help=SPECULATIVE_HELP)
    pair.add_argument("--method", choices=SUPPORTED_METHODS, help="proposer; as in the config")
    pair.add_argument(
        "--num-speculative-tokens", type=int, metavar="K", help="as in the config (default: 4)"
    )
    pair.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16"),
        default="auto",
        help="number type of both models",
    )
    pair.add_argument("--cache-dir", metavar="DIR", help=CACHE_HELP)
    group = parser.add_argument_group("how much")
    group.add_argument("--prompts", metavar="FILE", help=PROMPTS_HELP)
    group.add_argument("--num-prompts", type=int, metavar="N", help="use the first N prompts")
    group.add_argument(
        "--max-tokens", type=int, default=64, metavar="N", help="parity: tokens an answer"
    )
    group.add_argument(
        "--seconds", type=float, default=60.0, metavar="S", help="prefixes: time to draw in"
    )
    group.add_argument(
        "--bias",
        type=float,
        default=0.005,
        metavar="B",
        help="distribution: smallest bias of a probability that must be found",
    )
    group.add_argument(
        "--num-sequences", type=int, default=2000, metavar="N", help="distribution: short texts"
    )
    group.add_argument("--concurrency", type=int, default=24, metavar="N", help="requests at once")
    add_tls_flags(parser)
    output = parser.add_argument_group("output")
    output.add_argument("--json", metavar="FILE", help="also write the report as JSON")
    output.add_argument(
        "--verified-dir",
        metavar="DIR",
        help="folder of the records (default: ~/.cache/specserve/verified)",
    )
    output.add_argument("--no-record", action="store_true", help="keep no record")


def run(args: argparse.Namespace) -> int:
    """Run the parts that were asked for; 0 when all of them hold, 1 when one does not."""
    _check(args)
    report, passed = asyncio.run(_run(args))
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    say("PASSED" if passed else "FAILED")
    return 0 if passed else 1


def _check(args: argparse.Namespace) -> None:
    if not 0 < args.bias < 0.4:
        raise ConfigurationError(f"--bias: {args.bias:g}, above 0 and below 0.4 was wanted")
    if args.num_sequences < MIN_SEQUENCES:
        raise ConfigurationError(
            f"--num-sequences: {args.num_sequences}, at least {MIN_SEQUENCES} was wanted"
        )
    if args.seconds <= 0 or args.concurrency < 1 or args.max_tokens < 2:
        raise ConfigurationError("--seconds, --concurrency and --max-tokens must be positive")
    check_access(args)
    running = "--orchestrator-address" if args.url is None else "--url"
    if args.orchestrator_address is not None or args.url is not None:
        for name in ("target", "draft", "speculative_config", "method", "num_speculative_tokens"):
            if getattr(args, name) is not None:
                raise ConfigurationError(f"{as_flag(name)}: what runs at {running} has its own")


async def _run(args: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    if args.suite == "distribution":
        law = await _distribution(args)
        return law.record(), law.passed
    async with reached(_pair_options(args)) as pair:
        say(_about(pair))
        if pair.pair.reason:
            say(f"note: {pair.pair.reason}")
        parity = await _parity(pair, args) if args.suite != "prefixes" else None
        prefixes = await _prefixes(pair, args) if args.suite != "parity" else None
    if parity is not None and prefixes is not None:
        from specserve.tools.verify.outcome import Verification

        law = await _distribution(args, pair.pair)
        return _conclude(Verification(pair.pair, parity, prefixes, law), args)
    if parity is not None:
        return parity.record(), parity.passed
    return (prefixes.record(), prefixes.passed) if prefixes is not None else ({}, False)


def _conclude(outcome: Verification, args: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    from specserve.speculation.types import AcceptanceRule

    say(outcome.table())
    passed = all(outcome.passed(rule) for rule in AcceptanceRule)
    wanted = outcome.pair.num_speculative_tokens
    is_kept = args.url is None and not args.no_record
    for rule in AcceptanceRule:
        k = outcome.num_speculative_tokens(rule)
        if is_kept and k < wanted:
            say(
                f"note: no {rule.value} round had more than {k} draft tokens, {wanted} are "
                f"configured: only {k} are verified"
            )
    if is_kept and (shortfall := outcome.evidence.shortfall()):
        say(f"note: verified {shortfall}: --require-verified will refuse the record")
    if args.url is not None:
        say("no record: a gateway does not tell what its pair is; --orchestrator-address does")
    elif other := outcome.other_versions():
        say(
            "no record: the enumerable pair, started here, and the pair that was verified do not "
            f"run the same code: {', '.join(other)}"
        )
    elif not args.no_record:
        for path in outcome.write(folder_of(args.verified_dir)):
            say(f"record {path}")
    report: dict[str, Any] = {
        "suite": "all",
        "passed": passed,
        "rules": {rule.value: outcome.passed(rule) for rule in AcceptanceRule},
        "parity": outcome.parity.record(),
        "prefixes": outcome.prefixes.record(),
        "distribution": outcome.distribution.record(),
    }
    return report, passed


async def _parity(pair: VerifiedPair, args: argparse.Namespace) -> ParityReport:
    from specserve.rpc import codec

    progress = Progress()
    modes = await compare_modes(
        pair.client,
        pair.prompts,
        max_tokens=args.max_tokens,
        concurrency=args.concurrency,
        progress=progress,
    )
    progress.close()
    method = codec.unpack_method(pair.pair.speculative_method) or "no method"
    report = ParityReport(pair.pair.target.dtype, method, modes)
    say(report.table())
    return report


async def _prefixes(pair: VerifiedPair, args: argparse.Namespace) -> PrefixesReport:
    # Its statistics are torch's, which the other part leaves to its services.
    from specserve.tools.verify.prefixes import PrefixOptions, run_prefix_suite

    progress = Progress()
    report = await run_prefix_suite(
        pair.client,
        pair.prompts[:NUM_LAW_PROMPTS],
        PrefixOptions(
            args.seconds,
            args.concurrency,
            pair.pair.num_speculative_tokens,
            TIE_MARGIN[pair.pair.target.dtype],
        ),
        progress,
    )
    progress.close()
    say(report.table())
    return report


async def _distribution(
    args: argparse.Namespace, pair: GetPairResponse | None = None
) -> DistributionReport:
    """Draw from the enumerable pairs, set up as the pair is that they speak for."""
    from specserve.tools.verify.distribution import (
        DEFAULT_K,
        DistributionOptions,
        run_distribution_suite,
    )
    from specserve.tools.verify.wide_cases import wide_cases

    k = (pair.num_speculative_tokens if pair is not None else 0) or DEFAULT_K
    report = await run_distribution_suite(
        DistributionOptions(
            bias=args.bias,
            num_sequences=args.num_sequences,
            wide_cases=wide_cases(k),
            num_speculative_tokens=k,
            settings={} if pair is None else settings_of(pair),
        )
    )
    say(report.table())
    return report


def settings_of(pair: GetPairResponse) -> dict[str, float]:
    """Return what the draft of a pair was set to, as `--speculative-config` takes it."""
    return {
        name: json.loads(value)
        for name, _, value in (setting.partition("=") for setting in pair.draft.settings)
    }


def _about(pair: VerifiedPair) -> str:
    target, draft = pair.pair.target, pair.pair.draft
    text = f"target {target.model_id}"
    if target.hardware:
        text += f", {target.dtype} on {target.hardware} ({target.backend})"
    if pair.pair.HasField("draft"):
        text += f"; draft {draft.model_id}"
        if draft.backend:
            text += f", {draft.dtype} ({draft.backend})"
    return text


def _pair_options(args: argparse.Namespace) -> PairOptions:
    return PairOptions(
        url=args.url,
        address=args.orchestrator_address,
        target=args.target,
        speculative=_speculative(args),
        dtype=args.dtype,
        prompts=None if args.prompts is None else Path(args.prompts),
        num_prompts=args.num_prompts,
        max_tokens=args.max_tokens,
        cache_dir=args.cache_dir,
        tls=tls_of(args),
        headers=key_headers(args.api_key_from),
    )


def _speculative(args: argparse.Namespace) -> SpeculativeConfig | None:
    """Read the configuration of the pair; None where nothing is said of it."""
    config = speculative_from(args)
    said = {
        "method": args.method,
        "model": args.draft,
        "num_speculative_tokens": args.num_speculative_tokens,
    }
    said = {name: value for name, value in said.items() if value is not None}
    if not said:
        return config
    before = {} if config is None else config.model_dump(exclude_unset=True)
    config = build(SpeculativeConfig, {**before, **said}, "--speculative-config")
    check_speculative(config, "--speculative-config")
    return config
