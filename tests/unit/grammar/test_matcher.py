"""What a grammar allows is what trying every completion allows, and no token leaves a trace."""

from __future__ import annotations

import itertools
import re
import resource
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specserve.errors import InvalidRequest
from specserve.grammar import compiler
from specserve.grammar.compiler import Grammar, GrammarCompiler
from specserve.grammar.lark import choice_grammar, json_grammar, lark_grammar, regex_grammar
from specserve.grammar.matcher import GrammarMatcher
from specserve.model.token_table import TokenTable
from specserve.speculation.constraints import ConstraintState, TokenConstraints
from specserve.speculation.digest import TokenChain
from support.constrained import Wanted

EOS, OTHER_EOS, BOS, UNUSED = 0, 13, 6, 5
# Byte-level pieces: letters twice, several letters, half a letter, a mark's name, an unmarked EOS.
PIECES = (
    b"</s>",
    b"a",
    b"b",
    b"ab",
    b"a",
    b"",
    b"<a>",
    b"1",
    b"12",
    b"\xc3",
    b"\xa9",
    b"\xc3\xa9b",
    b"ba1",
    b"a2",
    b"<",
    b"2",
)
TABLE = TokenTable(PIECES, frozenset({EOS, BOS}))
LETTERS = "ab12é<"
REGEXES = (
    "(ab|é)*b?1",
    "a{2,4}",
    "(a|b)*12",
    "[a-b]+[12]?",
    ".*",
    "é{1,2}",
    "(ab)*|(ba1)+",
    "<a?",
    "(a|ab)(b|1)?",
    "[^a]{0,2}1",
)


def grammar_of(text: str, table: TokenTable = TABLE) -> Grammar:
    """Compile one grammar."""
    return GrammarCompiler(lambda: table).compile(text)


def matcher_of(regex: str, output: tuple[int, ...] = ()) -> GrammarMatcher:
    """Match a regular expression, behind some tokens."""
    matcher = grammar_of(regex_grammar("regex", regex)).matcher((EOS, OTHER_EOS))
    for token in output:
        matcher.push(token)
    return matcher


def ids_of(matcher: GrammarMatcher) -> list[int] | None:
    """Return what is allowed."""
    allowed = matcher.allowed_token_ids()
    return None if allowed is None else allowed.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("regex", REGEXES)
def test_the_mask_is_what_trying_every_completion_gives(regex: str) -> None:
    """All paths of three tokens: an id is allowed iff some text of the language goes on with it.

    Pieces of several letters, two ids of one text, half a letter, ids without text, marks whose
    name would fit, and an EOS that is not marked as one.
    """
    wanted = Wanted(
        regex=regex, letters=LETTERS, token_bytes=PIECES, eos_token_ids=(EOS, OTHER_EOS)
    )
    matcher = matcher_of(regex)
    num_rows = 0
    paths: list[list[int]] = [[]]
    while paths:
        path = paths.pop()
        for token in path:
            matcher.push(token)
        truth = [t for t in range(len(PIECES)) if t != BOS and wanted.fits(path, t)]
        assert ids_of(matcher) == truth, path
        num_rows += 1
        matcher.truncate(0)
        if len(path) < 3:
            paths += [[*path, t] for t in truth if t not in (EOS, OTHER_EOS)]
    assert num_rows > 3


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(REGEXES),
    st.lists(
        st.one_of(
            st.integers(0, len(PIECES) + 2), st.integers(-6, -1), st.sampled_from([1, 3, 1, 2])
        ),
        max_size=24,
    ),
)
def test_a_matcher_that_was_cut_back_is_one_that_never_went_on(
    regex: str, moves: list[int]
) -> None:
    """Tokens that fit, tokens that do not, EOS, ids that are none; forgotten again (< 0)."""
    moved, tokens = matcher_of(regex), list[int]()
    for move in moves:
        if move < 0:
            tokens = tokens[: max(0, len(tokens) + move)]
            moved.truncate(len(tokens))
        else:
            tokens.append(move)
            moved.push(move)
            if move % 3 == 0:
                moved.allowed_token_ids()  # looking changes nothing
        assert ids_of(moved) == ids_of(matcher_of(regex, tuple(tokens)))


def test_behind_an_end_all_is_allowed_and_behind_a_misfit_nothing() -> None:
    """The first is never read; the second must never give a token."""
    matcher = matcher_of("a1")
    assert ids_of(matcher) == [1, 4]
    matcher.push(1)
    matcher.push(7)
    assert ids_of(matcher) == [EOS, OTHER_EOS]
    matcher.push(EOS)
    assert ids_of(matcher) is None
    matcher.push(2)
    assert ids_of(matcher) is None
    matcher.truncate(1)
    assert ids_of(matcher) == [7]
    matcher.push(EOS)
    assert ids_of(matcher) == []
    matcher.push(7)
    assert ids_of(matcher) == []
    matcher.truncate(1)
    assert ids_of(matcher) == [7]


def test_a_text_that_the_vocabulary_cannot_go_on_with_is_stuck_and_comes_back() -> None:
    """Its row allows nothing, though the grammar is not wrong; cut back, others go on."""
    matcher = matcher_of("a[xy]|b1")
    assert ids_of(matcher) == [1, 2, 4]
    matcher.push(1)
    assert ids_of(matcher) == []
    assert matcher.is_stuck
    matcher.truncate(0)
    matcher.push(2)
    assert ids_of(matcher) == [7]


def test_a_state_joins_a_list_of_ids_and_a_grammar() -> None:
    """Only what both allow; bans come on top; the prompt is no part of the text."""
    constraints = TokenConstraints(
        prompt_length=2,
        allowed_token_ids=(1, 7, 0),
        bad_words=((7,),),
        grammar=regex_grammar("regex", "(a|b)1?"),
        eos_token_ids=(EOS,),
    )
    matcher = grammar_of(constraints.grammar).matcher(constraints.eos_token_ids)
    state, chain = ConstraintState(constraints, matcher), TokenChain()
    chain.append((9, 9, 1))

    state.follow(chain, 2)
    edits = state.edits()
    assert edits is not None
    assert edits.allowed_token_ids is not None
    assert edits.allowed_token_ids.tolist() == [1]
    after = state.edits_after((1,))
    assert after is not None
    np.testing.assert_array_equal(after.allowed_token_ids, [EOS, 7])
    assert after.banned_token_ids.tolist() == [7]
    state.follow(chain, 3)
    behind = state.edits()
    assert behind is not None
    np.testing.assert_array_equal(behind.allowed_token_ids, [EOS, 7])
    state.truncate(0)
    state.follow(chain, 2)
    again = state.edits()
    assert again is not None
    np.testing.assert_array_equal(again.allowed_token_ids, [1])


def test_a_grammar_without_a_matcher_is_refused_not_ignored() -> None:
    """B098: nothing decodes as if there were none."""
    with pytest.raises(InvalidRequest, match="grammar"):
        ConstraintState(TokenConstraints(grammar='start: "a"'))


BYTES = TokenTable((*(bytes([i]) for i in range(256)), b"<eos>"), frozenset({256}))


def accepts(grammar: Grammar, text: str) -> bool:
    """Say whether a text is of the language, byte by byte."""
    matcher = grammar.matcher((256,))
    for byte in text.encode():
        allowed = matcher.allowed_token_ids()
        if allowed is None or byte not in allowed:
            return False
        matcher.push(byte)
    allowed = matcher.allowed_token_ids()
    return allowed is not None and 256 in allowed


@pytest.mark.parametrize(
    "pattern",
    ["a/b", r"a\/b", "/", r"\d{2}", "^a+$", "(?i)ab", "é|ü", "a\nb", "[/]", "", r"\\", "x y"],
)
def test_what_a_pattern_means_survives_its_quoting(pattern: str) -> None:
    """The same short texts as `re.fullmatch`, slashes and line breaks included."""
    grammar = grammar_of(regex_grammar("regex", pattern), BYTES)
    for length in range(4):
        for letters in itertools.product("ab/AB1é\\\n xy", repeat=length):
            text = "".join(letters)
            assert accepts(grammar, text) == (re.fullmatch(pattern, text) is not None), text


def test_choices_are_taken_literally() -> None:
    """Quotes, backslashes, control characters and letters beyond ASCII."""
    choices = ['say "x"', "back\\slash", "two\nlines", "é😀", "\x00\x1f", "", "a.b", "/"]
    grammar = grammar_of(choice_grammar("choice", choices), BYTES)
    for choice in choices:
        assert accepts(grammar, choice), choice
    for other in ("say x", "a+b", "axb", "two", "//"):
        assert not accepts(grammar, other), other


def test_schemas_hold_the_text_and_options_its_whitespace() -> None:
    """Types, required keys, null as a value; no whitespace, some, or any."""
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer"}, "z": {"const": None}},
        "required": ["n"],
        "additionalProperties": False,
        "x-guidance": {"lenient": True},
    }
    any_space = grammar_of(json_grammar("json", schema), BYTES)
    tight = grammar_of(json_grammar("json", schema, any_whitespace=False), BYTES)
    one = grammar_of(json_grammar("json", schema, whitespace_pattern=" ?"), BYTES)
    for text, wanted in (
        ('{"n":1}', (True, True, True)),
        ('{"n": -12, "z": null}', (True, False, True)),
        ('{"n":  1}', (True, False, False)),
        ('{"n":\n1}', (True, False, False)),
        ('{"n": 1.5}', (False, False, False)),
        ('{"z":null}', (False, False, False)),
        ('{"n":1,"m":2}', (False, False, False)),
        ('{"n":1}{', (False, False, False)),
    ):
        assert tuple(accepts(g, text) for g in (any_space, tight, one)) == wanted, text


def test_a_grammar_of_one_s_own() -> None:
    """Recursion, which no regular expression has."""
    grammar = grammar_of(lark_grammar("grammar", 'start: "(" start ")" | "x"'), BYTES)
    assert accepts(grammar, "((x))")
    assert not accepts(grammar, "((x)")


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("start: /(a/", "unclosed group"),
        ("start: x", "unknown name"),
        ('start: %json {"type": "odd"}', "Invalid type"),
        ('start: %json {"unevaluatedItems": false}', "unevaluatedItems"),
        ("start: /[xyz]/", "no token"),
    ],
)
def test_what_the_library_refuses_is_told_in_its_words(text: str, what: str) -> None:
    """One line, without our own listing of the grammar."""
    with pytest.raises(InvalidRequest, match=what) as caught:
        grammar_of(text)

    assert "\n" not in str(caught.value)
    assert "%llguidance" not in str(caught.value)


def test_a_vocabulary_that_the_library_cannot_read_is_the_request_s_trouble() -> None:
    """B097: it panics at a token of so many bytes; the engine must live on."""
    table = TokenTable((b"<eos>", b"a" * 70_000), frozenset({0}))

    with pytest.raises(InvalidRequest, match="vocabulary cannot be held"):
        grammar_of('start: "a"', table)


def test_grammars_are_kept_per_tenant_and_in_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """B235: the same text again is found; another tenant's is not; the oldest ones go."""
    monkeypatch.setattr(compiler, "MAX_COMPILED", 3)
    grammars = GrammarCompiler(lambda: TABLE)
    texts = [f'start: "{"a" * n}"' for n in range(1, 5)]
    first = grammars.compile(texts[0])
    assert grammars.compile(texts[0]) is first
    assert grammars.compile(texts[0], b"tenant") is not first
    for text in texts[1:3]:
        grammars.compile(text)
    assert len(grammars) == 3
    assert grammars.compile(texts[0]) is not first


def ask_at_once(grammars: GrammarCompiler, text: str) -> list[Future[Grammar]]:
    """Ask from four threads, which begin together."""
    together = threading.Barrier(4)

    def ask() -> Grammar:
        together.wait(10)
        return grammars.compile(text)

    with ThreadPoolExecutor(4) as pool:
        return [pool.submit(ask) for _ in range(4)]


def test_threads_that_ask_for_one_grammar_at_once_compile_it_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A client's burst of one new schema costs one compilation, and all get the same grammar."""
    texts: list[str] = []
    compile_it = GrammarCompiler._compile

    def noted(self: GrammarCompiler, text: str, tokenizer: Any) -> Grammar:
        texts.append(text)
        return compile_it(self, text, tokenizer)

    monkeypatch.setattr(GrammarCompiler, "_compile", noted)
    grammars = GrammarCompiler(lambda: TABLE)
    found = {id(asked.result()) for asked in ask_at_once(grammars, regex_grammar("", "(a|b)+"))}

    assert len(found) == len(texts) == len(grammars) == 1


def test_every_thread_that_asks_hears_what_is_wrong_with_a_grammar() -> None:
    """And whoever asks later does, too: nothing of it is kept."""
    grammars = GrammarCompiler(lambda: TABLE)
    asked = ask_at_once(grammars, "start: /(a/")
    for one in asked:
        with pytest.raises(InvalidRequest, match="unclosed group"):
            one.result()
    with pytest.raises(InvalidRequest, match="unclosed group"):
        grammars.compile("start: /(a/")
    assert len(grammars) == 0


def test_no_grammar_is_kept_on_disk_B236(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred grammars later no file is where caches would be, and none could be written."""
    for name in ("HOME", "TMPDIR", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.chdir(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        for number in range(100):
            assert ids_of(matcher_of(f"(a|b){{{number + 1}}}"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    assert list(tmp_path.iterdir()) == []
