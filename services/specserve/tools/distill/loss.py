"""The distillation loss over a cut head, with its gradient taken in the forward pass.

Knows hidden states, a head and sparse targets; knows no model, file or optimiser.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

CHUNK = 256
"""Positions whose logits are held at once: 256 x 13,000 floats are 13 MB."""


@dataclass(frozen=True, slots=True)
class SparseTargets:
    """What the student should say at each trained position."""

    columns: Tensor
    """[T, k] columns of the cut head; column 0 with weight 0 where an id is not in it."""
    probs: Tensor
    """[T, k] cross-entropy targets; rows sum to 1, or to 0 where nothing is in the head."""
    overlap_probs: Tensor
    """[T, k] the target's own probabilities, for the overlap term; 0 switches it off."""
    weights: Tensor
    """[T] weight of each position."""

    def to(self, device: torch.device) -> "SparseTargets":
        """Return a copy on a device."""
        return SparseTargets(
            self.columns.to(device),
            self.probs.to(device),
            self.overlap_probs.to(device),
            self.weights.to(device),
        )


class _FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        hidden: Tensor,
        head: Tensor,
        num_exact: int,
        rest_shift: float,
        targets: SparseTargets,
        overlap_weight: float,
    ) -> Tensor:
        total = hidden.new_zeros((), dtype=torch.float32)
        grad_hidden = torch.empty_like(hidden)
        # Empty where the head is frozen.
        grad_head = torch.zeros(head.shape if head.requires_grad else (0,), device=head.device)
        scale = 1.0 / float(targets.weights.sum().clamp_min(1e-6))
        for start in range(0, hidden.shape[0], CHUNK):
            part = slice(start, start + CHUNK)
            columns, probs = targets.columns[part], targets.probs[part]
            weights = targets.weights[part] * scale
            logits = (hidden[part] @ head.T).float()  # [c, V']
            logits[:, num_exact:] += rest_shift
            largest = logits.amax(-1, keepdim=True)
            chosen = logits.gather(1, columns) - largest
            # In place from here on: a fresh [c, V'] tensor costs more than the arithmetic.
            grad = logits.sub_(largest).exp_()
            normaliser = grad.sum(-1, keepdim=True)
            chosen -= normaliser.log()  # [c, k] log q
            mass = probs.sum(-1)
            cross_entropy = -(probs * chosen).sum(-1)
            draft_probs = chosen.exp()
            overlap_probs = targets.overlap_probs[part]
            short = draft_probs * (draft_probs < overlap_probs)
            overlap = torch.minimum(draft_probs, overlap_probs).sum(-1)
            total += (weights * (cross_entropy - overlap_weight * overlap)).sum()
            # d(-overlap)/d(logit j) = q_j * S - [j in S] q_j, with S the mass q has still to gain.
            grad *= (weights * (mass + overlap_weight * short.sum(-1)))[:, None] / normaliser
            grad.scatter_add_(1, columns, -weights[:, None] * (probs + overlap_weight * short))
            rounded = grad.to(head.dtype)
            grad_hidden[part] = rounded @ head
            if head.requires_grad:
                grad_head += rounded.T @ hidden[part]
        ctx.save_for_backward(grad_hidden, grad_head)
        return total

    @staticmethod
    def backward(
        ctx: FunctionCtx, grad_output: Tensor
    ) -> tuple[Tensor, Tensor | None, None, None, None, None]:
        grad_hidden, grad_head = ctx.saved_tensors  # type: ignore[attr-defined]
        of_head = grad_head * grad_output if grad_head.numel() else None
        return grad_hidden * grad_output.to(grad_hidden.dtype), of_head, None, None, None, None


def distillation_loss(
    hidden: Tensor,
    head: Tensor,
    num_exact: int,
    rest_shift: float,
    targets: SparseTargets,
    overlap_weight: float,
) -> Tensor:
    """Return weighted mean cross-entropy - `overlap_weight` * sum min(p, q).

    Gradients (of `hidden`, and of the head where it is trained) are computed chunk by chunk while
    the logits exist: no [T, V] tensor outlives its chunk.

    Args:
        hidden: [T, H] final hidden states at the trained positions.
        head: [V', H] rows of the output head; same dtype as `hidden`.
        num_exact: head rows that stand for themselves; the later ones stand for many ids.
        rest_shift: added to the later rows' logits: log(ids stood for / rows).
        targets: at each of the T positions.
        overlap_weight: weight of the overlap sum min(p, q), the acceptance probability.
    """
    loss: Tensor = _FusedLoss.apply(  # type: ignore[no-untyped-call]
        hidden, head, num_exact, rest_shift, targets, overlap_weight
    )
    return loss
