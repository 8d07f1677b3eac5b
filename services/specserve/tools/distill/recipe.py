"""The recipe of a training run: its numbers, its learning rate, and a point of its curve.

Knows numbers only.
"""

from dataclasses import dataclass

from specserve.tools.distill.evaluate import Validation


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """The recipe of one training run; everything that decides the weights."""

    seed: int = 0
    """Order of rows and choice of negative ids."""
    num_steps: int = 1000
    """Optimiser steps."""
    batch_tokens: int = 4500
    """Tokens per step, about."""
    learning_rate: float = 2e-3
    """Reached after warm-up and held."""
    optimiser: str = "muon"
    """What moves the matrices: `muon` or `adamw`; norms are always moved by AdamW."""
    warmup_steps: int = 100
    """Steps of linear warm-up."""
    decay_share: float = 0.5
    """Share of all steps, the last ones, over which the rate falls to 0 in a straight line."""
    num_averaged: int = 5
    """Points near the end whose weights are averaged into the result; 1 takes the last alone."""
    average_every: int = 20
    """Steps between these points."""
    weight_decay: float = 0.05
    """AdamW weight decay on matrices."""
    max_grad_norm: float = 1.0
    """Gradient clipping."""
    sampled_weight: float = 0.1
    """Share of a drawn token in the cross-entropy target."""
    greedy_weight: float = 0.3
    """Share of a greedy answer's token: greedy acceptance asks for this one alone."""
    prompt_weight: float = 0.3
    """Weight of a user-turn position relative to an answer position."""
    overlap_weight: float = 3.0
    """Weight of the overlap (acceptance) term once it has grown, in a straight line, from 0."""
    overlap_ramp_steps: int = 300
    """Steps over which it grows."""
    num_negative_ids: int = 512
    """Ids outside the cut head drawn per step to stand for all of them."""
    held_out_every: int = 40
    """Every such pair of rows is held out for validation."""
    validate_every: int = 100
    """Steps between validations."""
    checkpoint_every: int = 50
    """Steps between checkpoints."""

    def is_averaged(self, step: int) -> bool:
        """Tell whether the weights after this step take part in the average."""
        left = self.num_steps - step
        return left % self.average_every == 0 and left < self.num_averaged * self.average_every


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """One validation during training."""

    step: int
    """Optimiser steps done."""
    train_loss: float | None
    """Mean loss since the last point; None before the first step."""
    elapsed_s: float
    """Seconds of training, over all resumptions."""
    validation: Validation
    """Figures on the held-out rows."""


def rate_at(step: int, config: TrainConfig) -> float:
    """Return the learning rate of a step: warm-up, plateau, decay.

    A plateau and not a cosine: a run on a machine shared with others can be lengthened on it
    before the fall begins, without becoming another recipe.
    """
    warm = (step + 1) / config.warmup_steps if config.warmup_steps else 1.0
    left = (config.num_steps - step) / max(1.0, config.decay_share * config.num_steps)
    return config.learning_rate * min(1.0, warm, left)
