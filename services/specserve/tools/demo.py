"""`specserve demo`: serves the embedded pair, measures six prompts both ways, and stops.

The shortest way to see what speculation gives: tokens per second both ways, acceptance, and
whether the text stayed the same. Knows the HTTP API and `specserve serve`; knows no service.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING

from specserve.config import EngineConfig
from specserve.errors import ConfigurationError, quoted
from specserve.gateway.config import GatewayConfig
from specserve.tools.chat.stream import Speculation, stream_chat
from specserve.tools.flags import add_model_flags
from specserve.tools.interrupts import stop_signals_interrupt
from specserve.tools.models import CACHE_HELP
from specserve.tools.process import SPECULATIVE_HELP
from specserve.tools.serve import announce, serve_args_from, serving
from specserve.tools.terminal import Progress, say, table

if TYPE_CHECKING:
    import httpx

EXCERPT_CHARACTERS = 72


@dataclass(frozen=True, slots=True)
class Prompt:
    """One shipped prompt."""

    kind: str
    prompt: str


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer, and how fast it came."""

    text: str
    num_tokens: int
    first_token_s: float
    """From sending to the first text."""
    decode_s: float
    """From the first text to the end."""
    speculation: Speculation | None

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second after the first: prefill is the same with and without speculation."""
        return (self.num_tokens - 1) / self.decode_s if self.decode_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Comparison:
    """One prompt, both ways."""

    kind: str
    on: Answer
    off: Answer

    @property
    def speedup(self) -> float:
        """How many times faster speculation is."""
        return self.on.tokens_per_s / self.off.tokens_per_s if self.off.tokens_per_s else 0.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `specserve demo`: those of `serve`, and how much to generate."""
    parser.add_argument("target", nargs="?", help="another target than the embedded one")
    parser.add_argument("--speculative-config", metavar="JSON", help=SPECULATIVE_HELP)
    parser.add_argument("--max-tokens", metavar="N", default="64", help="tokens per answer")
    add_model_flags(
        parser, EngineConfig, "engine", leave_out=("model", "draft_vocab_size", "quantization")
    )
    add_model_flags(parser, GatewayConfig, "gateway")
    group = parser.add_argument_group("replicas")
    group.add_argument("--cache-dir", metavar="DIR", help=CACHE_HELP)
    parser.set_defaults(num_target_replicas=None, num_draft_replicas=None)


def run(args: argparse.Namespace) -> int:
    """Run the demonstration."""
    import httpx

    if not args.max_tokens.isdigit() or int(args.max_tokens) < 2:
        raise ConfigurationError(f"--max-tokens: found {quoted(args.max_tokens)}, wanted 2 or more")
    started = time.monotonic()
    serve_args, pair = serve_args_from(args)
    prompts = shipped_prompts()
    with (
        stop_signals_interrupt() as interrupts,
        serving(serve_args, pair, interrupts) as (base_url, replicas),
    ):
        announce(base_url, replicas)
        with httpx.Client(base_url=base_url) as client:
            first = ask(client, "Say hello.", 2, None)
            seconds = time.monotonic() - started
            say(f"specserve: first token {seconds - first.decode_s:.1f} s after the start")
            comparisons = compare(client, prompts, int(args.max_tokens))
    say()
    say(report(comparisons))
    return 0


def shipped_prompts() -> list[Prompt]:
    """Read the six prompts."""
    text = resources.files("specserve.tools").joinpath("demo_prompts.json").read_text()
    return [Prompt(**entry) for entry in json.loads(text)]


def compare(client: httpx.Client, prompts: Sequence[Prompt], max_tokens: int) -> list[Comparison]:
    """Send every prompt with and without speculation, in turns: either may come first."""
    progress = Progress()
    comparisons = []
    for number, prompt in enumerate(prompts):
        answers = {}
        for half, speculates in enumerate((True, False) if number % 2 else (False, True)):
            progress("measuring", (number + half / 2) / len(prompts))
            answers[speculates] = ask(client, prompt.prompt, max_tokens, None if speculates else 0)
        comparisons.append(Comparison(prompt.kind, answers[True], answers[False]))
    progress("measuring", 1.0)
    return comparisons


def ask(
    client: httpx.Client, prompt: str, max_tokens: int, num_speculative_tokens: int | None
) -> Answer:
    """Stream one greedy answer and time it."""
    fields: dict[str, object] = {"temperature": 0, "max_tokens": max_tokens}
    if num_speculative_tokens is not None:
        fields["num_speculative_tokens"] = num_speculative_tokens
    started = time.perf_counter()
    first = ended = 0.0
    pieces: list[str] = []
    num_tokens = 0
    speculation: Speculation | None = None
    messages = [{"role": "user", "content": prompt}]
    for event in stream_chat(client, messages, fields):
        if event.text:
            ended = time.perf_counter()
            first = first or ended
            pieces.append(event.text)
        num_tokens = event.num_completion_tokens or num_tokens
        speculation = event.speculation or speculation
    return Answer("".join(pieces), num_tokens, first - started, ended - first, speculation)


def report(comparisons: Sequence[Comparison]) -> str:
    """Lay out one row per prompt, and the medians."""
    header = ("prompt", "tok/s", "without", "speed-up", "accepted", "length", "same text")
    rows = [
        _row(
            item.kind,
            item.on.tokens_per_s,
            item.off.tokens_per_s,
            item.speedup,
            item.on.speculation,
            "yes" if item.on.text == item.off.text else "no",
        )
        for item in comparisons
    ]
    records = [item.on.speculation for item in comparisons if item.on.speculation is not None]
    median = statistics.median
    middle = None
    if records:
        middle = Speculation(
            num_draft_tokens=sum(record.num_draft_tokens for record in records),
            num_accepted_draft_tokens=sum(record.num_accepted_draft_tokens for record in records),
            draft_acceptance_rate=median(record.draft_acceptance_rate for record in records),
            mean_acceptance_length=median(record.mean_acceptance_length for record in records),
        )
    rows.append(
        _row(
            "median",
            median(item.on.tokens_per_s for item in comparisons),
            median(item.off.tokens_per_s for item in comparisons),
            median(item.speedup for item in comparisons),
            middle,
            "",
        )
    )
    excerpts = [f"{item.kind:<12} {_excerpt(item.on.text)}" for item in comparisons]
    return "\n".join(
        [
            *excerpts,
            "",
            table(header, rows),
            "",
            "tok/s: tokens per second after the first, with and without speculation; accepted:",
            "accepted / verified draft tokens; length: tokens per speculative round; same text: in",
            "bfloat16 near-ties may fall either way, and --dtype float32 tells them from errors.",
        ]
    )


def _row(
    name: str, on: float, off: float, speedup: float, record: Speculation | None, same: str
) -> tuple[str, ...]:
    accepted = "-" if record is None else f"{100 * record.draft_acceptance_rate:.0f} %"
    length = "-" if record is None else f"{record.mean_acceptance_length:.2f}"
    return (name, f"{on:.1f}", f"{off:.1f}", f"{speedup:.2f}x", accepted, length, same)


def _excerpt(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= EXCERPT_CHARACTERS else flat[: EXCERPT_CHARACTERS - 3] + "..."
