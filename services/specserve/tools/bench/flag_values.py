"""From the flags of `specserve bench` to checked options. Knows flags; starts nothing."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from specserve.config import EngineConfig, SpeculativeConfig
from specserve.config_parsing import parse_speculative_config
from specserve.errors import ConfigurationError
from specserve.tools.bench.clients import RequestSettings
from specserve.tools.bench.options import AUTO_CONFIG, STATIC_CONFIG, BenchOptions, PeerOptions
from specserve.tools.bench.thresholds import Thresholds, read_thresholds
from specserve.tools.client_access import check_access, key_headers, tls_of
from specserve.tools.flags import config_from_flags, flags_given
from specserve.tools.load.arrivals import Pacing

DEFAULT_CONCURRENCY = {"serving": (1,), "auto": (1, 4, 16, 32), "sweep": (1, 2, 4, 8, 16)}
ACCEPTANCE_CONCURRENCY = (8,)
MAX_TOKENS = 96


def bench_options(args: argparse.Namespace, suite: str) -> BenchOptions:
    """Turn flags into the options of one suite.

    Raises:
        ConfigurationError: a value is wrong; the message names the flag.
    """
    for flag in ("num_prompts", "max_tokens", "pairs", "requests_per_wave"):
        _at_least_one(flag, [getattr(args, flag)] if getattr(args, flag) is not None else [])
    _at_least_one("concurrency", args.concurrency or [])
    _at_least_one("k_values", args.k_values)
    if suite == "overlap":
        _at_least_one("num_cached_outcomes", [args.num_cached_outcomes])
        if args.pairs == 1:
            raise ConfigurationError("--pairs: found 1, wanted 2 or more: its interval is judged")
    if not all(rate > 0 for rate in args.arrival_rate):
        raise ConfigurationError(f"--arrival-rate: found {args.arrival_rate}, wanted above 0")
    if not 0 <= args.temperature <= 2:
        raise ConfigurationError(f"--temperature: found {args.temperature:g}, wanted 0 to 2")
    check_access(args)
    engine = config_from_flags(args, EngineConfig, model="", dtype=args.dtype)
    return BenchOptions(
        target=args.target,
        speculative=_speculative(args),
        engine=engine,
        engine_flags=(f"--dtype={args.dtype}", *flags_given(_without_dtype(args), EngineConfig)),
        cache_dir=args.cache_dir,
        settings=RequestSettings(
            max_tokens=args.max_tokens or MAX_TOKENS,
            temperature=args.temperature,
            ignore_eos=args.ignore_eos,
            seed=args.seed,
        ),
        pacings=_pacings(args, suite),
        thresholds=thresholds_of(args),
        prompts=args.prompts,
        num_prompts=args.num_prompts,
        num_pairs=args.pairs,
        requests_per_wave=args.requests_per_wave,
        orchestrator_address=args.orchestrator_address,
        tls=tls_of(args),
        url=args.url,
        headers=key_headers(args.api_key_from),
        padding=args.padding,
        peers=PeerOptions(tuple(args.peer), args.vllm_python, _key_values(args.vllm_arg)),
        methods=tuple(args.methods),
        k_values=tuple(args.k_values),
        auto_config=_json_object("--auto-config", args.auto_config) or AUTO_CONFIG,
        static_config=_json_object("--static-config", args.static_config) or STATIC_CONFIG,
    )


def thresholds_of(args: argparse.Namespace) -> Thresholds:
    """Read the thresholds."""
    path = None if args.thresholds is None else Path(args.thresholds)
    return read_thresholds(path, args.threshold)


def _speculative(args: argparse.Namespace) -> SpeculativeConfig | None:
    config = None
    if args.speculative_config is not None:
        config = parse_speculative_config(args.speculative_config)
    if args.num_speculative_tokens is None:
        return config
    values = {} if config is None else config.model_dump(exclude_unset=True)
    values["num_speculative_tokens"] = args.num_speculative_tokens
    return parse_speculative_config(json.dumps(values))


def _pacings(args: argparse.Namespace, suite: str) -> tuple[Pacing, ...]:
    levels: Sequence[int] = args.concurrency or ()
    if not levels and not args.arrival_rate:
        levels = DEFAULT_CONCURRENCY.get(suite, ACCEPTANCE_CONCURRENCY)
    closed = [Pacing(concurrency=level) for level in levels]
    return (*closed, *(Pacing(arrival_rate=rate) for rate in args.arrival_rate))


def _without_dtype(args: argparse.Namespace) -> argparse.Namespace:
    # --dtype has a default of its own here, and the steps suite's flag of that name.
    values = {name: value for name, value in vars(args).items() if name not in ("dtype", "model")}
    return argparse.Namespace(**values)


def _at_least_one(name: str, values: Sequence[int]) -> None:
    for value in values:
        if value < 1:
            flag = "--" + name.replace("_", "-")
            raise ConfigurationError(f"{flag}: found {value}, wanted 1 or more")


def _key_values(words: Sequence[str]) -> dict[str, object]:
    values: dict[str, object] = {}
    for word in words:
        key, separator, text = word.partition("=")
        try:
            values[key] = json.loads(text)
        except ValueError:
            separator = ""
        if not separator:
            raise ConfigurationError(
                f"--vllm-arg: found {word!r}, wanted KEY=JSON, such as max_model_len=2048"
            )
    return values


def _json_object(flag: str, text: str | None) -> str | None:
    if text is None:
        return None
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigurationError(f"{flag}: not JSON ({error})") from error
    if not isinstance(value, dict):
        raise ConfigurationError(f"{flag}: found {text!r}, wanted a JSON object")
    return text
