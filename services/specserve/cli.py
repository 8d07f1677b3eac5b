"""The command line: finds the command and hands over. Each command lives in `tools/`.

Knows names and one-line summaries; imports a command's module only to run it, so that help is
instant and a missing optional part breaks nobody else.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from types import ModuleType

from specserve.config_parsing import did_you_mean
from specserve.errors import ConfigurationError, SpecServeError, quoted
from specserve.tools.flags import Parser
from specserve.tools.terminal import say, warn

EXIT_PROBLEM = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class Command:
    """Where a command is implemented."""

    module: str
    """Module of specserve.tools."""
    summary: str
    """One line for the overview."""
    add_arguments: str = "add_arguments"
    run: str = "run"


COMMANDS = {
    "serve": Command("serve", "serve a target, sped up by a draft, under Ray Serve"),
    "demo": Command("demo", "serve the embedded pair, measure six prompts, and stop"),
    "chat": Command(
        "chat.command", "chat in the terminal; colours show where each token came from"
    ),
    "doctor": Command("doctor.command", "check a pair, devices, ports, memory and versions"),
    "trace": Command("trace", "show where a request's time went, round by round"),
    "support-bundle": Command(
        "support_bundle.command", "collect what helpers need to know, without secrets or text"
    ),
    "speculation": Command("speculation", "switch speculation off, on or to auto while serving"),
    "config": Command("config", "check a file of settings; render what Ray Serve is given"),
    "keys": Command("keys", "add, list and revoke API keys of the gateway"),
    "drain-node": Command("drain_node", "empty this Ray node before its pod ends"),
    "models": Command("models", "pull the embedded pair"),
    "draft": Command(
        "process", "run a draft as a plain process", "add_draft_arguments", "run_draft"
    ),
    "target": Command(
        "process", "run a target as a plain process", "add_target_arguments", "run_target"
    ),
    "orchestrator": Command(
        "process",
        "run an orchestrator as a plain process",
        "add_orchestrator_arguments",
        "run_orchestrator",
    ),
    "gateway": Command("gateway", "run a gateway as a plain process"),
    "bench": Command("bench.command", "measure what speculation gains, and what the system costs"),
    "load": Command("load.command", "send open-loop load to a running system, and judge it"),
    "verify": Command("verify.command", "check that speculation changes no token and no law"),
    "gpu-check": Command(
        "gpu_check.command", "check exactness and speed on a GPU, in one run of minutes"
    ),
    "distill": Command("distill.flags", "train a draft from a target"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the process's exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help", "help"):
        say(_overview())
        return 0 if words else EXIT_USAGE
    if words[0] in ("-V", "--version"):
        say(f"specserve {_version()}")
        return 0
    name, rest = words[0], words[1:]
    command = COMMANDS.get(name)
    if command is None:
        kind = "flag" if name.startswith("-") else "command"
        warn(f"specserve: unknown {kind} {quoted(name)}{did_you_mean(name, COMMANDS)}")
        return EXIT_USAGE
    return _run(name, command, rest)


def parser_of(name: str) -> Parser:
    """Return the parser of one command, its flags in it."""
    command = COMMANDS[name]
    parser = Parser(f"specserve {name}", command.summary)
    getattr(_module_of(command), command.add_arguments)(parser)
    return parser


def _module_of(command: Command) -> ModuleType:
    return importlib.import_module(f"specserve.tools.{command.module}")


def _run(name: str, command: Command, arguments: Sequence[str]) -> int:
    try:
        namespace = parser_of(name).parse(arguments)
        module = _module_of(command)
    except SpecServeError as error:
        warn(f"specserve {name}: {error}")
        return EXIT_USAGE
    try:
        code = getattr(module, command.run)(namespace)
    except SpecServeError as error:
        warn(f"specserve {name}: {error}")
        return EXIT_USAGE if isinstance(error, ConfigurationError) else EXIT_PROBLEM
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has gone; there is nobody left to tell.
        return EXIT_PROBLEM
    return int(code)


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name.ljust(width)}  {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: specserve COMMAND [flags]",
            "",
            "Exact speculative decoding: a draft guesses ahead, the target decides.",
            "",
            *lines,
            "",
            "`specserve COMMAND --help` lists a command's flags.",
        ]
    )


def _version() -> str:
    try:
        return metadata.version("specserve")
    except metadata.PackageNotFoundError:
        return "(not installed)"


if __name__ == "__main__":
    sys.exit(main())
