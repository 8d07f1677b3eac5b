"""The served pair: both pools, the vocabulary, and whether speculation may be used.

Knows models and compatibility; knows no request.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import grpc

from specserve.config import OrchestratorConfig, SpeculativeMethod
from specserve.errors import ModelMismatch, PeerUnavailable, SpecServeError
from specserve.orchestrator.pool import (
    DRAFT_KIND,
    TARGET_KIND,
    DraftLink,
    Pool,
    TargetLink,
    model_of,
)
from specserve.orchestrator.synthetic import synthetic_acceptance
from specserve.orchestrator.vocabulary import (
    TargetIdentity,
    Vocabulary,
    check_pair,
    fetch_vocabulary,
)
from specserve.rpc import codec
from specserve.rpc.link import FrameLink
from specserve.rpc.tls import MutualTls
from specserve.rpc.v1 import common_pb2, draft_pb2, generation_pb2, target_pb2

logger = logging.getLogger(__name__)

RETRY_S = 0.2


class Pair:
    """Targets and drafts, and what they agree on."""

    def __init__(self, config: OrchestratorConfig, tls: MutualTls | None = None) -> None:
        self.targets: Pool[target_pb2.VerifyCall, target_pb2.VerifyReply] = Pool(
            TARGET_KIND, heartbeat_s=config.heartbeat_s, hang_s=config.device_hang_s, tls=tls
        )
        self.drafts: Pool[draft_pb2.ProposeCall, draft_pb2.ProposeReply] | None = None
        speculative = config.speculative
        if speculative is not None and speculative.methods and speculative.needs_draft_model:
            self.drafts = Pool(
                DRAFT_KIND, heartbeat_s=config.heartbeat_s, hang_s=config.device_hang_s, tls=tls
            )
        self.vocabulary: Vocabulary | None = None
        self._identity: TargetIdentity | None = None
        self._num_requests = 0
        self._was_complete = False
        """A pair that lost its draft goes on target-only: that is no reason to send users away."""
        self._config = config
        self._synthetic = synthetic_acceptance(speculative)
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to watch the pools."""
        self.targets.check = lambda link: self._changed.set()
        if self.drafts is not None:
            self.drafts.check = lambda link: self._changed.set()
        self.update_peers(self._config.target_addresses, self._config.draft_addresses)
        self._task = asyncio.create_task(self._watch(), name="pair")

    async def close(self) -> None:
        """Drop every link."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self.targets.close()
        if self.drafts is not None:
            await self.drafts.close()

    def update_peers(self, targets: Any, drafts: Any) -> None:
        """Know exactly these replicas."""
        self.targets.update(targets)
        if self.drafts is not None:
            self.drafts.update(drafts)
        self._changed.set()

    @property
    def max_model_len(self) -> int:
        """Shortest context of the known targets, in tokens: a session may move to any of them."""
        # Also of targets that are away just now: their requests are admitted, and wait.
        lengths = [link.model.max_model_len for link in self.targets.links.values() if link.model]
        return min(filter(None, lengths), default=1 << 30)

    @property
    def num_speculative_tokens(self) -> int:
        """Configured K, never above what both services take (field case B121)."""
        if self._config.speculative is None:
            return 0
        k = self._config.speculative.num_speculative_tokens
        for pool in self.pools():
            for link in pool.usable():
                if link.model is not None and link.model.max_num_speculative_tokens:
                    k = min(k, link.model.max_num_speculative_tokens)
        return k

    @property
    def method(self) -> SpeculativeMethod | None:
        """Configured proposer; None when speculation is off."""
        speculative = self._config.speculative
        return speculative.method if speculative is not None and speculative.methods else None

    @property
    def methods(self) -> tuple[SpeculativeMethod, ...]:
        """Proposers that a request may name."""
        return self._config.speculative.methods if self._config.speculative is not None else ()

    @property
    def may_draft(self) -> bool:
        """Whether a round can have draft tokens at present."""
        # Without its draft a cascade still has its suffix guesses.
        has_draft = self.drafts is not None and bool(self.drafts.usable())
        return self.method is not None and (has_draft or self.method != "draft_model")

    def models(
        self, target: TargetLink | None = None, draft: DraftLink | None = None
    ) -> tuple[common_pb2.GetModelResponse | None, common_pb2.GetModelResponse | None]:
        """Return what two links lead to; for None, what a session would find at present."""
        drafts = self.drafts.links if self.drafts is not None else {}
        return _model_behind(target, self.targets.links), _model_behind(draft, drafts)

    async def wait_ready(self, timeout_s: float) -> Vocabulary:
        """Wait for a loaded target.

        Raises:
            PeerUnavailable: none came in time.
        """
        if self.vocabulary is None:
            await self.targets.wait_usable(timeout_s)
        if self.vocabulary is None:
            raise PeerUnavailable("target", f"no replica was usable for {timeout_s} s")
        return self.vocabulary

    async def _watch(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            if self.targets.refusals and self._may_change_model():
                # What was refused for the sake of the old model may take its place now.
                self.targets.forget_refusals()
            for link in self.targets.unchecked():
                await self._check(link, self._check_target, self._target_pool)
            if self.drafts is not None and self.vocabulary is not None:
                for draft_link in self.drafts.unchecked():
                    await self._check(draft_link, self._check_draft, self._draft_pool)

    def _target_pool(self) -> Pool[Any, Any]:
        return self.targets  # another one after a check has changed the model

    def _draft_pool(self) -> Pool[Any, Any]:
        if self.drafts is None:
            raise RuntimeError("a draft was checked where none is asked")
        return self.drafts

    async def _check(
        self,
        link: FrameLink[Any, Any],
        check: Callable[[FrameLink[Any, Any]], Awaitable[SpecServeError | None]],
        pool: Callable[[], Pool[Any, Any]],
    ) -> None:
        """Approve or refuse one replica; one that does not answer keeps no other waiting."""
        asked = model_of(link).replica_id
        try:
            error = await check(link)
        except grpc.aio.AioRpcError as failure:
            kind = pool().kind.pool
            logger.info("%s %s could not be checked yet: %s", kind, link.address, failure)
            asyncio.get_running_loop().call_later(RETRY_S, self._changed.set)
            return
        except SpecServeError as failure:
            error = failure
        if model_of(link).replica_id != asked:
            self._changed.set()  # another process has taken the address meanwhile
        elif error is None:
            pool().approve(link)
        else:
            pool().refuse(link, str(error))

    async def _check_target(self, link: FrameLink[Any, Any]) -> SpecServeError | None:
        """Let only one model be the pool's: a session may move to any of its replicas.

        Another one takes its place where the old one's replicas all drain or are gone. Requests
        that are under way keep the old pool, and end on the replicas that they are on.
        """
        identity = TargetIdentity.of(model_of(link))
        changes = self._identity is not None and identity != self._identity
        if changes and not self._may_change_model():
            return ModelMismatch(model_of(link).replica_id, str(identity), str(self._identity))
        if changes or self.vocabulary is None:
            vocabulary = await fetch_vocabulary(link)
            if changes:
                logger.warning("the target is now %s, it was %s", identity, self._identity)
                self.targets = self.targets.renew()
                if self.drafts is not None:
                    self.drafts.forget_verdicts()
            self.vocabulary = vocabulary
        self._identity, self.targets.identity = identity, identity.key
        return None

    def _may_change_model(self) -> bool:
        """Say whether none of the pool's present model is to be expected any more.

        A replica that is only lost may come back for what runs on it; one that drains will not.
        """
        if self.targets.usable():
            return False
        return self._num_requests == 0 or not any(
            TargetIdentity.of(link.model) == self._identity
            for link in self.targets.links.values()
            if link.model is not None and not link.draining and not link.retired
        )

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Hold the pair as it is for one request."""
        self._num_requests += 1
        try:
            yield
        finally:
            self._num_requests -= 1
            if self._num_requests == 0 and self.targets.refusals:
                self._changed.set()

    async def _check_draft(self, link: FrameLink[Any, Any]) -> SpecServeError | None:
        if self.vocabulary is None:
            return None
        return await check_pair(self.vocabulary, link)

    def describe(self, *, include_token_table: bool) -> generation_pb2.GetPairResponse:
        """Say what is served and whether it is ready."""
        response = generation_pb2.GetPairResponse(
            num_speculative_tokens=self.num_speculative_tokens,
            rejection_sample_method=(
                self._config.speculative.rejection_sample_method
                if self._config.speculative
                else "auto"
            ),
            speculative_method=codec.pack_method(self.method),
            speculative_methods=map(codec.pack_method, self.methods),
            synthetic_acceptance_rates=self._synthetic.rates if self._synthetic else (),
        )
        target = next(iter(self.targets.usable()), None)
        draft = next(iter(self.drafts.usable()), None) if self.drafts else None
        if target is not None and target.model is not None:
            response.target.CopyFrom(target.model)
            response.target.max_model_len = self.max_model_len
            if include_token_table and self.vocabulary is not None:
                response.target.token_table = self.vocabulary.table.to_bytes()
        if draft is not None and draft.model is not None:
            response.draft.CopyFrom(draft.model)
        response.reason = self._reason(target, draft)
        response.speculation_enabled = self.may_draft
        response.ready = (
            target is not None
            and self.vocabulary is not None
            and (
                self.drafts is None
                or draft is not None
                or self._config.drafts_optional
                or self._was_complete
            )
        )
        self._was_complete = self._was_complete or response.ready
        return response

    def _reason(self, target: Any, draft: Any) -> str:
        if target is None or self.vocabulary is None:
            refused = "; ".join(self.targets.refusals.values())
            return refused or "no target replica is loaded"
        if self.method is None:
            return "speculation is off: num_speculative_tokens is 0 or no method is configured"
        if self.drafts is not None and draft is None:
            refused = "; ".join(self.drafts.refusals.values()) or "no draft replica is loaded"
            if self.method == "cascade":
                return f"only suffix guesses are made: {refused}"
            return f"speculation is off: {refused}"
        return ""

    def pools(self) -> tuple[Pool[Any, Any], ...]:
        """Give the pools of now."""
        return (self.targets,) if self.drafts is None else (self.targets, self.drafts)

    def replica_statuses(self) -> list[generation_pb2.ReplicaStatus]:
        """List the known replicas."""
        statuses = []
        for pool in self.pools():
            for link in pool.links.values():
                state = "draining" if link.draining else "connected"
                status = generation_pb2.ReplicaStatus(
                    role=pool.kind.pool,
                    address=link.address,
                    state=state if link.connected else "connecting",
                    num_sessions=len(link.sessions),
                )
                if link.model is not None:
                    status.replica_id = link.model.replica_id
                    status.pid = link.model.pid
                if link.load is not None:
                    status.load.CopyFrom(codec.pack_load(link.load))
                statuses.append(status)
        return statuses


def _model_behind(
    link: FrameLink[Any, Any] | None, links: Mapping[str, FrameLink[Any, Any]]
) -> common_pb2.GetModelResponse | None:
    """Return a link's model; without a link that of the first connected one, else of any."""
    if link is not None:
        return link.model
    known = [other for other in links.values() if other.model is not None]
    known.sort(key=lambda other: not other.connected)
    return known[0].model if known else None
