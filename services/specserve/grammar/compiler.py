"""Grammars over a vocabulary: compiled once, kept for the requests that bring the same one.

llguidance (MIT) reads them, without forced tokens: what may follow is every token whose bytes some
text of the language goes on with, however the text before was cut into tokens. Knows bytes of ids;
knows no tokenizer and no session.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from specserve.errors import InvalidRequest
from specserve.grammar.matcher import GrammarMatcher

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_COMPILED = 64
"""Grammars kept, of all tenants together."""

_MAX_LEXER_STATES = 50_000
"""Some 2 kB each, in one matcher."""

_EXPLICIT = '\n%llguidance {"no_forcing": true}\n'
"""A forced token would depend on how the tokenizer cuts a text, which is no part of the grammar."""

_END = b"<end>"
"""Stands for every EOS id: a grammar allows it where it accepts."""

_MESSAGE_CHARACTERS = 400


class Vocabulary(Protocol):
    """What every id stands for; a token table is one."""

    @property
    def token_bytes(self) -> tuple[bytes, ...]:
        """[V]; b"" for an id without text."""
        ...

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Ids that are control marks rather than text."""
        ...


class Grammar:
    """A compiled grammar; immutable."""

    def __init__(self, start: LLMatcher, vocab_size: int) -> None:
        self._start = start
        self._vocab_size = vocab_size

    def matcher(self, eos_token_ids: Sequence[int]) -> GrammarMatcher:
        """Return a matcher that has taken nothing in; EOS is allowed where the grammar accepts."""
        return GrammarMatcher(self._start, self._vocab_size, eos_token_ids)


class GrammarCompiler:
    """The grammars of one vocabulary. Threads may share it."""

    def __init__(self, vocabulary: Callable[[], Vocabulary]) -> None:
        """Load nothing: the first grammar asks for the vocabulary and the library."""
        self._vocabulary = vocabulary
        self._tokenizer: LLTokenizer | None = None
        self._vocab_size = 0
        self._lock = threading.Lock()
        """Of what is compiled; never held for long."""
        self._loading = threading.Lock()
        self._compiled: OrderedDict[tuple[bytes, str], Grammar] = OrderedDict()
        self._compiling: dict[tuple[bytes, str], Future[Grammar]] = {}

    def __len__(self) -> int:
        return len(self._compiled)

    def has(self, text: str, tenant_salt: bytes = b"") -> bool:
        """Return whether `compile` need only look it up."""
        with self._lock:
            return (tenant_salt, text) in self._compiled

    def compile(self, text: str, tenant_salt: bytes = b"") -> Grammar:
        """Compile a Lark grammar, or find it compiled, or being compiled, by the same tenant.

        Time and memory are bounded by the library's own limits.

        Raises:
            InvalidRequest: it is no grammar, too complex, no token can begin a text of it, or the
                library cannot read the vocabulary.
        """
        key = (tenant_salt, text)
        with self._lock:
            grammar = self._compiled.get(key)
            if grammar is not None:
                self._compiled.move_to_end(key)
                return grammar
            future = self._compiling.get(key)
            is_first = future is None
            if future is None:
                future = self._compiling[key] = Future[Grammar]()
        if is_first:
            self._fulfil(future, key)
        return future.result()

    def _fulfil(self, future: Future[Grammar], key: tuple[bytes, str]) -> None:
        """Compile for all threads that ask meanwhile: each gets the grammar, or the error."""
        try:
            with self._loading:
                tokenizer = self._tokenizer = self._tokenizer or self._load()
            grammar = self._compile(key[1], tokenizer)
            with self._lock:
                self._compiled[key] = grammar
                if len(self._compiled) > MAX_COMPILED:
                    self._compiled.popitem(last=False)
        except BaseException as error:  # noqa: BLE001 - whatever it is, those who wait must hear it
            future.set_exception(error)
        else:
            future.set_result(grammar)
        finally:
            with self._lock:
                del self._compiling[key]

    def _compile(self, text: str, tokenizer: LLTokenizer) -> Grammar:
        from llguidance import LLMatcher, LLParserLimits  # noqa: PLC0415 - few requests need it

        limits = LLParserLimits(max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False)
        with _panics_as_refusals("the grammar cannot be read"):
            start = LLMatcher(tokenizer, text + _EXPLICIT, log_level=0, limits=limits)
        if start.is_error():
            raise InvalidRequest("grammar", explained(start.get_error()))
        grammar = Grammar(start, self._vocab_size)
        if grammar.matcher(()).is_stuck:
            raise InvalidRequest("grammar", "no token of the vocabulary can begin a text of it")
        return grammar

    def _load(self) -> LLTokenizer:
        from llguidance import LLTokenizer, TokenizerWrapper  # noqa: PLC0415 - as above

        table = self._vocabulary()
        self._vocab_size = len(table.token_bytes)
        with _panics_as_refusals("this model's vocabulary cannot be held to one"):
            return LLTokenizer(TokenizerWrapper(_Bytes(table)), eos_token=[self._vocab_size])


@contextmanager
def _panics_as_refusals(what: str) -> Iterator[None]:
    """Refuse a request for what the library does to it: its trouble, and not the engine's end."""
    try:
        yield
    except BaseException as error:
        # A panic of the library is no Exception.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise InvalidRequest("grammar", f"{what}: {error}") from error


class _Bytes:
    """The vocabulary as the library asks for it."""

    bos_token_id = None

    def __init__(self, table: Vocabulary) -> None:
        self.tokens = [*table.token_bytes, _END]
        self.eos_token_id = len(table.token_bytes)
        self.special_token_ids = [*sorted(table.special_token_ids), self.eos_token_id]

    def __call__(self, text: str | bytes) -> list[int]:
        """Refuse to tokenise: without forced tokens nobody asks."""
        raise RuntimeError("forced tokens are off: nothing is to be tokenised")


def explained(message: str) -> str:
    """Make one line of what the library says, without its listing of our grammar."""
    lines: list[str] = []
    for line in message.splitlines():
        if line.lstrip()[:1].isdigit() and " | " in line:
            break
        lines.append(line)
    return " ".join(" ".join(lines).split())[:_MESSAGE_CHARACTERS]
