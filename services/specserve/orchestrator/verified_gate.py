"""Whether a pair may speculate: only where a passing record of `specserve verify` fits it.

Off unless `require_verified` is set. Looks at the record's file again every few seconds, so that
one that appears, or goes, counts without a restart. Knows records and models; knows no round.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from specserve.config import DRAFT_MODEL_METHODS, OrchestratorConfig, SpeculativeMethod
from specserve.errors import ConfigurationError
from specserve.model.environment import code_versions
from specserve.rpc.v1.common_pb2 import GetModelResponse
from specserve.rpc.verified_records import PairKey, folder_of, pair_keys, read_all, read_record
from specserve.speculation.types import AcceptanceRule

logger = logging.getLogger(__name__)

RECHECK_S = 2.0
"""A verdict is as old as this at most."""

MAX_VERDICTS = 256
"""Of replicas that came and went, none need be kept."""

VERIFIED = ""
"""A verdict that refuses nothing."""


@dataclass(frozen=True, slots=True)
class _Verdict:
    refusal: str
    at: float


class VerifiedGate:
    """The verdicts of one orchestrator."""

    def __init__(
        self, config: OrchestratorConfig, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Prepare; a broken record is told now, not with the first request.

        Raises:
            ConfigurationError: a file of the folder is no record, or the rule is synthetic, which
                nothing can verify.
        """
        self.is_required = config.require_verified
        self._folder = folder_of(config.verified_dir)
        speculative = config.speculative
        self._k = 0 if speculative is None else speculative.num_speculative_tokens
        self._clock = clock
        self._verdicts: dict[tuple[str, ...], _Verdict] = {}
        if not self.is_required:
            return
        if speculative is not None and speculative.rejection_sample_method == "synthetic":
            raise ConfigurationError(
                "require_verified: rejection_sample_method synthetic is not lossless; no record "
                "can fit it"
            )
        read_all(self._folder)

    def refusal(
        self,
        rule: AcceptanceRule,
        method: SpeculativeMethod,
        target: GetModelResponse | None,
        draft: GetModelResponse | None,
    ) -> str:
        """Say why rounds may not speculate; empty where they may, or where nobody asks.

        Without a target, or a draft where all depends on one, there is nothing to refuse.
        """
        if not self.is_required or target is None:
            return VERIFIED
        if method in DRAFT_MODEL_METHODS and draft is None:
            if method == "draft_model":
                return VERIFIED
            method = "suffix"  # all that a cascade does without its draft
        asked = draft if method in DRAFT_MODEL_METHODS else None
        names = (rule, method, target.replica_id, "" if asked is None else asked.replica_id)
        now = self._clock()
        known = self._verdicts.get(names)
        if known is not None and now - known.at < RECHECK_S:
            return known.refusal
        (key,) = pair_keys(target, asked, code_versions(), method, (rule,))
        found = self._look_up(key)
        if known is None or known.refusal != found:
            _tell(key, found)
        if len(self._verdicts) >= MAX_VERDICTS:
            self._verdicts.clear()
        self._verdicts[names] = _Verdict(found, now)
        return found

    def refusals(
        self,
        method: SpeculativeMethod,
        target: GetModelResponse | None,
        draft: GetModelResponse | None,
    ) -> dict[AcceptanceRule, str]:
        """Give the verdict of every rule; empty where no record is required."""
        if not self.is_required:
            return {}
        return {rule: self.refusal(rule, method, target, draft) for rule in AcceptanceRule}

    def _look_up(self, key: PairKey) -> str:
        path = self._folder / key.file_name
        try:
            record = read_record(path)
        except FileNotFoundError:
            return f"no record of `specserve verify` fits this pair and rule {key.rule}"
        except ConfigurationError as error:
            logger.error("%s", error)
            # Clients read this too, and the folder is no affair of theirs.
            return f"{path.name} is not a usable verification record"
        if not record.passed:
            return f"`specserve verify` failed for rule {key.rule} at {record.made_at}"
        if record.num_speculative_tokens < self._k:
            return (
                f"rule {key.rule} was verified up to {record.num_speculative_tokens} draft tokens "
                f"a round, {self._k} are configured"
            )
        if shortfall := record.evidence.shortfall():
            return f"rule {key.rule} was verified {shortfall}: run `specserve verify` again"
        return VERIFIED


def _tell(key: PairKey, refusal: str) -> None:
    draft = "none" if key.draft is None else key.draft.weights_fingerprint[:12]
    target = key.target.weights_fingerprint[:12]
    if refusal:
        logger.warning(
            "rule %s of target %s, draft %s (%s) is served target-only: %s; wanted %s",
            key.rule,
            target,
            draft,
            key.method,
            refusal,
            key.file_name,
        )
    else:
        logger.warning(
            "rule %s of target %s, draft %s (%s) is verified", key.rule, target, draft, key.method
        )
