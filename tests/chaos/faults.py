"""What can be broken in a cluster of plain processes, and how it is mended again.

Each fault takes one member, harms it, waits, and leaves it as it was. Knows processes, signals and
proxies; knows neither plan nor requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import httpx

from chaos.cluster import FATAL_TOKEN_ID, VOCAB_SIZE
from chaos.members import Member
from helpers.waiting import eventually

Harm = Callable[[Member, random.Random], Awaitable[None]]
AWAY_S = 0.5
"""How long the place of a killed process stays empty: whoever restarts it needs time to see it."""

POISON_S = 60.0
"""How long what devices die of may take to be found out: other faults are on, too."""

FRAME_WAIT_S = 5.0
"""How long a fault of frames waits for one to hit."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One kind."""

    kind: str
    role: str
    """Whose member it takes."""
    harm: Harm
    weight: int = 1
    """How often it is drawn; killing is dear, for a start costs seconds of a processor."""
    through: str = ""
    """frames or line: which proxy the member must stand behind; empty: none."""
    leaves_it: bool = False
    """The member serves on meanwhile: it may be the last one of its role."""


async def _kill(member: Member, chance: random.Random) -> None:
    member.running.kill()
    await asyncio.sleep(AWAY_S)
    await member.restart()


async def _terminate(member: Member, chance: random.Random) -> None:
    """As a pod ends: a signal, time to finish or hand over, then another in its place."""
    code = await member.running.stop()
    if code != 0:
        raise RuntimeError(f"{member.name} ended with {code} after SIGTERM")
    await member.restart()


async def _retire(member: Member, chance: random.Random) -> None:
    """As a load balancer and a pod end: no new clients first, the signal after."""
    await asyncio.sleep(AWAY_S)
    await _terminate(member, chance)


async def _kill_device(member: Member, chance: random.Random) -> None:
    """Kill the device process alone; its server starts another, or ends where it gave up."""
    old = member.device_pid()
    if old is not None:
        os.kill(old, signal.SIGKILL)
    await eventually(
        lambda: member.device_pid() not in (None, old) or member.running.returncode is not None,
        f"{member.name} has a device again",
        within_s=90,
    )


async def _pause(pid: int | None, seconds: float) -> None:
    if pid is None:
        return
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            os.kill(pid, signal.SIGCONT)


async def _hang(member: Member, chance: random.Random) -> None:
    """Stop the process until it must have been found out, then let it come back as it was."""
    await _pause(member.running.pid, 1.5 * member.timing.hang_s + chance.random())


async def _hang_device(member: Member, chance: random.Random) -> None:
    await _pause(member.device_pid(), 1.5 * member.timing.hang_s + chance.random())


async def _slow(member: Member, chance: random.Random) -> None:
    """Run for a tenth of the time, for three seconds: slow, but alive."""
    for _ in range(15):
        await _pause(member.device_pid(), 0.18)
        await asyncio.sleep(0.02)


async def _cut(member: Member, chance: random.Random) -> None:
    """Reset the connections, in mid-frame where it happens so; a new one passes."""
    assert member.line is not None
    for _ in range(chance.randint(1, 3)):
        member.line.cut()
        await asyncio.sleep(0.1 * chance.random())


async def _lose_replies(member: Member, chance: random.Random) -> None:
    """Let calls arrive and be worked on, but lose their replies; then cut."""
    assert member.line is not None
    member.line.lose_replies = True
    await asyncio.sleep(0.1 + 0.2 * chance.random())
    member.line.cut()


async def _partition(member: Member, chance: random.Random) -> None:
    """Pass nothing until its sessions have left, then everything: it comes back with old ones."""
    assert member.line is not None
    member.line.stall()
    await asyncio.sleep(min(1.3 * member.timing.hang_s, 0.9 * member.timing.lease_s))
    member.line.flow()


async def _blink(member: Member, chance: random.Random) -> None:
    """Hold everything back for less than anybody would notice."""
    assert member.line is not None
    member.line.stall()
    await asyncio.sleep(0.3 * member.timing.hang_s * chance.random())
    member.line.flow()


async def _poison(member: Member, chance: random.Random) -> None:
    """Ask a gateway for what devices die of, on targets and drafts: it must be told so."""
    prompt = [chance.randrange(1, VOCAB_SIZE) for _ in range(chance.randint(1, 40))]
    body = {"prompt": [*prompt, FATAL_TOKEN_ID], "max_tokens": 8, "temperature": 0}
    async with httpx.AsyncClient(base_url=f"http://{member.address}", timeout=POISON_S) as client:
        answer = await client.post("/v1/completions", json=body)
    if answer.status_code != 500 or answer.json()["error"]["code"] != "poison_request":
        raise RuntimeError(f"a poison request was answered {answer.status_code} {answer.text}")


def _frame(fault: str) -> Harm:
    async def harm(member: Member, chance: random.Random) -> None:
        proxy = member.frames
        assert proxy is not None
        before = proxy.num_spoiled
        proxy.spoil(chance.choice(("calls", "replies")), fault)  # type: ignore[arg-type]
        with contextlib.suppress(AssertionError):
            await eventually(lambda: proxy.num_spoiled > before, within_s=FRAME_WAIT_S)
        proxy.forget_faults()
        if proxy.num_spoiled == before:
            raise MissedError(f"no frame of {member.name} came by")
        # What was lost is asked for anew only when the call's time is over.
        await asyncio.sleep(member.timing.call_s if fault == "lose" else 0.3)

    return harm


class MissedError(Exception):
    """The fault hit nothing: it does not count."""


FAULTS: tuple[Fault, ...] = (
    Fault("target killed", "target", _kill, 3),
    Fault("draft killed", "draft", _kill, 2),
    Fault("target device killed", "target", _kill_device, 2),
    Fault("draft device killed", "draft", _kill_device),
    Fault("orchestrator killed", "orchestrator", _kill, 3),
    Fault("gateway killed", "gateway", _kill, 2),
    Fault("target ended by SIGTERM", "target", _terminate, 2),
    Fault("draft ended by SIGTERM", "draft", _terminate),
    Fault("orchestrator ended by SIGTERM", "orchestrator", _terminate, 2),
    Fault("gateway ended by SIGTERM", "gateway", _retire, 1),
    Fault("target hangs", "target", _hang, 2),
    Fault("draft hangs", "draft", _hang, 2),
    Fault("orchestrator hangs", "orchestrator", _hang, 2),
    Fault("target device hangs", "target", _hang_device, 2),
    Fault("draft device hangs", "draft", _hang_device),
    Fault("target slow", "target", _slow, 2),
    Fault("draft slow", "draft", _slow, 2),
    Fault("target connection cut", "target", _cut, 4, "line"),
    Fault("draft connection cut", "draft", _cut, 2, "line"),
    Fault("orchestrator connection cut", "orchestrator", _cut, 4, "line"),
    Fault("target replies lost", "target", _lose_replies, 4, "line"),
    Fault("draft replies lost", "draft", _lose_replies, 2, "line"),
    Fault("target back with old sessions", "target", _partition, 2, "line"),
    Fault("target held up", "target", _blink, 2, "line"),
    Fault("target frame twice", "target", _frame("duplicate"), 4, "frames"),
    Fault("draft frame twice", "draft", _frame("duplicate"), 2, "frames"),
    Fault("target frames swapped", "target", _frame("reorder"), 4, "frames"),
    Fault("draft frames swapped", "draft", _frame("reorder"), 2, "frames"),
    Fault("target frame lost", "target", _frame("lose"), 2, "frames"),
    Fault("draft frame lost", "draft", _frame("lose"), 1, "frames"),
    Fault("poison request", "gateway", _poison, 2, leaves_it=True),
    Fault("target frame lost and cut", "target", _frame("lose_and_cut"), 4, "frames"),
)
