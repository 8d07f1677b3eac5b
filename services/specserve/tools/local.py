"""A pair on this machine as plain processes: starts them, waits for their ready lines, stops them.

For tests, benchmarks and the terminal chat. Knows which service needs which flags and addresses;
imports none of them. Processes end when this one does, however it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import grpc

from specserve.config_parsing import parse_speculative_config
from specserve.errors import PeerUnavailable
from specserve.rpc.channel import open_channel
from specserve.rpc.v1.generation_pb2 import GetPairRequest
from specserve.rpc.v1.generation_pb2_grpc import GenerationServiceStub
from specserve.tools.held_port import HeldPort
from specserve.tools.local_process import LocalService, launch

PAIR_TIMEOUT_S = 30.0
"""Longest wait for services that all are ready to find one another."""

_PAIR_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class PairSpec:
    """What to start."""

    target: str
    """Model directory or toy:..."""
    draft: str | None
    """Draft model; None for methods without one, or for no speculation at all."""
    speculative_config: str | None = None
    """JSON as for `--speculative-config`; None serves the target alone unless `draft` is given."""
    num_targets: int = 1
    num_drafts: int = 1
    num_orchestrators: int = 1
    num_gateways: int = 1
    """0 starts none: callers speak gRPC to the orchestrator."""
    engine_flags: tuple[str, ...] = ()
    """For target and draft, such as ("--dtype", "float32")."""
    target_flags: tuple[str, ...] = ()
    draft_flags: tuple[str, ...] = ()
    orchestrator_flags: tuple[str, ...] = ()
    gateway_flags: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    """Added to this process's own environment."""

    def speculative_json(self) -> str | None:
        """Return the JSON that the orchestrator and drafts are given, the draft filled in."""
        if self.speculative_config is None and self.draft is None:
            return None
        values = json.loads(self.speculative_config or "{}")
        if self.draft is not None:
            values.setdefault("model", self.draft)
        return json.dumps(values)

    def needs_drafts(self) -> bool:
        """Say whether the method asks a draft service."""
        text = self.speculative_json()
        return text is not None and parse_speculative_config(text).needs_draft_model


class LocalPair:
    """The processes of one pair. An async context manager: inside it, all of them are ready."""

    def __init__(self, spec: PairSpec) -> None:
        self.spec = spec
        self.targets: list[LocalService] = []
        self.drafts: list[LocalService] = []
        self.orchestrators: list[LocalService] = []
        self.gateways: list[LocalService] = []
        self._ports: list[HeldPort] = []

    @property
    def services(self) -> list[LocalService]:
        """All processes, those that others depend on last."""
        return [*self.gateways, *self.orchestrators, *self.drafts, *self.targets]

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.stop()

    async def _start(self) -> None:
        # All start at once, on ports chosen beforehand: most of a start is imports, in parallel.
        # They stay held to the end: a successor finds the port of the one it replaces.
        spec = self.spec
        config = spec.speculative_json()
        config_flags = () if config is None else (f"--speculative-config={config}",)
        peers: list[str] = []
        for _ in range(spec.num_targets):
            port = self._hold_port()
            await self.start_target(f"--port={port}")
            peers.append(f"--target-address=127.0.0.1:{port}")
        for _ in range(spec.num_drafts if spec.needs_drafts() else 0):
            port = self._hold_port()
            await self.start_draft(f"--port={port}")
            peers.append(f"--draft-address=127.0.0.1:{port}")
        fronts: list[str] = []
        for _ in range(spec.num_orchestrators):
            port = self._hold_port()
            flags = (*peers, *config_flags, *spec.orchestrator_flags, f"--port={port}")
            self.orchestrators.append(await launch("orchestrator", flags, spec.env))
            fronts.append(f"--orchestrator-address=127.0.0.1:{port}")
        for _ in range(spec.num_gateways):
            flags = (f"--tokenizer={spec.target}", "--port=0", *fronts, *spec.gateway_flags)
            self.gateways.append(await launch("gateway", flags, spec.env))
        await self.wait_ready(self.services)
        await asyncio.gather(
            *(_pair_ready(service.address, config is not None) for service in self.orchestrators)
        )

    async def start_target(self, *flags: str) -> LocalService:
        """Start one more target, such as the successor of one that was killed, on `--port`."""
        spec = self.spec
        words = (spec.target, *spec.engine_flags, *spec.target_flags, *flags)
        self.targets.append(await launch("target", words, spec.env))
        return self.targets[-1]

    async def start_draft(self, *flags: str) -> LocalService:
        """Start one more draft."""
        spec = self.spec
        config = spec.speculative_json() or "{}"
        words = (f"--speculative-config={config}", *spec.engine_flags, *spec.draft_flags, *flags)
        self.drafts.append(await launch("draft", words, spec.env))
        return self.drafts[-1]

    @staticmethod
    async def wait_ready(services: Sequence[LocalService]) -> None:
        """Wait until all of them are ready; the first that cannot be ends the wait."""
        await asyncio.gather(*(service.wait_ready() for service in services))

    async def stop(self) -> None:
        """Stop every process: first who asks, then who answers. Idempotent."""
        for layer in (self.gateways, self.orchestrators, [*self.drafts, *self.targets]):
            await asyncio.gather(*(service.stop() for service in layer))
            layer.clear()
        while self._ports:
            self._ports.pop().release()

    def _hold_port(self) -> int:
        self._ports.append(HeldPort())
        return self._ports[-1].number


@contextlib.contextmanager
def run_pair(spec: PairSpec) -> Iterator[LocalPair]:
    """Run a pair for a caller that is not asynchronous."""
    with asyncio.Runner() as runner:
        pair = LocalPair(spec)
        runner.run(pair.__aenter__())
        try:
            yield pair
        finally:
            runner.run(pair.stop())


async def _pair_ready(orchestrator: str, speculates: bool) -> None:
    """Wait until an orchestrator has reached a target, and a draft where one is due.

    Raises:
        PeerUnavailable: with its reason, when that takes longer than PAIR_TIMEOUT_S.
    """
    reason = "no answer"
    async with open_channel(orchestrator) as channel:
        stub = GenerationServiceStub(channel)
        for _ in range(round(PAIR_TIMEOUT_S / _PAIR_POLL_S)):
            try:
                answer = await stub.GetPair(GetPairRequest(), timeout=PAIR_TIMEOUT_S)
                if answer.ready and (answer.speculation_enabled or not speculates):
                    return
                reason = answer.reason
            except grpc.aio.AioRpcError as error:
                reason = str(error.details())
            await asyncio.sleep(_PAIR_POLL_S)
    raise PeerUnavailable("orchestrator", f"the pair is not ready: {reason}")
