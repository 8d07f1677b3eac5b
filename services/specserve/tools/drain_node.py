"""`specserve drain-node`: empties this Ray node before its pod ends, as a preStop hook.

Ray is told that the node drains; Serve then starts other replicas elsewhere, and ends those here
once their sessions have finished or moved. Without this a pod that is evicted takes its sessions
along. Knows Ray by its command line and by the names of its processes.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil

from specserve.errors import ConfigurationError
from specserve.tools.terminal import say, warn

SERVING = ("ray::ServeReplica:", "ray::ProxyActor")
"""How Ray names the processes that hold requests."""

RAY_TIMEOUT_S = 20.0
"""Longest that Ray may take to accept. Where the head is gone, nobody is left to move anything."""

LONGEST_S = 86_400.0

POLL_S = 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `specserve drain-node`."""
    parser.add_argument(
        "--timeout-s",
        metavar="S",
        type=float,
        default=90.0,
        help="longest wait for replicas and proxy to end, in seconds (default: 90)",
    )
    parser.add_argument("--address", metavar="HOST:PORT", help="Ray's head (default: this node's)")


def run(args: argparse.Namespace) -> int:
    """Drain the node that runs on this machine; exit code 1 when something was left."""
    timeout_s: float = args.timeout_s
    if not 0 < timeout_s <= LONGEST_S:
        raise ConfigurationError(f"--timeout-s: found {timeout_s:g}, wanted 1 to {LONGEST_S:g}")
    deadline = time.monotonic() + timeout_s
    node_id = node_id_of(command_lines())
    if not request_drain(node_id, args.address, timeout_s):
        return 1
    left = wait_until_gone(lambda: serving(process_names()), deadline)
    if left:
        warn(f"specserve drain-node: still here after {timeout_s:g} s: {', '.join(left)}")
        return 1
    say("specserve drain-node: nothing is served here any more")
    return 0


def request_drain(node_id: str, address: str | None, timeout_s: float) -> bool:
    """Ask Ray to drain a node; say why when it does not."""
    words = [
        str(Path(sys.executable).with_name("ray")),
        "drain-node",
        f"--node-id={node_id}",
        "--reason=DRAIN_NODE_REASON_PREEMPTION",
        "--reason-message=the pod ends",
        f"--deadline-remaining-seconds={int(timeout_s)}",
    ]
    if address is not None:
        words.append(f"--address={address}")
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=RAY_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        warn(f"specserve drain-node: Ray did not answer within {RAY_TIMEOUT_S:g} s")
        return False
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        warn(f"specserve drain-node: Ray refused: {lines[-1] if lines else done.returncode}")
        return False
    return True


def node_id_of(commands: Iterable[list[str]]) -> str:
    """Find the id of the one Ray node that runs here in its raylet's command line.

    Raises:
        ConfigurationError: no node runs here, or several do.
    """
    ids = {
        word.removeprefix("--node_id=")
        for words in commands
        if words and Path(words[0]).name == "raylet"
        for word in words
        if word.startswith("--node_id=")
    }
    if len(ids) != 1:
        raise ConfigurationError(f"found {len(ids)} Ray nodes on this machine, wanted one")
    return ids.pop()


def serving(names: Iterable[str]) -> list[str]:
    """Return those of the process names that hold requests."""
    return sorted(name for name in names if name.startswith(SERVING))


def wait_until_gone(look: Callable[[], list[str]], deadline: float) -> list[str]:
    """Look until nothing is left or the deadline has come; return what is left."""
    while (left := look()) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return left


def command_lines() -> list[list[str]]:
    """Return the command line of every process that may be looked at."""
    return [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]


def process_names() -> list[str]:
    """Return what every process calls itself: Ray's workers put it where the command line was."""
    return [" ".join(words) for words in command_lines() if words]
