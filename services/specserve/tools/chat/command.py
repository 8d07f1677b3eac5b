"""`specserve chat`: a chat in the terminal whose colours show where each token came from.

Talks HTTP: to a running gateway (`--url`), or to a pair that it starts as plain processes, which is
up in half the time that a Ray takes. Knows the terminal; knows no service.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from specserve.config import EngineConfig
from specserve.errors import ConfigurationError, SpecServeError
from specserve.rpc.placement import threads_per_engine
from specserve.tools.chat.painter import ORIGIN_COLOURS, Painter
from specserve.tools.chat.stream import Speculation, stream_chat
from specserve.tools.client_access import add_key_flag, check_access, key_headers
from specserve.tools.flags import add_model_flags, config_from_flags, flags_given
from specserve.tools.interrupts import stop_signals_interrupt
from specserve.tools.local import PairSpec, run_pair
from specserve.tools.models import CACHE_HELP, require_fitting, resolve_pair
from specserve.tools.process import SPECULATIVE_HELP, speculative_from
from specserve.tools.terminal import (
    BOLD,
    DIM,
    paint,
    say,
    wants_colour,
    warn,
    write,
)

if TYPE_CHECKING:
    import httpx


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `specserve chat`."""
    parser.add_argument("target", nargs="?", help="target to start; the embedded pair without it")
    parser.add_argument("--url", help="a running gateway, such as http://127.0.0.1:8000")
    add_key_flag(parser)
    parser.add_argument("--speculative-config", metavar="JSON", help=SPECULATIVE_HELP)
    parser.add_argument("--message", metavar="TEXT", help="say this, print the answer, and leave")
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument("--max-tokens", type=int, default=512, help="most tokens of an answer")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    parser.add_argument("--seed", type=int, help="same seed, same answer")
    parser.add_argument("--num-speculative-tokens", type=int, metavar="K", help="0: none")
    parser.add_argument("--cache-dir", metavar="DIR", help=CACHE_HELP)
    add_model_flags(
        parser, EngineConfig, "engine", leave_out=("model", "draft_vocab_size", "quantization")
    )


def run(args: argparse.Namespace) -> int:
    """Chat until the input ends, or /exit."""
    import httpx

    if args.url and args.target:
        raise ConfigurationError("--url names a running server; leave the target out")
    check_access(args)
    headers = key_headers(args.api_key_from)
    with stop_signals_interrupt(), contextlib.ExitStack() as stack:
        url = args.url or stack.enter_context(_local_url(args))
        client = stack.enter_context(httpx.Client(base_url=url, headers=headers))
        return _talk(client, args)


@contextlib.contextmanager
def _local_url(args: argparse.Namespace) -> Iterator[str]:
    pair = resolve_pair(args.target, speculative_from(args), args.cache_dir)
    engine = config_from_flags(args, EngineConfig, model=pair.target)
    require_fitting(pair, engine)
    warn("specserve chat: loading models")
    spec = PairSpec(
        target=pair.target,
        draft=None if pair.speculative is None else pair.speculative.model,
        speculative_config=(
            None if pair.speculative is None else pair.speculative.model_dump_json()
        ),
        engine_flags=(f"--num-threads={threads_per_engine()}", *flags_given(args, EngineConfig)),
    )
    with run_pair(spec) as local:
        yield f"http://{local.gateways[0].address}"


def _talk(client: httpx.Client, args: argparse.Namespace) -> int:
    colour = wants_colour(sys.stdout)
    if colour:
        legend = (paint(name, shade, True) for name, shade in ORIGIN_COLOURS.items())
        say(f"tokens: {', '.join(legend)}")
    history = [{"role": "system", "content": args.system}] if args.system else []
    for message in _messages(args.message, colour):
        history.append({"role": "user", "content": message})
        try:
            answer = _answer(client, history, args, colour)
        except SpecServeError as error:
            warn(f"specserve chat: {error}")
            history.pop()
            if args.message:
                return 1
            continue
        history.append({"role": "assistant", "content": answer})
    return 0


def _messages(given: str | None, colour: bool) -> Iterator[str]:
    if given is not None:
        yield given
        return
    if not sys.stdin.isatty():
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(encoding="utf-8", errors="replace")
        yield from (line.strip() for line in sys.stdin if line.strip())
        return
    while True:
        try:
            message = input(paint("> ", BOLD, colour)).strip()
        except EOFError:
            return
        if message in ("/exit", "/quit"):
            return
        if message:
            yield message


def _answer(
    client: httpx.Client,
    history: list[dict[str, str]],
    args: argparse.Namespace,
    colour: bool,
) -> str:
    """Stream one answer; Ctrl-C ends the answer, not the chat."""
    fields: dict[str, object] = {"temperature": args.temperature, "max_tokens": args.max_tokens}
    if args.seed is not None:
        fields["seed"] = args.seed
    if args.num_speculative_tokens is not None:
        fields["num_speculative_tokens"] = args.num_speculative_tokens
    painter = Painter(colour)
    pieces: list[str] = []
    speculation: Speculation | None = None
    stream = stream_chat(client, history, fields, origins=True)
    try:
        with contextlib.closing(stream):
            for event in stream:
                pieces.append(event.text)
                write(painter.paint(event.text, event.tokens))
                speculation = event.speculation or speculation
    except KeyboardInterrupt:
        if args.message or not sys.stdin.isatty():
            raise
    say()
    if speculation is not None:
        say(paint(_summary(speculation, painter.counts), DIM, colour))
    return "".join(pieces)


def _summary(speculation: Speculation, counts: dict[str, int]) -> str:
    origins = ", ".join(f"{count} {origin}" for origin, count in counts.items() if count)
    return (
        f"[{origins or 'no tokens'}; {100 * speculation.draft_acceptance_rate:.0f} % of "
        f"{speculation.num_draft_tokens} draft tokens accepted, "
        f"{speculation.mean_acceptance_length:.2f} tokens per round]"
    )
