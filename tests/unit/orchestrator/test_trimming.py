"""Where a text ends does not depend on how its tokens were grouped into blocks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import pytest

from specserve.orchestrator.trimming import FinishReason, Trimmer

ALPHABET = tuple(bytes((byte,)) for byte in range(256))
"""A vocabulary of single bytes: token id = byte."""
EOS = 0
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


@dataclass(frozen=True, slots=True)
class Output:
    """What a client has after the last block."""

    token_ids: tuple[int, ...]
    text: bytes
    reason: FinishReason | None
    stop_index: int | None


def run(trimmer: Trimmer, blocks: Sequence[Sequence[int]]) -> Output:
    """Feed blocks until the text has ended."""
    token_ids: list[int] = []
    text = b""
    for block in blocks:
        emission = trimmer.take(block)
        token_ids += block[: emission.num_tokens]
        text += emission.text
        if emission.finish_reason is not None:
            return Output(tuple(token_ids), text, emission.finish_reason, emission.stop_index)
        assert emission.num_tokens == len(block)
        assert emission.stop_index is None
    return Output(tuple(token_ids), text, None, None)


def make(
    stop: Sequence[bytes] = (),
    *,
    table: Sequence[bytes] = ALPHABET,
    ends: Sequence[int] = (EOS,),
    hidden: Sequence[int] = (EOS,),
    max_tokens: int = 10_000,
    min_tokens: int = 0,
) -> Trimmer:
    """Make a trimmer over single bytes."""
    return Trimmer(table, frozenset(hidden), frozenset(ends), stop, max_tokens, min_tokens)


def split(tokens: Sequence[int], size: int, offset: int = 0) -> list[Sequence[int]]:
    """Cut into blocks of `size`, the first of `offset`."""
    cuts = [0, *range(offset or size, len(tokens), size), len(tokens)]
    return [tokens[a:b] for a, b in pairwise(cuts)]


@pytest.mark.parametrize("offset", range(1, 9))
@pytest.mark.parametrize("size", [1, 2, 4, 5, 17])
def test_stop_string_is_seen_at_every_alignment_B040_B047(size: int, offset: int) -> None:
    """It may complete at any place of a block and span several; the text ends before it."""
    tokens = list(b"so it goes ha ha, said the reader")
    output = run(make([b" ha ha"]), split(tokens, size, offset))
    assert output == Output(tuple(b"so it goes ha ha"), b"so it goes", STOP, 0)


def test_stop_early_in_a_long_block_is_seen_B043() -> None:
    """A newline as the first of 17 accepted tokens ends the text there."""
    output = run(make([b"\n"]), [list(b"\nsixteen more tok")])
    assert output == Output((10,), b"", STOP, 0)


def test_marker_of_five_tokens_inside_a_long_run_B047() -> None:
    """A structural end marker is found wherever its tokens fall."""
    pieces = (b"<eos>", b"<|", b"end", b"_re", b"gion", b"|>", b"x")
    for lead in range(20):
        tokens = [6] * lead + [1, 2, 3, 4, 5] + [6] * 10
        output = run(make([b"<|end_region|>"], table=pieces), split(tokens, 20))
        assert output == Output((*[6] * lead, 1, 2, 3, 4, 5), b"x" * lead, STOP, 0)


def test_ids_end_with_the_token_that_completes_the_stop_B044() -> None:
    """The rule: that token counts as output, what follows it in the block does not."""
    pieces = (b"<eos>", b"ab", b"cd", b"ef")
    output = run(make([b"bc"], table=pieces), [[3, 1, 2, 3, 3]])
    assert output == Output((3, 1, 2), b"efa", STOP, 0)


def test_stop_before_the_limit_wins_B041() -> None:
    """[10, 11, STOP, 20, 21, 22] with max_tokens 5: three tokens, `stop`."""
    output = run(make(ends=[99], max_tokens=5), [[10, 11, 99, 20, 21, 22]])
    assert (output.token_ids, output.reason) == ((10, 11, 99), STOP)


def test_limit_before_the_stop_wins_B041() -> None:
    """The stop at position 6 with max_tokens 5: exactly five tokens, `length`."""
    output = run(make(ends=[99], max_tokens=5), [[10, 11, 12, 13, 14, 99]])
    assert (output.token_ids, output.reason) == ((10, 11, 12, 13, 14), LENGTH)


def test_stop_on_the_last_allowed_token_is_a_stop_B041() -> None:
    """A token is checked for stops before it is checked against limits."""
    assert run(make(ends=[99], max_tokens=3), [[10, 11, 99, 20]]).reason is STOP
    assert run(make([b"c"], max_tokens=3), [list(b"abcd")]).reason is STOP


@pytest.mark.parametrize("size", [1, 2, 3, 9])
def test_stop_strings_end_nothing_before_min_tokens_B050(size: int) -> None:
    """What the first min_tokens tokens complete is text; the next that completes one ends it."""
    tokens = list(b"a\nb\n\nc\n")
    assert run(make([b"\n"], min_tokens=1), split(tokens, size)).text == b"a"
    assert run(make([b"\n"], min_tokens=2), split(tokens, size)).text == b"a\nb"
    assert run(make([b"\n"], min_tokens=5), split(tokens, size)).text == b"a\nb\n\nc"
    assert run(make([b"\n"], min_tokens=7), split(tokens, size)).reason is None


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_stop_that_is_completed_after_min_tokens_may_have_begun_before_B050(size: int) -> None:
    """min_tokens 3 within `ha ha`: the text ends before the stop's first byte all the same."""
    output = run(make([b"ha ha", b"h"], min_tokens=3), split(list(b"ha ha"), size))
    assert output == Output(tuple(b"ha h"), b"ha ", STOP, 1)
    output = run(make([b"ha ha"], min_tokens=3), split(list(b"ha ha"), size))
    assert output == Output(tuple(b"ha ha"), b"", STOP, 0)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("end", [0, 7])
def test_any_of_several_eos_ids_ends_the_text_B053(size: int, end: int) -> None:
    """At any place of a block; its bytes are no text."""
    tokens = [65, 66, 67, 68, end, 69, 70]
    output = run(make(ends=[0, 7], hidden=[0, 7]), split(tokens, size))
    assert output == Output((65, 66, 67, 68, end), b"ABCD", STOP, None)


def test_ignored_eos_runs_to_the_limit_B053() -> None:
    """Its bytes stay hidden, and it counts as a token."""
    output = run(make(ends=[], max_tokens=6), [[65, 0, 66, 0, 67], [68, 69]])
    assert output == Output((65, 0, 66, 0, 67, 68), b"ABCD", LENGTH, None)


def test_special_tokens_are_shown_when_asked_for() -> None:
    """Then they are text like any other, for stops too."""
    table = (b"<eos>", b"<|im_end|>", b"a")
    shown = make([b"im_end"], table=table, ends=[0], hidden=[])
    assert run(shown, [[2, 1, 2]]) == Output((2, 1), b"a<|", STOP, 0)
    hidden = make([b"im_end"], table=table, ends=[0], hidden=[0, 1])
    assert run(hidden, [[2, 1, 2, 0]]) == Output((2, 1, 2, 0), b"aa", STOP, None)


def test_hidden_token_does_not_break_a_stop_string_apart() -> None:
    """The text is what the reader sees: `a`, a hidden mark, `b` reads `ab`."""
    output = run(make([b"ab"], hidden=[EOS, 1], ends=[]), [[120, 97, 1, 98, 120]])
    assert output == Output((120, 97, 1, 98), b"x", STOP, 0)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_stop_across_the_bytes_of_one_character(size: int) -> None:
    """Matching is on bytes: a stop is found across parts of characters, the text stays whole."""
    tokens = list("naïve 日本語 text".encode())
    output = run(make(["本".encode()]), split(tokens, size))
    assert output.text.decode() == "naïve 日"
    assert output.reason is STOP
    assert output.token_ids == tuple("naïve 日本".encode())


def test_what_may_become_a_stop_is_held_back_and_flushed_at_the_end() -> None:
    """Held bytes come out as soon as they cannot be a stop any more, or when the text ends."""
    trimmer = make([b"stop"], max_tokens=8)
    assert trimmer.take(list(b"xs")).text == b"x"
    assert trimmer.take(list(b"t")).text == b""
    assert trimmer.take(list(b"a")).text == b"sta"
    assert trimmer.take(list(b"st")).text == b""
    emission = trimmer.take(list(b"oq"))
    assert (emission.text, emission.finish_reason) == (b"stoq", LENGTH)
    at_limit = make([b"stop"], max_tokens=3).take(list(b"stop"))
    assert (at_limit.text, at_limit.finish_reason, at_limit.num_tokens) == (b"sto", LENGTH, 3)
    at_eos = make([b"stop"]).take([*b"sto", EOS])
    assert (at_eos.text, at_eos.finish_reason) == (b"sto", STOP)


def test_overlapping_stops_end_at_the_first_byte_of_the_earliest() -> None:
    """Of several completed by one token the first to begin wins; ties go to the first listed."""
    pieces = (b"<eos>", b"abcd", b"x")
    assert run(make([b"cd", b"bc"], table=pieces), [[2, 1]]) == Output((2, 1), b"xa", STOP, 1)
    assert run(make([b"bcd", b"bc"], table=pieces), [[2, 1]]).stop_index == 0
    assert run(make([b"bc", b"bcd"], table=pieces), [[2, 1]]).stop_index == 0
    # Byte by byte the shorter completes first, and the longer never gets its turn.
    assert run(make([b"bcd", b"bc"]), [list(b"abcd")]) == Output(tuple(b"abc"), b"a", STOP, 1)


def test_self_overlapping_stop() -> None:
    """`aab` in `aaab`: the held tail is the longest that may still match."""
    assert run(make([b"aab"]), [[byte] for byte in b"xaaab"]).text == b"xa"


def test_padding_ids_have_no_text() -> None:
    """An id beyond the table counts as a token and reads as nothing."""
    assert run(make(), [[65, 5000, 66]]) == Output((65, 5000, 66), b"AB", None, None)


def test_carried_over_prefix_still_matters_to_stops() -> None:
    """A stop may begin in what another orchestrator has committed, and end in what is new."""
    trimmer = make([b"stop"], max_tokens=100)
    assert trimmer.take(list(b"we st")).text == b"we "
    emission = trimmer.take(list(b"op now"))
    assert (emission.num_tokens, emission.text, emission.stop_index) == (2, b"", 0)


def _oracle(
    tokens: Sequence[int],
    table: Sequence[bytes],
    stops: Sequence[bytes],
    ends: frozenset[int],
    hidden: frozenset[int],
    max_tokens: int,
    min_tokens: int,
) -> Output:
    """Decide by looking at the whole text after each token."""
    before = 0
    for count in range(1, len(tokens) + 1):
        text = b"".join(table[t] for t in tokens[:count] if t not in hidden)
        hits = [
            (at, index)
            for index, stop in enumerate(stops)
            for at in range(len(text))
            if text[at:].startswith(stop) and at + len(stop) > before
        ]
        before = len(text)
        if hits and count > min_tokens:
            at, index = min(hits)
            return Output(tuple(tokens[:count]), text[:at], STOP, index)
        if tokens[count - 1] in ends:
            return Output(tuple(tokens[:count]), text, STOP, None)
        if count >= max_tokens:
            return Output(tuple(tokens[:count]), text, LENGTH, None)
    return Output(tuple(tokens), b"", None, None)


def test_any_split_into_blocks_ends_at_the_same_place_B041_B044() -> None:
    """2,000 random texts, four random splits each: ids, text, reason, stop as the oracle says."""
    chance = random.Random(7)
    for _ in range(2000):
        table = [
            bytes(chance.choices(b"abc", k=chance.choice((0, 1, 1, 1, 2, 3)))) for _ in range(8)
        ]
        stops = [
            bytes(chance.choices(b"abc", k=chance.randrange(1, 5)))
            for _ in range(chance.randrange(4))
        ]
        ends = frozenset(chance.sample(range(8), chance.randrange(3)))
        hidden = frozenset(chance.sample(range(8), chance.randrange(3)))
        max_tokens = chance.randrange(1, 40)
        min_tokens = chance.choice((0, 0, chance.randrange(30)))
        tokens = [chance.randrange(8) for _ in range(40)]
        expected = _oracle(tokens, table, stops, ends, hidden, max_tokens, min_tokens)
        for size in (1, 3, 40, chance.randrange(1, 12)):
            trimmer = Trimmer(table, hidden, ends, stops, max_tokens, min_tokens)
            offset = chance.randrange(1, size + 1)
            assert run(trimmer, split(tokens, size, offset)) == expected
