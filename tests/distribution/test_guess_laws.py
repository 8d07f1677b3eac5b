"""Guesses keep the law: n-gram, suffix, the cascade and past outputs, over whole rounds.

Each law test draws 100,000 sequences by the real guessers and compares them with the enumerated law
by chi-square at nominal odds of 1e-7 (false alarm below 1e-6 a test; seeds are fixed). A guess is a
function of the committed tokens, so it is made once per distinct prefix; the walk over it is
written again over arrays, and first proved equal to the public functions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest

from distribution.simulator import (
    Faults,
    Floats,
    Ints,
    Pair,
    RoundView,
    Tables,
    draw,
    exact_law,
    fit,
    fixed,
    keyed,
    play_round,
    simulate,
    tables_of,
)
from specserve.speculation.acceptance import accept
from specserve.speculation.guess import NO_GUESS, Guess, Guesser
from specserve.speculation.ngram import NgramGuesser
from specserve.speculation.past_outputs import PastOutputs
from specserve.speculation.randomness import Purpose, uniforms
from specserve.speculation.scoring import TargetRow, score_row
from specserve.speculation.suffix import SuffixGuesser, SuffixParams
from specserve.speculation.types import AcceptanceRule, SamplingParams, TargetScores

NUM_SEQUENCES = 100_000
LENGTH = 4
MAX_K = 4
PROMPT = (1, 2, 0, 1, 1, 0, 2, 2, 1, 0)
"""Every token has followed every other somewhere: there is always something to guess."""
START = PROMPT[-1]

STANDARD = SamplingParams(AcceptanceRule.STANDARD, 0, 0)
TARGET = np.array([[0.6, 0.3, 0.1], [0.2, 0.5, 0.3], [0.1, 0.1, 0.8]])
DRAFT = np.array([[0.2, 0.3, 0.5], [0.6, 0.2, 0.2], [0.3, 0.4, 0.3]])
PAIR = Pair(np.log(TARGET).astype(np.float32), np.log(DRAFT).astype(np.float32), STANDARD, STANDARD)
PARAMS = SuffixParams(max_tree_depth=24, max_spec_factor=2.0, min_token_prob=0.1)

GuessOf = Callable[[tuple[int, ...]], Guess]
"""Committed tokens -> the guess."""


def by(make: Callable[[], Guesser]) -> GuessOf:
    """Guess with a guesser of its own for each text; all texts begin with the prompt."""

    def guess_of(prefix: tuple[int, ...]) -> Guess:
        guesser = make()
        guesser.append((*PROMPT, *prefix))
        return guesser.guess(MAX_K)

    return guess_of


METHODS = {
    "ngram": by(lambda: NgramGuesser(1, 3)),
    "suffix": by(lambda: SuffixGuesser(PARAMS)),
}


@dataclass(frozen=True, slots=True)
class GuessFaults:
    """Mistakes to plant."""

    claimed_q: float | None = None
    """The guess is said to have been drawn with this probability, the rest of q unsaid."""


def walk_guesses(
    p: Floats,
    seeds: Ints,
    committed: Ints,
    state: Ints,
    guesses: Ints,
    faults: GuessFaults = GuessFaults(),
) -> tuple[Ints, Ints]:
    """Score and accept deterministic guesses.

    Args:
        p: [V + 1, V + 1] by state and token.
        committed: [N] committed tokens at round start.
        state: [N] the last committed token.
        guesses: [N, K] ids, -1 where a guess has ended.

    Returns:
        accepted [N], next token [N].
    """
    number = np.arange(len(seeds))
    num_accepted, following = np.zeros((2, len(seeds)), np.int64)
    walking = np.ones(len(seeds), bool)
    q = 1.0 if faults.claimed_q is None else faults.claimed_q
    for row in range(guesses.shape[1] + 1):
        token = guesses[:, row] if row < guesses.shape[1] else np.full(len(seeds), -1)
        rest = p[state].copy()
        rest[number, token] = np.where(
            token >= 0, np.maximum(rest[number, token] - q, 0.0), rest[number, token]
        )
        rest = np.where(rest.sum(axis=1, keepdims=True) > 0.0, rest, p[state])
        own = draw(np.cumsum(rest, axis=1), keyed(seeds, committed, row, Purpose.REPLACE, Faults()))
        u = keyed(seeds, committed, row, Purpose.ACCEPT, Faults())
        passed = (token >= 0) & (u * q < p[state, token])
        ends = walking & ~passed
        num_accepted[ends], following[ends] = row, own[ends]
        walking &= passed
        state = np.where(token >= 0, token, state)
    return num_accepted, following


def simulate_guesses(
    guess_of: GuessOf,
    seeds: Ints,
    *,
    min_match_length: int = 0,
    faults: GuessFaults = GuessFaults(),
) -> Ints:
    """Decode LENGTH tokens after the prompt, round by round.

    Args:
        min_match_length: guesses of shorter matches give way to the draft model (a cascade), whose
            proposals are lost by the clock three times in ten: then the guess is taken after all.

    Returns:
        [N, LENGTH]
    """
    tables, clock = tables_of(PAIR), np.random.default_rng(9)
    start = len(PROMPT)
    tokens = np.full((len(seeds), start + LENGTH + MAX_K + 1), -1)
    tokens[:, :start] = PROMPT
    committed = np.full(len(seeds), start)
    while (live := np.flatnonzero(committed < start + LENGTH)).size:
        # All rounds of one prefix are alike but for their uniforms, and whether the draft is lost.
        known = np.where(np.arange(tokens.shape[1]) < committed[live, None], tokens[live], -1)
        is_lost = clock.random(len(live)) < 0.3
        _, groups = np.unique(np.column_stack([known, is_lost]), axis=0, return_inverse=True)
        for group in range(groups.max() + 1):
            members = groups.ravel() == group
            rows = live[members]
            length = int(committed[rows[0]])
            guess = guess_of(tuple(tokens[rows[0], start:length].tolist()))
            if guess.match_length >= min_match_length or is_lost[members][0]:
                drafted = np.tile(np.array(guess.token_ids, np.int64), (len(rows), 1))
                num_accepted, following = walk_guesses(
                    tables.p,
                    seeds[rows],
                    committed[rows],
                    tokens[rows, length - 1],
                    drafted,
                    faults,
                )
            else:
                drafted, num_accepted, following = draft_round(
                    tables, seeds[rows], tokens[rows], committed[rows]
                )
            for row in range(drafted.shape[1]):
                taken = row < num_accepted
                tokens[rows[taken], length + row] = drafted[taken, row]
            tokens[rows, length + num_accepted] = following
            committed[rows] += num_accepted + 1
    return tokens[:, start : start + LENGTH]


def draft_round(
    tables: Tables, seeds: Ints, tokens: Ints, committed: Ints
) -> tuple[Ints, Ints, Ints]:
    """Play one round of the draft model at K = 3."""
    nothing = np.zeros(len(seeds), np.int64)
    view = RoundView(tokens, committed, nothing[:, None], nothing, nothing.astype(float))
    return play_round(tables, PAIR.vocab_size, seeds, view, nothing + 3, Faults())


def law_after_prompt() -> dict[tuple[int, ...], float]:
    """The exact law of LENGTH tokens after the prompt, which ends with the start token 0."""
    assert START == 0
    return exact_law(PAIR, LENGTH)


SEEDS = np.arange(1, NUM_SEQUENCES + 1)


def decode_publicly(guess_of: GuessOf, seed: int) -> list[int]:
    """Whole rounds of one sequence by the public functions alone."""
    params = replace(STANDARD, seed=seed)
    tokens = list(PROMPT)
    while len(tokens) < len(PROMPT) + LENGTH:
        committed = len(tokens)
        proposal = guess_of(tuple(tokens[len(PROMPT) :])).proposal(params.rule)
        drafted, q = proposal.draft_token_ids, proposal.draft_probs
        states = [tokens[-1], *drafted]
        scores = [
            score_row(
                PAIR.target_logits[state],
                TargetRow(
                    params,
                    committed + row,
                    committed,
                    row,
                    drafted[row] if row < len(drafted) else None,
                    q.token_ids[row] if q is not None and row < len(drafted) else None,
                    q.weights[row] if q is not None and row < len(drafted) else None,
                ),
            )
            for row, state in enumerate(states)
        ]
        verdict = accept(
            proposal,
            TargetScores(
                tuple(score.target_prob for score in scores[:-1]),
                tuple(score.replacement_token_id for score in scores),
            ),
            uniforms(seed, 0, committed, len(drafted), Purpose.ACCEPT),
            params.rule,
        )
        tokens += [*drafted[: verdict.num_accepted], verdict.next_token_id]
    return tokens[len(PROMPT) : len(PROMPT) + LENGTH]


@pytest.mark.parametrize("method", METHODS)
def test_the_walk_commits_what_the_public_functions_commit(method):
    """Token for token; and guesses of several tokens are among them."""
    sequences = simulate_guesses(METHODS[method], SEEDS[:60])
    for seed, sequence in zip(SEEDS[:60].tolist(), sequences.tolist(), strict=True):
        assert decode_publicly(METHODS[method], seed) == sequence
    assert max(len(METHODS[method](tuple(s[:3])).token_ids) for s in sequences.tolist()) > 1


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_guesses_keep_the_law(method):
    """K by match length and estimate, q one-hot: the law of target-only sampling."""
    result = fit(simulate_guesses(METHODS[method], SEEDS), law_after_prompt())
    assert result.holds, result


@pytest.mark.slow
def test_a_cascade_keeps_the_law():
    """Guess or draft by the committed tokens; a draft lost by the clock gives way to a guess."""
    lengths = {METHODS["suffix"](prefix).match_length for prefix in ((), (1,), (0, 1), (1, 2, 0))}
    assert min(lengths) < 3 <= max(lengths), "both are used"
    sequences = simulate_guesses(METHODS["suffix"], SEEDS, min_match_length=3)
    result = fit(sequences, law_after_prompt())
    assert result.holds, result


@pytest.mark.slow
def test_a_guess_that_claims_a_q_it_was_not_drawn_from_is_caught():
    """A guess is no draw: only the one-hot q is its own."""
    sequences = simulate_guesses(METHODS["suffix"], SEEDS, faults=GuessFaults(claimed_q=0.7))
    assert not fit(sequences, law_after_prompt()).holds


def sequences_after(first_run: Ints, seeds: Ints) -> Ints:
    """Decode again, each sequence with what one earlier run of its own gave as the past output."""
    p = tables_of(PAIR).p
    tokens = np.full((len(seeds), LENGTH + MAX_K + 1), -1)
    committed = np.zeros(len(seeds), np.int64)
    places = np.arange(LENGTH)
    while (live := np.flatnonzero(committed < LENGTH)).size:
        # The earlier run is a guess wherever it has agreed so far, as suffix decoding finds it.
        agrees = (
            (tokens[live, :LENGTH] == first_run[live]) | (places >= committed[live, None])
        ).all(axis=1)
        guesses = np.full((len(live), MAX_K), -1)
        for row in range(MAX_K):
            place = committed[live] + row
            usable = agrees & (place < LENGTH)
            guesses[usable, row] = first_run[live[usable], place[usable]]
        last = tokens[live, committed[live] - 1]
        state = np.where(committed[live] == 0, START, last)
        num_accepted, following = walk_guesses(
            p, seeds[live], committed[live] + len(PROMPT), state, guesses
        )
        for row in range(MAX_K):
            taken = row < num_accepted
            tokens[live[taken], committed[live[taken]] + row] = guesses[taken, row]
        tokens[live, committed[live] + num_accepted] = following
        committed[live] += num_accepted + 1
    return tokens[:, :LENGTH]


@pytest.mark.slow
def test_a_past_output_of_the_same_draws_would_break_the_law():
    """The reason why such outputs are left out: their uniforms decide about their own work.

    Outputs of other seeds, guessed from in the same way, keep the law.
    """
    same = simulate_guesses(lambda prefix: NO_GUESS, SEEDS)
    others = simulate_guesses(lambda prefix: NO_GUESS, SEEDS + 10 * NUM_SEQUENCES)
    assert fit(same, law_after_prompt()).holds
    assert fit(sequences_after(others, SEEDS), law_after_prompt()).holds
    assert not fit(sequences_after(same, SEEDS), law_after_prompt()).holds


def test_the_store_leaves_such_outputs_out():
    """The planted case above, asked of the real store: nothing of (seed, choice) comes back."""
    past = PastOutputs(8, 1000, PARAMS.max_tree_depth)
    list(past.add(b"", (5, 0), [1, 2, 0, 1]))
    same = SuffixGuesser(PARAMS, lambda: past.of(b"", (5, 0)))
    other = SuffixGuesser(PARAMS, lambda: past.of(b"", (6, 0)))
    for guesser in (same, other):
        guesser.append([1])
    assert same.guess(2).token_ids == ()
    assert other.guess(2).token_ids == (2, 0)


def test_nothing_drafted_is_the_plain_walk():
    """Without guesses the walk is the simulator's own at K = 0, draw for draw."""
    nothing = np.zeros((40, 0), np.int64)
    state = np.full(40, START)
    committed = np.ones(40, np.int64)
    _, following = walk_guesses(tables_of(PAIR).p, SEEDS[:40], committed, state, nothing)
    assert following.tolist() == simulate(PAIR, 40, 1, fixed(0), 0)[:, 0].tolist()
