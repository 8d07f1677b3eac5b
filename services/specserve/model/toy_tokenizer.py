"""The toy model's vocabulary: id 0 ends, each further id is one byte. Knows no model."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence

from specserve.errors import InvalidRequest
from specserve.model.token_table import TokenTable
from specserve.model.toy import ToySpec

_FIRST = (" " + string.ascii_lowercase + string.ascii_uppercase + string.digits).encode()
_PRINTABLE = bytes(b for b in string.printable.encode() if b not in _FIRST)
_ORDER = _FIRST + _PRINTABLE + bytes(b for b in range(256) if b not in _FIRST + _PRINTABLE)
"""Bytes by token id - 1: readable ones first, so that small vocabularies make text."""


class ToyTokenizer:
    """Bytes of `toy:vocab_size=...`; a byte beyond a small vocabulary shares another's id."""

    def __init__(self, spec: ToySpec) -> None:
        self._vocab_size = spec.vocab_size
        self._eos_token_ids = spec.eos_token_ids
        size = min(spec.vocab_size - 1, len(_ORDER))
        self._ids = {byte: 1 + position for position, byte in enumerate(_ORDER[:size])}
        self._modulus = size

    @property
    def vocab_size(self) -> int:
        """Tokens in the vocabulary."""
        return self._vocab_size

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a text."""
        return self._eos_token_ids

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Give the id of each UTF-8 byte; there are no special tokens to add."""
        return [self._ids.get(byte, 1 + byte % self._modulus) for byte in text.encode()]

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, object]], **options: object
    ) -> list[int]:
        """Encode `role: content` lines, and `assistant:` for the answer."""
        lines = []
        for message in messages:
            role, content = message.get("role"), message.get("content")
            if not isinstance(role, str) or not isinstance(content, str):
                raise InvalidRequest("messages", "each wants a role and a content of text")
            lines.append(f"{role}: {content}\n")
        if options.get("add_generation_prompt", True):
            lines.append("assistant:")
        return self.encode("".join(lines), add_special_tokens=True)

    def token_table(self) -> TokenTable:
        """Return what each id stands for; ids beyond all bytes read `<id>`."""
        singles = [bytes((byte,)) for byte in _ORDER[: self._modulus]]
        rest = [b"<%d>" % i for i in range(1 + len(singles), self._vocab_size)]
        return TokenTable((b"<eos>", *singles, *rest), frozenset(self._eos_token_ids))
