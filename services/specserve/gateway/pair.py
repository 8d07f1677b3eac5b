"""What the gateway knows of the served pair, no older than a couple of seconds.

Knows the backend's `get_pair`; knows no request. Logs whether the pair is ready when that changes,
however often it is asked.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from dataclasses import dataclass

from specserve.config import SpeculativeMethod
from specserve.errors import Draining, ModelUnavailable, PeerUnavailable, SpecServeError
from specserve.gateway.backend import GenerationBackend
from specserve.rpc.codec import unpack_ids, unpack_methods
from specserve.rpc.v1.common_pb2 import GetModelResponse
from specserve.rpc.v1.generation_pb2 import GetPairResponse

logger = logging.getLogger(__name__)

READY = ""
"""State of a pair that serves."""


@dataclass(frozen=True, slots=True)
class ServedPair:
    """The served pair, as far as requests are checked against it."""

    model: str
    """Name that clients ask for."""
    vocab_size: int
    """Token ids are in [0, vocab_size)."""
    max_model_len: int
    """Longest sequence in tokens; 0 means no limit."""
    eos_token_ids: tuple[int, ...]
    """Ids that end a text."""
    num_speculative_tokens: int
    """Configured K; requests may ask for less."""
    rejection_sample_method: str
    """auto, standard, coupled or synthetic."""
    speculative_methods: tuple[SpeculativeMethod, ...] = ()
    """Proposers that a request may name; empty when speculation is off."""
    system_fingerprint: str = ""
    """Names what decides a seeded text: the target's weights and number format, no draft."""


class PairWatch:
    """Answers from memory while the answer is fresh; one question at a time goes out."""

    def __init__(
        self,
        backend: GenerationBackend,
        served_model_name: str | None,
        refresh_s: float,
        vocab_fingerprint: str = "",
    ) -> None:
        self._backend = backend
        self._served_model_name = served_model_name
        self._refresh_s = refresh_s
        self._vocab_fingerprint = vocab_fingerprint
        """Of the gateway's own tokenizer; empty compares nothing."""
        self._asking = asyncio.Lock()
        self._pair: ServedPair | None = None
        self._asked_at = 0.0
        self._state: str | None = None
        """What was logged last: READY, or why not; None before the first answer."""

    async def ready(self) -> ServedPair:
        """Return the pair.

        Raises:
            ModelUnavailable: no target is loaded; the reason is in the message.
            PeerUnavailable: no orchestrator could be asked, and none ever answered.
        """
        async with self._asking:
            loop = asyncio.get_running_loop()
            if self._pair is None or loop.time() - self._asked_at >= self._refresh_s:
                self._pair = await self._ask(self._pair)
                self._asked_at = loop.time()
            return self._pair

    async def refresh(self) -> GetPairResponse:
        """Ask now, for those who want the whole answer.

        Raises:
            SpecServeError: no orchestrator could be asked.
        """
        try:
            answer = await self._backend.get_pair()
        except SpecServeError as error:
            # The class is the state: transports spell one and the same loss in many ways.
            self._note(type(error).__name__, str(error))
            raise
        reason = self.mismatch(answer)
        if not answer.ready or reason:
            reason = reason or answer.reason or "the model pair is still being loaded"
            self._note(reason, reason)
        else:
            self._note(READY, answer.target.model_id)
        return answer

    def _note(self, state: str, detail: str) -> None:
        before, self._state = self._state, state
        if state == before:
            return
        if state != READY:
            logger.warning("not ready: %s", detail)
        elif before is not None:
            logger.warning("ready again: %s", detail)
        else:
            logger.info("ready: %s", detail)

    async def _ask(self, known: ServedPair | None) -> ServedPair:
        try:
            answer = await self.refresh()
        except (PeerUnavailable, Draining, ModelUnavailable):
            # Orchestrators that restart lose no request: the backend waits for one to come back.
            if known is None:
                raise
            return known
        if known is not None and not answer.HasField("target"):
            # A target that restarts loses no request either: the orchestrator waits for it.
            return known
        return self.of(answer)

    def mismatch(self, answer: GetPairResponse) -> str:
        """Say how the gateway's tokenizer differs from the served target's; empty when it fits."""
        ours, theirs = self._vocab_fingerprint, answer.target.vocab_fingerprint
        if not ours or not theirs or ours == theirs:
            return ""
        return (
            f"the gateway's tokenizer ({ours[:12]}) is not the target's ({theirs[:12]}): "
            "its --tokenizer names another model"
        )

    def of(self, answer: GetPairResponse) -> ServedPair:
        """Read an answer. A pair without a draft serves too, target-only.

        Raises:
            ModelUnavailable: no target is loaded.
        """
        if not answer.HasField("target"):
            raise ModelUnavailable(answer.reason or "the model pair is still being loaded")
        target = answer.target
        if reason := self.mismatch(answer):
            raise ModelUnavailable(reason)
        return ServedPair(
            model=self._served_model_name or target.model_id,
            vocab_size=target.vocab_size,
            max_model_len=target.max_model_len,
            eos_token_ids=unpack_ids(target.eos_token_ids, "eos_token_ids"),
            num_speculative_tokens=answer.num_speculative_tokens,
            rejection_sample_method=answer.rejection_sample_method or "auto",
            speculative_methods=unpack_methods(answer.speculative_methods),
            system_fingerprint=system_fingerprint(target),
        )


def system_fingerprint(target: GetModelResponse) -> str:
    """Return OpenAI's `system_fingerprint`: another one means that a seed's text may differ."""
    parts = f"{target.weights_fingerprint} {target.dtype} {target.vocab_fingerprint}"
    return f"fp_{hashlib.sha256(parts.encode()).hexdigest()[:10]}"
