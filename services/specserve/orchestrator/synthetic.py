"""Whether this deployment accepts by configured rates. Knows configuration; decides nothing."""

from __future__ import annotations

from specserve.config import SpeculativeConfig
from specserve.speculation.synthetic import SyntheticAcceptance


def synthetic_acceptance(config: SpeculativeConfig | None) -> SyntheticAcceptance | None:
    """Return the configured rates; None where the target decides, as it always should."""
    if config is None or config.rejection_sample_method != "synthetic":
        return None
    return SyntheticAcceptance.of(
        config.synthetic_acceptance_rates,
        config.synthetic_acceptance_length,
        config.num_speculative_tokens,
    )
