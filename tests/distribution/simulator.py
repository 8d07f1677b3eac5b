"""Whole speculative rounds over a Markov pair, for 100,000 sequences at a time.

The tables come from the public reference functions (`transform`, `propose_row`), one row per state,
so they hold exactly the p and q that the services use; randomness comes from the public Philox.
Only the walk is written again, over arrays; `test_laws.py` proves it equal to the public functions
first. Faults can be planted to see that the law tests catch them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from specserve.speculation.philox import philox4x32_blocks
from specserve.speculation.randomness import Purpose, uniforms_from_words
from specserve.speculation.scoring import DraftRow, propose_row
from specserve.speculation.transforms import transform
from specserve.speculation.types import SamplingParams

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Pair:
    """A target and a draft whose next token depends on the last one only; token 0 starts."""

    target_logits: NDArray[np.float32]
    """[V, V]; row s is the next-token row after token s."""
    draft_logits: NDArray[np.float32]
    """[V, V]"""
    target_params: SamplingParams
    draft_params: SamplingParams
    draft_sample_top_k: int = 64
    confidence_threshold: float = 0.0
    """The draft stops behind the row at which its largest q, multiplied, fall below this."""
    eos_token_id: int | None = None
    """Generation ends with this token; what a round commits beyond it is cut."""
    stray_weight: float = 0.0
    """Weight of an id outside the vocabulary (V) in every row of q, a broken draft."""

    @property
    def vocab_size(self) -> int:
        return len(self.target_logits)


@dataclass(frozen=True, slots=True)
class Tables:
    """p and q of every state; a column V stands for an id outside the vocabulary."""

    p: Floats
    """[V + 1, V + 1] by state and token; state V only follows a stray id and is never committed."""
    q: Floats
    """[V + 1, V + 1] by state and token."""
    wire_ids: Ints
    """[V + 1, V + 1] q's tokens in wire order."""
    wire_cdf: Floats
    """[V + 1, V + 1] running float64 sum of the wire weights."""


@dataclass(frozen=True, slots=True)
class Faults:
    """Mistakes to plant; the default plants none."""

    keys_by_position: bool = False
    """Uniforms keyed by absolute position instead of committed length at round start."""
    merged_purposes: bool = False
    """Draft, accept and replace draws share one stream."""
    residual_from_p: bool = False
    """The replacement is drawn from p instead of (p - q)+."""
    q_of_other_row: bool = False
    """The accept test uses q of the state one further along."""
    truncate_below: float = 0.0
    """A proposal is cut before the first drawn token with a smaller q."""
    accept_on_equality: bool = False
    """`<=` instead of `<`."""
    draft_takes_argmax: bool = False
    """The draft proposes its most likely token but reports the whole of q."""
    accept_u: float | None = None
    """Inject this number for every accept uniform."""


@dataclass(frozen=True, slots=True)
class RoundView:
    """What a policy may look at when it picks K for the next round; [N] or [N, ...] each."""

    tokens: Ints
    """[N, length of the table]; beyond committed_length: garbage."""
    committed_length: Ints
    last_drafted: Ints
    """[N, K max] the previous round's draft tokens, -1 where none: reading it is the fault."""
    last_num_accepted: Ints
    clock: Floats
    """[N] fresh numbers in [0, 1) independent of every token."""


Policy = Callable[[RoundView], Ints]


def fixed(k: int) -> Policy:
    """Draft k tokens each round."""
    return lambda view: np.full(len(view.committed_length), k)


def tables_of(pair: Pair) -> Tables:
    """Tabulate p and q by the public reference functions."""
    size = pair.vocab_size
    p, q, cdf = np.zeros((3, size + 1, size + 1))
    wire_ids = np.full((size + 1, size + 1), size)
    for state in range(size + 1):
        row = min(state, size - 1)
        target = transform(pair.target_logits[row], pair.target_params)
        p[state, target.token_ids] = target.probs
        draw = propose_row(
            pair.draft_logits[row], DraftRow(pair.draft_params, 0, 0, 0), pair.draft_sample_top_k
        )
        ids, weights = draw.support_token_ids, draw.support_weights
        assert ids is not None
        assert weights is not None
        if pair.stray_weight:
            ids = np.append(ids, np.int32(size))
            weights = np.append(weights, np.float32(pair.stray_weight))
        q[state, ids] = weights.astype(np.float64) / weights.sum(dtype=np.float64)
        wire_ids[state, : len(ids)] = ids
        cdf[state] = np.cumsum(np.pad(weights, (0, size + 1 - len(weights))), dtype=np.float64)
    return Tables(p, q, wire_ids, cdf)


def keyed(seeds: Ints, committed: Ints, row: int, purpose: Purpose, faults: Faults) -> Floats:
    """Draw one uniform per sequence under the key of `randomness.uniform` (choice 0)."""
    if faults.merged_purposes:
        purpose = Purpose.DRAFT
    rows, lengths = (0, committed + row) if faults.keys_by_position else (row, committed)
    word0, word1, _, _ = philox4x32_blocks(rows, lengths, 0, int(purpose), seeds)
    return uniforms_from_words(word0, word1)


def draw(cdf: Floats, u: Floats) -> Ints:
    """Inverse CDF by row; as in draws.inverse_cdf, the last weight owns the end of the CDF."""
    total = cdf[:, -1:]
    index = (cdf <= np.minimum(u[:, None] * total, np.nextafter(total, 0))).sum(axis=1)
    return np.asarray(index)


def simulate(
    pair: Pair,
    num_sequences: int,
    length: int,
    policy: Policy,
    max_k: int,
    faults: Faults = Faults(),
    first_seed: int = 1,
) -> Ints:
    """Run rounds until every sequence has `length` tokens after the start token.

    Returns:
        [N, length]; after EOS the row is filled with EOS.
    """
    tables, size = tables_of(pair), pair.vocab_size
    seeds = np.arange(first_seed, first_seed + num_sequences)
    clock = np.random.default_rng(first_seed)
    tokens = np.zeros((num_sequences, 1 + length + max_k + 1), np.int64)
    committed = np.ones(num_sequences, np.int64)
    drafted_before = np.full((num_sequences, max(1, max_k)), -1)
    accepted_before = np.zeros(num_sequences, np.int64)
    done = np.zeros(num_sequences, bool)
    while not done.all():
        live = np.flatnonzero(~done)
        view = RoundView(
            tokens[live],
            committed[live],
            drafted_before[live],
            accepted_before[live],
            clock.random(len(live)),
        )
        drafted, num_accepted, replacement = play_round(
            tables,
            size,
            seeds[live],
            view,
            np.minimum(policy(view), max_k),
            faults,
            pair.confidence_threshold,
        )
        drafted_before[live, : drafted.shape[1]] = drafted
        accepted_before[live] = num_accepted
        for row in range(drafted.shape[1]):
            taken = live[row < num_accepted]
            tokens[taken, committed[taken] + row] = drafted[row < num_accepted, row]
        committed[live] += num_accepted + 1
        tokens[live, committed[live] - 1] = replacement
        done = committed >= 1 + length
        if pair.eos_token_id is not None:
            places = np.arange(tokens.shape[1])
            ended = (tokens == pair.eos_token_id) & (places < committed[:, None]) & (places > 0)
            done |= ended.any(axis=1)
    result = tokens[:, 1 : 1 + length]
    if pair.eos_token_id is not None:
        ended = np.cumsum(result == pair.eos_token_id, axis=1) > 0
        result = np.where(ended, pair.eos_token_id, result)
    return result


def play_round(
    tables: Tables,
    size: int,
    seeds: Ints,
    view: RoundView,
    k: Ints,
    faults: Faults,
    confidence_threshold: float = 0.0,
) -> tuple[Ints, Ints, Ints]:
    """Propose, score and accept once; returns draft tokens [N, K max], accepted [N], next [N]."""
    committed, number = view.committed_length, np.arange(len(seeds))
    state = view.tokens[number, committed - 1]
    max_k = int(k.max(initial=0))
    drafted = np.full((len(seeds), max_k), -1)
    states = [state]
    confidence = np.ones(len(seeds))
    for row in range(max_k):
        u = keyed(seeds, committed, row, Purpose.DRAFT, faults)
        index = draw(tables.wire_cdf[state], u)
        if faults.draft_takes_argmax:
            index = np.zeros_like(index)
        token = tables.wire_ids[state, index]
        if faults.truncate_below:
            k = np.where((k > row) & (tables.q[state, token] < faults.truncate_below), row, k)
        confidence *= tables.q[state].max(axis=1)
        k = np.where((k > row + 1) & (confidence < confidence_threshold), row + 1, k)
        drafted[:, row] = np.where(row < k, token, -1)
        state = token
        states.append(state)
    num_accepted = np.zeros(len(seeds), np.int64)
    replacement = np.zeros(len(seeds), np.int64)
    walking = np.ones(len(seeds), bool)
    for row in range(max_k + 1):
        p, q = tables.p[states[row]], tables.q[states[row]]
        has_draft = (row < k)[:, None]
        left = np.where(has_draft, np.maximum(p - q, 0.0), p)
        left = np.where(left.sum(axis=1, keepdims=True) > 0.0, left, p)
        if faults.residual_from_p:
            left = p
        u = keyed(seeds, committed, row, Purpose.REPLACE, faults)
        own = draw(np.cumsum(left, axis=1), u)
        passed = np.zeros(len(seeds), bool)
        if row < max_k:
            token = drafted[:, row]
            other = states[row + 1] if faults.q_of_other_row else states[row]
            tested_p, tested_q = p[number, token], tables.q[other, token]
            tested_p = np.where(token == size, 0.0, tested_p)
            u = keyed(seeds, committed, row, Purpose.ACCEPT, faults)
            if faults.accept_u is not None:
                u = np.full_like(u, faults.accept_u)
            scaled = u * tested_q
            passed = scaled <= tested_p if faults.accept_on_equality else scaled < tested_p
            passed &= row < k
        ends = walking & ~passed
        num_accepted[ends], replacement[ends] = row, own[ends]
        walking &= passed
    return drafted, num_accepted, replacement


def exact_law(pair: Pair, length: int) -> dict[tuple[int, ...], float]:
    """Enumerate target-only sampling: the probability of every sequence of `length` tokens."""
    p = tables_of(pair).p
    law = {}
    for sequence in itertools.product(range(pair.vocab_size), repeat=length):
        probability, state, ended = 1.0, 0, False
        for token in sequence:
            if ended:
                probability *= float(token == pair.eos_token_id)
            else:
                probability *= p[state, token]
            ended = ended or token == pair.eos_token_id
            state = token
        law[sequence] = probability
    return law


@dataclass(frozen=True, slots=True)
class Fit:
    """Pearson's chi-square of counted sequences against their law."""

    statistic: float
    critical: float
    """Exceeded with probability `odds` when the law holds."""
    num_impossible: int
    """Sequences counted that have probability 0."""

    @property
    def holds(self) -> bool:
        return self.num_impossible == 0 and self.statistic <= self.critical


def fit(sequences: Ints, law: dict[tuple[int, ...], float], odds: float = 1e-7) -> Fit:
    """Compare counted sequences with their law, merging those expected fewer than 20 times.

    The critical value is Wilson and Hilferty's; with 20 expected per cell the true odds stay within
    a small factor of the nominal ones, below 1e-6.
    """
    size = max(max(key) for key in law) + 1
    places = size ** np.arange(sequences.shape[1])[::-1]
    counts = np.bincount(np.clip(sequences, 0, size - 1) @ places, minlength=len(law))
    stray = int(((sequences < 0) | (sequences >= size)).any(axis=1).sum())
    expected = np.array([law[key] for key in sorted(law)]) * len(sequences)
    num_impossible = stray + int(counts[expected == 0.0].sum())
    common = expected >= 20
    cells = [*zip(counts[common], expected[common], strict=True)]
    rest = (int(counts[~common].sum()), float(expected[~common].sum()))
    if rest[1] > 0:
        cells.append(rest)
    statistic = sum((count - mean) ** 2 / mean for count, mean in cells)
    freedom = max(1, len(cells) - 1)
    z = NormalDist().inv_cdf(1 - odds)
    cube = 1 - 2 / (9 * freedom) + z * math.sqrt(2 / (9 * freedom))
    return Fit(float(statistic), freedom * cube**3, num_impossible)
