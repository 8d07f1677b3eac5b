"""A table-driven model over a small vocabulary, whose exact law tests can enumerate.

Logits are a pure function of the last `order` tokens. Named by a string:

    toy:vocab_size=32,seed=7,order=2,noise=0.5,noise_seed=1,step_ms=3

A target and a draft of equal `seed` agree up to the draft's `noise`. Token id 0 is EOS. Knows no
tensor library; `toy_runner.py` serves the toy as a model.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from specserve.errors import ConfigurationError

PREFIX = "toy:"
EOS_TOKEN_ID = 0


@dataclass(frozen=True, slots=True)
class ToySpec:
    """Everything that determines a toy model."""

    vocab_size: int = 32
    seed: int = 7
    """Names the table."""
    order: int = 2
    """Newest tokens that the logits depend on."""
    sharpness: float = 2.0
    """Standard deviation of the logits."""
    noise: float = 0.0
    """Standard deviation of what is added to the table: makes a draft that agrees in part."""
    noise_seed: int = 1
    eos_bias: float = 0.0
    """Added to the logit of EOS (id 0); -inf is not possible, -1000 is never."""
    second_eos: int = -1
    """Another id that ends a text, as EOS does; -1 for none."""
    step_ms: float = 0.0
    """Modelled time of one forward, in ms."""
    row_ms: float = 0.0
    """Modelled time of each token in a forward, in ms."""
    nan_token: int = -1
    """A row whose newest token is this id is all NaN; -1 for none."""
    inf_token: int = -1
    """A row whose newest token is this id has a logit of +inf; -1 for none."""
    fatal_token: int = -1
    """A forward that computes this id ends the device; two of them in a row make it hang. -1: none.
    """

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a text."""
        return (EOS_TOKEN_ID,) if self.second_eos < 0 else (EOS_TOKEN_ID, self.second_eos)

    @staticmethod
    def parse(model: str) -> ToySpec:
        """Read a `toy:key=value,...` model string.

        Raises:
            ConfigurationError: an unknown key (the nearest right one is named) or a bad value.
        """
        types = {field.name: field.type for field in fields(ToySpec)}
        values: dict[str, float] = {}
        for item in filter(None, model.removeprefix(PREFIX).split(",")):
            key, _, text = item.partition("=")
            if key not in types:
                near = difflib.get_close_matches(key, types, n=1, cutoff=0.0)
                raise ConfigurationError(f"{model}: unknown key {key!r}, did you mean {near[0]!r}?")
            try:
                values[key] = int(text) if types[key] == "int" else float(text)
            except ValueError:
                raise ConfigurationError(
                    f"{model}: {key}={text!r} is not of type {types[key]}"
                ) from None
        # Every value's type was checked against its field just above.
        spec = ToySpec(**values)  # type: ignore[arg-type]
        if spec.vocab_size < 2 or spec.order < 1 or min(spec.seed, spec.noise_seed) < 0:
            raise ConfigurationError(
                f"{model}: vocab_size must be at least 2, order at least 1, seeds at least 0"
            )
        if spec.second_eos >= spec.vocab_size:
            raise ConfigurationError(f"{model}: second_eos must be below vocab_size")
        return spec


def toy_logits(spec: ToySpec, context: Sequence[int]) -> NDArray[np.float32]:
    """Return the logits after `context`: a pure function of spec and the last `order` tokens.

    Returns:
        [vocab_size] float32.
    """
    newest = [int(token) for token in context[-spec.order :]]
    # Shorter contexts are padded with an id outside the vocabulary, so that they have rows too.
    key = [spec.vocab_size] * (spec.order - len(newest)) + newest
    table = np.random.Generator(np.random.PCG64([spec.seed, 0, *key]))
    logits = spec.sharpness * table.standard_normal(spec.vocab_size)
    if spec.noise:
        other = np.random.Generator(np.random.PCG64([spec.noise_seed, 1, *key]))
        logits += spec.noise * other.standard_normal(spec.vocab_size)
    logits[EOS_TOKEN_ID] += spec.eos_bias
    if newest and newest[-1] == spec.nan_token:
        logits[:] = np.nan
    if newest and newest[-1] == spec.inf_token:
        logits[-1] = np.inf
    return logits.astype(np.float32)
