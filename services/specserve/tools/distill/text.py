"""Text sampled from a target, with the target's top log-probabilities, as one `.npz` file.

Knows the arrays and how rows are cut into training batches; knows no model.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]
_SAME_START = 64
"""Prompts that share this many tokens after the common part are on the same passage."""
_FEW_ROWS, _FEW_SHARE = 8, 0.05
"""A start that more rows and a larger share of them have is a preamble and no passage."""


@dataclass(frozen=True, slots=True)
class Row:
    """One prompt and its answer."""

    prompt: IntArray
    """Token ids of the prompt, template included."""
    answer: IntArray
    """Token ids sampled after the prompt."""
    top_ids: IntArray
    """[answer length, k] the target's most likely ids at each answer position."""
    top_logprobs: FloatArray
    """[answer length, k] their log-probabilities at temperature 1; -30 fills."""
    is_greedy: bool
    """Whether the answer took the most likely id at each position, or was drawn."""
    is_prompt_sampled: bool = True
    """Whether the target wrote the user's words too; else they were given."""
    kind: str = ""
    """What the prompt's file calls its kind or category; figures are given by it."""


@dataclass(frozen=True, slots=True)
class DistillText:
    """All rows of one text file."""

    rows: tuple[Row, ...]
    """In file order."""

    @property
    def num_answer_tokens(self) -> int:
        """Count the answer tokens of all rows."""
        return sum(len(row.answer) for row in self.rows)

    @property
    def common_prefix_length(self) -> int:
        """Count the leading tokens that all prompts of the target's own share (the system part)."""
        return _common_prefix([row.prompt for row in self.rows if row.is_prompt_sampled])

    def frequent_token_ids(self, size: int, special_ids: tuple[int, ...]) -> tuple[int, ...]:
        """List the `size` most frequent ids of answers and first guesses, plus `special_ids`."""
        frequent = self._by_frequency()[:size]
        return tuple(sorted({*frequent, *special_ids}))

    def ranked(self, token_ids: Sequence[int], special_ids: Sequence[int]) -> list[int]:
        """Order ids as `draft_vocab.json` has them: special ones, then the most frequent first."""
        ranking = dict.fromkeys((*special_ids, *self._by_frequency()))
        place = {token_id: i for i, token_id in enumerate(ranking)}
        return sorted(token_ids, key=lambda token_id: place.get(token_id, len(place)))

    def _by_frequency(self) -> list[int]:
        """List the ids of answers and first guesses, the most frequent first."""
        used = [row.answer for row in self.rows] + [row.top_ids[:, 0] for row in self.rows]
        counts = np.bincount(np.concatenate(used))
        order = np.argsort(-counts, kind="stable")
        return [int(token_id) for token_id in order if counts[token_id] > 0]

    def held_out(self, every: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Split row numbers into training and held-out ones.

        Every `every`-th pair of rows is held out, and rows that begin like one of them (several
        questions on one passage) are in neither part. What very many rows begin with is no passage.
        """
        # A stretch of a corpus has a prompt of one token.
        prompts = [row.prompt for row in self.rows if len(row.prompt) > 1]
        reach = _common_prefix(prompts) + _SAME_START
        starts = [
            row.prompt[:reach].tobytes() if len(row.prompt) > reach else None for row in self.rows
        ]
        few = max(_FEW_ROWS, _FEW_SHARE * len(starts))
        passages = {start for start, count in Counter(starts).items() if start and count <= few}
        held = tuple(i for i in range(len(starts)) if (i // 2) % every == 0)
        seen = passages.intersection(start for i in held if (start := starts[i]) is not None)
        train = tuple(
            i for i, start in enumerate(starts) if (i // 2) % every != 0 and start not in seen
        )
        return train, held

    def digest(self) -> str:
        """Hash everything that is trained on; hex SHA-256."""
        digest = hashlib.sha256()
        for row in self.rows:
            for array in (row.prompt, row.answer, row.top_ids, row.top_logprobs):
                digest.update(f"{array.shape} {array.dtype}".encode())
                digest.update(np.ascontiguousarray(array).tobytes())
            digest.update(f"{row.is_greedy} {row.is_prompt_sampled}".encode())
        return digest.hexdigest()


def _common_prefix(prompts: Sequence[IntArray]) -> int:
    """Count the leading tokens that all prompts share; the last of a prompt is never among them."""
    if not prompts:
        return 0
    first = prompts[0]
    length = len(first) - 1
    for prompt in prompts[1:]:
        length = min(length, len(prompt) - 1)
        differs = np.flatnonzero(prompt[:length] != first[:length])
        if len(differs):
            length = int(differs[0])
    return length


def load_text(path: Path) -> DistillText:
    """Read the rows of a text file."""
    with np.load(path) as arrays:
        prompt, answer = arrays["prompt"].astype(np.int64), arrays["answer"].astype(np.int64)
        top_ids = arrays["top_ids"].astype(np.int64)
        top_logprobs = arrays["top_logprobs"].astype(np.float32)
        prompt_ends = np.cumsum(arrays["prompt_len"])[:-1]
        answer_ends = np.cumsum(arrays["answer_len"])[:-1]
        num_rows = len(arrays["answer_len"])
        # Files of the first version have no such array: even rows were greedy.
        greedy = arrays["is_greedy"] if "is_greedy" in arrays else np.arange(num_rows) % 2 == 0
        invented = arrays["is_prompt_sampled"] if "is_prompt_sampled" in arrays else greedy | True
        kinds = arrays["kind"] if "kind" in arrays else np.full(num_rows, "")
    pieces = zip(
        np.split(prompt, prompt_ends),
        np.split(answer, answer_ends),
        np.split(top_ids, answer_ends),
        np.split(top_logprobs, answer_ends),
        greedy.tolist(),
        invented.tolist(),
        kinds.tolist(),
        strict=True,
    )
    return DistillText(tuple(Row(*piece) for piece in pieces))


def join_texts(texts: Sequence[DistillText]) -> DistillText:
    """Put several texts one after the other."""
    return DistillText(tuple(row for text in texts for row in text.rows))


def save_text(path: Path, text: DistillText) -> None:
    """Write the rows to `path`, whole or not at all."""
    rows = text.rows
    largest = max(int(row.top_ids.max()) for row in rows)
    id_type = np.uint16 if largest < 1 << 16 else np.uint32
    part = path.with_name(path.name + ".part.npz")
    np.savez_compressed(
        part,
        prompt=np.concatenate([row.prompt for row in rows]).astype(id_type),
        prompt_len=np.array([len(row.prompt) for row in rows], np.int32),
        answer=np.concatenate([row.answer for row in rows]).astype(id_type),
        answer_len=np.array([len(row.answer) for row in rows], np.int32),
        top_ids=np.concatenate([row.top_ids for row in rows]).astype(id_type),
        top_logprobs=np.concatenate([row.top_logprobs for row in rows]).astype(np.float16),
        is_greedy=np.array([row.is_greedy for row in rows]),
        is_prompt_sampled=np.array([row.is_prompt_sampled for row in rows]),
        kind=np.array([row.kind for row in rows]),
    )
    part.replace(path)


def batches(
    text: DistillText, row_numbers: tuple[int, ...], num_tokens: int, seed: int, epoch: int
) -> Iterator[list[Row]]:
    """Yield shuffled groups of rows of about `num_tokens` tokens; the same for the same seed."""
    group: list[Row] = []
    filled = 0
    for number in np.random.default_rng([seed, epoch]).permutation(row_numbers):
        row = text.rows[number]
        group.append(row)
        filled += len(row.prompt) + len(row.answer)
        if filled >= num_tokens:
            yield group
            group, filled = [], 0
    if group:
        yield group
