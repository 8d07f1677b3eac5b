"""The automaton counts as a plain count of every short string does."""

import random
from collections import Counter, defaultdict
from dataclasses import dataclass, field

import pytest

from specserve.speculation.suffix_automaton import ROOT, SuffixAutomaton


@dataclass
class Counts:
    """Brute force: every string of at most `depth` tokens of every text, counted one by one."""

    depth: int
    occurrences: Counter = field(default_factory=Counter)
    followers: dict = field(default_factory=lambda: defaultdict(dict))
    """{string: {token: (times, when last)}}."""
    num_tokens: int = 0

    def add(self, text):
        for end in range(1, len(text) + 1):
            for length in range(1, min(self.depth, end) + 1):
                self.occurrences[tuple(text[end - length : end])] += 1
            for length in range(1, min(self.depth, end)):
                following = self.followers[tuple(text[end - 1 - length : end - 1])]
                times, _ = following.get(text[end - 1], (0, 0))
                following[text[end - 1]] = (times + 1, self.num_tokens + end)
        self.num_tokens += len(text)


def lengths_of(automaton, endings):
    """Every length that the given endings stand for."""
    return [
        length
        for state, longest in endings
        for length in range(longest, automaton.shortest(state) - 1, -1)
    ]


def state_of(automaton, string):
    (state, length), *_ = automaton.endings_of(string)
    assert length == len(string)
    return state


@pytest.mark.parametrize("seed", range(12))
def test_counts_followers_and_endings_are_those_of_brute_force(seed):
    """100 random sets of texts a seed, one of them open or none: every string, every ending."""
    chance = random.Random(seed)
    for _ in range(100):
        depth, size = chance.randrange(1, 8), chance.choice([1, 2, 3, 5])
        automaton, counts = SuffixAutomaton(depth), Counts(depth)
        texts = [
            [chance.randrange(size) for _ in range(chance.randrange(0, 25))]
            for _ in range(chance.randrange(1, 4))
        ]
        is_open = chance.random() < 0.5
        for number, text in enumerate(texts):
            for token_id in text:
                automaton.append(token_id)
            if not is_open or number < len(texts) - 1:
                automaton.end_text()
            counts.add(text)
        open_text = texts[-1] if is_open else []
        assert automaton.num_tokens == sum(map(len, texts))

        for string, times in counts.occurrences.items():
            if len(string) == depth:
                continue
            step = automaton.follow(state_of(automaton, string))
            following = counts.followers.get(string)
            if following is None:
                assert step is None
                continue
            best, (follower_times, _) = max(following.items(), key=lambda item: item[1])
            ends_open = tuple(open_text[-len(string) :]) == string
            assert step is not None
            assert step[0] == best
            assert step[2] == pytest.approx(follower_times / (times - ends_open))

        occurs = counts.occurrences
        assert lengths_of(automaton, automaton.endings()) == [
            length
            for length in range(min(depth, len(open_text)), 0, -1)
            if occurs[tuple(open_text[-length:])] > 1
        ]
        other = [chance.randrange(size) for _ in range(chance.randrange(0, 12))]
        assert lengths_of(automaton, automaton.endings_of(other)) == [
            length
            for length in range(min(depth, len(other)), 0, -1)
            if occurs[tuple(other[-length:])] > 0
        ]


def test_memory_does_not_grow_with_the_depth():
    """At most two states a token, whatever the text and however deep strings are counted."""
    chance = random.Random(5)
    for size in (1, 2, 3, 1000):
        for depth in (2, 24, 200):
            automaton = SuffixAutomaton(depth)
            for _ in range(1000):
                automaton.append(chance.randrange(size))
            assert len(automaton._link) <= 2 * 1000


@pytest.mark.parametrize("text", [[7] * 3000, [1, 2] * 1500, list(range(50)) * 60])
def test_a_loop_costs_no_more_than_any_text(text):
    """The chain that is counted is at most max_depth long, though the text's own grows with it."""
    automaton = SuffixAutomaton(16)
    for token_id in text:
        automaton.append(token_id)
        state, length = automaton._tail, 0
        while state != ROOT:
            state, length = automaton._link[state], length + 1
        assert length <= 16
