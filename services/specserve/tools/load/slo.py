"""Service level objectives of single requests, and how many requests meet them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import Field

from specserve.config import Config
from specserve.config_parsing import build
from specserve.errors import ConfigurationError
from specserve.tools.bench.sample import Sample


class Objectives(Config):
    """What every request should keep to, in milliseconds; None leaves it open."""

    ttft_ms: float | None = Field(None, gt=0)
    """Time to the first token, from when the request was due."""
    tpot_ms: float | None = Field(None, gt=0)
    """Time per output token after the first block."""
    itl_ms: float | None = Field(None, gt=0)
    """Every inter-token latency: no pause may be longer, shared out among its block's tokens."""
    e2e_ms: float | None = Field(None, gt=0)
    """From when the request was due to its last token."""

    @property
    def any(self) -> bool:
        """Some objective was set."""
        return any(value is not None for value in self.model_dump().values())


@dataclass(frozen=True, slots=True)
class Attainment:
    """How many requests met the objectives."""

    num_requests: int
    """All that were due, those that failed or were never sent too."""
    num_met: int
    share: float
    missed: dict[str, int]
    """By objective, and `failed`: requests that missed it; one request may miss several."""


def read_objectives(words: Sequence[str]) -> Objectives:
    """Read NAME=MILLISECONDS words.

    Raises:
        ConfigurationError: an unknown name or a value that is no number above 0.
    """
    values: dict[str, str] = {}
    for word in words:
        name, separator, text = word.partition("=")
        if not separator:
            raise ConfigurationError(
                f"--slo: found {word!r}, wanted NAME=MILLISECONDS, such as ttft_ms=500"
            )
        values[name] = text
    return build(Objectives, values, "--slo", from_text=True)


def attainment(samples: Sequence[Sample], objectives: Objectives) -> Attainment:
    """Count the requests that met every objective."""
    limits = {
        name: limit / 1e3 for name, limit in objectives.model_dump().items() if limit is not None
    }
    missed = dict.fromkeys((*limits, "failed"), 0)
    num_met = 0
    for sample in samples:
        if sample.error:
            missed["failed"] += 1
            continue
        measured = {
            "ttft_ms": sample.ttft_s,
            "tpot_ms": sample.tpot_s,
            "itl_ms": max(sample.itl_s, default=None),
            "e2e_ms": sample.e2e_s,
        }
        over = [name for name, limit in limits.items() if (measured[name] or 0.0) > limit]
        for name in over:
            missed[name] += 1
        num_met += not over
    count = len(samples)
    return Attainment(count, num_met, num_met / count if count else 0.0, missed)
