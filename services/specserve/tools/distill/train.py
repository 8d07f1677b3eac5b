"""The training loop: deterministic by seed, checkpointed, resumable at any step.

Knows student, batches and loss; knows no target and no package file.
"""

import hashlib
import itertools
import json
import math
import pickle
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from specserve.errors import ConfigurationError
from specserve.tools.distill.batch import Batch, TargetSettings, column_of, make_batch
from specserve.tools.distill.evaluate import Validation, validate
from specserve.tools.distill.loss import distillation_loss
from specserve.tools.distill.optimiser import make_optimisers
from specserve.tools.distill.recipe import CurvePoint, TrainConfig, rate_at
from specserve.tools.distill.student import hidden_states
from specserve.tools.distill.text import DistillText, IntArray, Row, batches
from specserve.tools.flags import as_flag

PROGRESS_EVERY = 20
"""Steps between progress lines."""


_MAY_CHANGE = ("num_steps", "validate_every", "checkpoint_every")


class Trainer:
    """Owns the student, its optimiser and the step counter."""

    def __init__(
        self,
        student: LlamaForCausalLM,
        text: DistillText,
        vocab: tuple[int, ...],
        config: TrainConfig,
        checkpoint: Path,
        progress: Callable[[str], None],
    ) -> None:
        self.student, self.text, self.vocab = student, text, vocab
        self.config, self.checkpoint, self.progress = config, checkpoint, progress
        self.step = 0
        self.elapsed_s = 0.0
        self.curve: list[CurvePoint] = []
        self.train_rows, self.held_rows = text.held_out(config.held_out_every)
        if not self.train_rows:
            raise ConfigurationError(
                f"--held-out-every {config.held_out_every}: of {len(text.rows)} rows "
                f"{len(self.held_rows)} are held out and none is left to train on"
            )
        self._losses: list[float] = []
        self._average: dict[str, Tensor] = {}
        self._num_averaged = 0
        self._made_from = _made_from(student, text, vocab, config)
        trained = [p for p in student.parameters() if p.requires_grad]
        self._trained = trained
        weight = student.lm_head.weight
        matrices = [p for p in trained if p.ndim > 1 and p is not weight]
        rest = [p for p in trained if p.ndim == 1 or p is weight]
        self._optimisers = make_optimisers(matrices, rest, config)
        self._device = weight.device
        self._vocab_size = weight.shape[0]
        # A frozen head is rounded once; one that is trained, at every step.
        self._frozen_head = None if weight.requires_grad else weight.detach().bfloat16()
        self._columns: IntArray = column_of(vocab, self._vocab_size)
        self._rest = np.setdiff1d(np.arange(self._vocab_size), np.array(vocab))
        self._settings = TargetSettings(
            config.sampled_weight,
            config.greedy_weight,
            config.prompt_weight,
            text.common_prefix_length,
        )

    @property
    def num_left_out(self) -> int:
        """Rows that are neither trained on nor held out."""
        return len(self.text.rows) - len(self.train_rows) - len(self.held_rows)

    def _head(self, step: int) -> tuple[Tensor, float]:
        """Return head rows (the cut head, then drawn negative ids) and the latter's shift."""
        count = min(self.config.num_negative_ids, len(self._rest))
        drawn = np.random.default_rng([self.config.seed, 1, step]).choice(
            self._rest, count, replace=False
        )
        shift = math.log(len(self._rest) / count) if count else 0.0
        rows = torch.tensor([*self.vocab, *drawn.tolist()], device=self._device)
        head = self._frozen_head
        if head is None:
            return self.student.lm_head.weight[rows].bfloat16(), shift
        return head[rows], shift

    def _train_step(self, batch: Batch) -> float:
        for optimiser in self._optimisers:
            for group in optimiser.param_groups:
                group["lr"] = rate_at(self.step, self.config)
        head, rest_shift = self._head(self.step)
        batch = batch.to(self._device)
        with torch.autocast(self._device.type, torch.bfloat16):
            hidden = hidden_states(self.student, batch.packed).bfloat16()[batch.selected]
        grown = min(1.0, self.step / max(1, self.config.overlap_ramp_steps))
        overlap_weight = self.config.overlap_weight * grown
        loss = distillation_loss(
            hidden, head, len(self.vocab), rest_shift, batch.targets, overlap_weight
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._trained, self.config.max_grad_norm)
        for optimiser in self._optimisers:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        return float(loss.detach())

    def _weights(self) -> dict[str, Tensor]:
        return {name: p for name, p in self.student.named_parameters() if p.requires_grad}

    @torch.no_grad()
    def _average_in(self) -> None:
        """Take the present weights into the running mean; at the last step, put it in place."""
        self._num_averaged += 1
        for name, weight in self._weights().items():
            mean = self._average.setdefault(name, torch.zeros_like(weight))
            mean += (weight - mean) / self._num_averaged
            if self.step == self.config.num_steps:
                weight.copy_(mean)

    def save(self) -> None:
        """Write the checkpoint, whole or not at all."""
        part = self.checkpoint.with_suffix(".part")
        torch.save(
            {
                "made_from": self._made_from,
                "step": self.step,
                "elapsed_s": self.elapsed_s,
                "losses": self._losses,
                "weights": self._weights(),
                "average": self._average,
                "num_averaged": self._num_averaged,
                "num_steps": self.config.num_steps,
                "optimisers": [optimiser.state_dict() for optimiser in self._optimisers],
                "curve": [asdict(point) for point in self.curve],
            },
            part,
        )
        part.replace(self.checkpoint)

    def resume(self) -> bool:
        """Load the checkpoint if there is one; return whether there was.

        Raises:
            ConfigurationError: it cannot be read, or is of another run; says what differs.
        """
        if not self.checkpoint.exists():
            return False
        try:
            saved = torch.load(self.checkpoint, map_location=self._device, weights_only=True)
        except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
            raise ConfigurationError(
                f"{self.checkpoint} cannot be read ({error}); remove it to begin anew"
            ) from error
        made_from = saved.get("made_from", {})
        others = [name for name, value in self._made_from.items() if made_from.get(name) != value]
        if others:
            raise ConfigurationError(
                f"{self.checkpoint} is of another run: {', '.join(others)} differ; choose another "
                "--output, or remove it to begin anew"
            )
        self.student.load_state_dict(saved["weights"], strict=False)
        for optimiser, state in zip(self._optimisers, saved["optimisers"], strict=True):
            optimiser.load_state_dict(state)
        self.step, self.elapsed_s = saved["step"], saved["elapsed_s"]
        self._losses = saved["losses"]
        if saved["num_steps"] == self.config.num_steps:  # else it was of another plan
            self._average, self._num_averaged = saved["average"], saved["num_averaged"]
        self.curve = [
            CurvePoint(**(point | {"validation": Validation(**point["validation"])}))
            for point in saved["curve"]
        ]
        return True

    def _measure(self) -> None:
        figures = validate(self.student, self.text, self.held_rows, self.vocab, self._columns)
        loss = float(np.mean(self._losses)) if self._losses else None
        self._losses = []
        self.curve.append(CurvePoint(self.step, loss, self.elapsed_s, figures))
        said = "start" if loss is None else f"loss {loss:.3f}"
        self.progress(f"step {self.step}: {said} {figures} after {self.elapsed_s:.0f} s")

    def _remaining_groups(self) -> Iterator[list[Row]]:
        """Yield the groups of rows from the current step on, epoch after epoch."""
        skip = self.step
        for epoch in itertools.count():
            config = self.config
            for rows in batches(
                self.text, self.train_rows, config.batch_tokens, config.seed, epoch
            ):
                if skip:
                    skip -= 1
                else:
                    yield rows

    def train(self, stop_after: int | None = None) -> tuple[CurvePoint, ...]:
        """Train to the last step, or to step `stop_after`; return the curve."""
        config = self.config
        end = config.num_steps if stop_after is None else min(stop_after, config.num_steps)
        started = time.monotonic() - self.elapsed_s
        groups = self._remaining_groups()
        if not self.curve:
            self._measure()
        while self.step < end:
            batch = make_batch(next(groups), self._columns, self._settings)
            self._losses.append(self._train_step(batch))
            self.step += 1
            self.elapsed_s = time.monotonic() - started
            if self.step % PROGRESS_EVERY == 0:
                recent = float(np.mean(self._losses[-PROGRESS_EVERY:]))
                self.progress(f"step {self.step}/{config.num_steps} loss {recent:.3f}")
            if config.is_averaged(self.step):
                self._average_in()
            if self.step % config.validate_every == 0 or self.step == config.num_steps:
                self._measure()
            if self.step % config.checkpoint_every == 0 or self.step == end:
                self.save()
        return tuple(self.curve)


def _made_from(
    student: LlamaForCausalLM, text: DistillText, vocab: tuple[int, ...], config: TrainConfig
) -> dict[str, str]:
    """Describe what decides the weights, by names that a user knows.

    The number of steps is not among it: a run can be lengthened.
    """
    recipe = {name: v for name, v in asdict(config).items() if name not in _MAY_CHANGE}
    start = hashlib.sha256()
    for name, weight in student.named_parameters():
        if weight.requires_grad:
            start.update(f"{name} {tuple(weight.shape)}".encode())
            start.update(weight.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return {
        "the target, --layers or --scratch": start.hexdigest(),
        "the text": text.digest(),
        "--draft-vocab-size": hashlib.sha256(json.dumps(vocab).encode()).hexdigest(),
        **{as_flag(name): str(value) for name, value in recipe.items()},
    }
