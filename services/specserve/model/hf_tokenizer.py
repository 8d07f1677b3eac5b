"""The tokenizer of a model directory: a tokenizer.json, its chat template and its EOS ids.

Bytes come from the vocabulary itself, not from a decoder: decoding pieces of a sequence loses
spaces and breaks characters. Knows files and vocabularies; knows no weights.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from specserve.config import EngineConfig
from specserve.errors import ConfigurationError, InvalidRequest, ModelUnavailable
from specserve.model.model_files import resolve_model_dir
from specserve.model.token_table import TokenTable

logger = logging.getLogger(__name__)

_NO_LIMIT = 1 << 40
"""Prompt length is judged elsewhere; the tokenizer need not warn."""

_GENERIC_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Classes that do what tokenizer.json says and nothing more, by their old name and the new."""


def load_hf_tokenizer(config: EngineConfig) -> HuggingFaceTokenizer:
    """Load the tokenizer of a model directory or hub id.

    Raises:
        ModelUnavailable: its files are missing or damaged.
        ConfigurationError: its vocabulary cannot be told in bytes, or its EOS ids are wrong.
    """
    model_dir = resolve_model_dir(config.model, config.revision, config.trust_remote_code)
    try:
        loaded = load_backend(model_dir, config.trust_remote_code)
    except (OSError, ValueError, KeyError, ImportError) as error:
        text = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelUnavailable(f"{model_dir}: no tokenizer could be loaded: {text}") from error
    if not isinstance(loaded, PreTrainedTokenizerFast):
        raise ConfigurationError(f"{model_dir}: a tokenizer with a tokenizer.json is wanted")
    return HuggingFaceTokenizer(loaded, eos_token_ids(model_dir, loaded))


def load_backend(model_dir: Path, trust_remote_code: bool) -> object:
    """Load the library's own tokenizer: the one that AutoTokenizer would, without torch if it can.

    Raises:
        OSError, ValueError, KeyError, ImportError: as the library puts it.
    """
    if _is_generic(model_dir):
        return PreTrainedTokenizerFast.from_pretrained(model_dir)
    # What class it is hangs on the model's configuration, and with that comes torch.
    from transformers import AutoTokenizer  # noqa: PLC0415

    return AutoTokenizer.from_pretrained(model_dir, trust_remote_code=trust_remote_code)


def _is_generic(model_dir: Path) -> bool:
    """Say whether AutoTokenizer would take the generic class for this directory.

    For Llama models alone: some other families have a class of their own whatever is named.
    """
    try:
        model = json.loads((model_dir / "config.json").read_text())
        named = json.loads((model_dir / "tokenizer_config.json").read_text())
        return (
            model["model_type"] == "llama"
            and named["tokenizer_class"] in _GENERIC_CLASSES
            and "auto_map" not in named
            and (model_dir / "tokenizer.json").is_file()
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False  # AutoTokenizer knows what to say of it


class HuggingFaceTokenizer:
    """A tokenizer with a tokenizer.json."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, eos_token_ids: Sequence[int]) -> None:
        tokenizer.model_max_length = _NO_LIMIT
        self._tokenizer = tokenizer
        self._table = _token_table(tokenizer)
        self._eos_token_ids = tuple(sorted(set(eos_token_ids)))
        for token_id in self._eos_token_ids:
            if not 0 <= token_id < self._table.vocab_size:
                raise ConfigurationError(
                    f"EOS id {token_id} lies outside the vocabulary of {self._table.vocab_size}"
                )

    @property
    def vocab_size(self) -> int:
        """Tokens of the vocabulary: the largest id plus one."""
        return self._table.vocab_size

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a text, ascending."""
        return self._eos_token_ids

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Turn text into ids."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return ids

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, object]], **options: object
    ) -> list[int]:
        """Turn a conversation into the ids of a prompt; options go to the template."""
        if self._tokenizer.chat_template is None:
            raise InvalidRequest("messages", "this model has no chat template; use completions")
        settings: dict[str, Any] = {"add_generation_prompt": True, **options}
        try:
            conversation = [{**message} for message in messages]
            text = self._tokenizer.apply_chat_template(
                conversation,  # type: ignore[arg-type] # content may be a list of parts too
                tokenize=False,
                **settings,
            )
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise InvalidRequest("messages", f"the chat template refuses them: {error}") from error
        # The template writes every special token itself.
        return self.encode(str(text), add_special_tokens=False)

    def token_table(self) -> TokenTable:
        """Return the bytes of every id."""
        return self._table


def eos_token_ids(model_dir: Path, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Collect the ids that end a text from generation_config.json and the tokenizer.

    Raises:
        ModelUnavailable: generation_config.json cannot be read.
    """
    found: list[int] = []
    path = model_dir / "generation_config.json"
    if path.is_file():
        try:
            named = json.loads(path.read_text()).get("eos_token_id")
        except ValueError as error:
            raise ModelUnavailable(f"{path} is damaged: {error}") from error
        found += named if isinstance(named, list) else [] if named is None else [named]
    if tokenizer.eos_token_id is not None:
        found.append(tokenizer.eos_token_id)
    if not found:
        logger.warning("%s names no EOS id: texts end at max_tokens only", model_dir)
    return found


def _token_table(tokenizer: PreTrainedTokenizerFast) -> TokenTable:
    """Read the bytes of each id from the vocabulary.

    Raises:
        ConfigurationError: the vocabulary is neither byte-level nor SentencePiece-like.
    """
    layout = json.loads(tokenizer.backend_tokenizer.to_str())
    decoders = set(_kinds(layout.get("decoder")))
    if "ByteLevel" in decoders:
        to_bytes = _byte_level
    elif decoders & {"Metaspace", "ByteFallback"}:
        to_bytes = _sentencepiece
    else:
        raise ConfigurationError(
            f"tokens cannot be told in bytes: decoder {sorted(decoders) or None} is neither "
            "byte-level nor SentencePiece-like"
        )
    added = {token["id"]: token for token in layout.get("added_tokens", ())}
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    pieces = [b""] * (1 + max(max(vocabulary.values(), default=-1), max(added, default=-1)))
    for piece, token_id in vocabulary.items():
        pieces[token_id] = to_bytes(piece)
    for token_id, token in added.items():
        pieces[token_id] = token["content"].encode()
    special = {token_id for token_id, token in added.items() if token["special"]}
    return TokenTable(tuple(pieces), frozenset(special | set(tokenizer.all_special_ids)))


def _kinds(part: Any) -> Iterator[str]:
    """List the type names in a tokenizer.json component, sequences opened."""
    if isinstance(part, Mapping):
        yield part["type"]
        for name in ("decoders", "pretokenizers"):
            for inner in part.get(name, ()):
                yield from _kinds(inner)


def _byte_characters() -> dict[str, int]:
    """Invert GPT-2's map of bytes to printable characters."""
    kept = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1)]
    kept += range(ord("®"), ord("ÿ") + 1)
    rest = [byte for byte in range(256) if byte not in kept]
    return {chr(b): b for b in kept} | {chr(256 + i): b for i, b in enumerate(rest)}


_BYTE_OF = _byte_characters()


def _byte_level(piece: str) -> bytes:
    if all(character in _BYTE_OF for character in piece):
        return bytes(_BYTE_OF[character] for character in piece)
    return piece.encode()


def _sentencepiece(piece: str) -> bytes:
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return bytes((int(piece[3:5], 16),))
    return piece.replace("▁", " ").encode()
