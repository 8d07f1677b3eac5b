"""Other engines on the same prompts: each a process of its own, started once, asked in turns.

Knows the peers' command lines and the lines they speak (`peer_runner.py`); knows neither library.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO, Any

from specserve.errors import PeerUnavailable
from specserve.tools.bench.clients import RequestSettings
from specserve.tools.bench.conditions import DeploymentFacts
from specserve.tools.bench.deployment import WARM_UP_TOKENS
from specserve.tools.bench.host import ProcessorMeter, resident_bytes
from specserve.tools.bench.peer_spec import PeerSpec
from specserve.tools.bench.sample import BenchPrompt, Sample, Wave
from specserve.tools.load.arrivals import Pacing

RUNNER = Path(__file__).with_name("peer_runner.py")

START_TIMEOUT_S = 900.0
"""vLLM may compile for minutes when it is first loaded."""

STOP_TIMEOUT_S = 20.0
SETTLE_TIMEOUT_S = 10.0
SETTLE_POLL_S = 0.2
SETTLED_SHARE = 0.1
"""A peer is quiet when its processes take no more than this share of one processor."""

_LINE_LIMIT_BYTES = 1 << 26


class PeerArm:
    """A running peer."""

    num_speculative_tokens = None

    def __init__(
        self,
        spec: PeerSpec,
        process: asyncio.subprocess.Process,
        log: IO[bytes],
        settings: RequestSettings,
    ) -> None:
        self.spec = spec
        self.versions: dict[str, str] = {}
        self._process = process
        self._log = log
        self._settings = settings

    @property
    def name(self) -> str:
        """What reports call it."""
        return self.spec.name

    @property
    def deployment(self) -> str:
        """It is a deployment of its own."""
        return self.spec.name

    def facts(self) -> DeploymentFacts:
        """Describe it for the conditions."""
        return DeploymentFacts(
            name=self.name,
            address="",
            speculative_config=self.spec.speculative_json(),
            engine_flags=self.spec.flags(),
            models=(),
            versions=self.versions,
            resident_bytes=resident_bytes([self._process.pid]),
        )

    async def wait_ready(self) -> None:
        """Wait until it has loaded its models.

        Raises:
            PeerUnavailable: it ended, or took longer than START_TIMEOUT_S.
        """
        answer = await self._read(START_TIMEOUT_S)
        self.versions = dict(answer["versions"])

    async def run(self, prompts: Sequence[BenchPrompt], pacing: Pacing, label: str) -> Wave:
        """Decode the prompts; the label is not needed."""
        wave = await self._ask(prompts, pacing.concurrency or 1, self._settings)
        await self._settle()
        return wave

    async def warm_up(self, prompts: Sequence[BenchPrompt]) -> None:
        """Send every prompt once, for a few tokens."""
        settings = RequestSettings(WARM_UP_TOKENS, temperature=0.0, ignore_eos=True, seed=0)
        for prompt in prompts:
            await self._ask([prompt], 1, settings)
        await self._settle()

    async def stop(self) -> None:
        """End it: its input ends, and if it does not follow it is killed. Idempotent."""
        if self._process.returncode is None and self._process.stdin is not None:
            self._process.stdin.close()
            try:
                await asyncio.wait_for(self._process.wait(), STOP_TIMEOUT_S)
            except TimeoutError:
                await self.kill()
        self._log.close()

    async def kill(self) -> None:
        """End it and what it started, whatever it is doing."""
        with contextlib.suppress(ProcessLookupError):
            # It leads a session of its own, so its group is its engine's processes.
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()

    async def _ask(
        self, prompts: Sequence[BenchPrompt], concurrency: int, settings: RequestSettings
    ) -> Wave:
        question = {
            "prompts": [list(prompt.token_ids) for prompt in prompts],
            "concurrency": concurrency,
            "max_tokens": settings.max_tokens,
            "temperature": settings.temperature,
            "ignore_eos": settings.ignore_eos,
            "seed": settings.seed,
        }
        if self._process.stdin is not None:
            with contextlib.suppress(ConnectionError):  # the answer will tell
                self._process.stdin.write(json.dumps(question).encode() + b"\n")
                await self._process.stdin.drain()
        answer = await self._read(None)
        samples = [
            Sample(
                prompt.prompt_id,
                prompt.category,
                len(prompt.token_ids),
                block_at_s=tuple(sample["block_at_s"]),
                block_sizes=tuple(sample["block_sizes"]),
                e2e_s=sample["e2e_s"],
            )
            for prompt, sample in zip(prompts, answer["samples"], strict=True)
        ]
        return Wave(tuple(samples), answer["wall_s"])

    async def _read(self, timeout_s: float | None) -> dict[str, Any]:
        stdout = self._process.stdout
        try:
            async with asyncio.timeout(timeout_s):
                line = b"" if stdout is None else await stdout.readline()
        except TimeoutError:
            raise PeerUnavailable(self.name, f"not ready after {timeout_s} s") from None
        if not line:
            raise PeerUnavailable(self.name, f"it ended: {self._log_tail()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerUnavailable(self.name, answer["error"])
        return answer

    async def _settle(self) -> None:
        """Wait until it is quiet: an engine may spin for a while after its last token."""
        loop = asyncio.get_running_loop()
        end = loop.time() + SETTLE_TIMEOUT_S
        while loop.time() < end:
            meter = ProcessorMeter([self._process.pid])
            await asyncio.sleep(SETTLE_POLL_S)
            if meter.own_processors() <= SETTLED_SHARE:
                return

    def _log_tail(self) -> str:
        self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, self._log.tell() - 4000))
        return self._log.read().decode(errors="replace").strip()


@asynccontextmanager
async def running_peer(spec: PeerSpec, settings: RequestSettings) -> AsyncIterator[PeerArm]:
    """Start a peer; it ends on leaving.

    Raises:
        PeerUnavailable: it cannot be started or does not load; its last words are kept.
    """
    log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by PeerArm.stop
    try:
        process = await asyncio.create_subprocess_exec(
            spec.python,
            str(RUNNER),
            spec.options(),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            env={**os.environ, **spec.environment()},
            limit=_LINE_LIMIT_BYTES,
            start_new_session=True,
        )
    except OSError as error:
        log.close()
        raise PeerUnavailable(spec.name, f"cannot start {spec.python}: {error.strerror}") from error
    arm = PeerArm(spec, process, log, settings)
    try:
        await arm.wait_ready()
        yield arm
    except BaseException:
        await arm.kill()
        raise
    finally:
        await arm.stop()
