"""Suffix decoding: continue as equal endings most often went on, in this text or in past outputs.

After SuffixDecoding (Oliaro et al., arXiv:2411.04975). A longer match justifies a longer guess, and
a guess ends where its estimated probability falls too low. Knows token ids only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from specserve.speculation.guess import NO_GUESS, Guess
from specserve.speculation.suffix_automaton import SuffixAutomaton


@dataclass(frozen=True, slots=True)
class SuffixParams:
    """How far suffix decoding goes."""

    max_tree_depth: int
    """Longest match and its guess together, in tokens."""
    max_spec_factor: float
    """A match of m tokens justifies at most factor * m guessed ones."""
    min_token_prob: float
    """Least estimated probability of a guessed token, in [0, 1]."""


class SuffixGuesser:
    """Continues one text from itself and from past outputs (a `Guesser`)."""

    def __init__(
        self,
        params: SuffixParams,
        past: Callable[[], Iterable[SuffixAutomaton]] = tuple,
    ) -> None:
        """Prepare an empty text.

        Args:
            past: gives the past outputs that may be looked into now.
        """
        self._params = params
        self._past = past
        self._text = SuffixAutomaton(params.max_tree_depth)
        self._recent: deque[int] = deque(maxlen=params.max_tree_depth)

    def append(self, token_ids: Sequence[int]) -> None:
        """Take in committed tokens: O(max_tree_depth) each, amortised."""
        for token_id in token_ids:
            self._text.append(token_id)
        self._recent.extend(token_ids)

    def guess(self, num_speculative_tokens: int) -> Guess:
        """Return the guess of the highest score; of equals the text's own, the longer match."""
        best = best_guess(self._text, self._text.endings(), num_speculative_tokens, self._params)
        for outputs in self._past():
            endings = outputs.endings_of(tuple(self._recent))
            other = best_guess(outputs, endings, num_speculative_tokens, self._params)
            best = max(best, other, key=lambda guess: guess.score)
        return best


def best_guess(
    automaton: SuffixAutomaton,
    endings: Iterable[tuple[int, int]],
    num_speculative_tokens: int,
    params: SuffixParams,
) -> Guess:
    """Follow every ending; return the guess from which most tokens are expected to hold.

    Args:
        endings: (state, length) of the endings that match, longest first.
    """
    best, best_score = NO_GUESS, 0.0
    for state, length in endings:
        limit = min(num_speculative_tokens, _max_tokens(automaton.shortest(state), length, params))
        if limit <= best_score:
            continue  # no token counts more than 1
        token_ids, probs = _follow(automaton, state, limit, params.min_token_prob)
        if (score := sum(probs)) > best_score:
            best, best_score = Guess(token_ids, probs, length), score
    return best


def _max_tokens(shortest: int, longest: int, params: SuffixParams) -> int:
    """Longest guess that one of the matches of shortest..longest tokens justifies."""
    depth, factor = params.max_tree_depth, params.max_spec_factor
    # Matches grow the guess until match and guess fill the depth; the best one lies there.
    best = int(depth / (1 + factor))
    lengths = (min(max(length, shortest), longest) for length in (best, best + 1))
    # The tiny addend keeps a product such as 10 * 0.3 from falling below its whole number.
    return max(min(depth - length, int(factor * length + 1e-6)) for length in lengths)


def _follow(
    automaton: SuffixAutomaton, state: int, limit: int, min_token_prob: float
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    token_ids: list[int] = []
    probs: list[float] = []
    prob = 1.0
    while len(token_ids) < limit and (step := automaton.follow(state)) is not None:
        token_id, state, share = step
        prob *= share
        if prob < min_token_prob:
            break
        token_ids.append(token_id)
        probs.append(prob)
    return tuple(token_ids), tuple(probs)
