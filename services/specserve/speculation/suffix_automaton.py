"""A suffix automaton of growing texts: how often every short string occurs, and what follows it.

The online construction of Blumer et al. (1985), over many texts as well, with counts kept for
strings of at most `max_depth` tokens. A state stands for strings that end at the same places, so
there are at most two states a token, whatever the depth. Knows token ids only.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

ROOT = 0
_NONE = -1


class SuffixAutomaton:
    """Texts, taken in token by token; memory grows by about 150 bytes a token."""

    def __init__(self, max_depth: int) -> None:
        """Prepare an empty text.

        Args:
            max_depth: longest string that is counted, in tokens, at least 1.
        """
        self.max_depth = max_depth
        self.num_tokens = 0
        """Tokens of all texts together."""
        self._link = array("i")
        """The state of the longest proper ending that occurs elsewhere too."""
        self._length = array("i")
        """Tokens of the state's longest string."""
        self._count = array("i")
        """Occurrences; right for strings of at most max_depth tokens."""
        self._last_end = array("i")
        """Where the last occurrence ends, in tokens of all texts."""
        self._best = array("i")
        """The token that followed most often; the more recent of equals."""
        # Nine states in ten have one way on: two numbers do for them, and a dict for the others.
        self._only_token = array("i")
        self._only_state = array("i")
        self._branches: dict[int, dict[int, int]] = {}
        self._new_state(0)
        self._last = ROOT
        """The state of the whole open text."""
        self._tail = ROOT
        """The state of the open text's last `_tail_length` tokens."""
        self._tail_length = 0
        """At most max_depth."""

    def append(self, token_id: int) -> None:
        """Lengthen the open text: O(max_depth), amortised."""
        self._extend(token_id)
        self.num_tokens += 1
        # A clone may have taken the shorter strings of the tail's state over.
        before = self._containing(self._tail, self._tail_length)
        length = min(self._tail_length + 1, self.max_depth)
        self._tail = state = self._containing(self._next(before, token_id), length)
        self._tail_length = length
        # Every committed token passes here: no attribute is looked up twice.
        link, count, last_end, best = self._link, self._count, self._last_end, self._best
        end = self.num_tokens
        while state != ROOT:
            count[state] += 1
            last_end[state] = end
            state = link[state]
        while before != _NONE:
            if best[before] != token_id:
                self._note_follower(before, token_id)
            before = link[before]

    def end_text(self) -> None:
        """Close the open text; the next token begins another one."""
        self._last = self._tail = ROOT
        self._tail_length = 0

    def endings(self) -> Iterator[tuple[int, int]]:
        """Give (state, length) of the open text's endings that occur elsewhere, longest first.

        All shorter endings down to the next one given occur at the same places.
        """
        state = self._tail
        while state != ROOT:
            if self._count[state] > 1:
                yield state, min(self._length[state], self.max_depth)
            state = self._link[state]

    def endings_of(self, text: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Give (state, length) of the endings of another text that occur here, longest first."""
        state, length = ROOT, 0
        for token_id in text[-self.max_depth :]:
            while state != ROOT and self._next(state, token_id) == _NONE:
                state = self._link[state]
                length = self._length[state]
            following = self._next(state, token_id)
            if following != _NONE:
                state, length = following, length + 1
        while state != ROOT:
            yield state, length
            state = self._link[state]
            length = self._length[state]

    def shortest(self, state: int) -> int:
        """Return the length of the shortest string of a state."""
        return self._length[self._link[state]] + 1

    def follow(self, state: int) -> tuple[int, int, float] | None:
        """Return (token, state, share): what most often followed, and how often of all times.

        A past text that ended here counts as a time when something else followed; the open text,
        which has not gone on yet, does not count.
        """
        token_id = self._best[state]
        if token_id == _NONE:
            return None
        following = self._next(state, token_id)
        is_open = self._tail_length > 0 and self._last_end[state] == self.num_tokens
        return token_id, following, self._count[following] / (self._count[state] - is_open)

    def _new_state(self, length: int) -> int:
        state = len(self._link)
        self._link.append(_NONE)
        self._length.append(length)
        self._count.append(0)
        self._last_end.append(_NONE)
        self._best.append(_NONE)
        self._only_token.append(_NONE)
        self._only_state.append(_NONE)
        return state

    def _next(self, state: int, token_id: int) -> int:
        branches = self._branches.get(state)
        if branches is not None:
            return branches.get(token_id, _NONE)
        return self._only_state[state] if self._only_token[state] == token_id else _NONE

    def _set_next(self, state: int, token_id: int, following: int) -> None:
        branches = self._branches.get(state)
        if branches is not None:
            branches[token_id] = following
        elif self._only_token[state] in (_NONE, token_id):
            self._only_token[state] = token_id
            self._only_state[state] = following
        else:
            only = {self._only_token[state]: self._only_state[state]}
            self._branches[state] = only | {token_id: following}

    def _extend(self, token_id: int) -> None:
        state = self._last
        following = self._next(state, token_id)
        if following != _NONE:  # a new text that begins as another one went on
            self._last = self._split(state, token_id, following)
            return
        new = self._new_state(self._length[state] + 1)
        while state != _NONE and (following := self._next(state, token_id)) == _NONE:
            self._set_next(state, token_id, new)
            state = self._link[state]
        self._link[new] = ROOT if state == _NONE else self._split(state, token_id, following)
        self._last = new

    def _split(self, state: int, token_id: int, following: int) -> int:
        """Return a state for just the strings of `state` and their endings, with the token."""
        length = self._length[state] + 1
        if self._length[following] == length:
            return following
        clone = self._new_state(length)
        for values in (self._link, self._count, self._last_end, self._best):
            values[clone] = values[following]
        self._only_token[clone] = self._only_token[following]
        self._only_state[clone] = self._only_state[following]
        if following in self._branches:
            self._branches[clone] = dict(self._branches[following])
        self._link[following] = clone
        while state != _NONE and self._next(state, token_id) == following:
            self._set_next(state, token_id, clone)
            state = self._link[state]
        return clone

    def _containing(self, state: int, length: int) -> int:
        """Return the state of an ending of the state's strings, `length` tokens long."""
        while state != ROOT and self._length[self._link[state]] >= length:
            state = self._link[state]
        return state

    def _note_follower(self, state: int, token_id: int) -> None:
        best = self._best[state]
        if best == _NONE or (
            self._count[self._next(state, token_id)] >= self._count[self._next(state, best)]
        ):
            self._best[state] = token_id
