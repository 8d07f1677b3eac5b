"""Text to token ids, and token ids to exact bytes: what every tokenizer here does.

A service with a toy model loads no tokenizer library. Knows the two kinds; knows no file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from specserve.config import EngineConfig
from specserve.model.token_table import TokenTable
from specserve.model.toy import PREFIX, ToySpec
from specserve.model.toy_tokenizer import ToyTokenizer


class Tokenizer(Protocol):
    """Text in, ids out, and what every id stands for."""

    @property
    def vocab_size(self) -> int:
        """Tokens of the vocabulary: the largest id plus one."""
        ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a text, ascending."""
        ...

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Turn text into ids."""
        ...

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, object]], **options: object
    ) -> list[int]:
        """Turn a conversation into the ids of a prompt; options go to the template.

        Raises:
            InvalidRequest: the template refuses the messages, or the model has no template.
        """
        ...

    def token_table(self) -> TokenTable:
        """Return the bytes of every id."""
        ...


def load_tokenizer(config: EngineConfig) -> Tokenizer:
    """Load the tokenizer of the model that a configuration names, or the toy's.

    Raises:
        ModelUnavailable: its files are missing or damaged.
        ConfigurationError: its vocabulary cannot be told in bytes, or its EOS ids are wrong.
    """
    if config.model.startswith(PREFIX):
        return ToyTokenizer(ToySpec.parse(config.model))
    # Its library takes a second to import, which a toy's processes need not spend.
    from specserve.model.hf_tokenizer import load_hf_tokenizer  # noqa: PLC0415

    return load_hf_tokenizer(config)
