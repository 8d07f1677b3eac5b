"""What the engine asks of a model: one ragged forward over a paged KV pool.

Two implementations: `hf_runner.HuggingFaceRunner` (any decoder-only model) and `toy.ToyRunner`
(a table over an enumerable vocabulary). Knows no session, no scheduler and no sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from specserve.model.messages import ModelInfo

NO_IDS: NDArray[np.int64] = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class SequenceSlice:
    """One session's new tokens in a forward."""

    token_ids: Sequence[int]
    """[n] new tokens, n >= 1; written to the pool at start_position ... start_position + n - 1."""
    start_position: int
    """Tokens of this session already in the pool; also the position id of token_ids[0]."""
    block_table: Sequence[int]
    """Blocks of start_position + n tokens: token t lies in block_table[t // block_size]."""
    num_logit_rows: int
    """Logits are wanted for the last this many of the new tokens; 0 for a prefill chunk."""
    context_ids: NDArray[np.int64] = field(default_factory=lambda: NO_IDS)
    """[E] ascending: ids that a cut head lacks and that its rows have columns for all the same."""


@dataclass(frozen=True, slots=True)
class GuessedTokens:
    """A greedy guess; all of its tokens but the last have been fed."""

    token_ids: list[int]
    confidences: list[float]
    """Probability of each, at temperature 1."""


class GuessCall(Protocol):
    """Guesses one sequence's next tokens."""

    def __call__(
        self,
        logits: torch.Tensor,
        position: int,
        block_table: Sequence[int],
        num_tokens: int,
        least_confidence: float,
        token_ids: torch.Tensor | None,
        context_ids: NDArray[np.int64],
    ) -> GuessedTokens:
        """Take the most likely token, feed it, take the next one.

        Args:
            logits: [1, V'] of the last forward: the first token is read from it.
            position: where the first token goes; the blocks of all but the last can be written.
            num_tokens: most to guess, at least 1.
            least_confidence: the last token is the one that takes the product of all confidences
                below this.
            token_ids: [V'] of the columns of `logits`; None where they are the same.
            context_ids: of the sequence.

        Returns:
            Fewer tokens, or none, where a row holds what is no number: the next one is for
            `forward` and the sampler.
        """
        ...


class Runner(Protocol):
    """A loaded model with its KV pool."""

    @property
    def info(self) -> ModelInfo:
        """What was loaded, and the size of the pool."""
        ...

    @property
    def logit_token_ids(self) -> torch.Tensor | None:
        """[V'] int64 ascending: the token id of each column of a cut head, else None."""
        ...

    @property
    def takes_context_ids(self) -> bool:
        """Whether slices may bring ids that the cut head lacks."""
        ...

    def columns(self, batch: Sequence[SequenceSlice]) -> torch.Tensor | None:
        """Return [V'] int64 ascending: the token id of each logit column of this batch's forward;
        None where they are the same.
        """
        ...

    def forward(self, batch: Sequence[SequenceSlice]) -> torch.Tensor:
        """Run the new tokens of all sequences in one forward and write their KV.

        Returns:
            [sum of num_logit_rows, V'] float32 logits, in batch order; V' = vocab_size unless the
            head was cut; then the columns are those of `columns`, and an id that only another
            sequence of the batch brought is -inf. Padded embedding rows are not among them.
        """
        ...

    @property
    def guess(self) -> GuessCall | None:
        """Guesses greedily in one call; None where each token takes a `forward` of its own."""
        ...

    def copy_block(self, source: int, destination: int) -> None:
        """Copy one KV block, all layers (copy on write of a shared block)."""
        ...
