"""Thresholds that a run is judged by: declared before it, from a file or from words.

Values and reading them; the judgement is in `decision.py`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

from specserve.config import Config
from specserve.config_parsing import build
from specserve.errors import ConfigurationError


class Thresholds(Config):
    """What speculation must show, level by level; None leaves a figure unjudged."""

    min_speedup: float | None = Field(1.05, gt=0)
    """Lower end of the 95 % interval of tokens/s over the best target-only: one-row or padded
    steps, whichever is faster. At an arrival rate: target-only's median end to end latency over
    that of speculation."""
    max_ttft_p95_ratio: float | None = Field(1.2, gt=0)
    """Time to first token, p95, over target-only's."""
    max_tpot_p95_ratio: float | None = Field(1.2, gt=0)
    """Time per output token, p95, over target-only's."""
    max_e2e_p95_ratio: float | None = Field(1.1, gt=0)
    """End to end latency, p95, over target-only's."""
    max_itl_p99_ratio: float | None = Field(None, gt=0)
    """Inter-token latency, p99, over target-only's."""
    min_mean_acceptance_length: float | None = Field(None, ge=1)
    """Tokens per speculative round."""
    max_memory_ratio: float | None = Field(None, gt=0)
    """Weights and KV of draft and target over those of the target."""
    max_ttft_p95_s: float | None = Field(None, gt=0)
    """Time to first token, p95, in seconds."""
    max_tpot_p95_s: float | None = Field(None, gt=0)
    """Time per output token, p95, in seconds."""
    min_dynamic_ratio: float = Field(0.97, gt=0)
    """sweep: tokens/s of dynamic K over the fixed setting that it would replace; auto: over the
    better of always on and always off."""
    max_failed_share: float | None = Field(0.0, ge=0, le=1)
    """Failed requests over all, either side."""
    max_half_difference: float = Field(0.1, gt=0)
    """The two halves of a run may differ by this share; past it the level is not comparable."""
    max_others_cpu_share: float | None = Field(0.25, ge=0, le=1)
    """Processor time that other programs may take; past it the level is not comparable."""


def read_thresholds(path: Path | None, settings: Sequence[str]) -> Thresholds:
    """Read thresholds from a JSON file and from NAME=VALUE words, which win.

    Raises:
        ConfigurationError: no JSON object, an unknown name, a value out of range.
    """
    values: dict[str, object] = {}
    if path is not None:
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigurationError(f"--thresholds: {path}: {error.strerror}") from error
        except ValueError as error:
            raise ConfigurationError(f"--thresholds: {path}: not JSON ({error})") from error
        if not isinstance(values, dict):
            raise ConfigurationError(f"--thresholds: {path}: an object was wanted")
    for word in settings:
        name, separator, text = word.partition("=")
        if not separator:
            raise ConfigurationError(f"--threshold: found {word!r}, wanted NAME=VALUE")
        values[name] = None if text == "none" else text
    return build(Thresholds, values, "thresholds", from_text=True)
