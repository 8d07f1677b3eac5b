"""What a grammar is to the constraints: it moves with the output and tells what may follow.

Knows token ids; the library that reads grammars is behind it (`grammar/`).
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class TokenMatcher(Protocol):
    """A language, and how far an output has come in it."""

    def push(self, token_id: int) -> None:
        """Take one more token in, be it one that fits or not."""
        ...

    def truncate(self, num_tokens: int) -> None:
        """Forget all but the first tokens; costs what is forgotten."""
        ...

    def allowed_token_ids(self) -> NDArray[np.int64] | None:
        """Return the ascending ids that may come next; None for all."""
        ...
