"""Exact bytes of every token id, and what two vocabularies must agree on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import specserve
from specserve.config import EngineConfig
from specserve.errors import ConfigurationError, InvalidRequest, ModelUnavailable
from specserve.grammar.compiler import GrammarCompiler
from specserve.grammar.lark import regex_grammar
from specserve.model.hf_tokenizer import load_backend
from specserve.model.token_table import TokenTable
from specserve.model.tokenizer import Tokenizer as AnyTokenizer
from specserve.model.tokenizer import load_tokenizer
from support.tiny_models import byte_tokenizer

TEXT = "héllo  wörld\n\t ¡ 日本 🙂"
SOURCES = str(Path(specserve.__file__).parents[1])


def load(folder: Path, **generation: object) -> AnyTokenizer:
    if generation:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return load_tokenizer(EngineConfig(model=str(folder)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    byte_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def test_byte_level_ids_concatenate_to_the_very_bytes(folder):
    """Spaces, broken characters and added tokens included; specials are their names."""
    tokenizer = load(folder)
    table = tokenizer.token_table()
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    assert table.decode(ids) == TEXT.encode()
    assert len(ids) == len(TEXT.encode())
    assert tokenizer.vocab_size == table.vocab_size == 260
    assert table.special_token_ids == {0, 1, 258}
    assert table.token_bytes[258:] == (b"<|user|>", "  é".encode())
    assert table.decode([1, *ids[:1]]) == b"h"
    assert table.decode([1, *ids[:1]], skip_special=False) == b"</s>h"
    assert {len(t) for t in table.token_bytes[2:258]} == {1}
    assert len(set(table.token_bytes)) == 260


def test_a_grammar_over_byte_level_ids_sees_their_bytes(folder):
    """Spaces and letters beyond ASCII are several ids; a mark is no text, its name is."""
    tokenizer = load(folder)
    table = tokenizer.token_table()
    grammar = GrammarCompiler(lambda: table).compile(regex_grammar("regex", "  é.|<s>é?"))
    ids = {text: i for i, text in enumerate(table.token_bytes)}

    def allowed(*texts: bytes) -> set[int]:
        matcher = grammar.matcher(tokenizer.eos_token_ids)
        for text in texts:
            matcher.push(ids[text])
        return set(matcher.allowed_token_ids().tolist())

    added = "  é".encode()
    assert allowed() == {ids[b" "], ids[added], ids[b"<"]}
    assert allowed(b" ", b" ") == {ids[b"\xc3"]}
    assert allowed(b"<", b"s", b">") == {ids[b"\xc3"], *tokenizer.eos_token_ids}
    assert allowed(b"<", b"s", b">", b"\xc3") == {ids[b"\xa9"]}
    # Behind the added token: any letter, from its first byte on; no line break, no second half.
    letters = allowed(added)
    assert {ids[b"x"], ids[b"\xc3"], ids[b"\xe2"], ids[b"\xf0"]} <= letters
    assert not letters & {ids[b"\n"], ids[b"\xa9"], ids[b"\xff"], ids[added], 0, 1, 258}
    assert allowed(added, b"x") == set(tokenizer.eos_token_ids)


def test_sentencepiece_pieces_become_bytes(tmp_path):
    """The space mark becomes a space, <0xNN> its byte."""
    vocabulary = {"<unk>": 0, "<0x0A>": 1, "<0xE6>": 2, "▁a": 3, "▁▁": 4, "é": 5}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>").save_pretrained(tmp_path)
    table = load(tmp_path).token_table()
    assert table.token_bytes == (b"<unk>", b"\n", b"\xe6", b" a", b"  ", "é".encode())
    assert 0 in table.special_token_ids


def test_a_vocabulary_without_bytes_is_refused(tmp_path):
    inner = Tokenizer(models.WordPiece(vocab={"[UNK]": 0, "##a": 1}, unk_token="[UNK]"))
    inner.decoder = decoders.WordPiece()
    PreTrainedTokenizerFast(tokenizer_object=inner).save_pretrained(tmp_path)
    with pytest.raises(ConfigurationError, match="WordPiece"):
        load(tmp_path)


def test_eos_ids_come_from_generation_config_and_tokenizer(folder):
    assert load(folder).eos_token_ids == (1,)
    assert load(folder, eos_token_id=[258, 1]).eos_token_ids == (1, 258)
    assert load(folder, eos_token_id=0).eos_token_ids == (0, 1)
    with pytest.raises(ConfigurationError, match="EOS id 260"):
        load(folder, eos_token_id=260)
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(ModelUnavailable, match=r"generation_config\.json is damaged"):
        load(folder)


def test_a_missing_tokenizer_is_named(tmp_path):
    with pytest.raises(ModelUnavailable, match="tokenizer"):
        load(tmp_path)


def test_chat_template_gives_ids_and_refuses_in_words(folder):
    tokenizer = load(folder)
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
    assert tokenizer.token_table().decode(ids, skip_special=False) == b"<|user|>hi</s><s>"
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=False
    )
    assert ids[-1] == 1
    plain = byte_tokenizer()
    plain.chat_template = None
    plain.save_pretrained(folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    with pytest.raises(InvalidRequest, match="no chat template"):
        load(folder).apply_chat_template([{"role": "user", "content": "hi"}])


def test_a_template_that_raises_is_the_clients_error(folder):
    (folder / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        load(folder).apply_chat_template([{"role": "user", "content": "hi"}])


def test_tables_travel_as_bytes(folder):
    table = load(folder).token_table()
    data = table.to_bytes()
    again = TokenTable.from_bytes(data)
    assert again == table
    assert again.fingerprint == table.fingerprint
    for damaged in (b"", data[:-1], data[:1000], data + b"\0", b"\xff" * 8):
        with pytest.raises(InvalidRequest, match="token_table"):
            TokenTable.from_bytes(damaged)


def test_the_first_differing_id_is_named():
    """Bytes, special marks and missing ids count; empty rows at the end do not."""
    table = TokenTable((b"<s>", b"a", b"", b"b"), frozenset({0}))
    padded = TokenTable((*table.token_bytes, b"", b""), frozenset({0}))
    assert table.first_difference(padded) is None
    assert padded.first_difference(table) is None
    assert table.fingerprint == padded.fingerprint
    for other, token_id, ours, theirs in (
        (TokenTable((b"<s>", b"c", b"", b"b"), frozenset({0})), 1, "b'a'", "b'c'"),
        (TokenTable((b"<s>", b"a", b"", b"b"), frozenset()), 0, "b'<s>' (special)", "b'<s>'"),
        (TokenTable((b"<s>", b"a", b"", b"b", b"x"), frozenset({0})), 4, "nothing", "b'x'"),
        (TokenTable((b"<s>", b"a"), frozenset({0})), 3, "b'b'", "nothing"),
    ):
        assert table.first_difference(other) == (token_id, ours, theirs)
        assert table.fingerprint != other.fingerprint


@pytest.mark.parametrize("size", [2, 32, 96, 257, 300])
def test_the_toy_speaks_bytes(size):
    tokenizer = load_tokenizer(EngineConfig(model=f"toy:vocab_size={size}"))
    table = tokenizer.token_table()
    assert tokenizer.vocab_size == table.vocab_size == size
    assert tokenizer.eos_token_ids == (0,)
    ids = tokenizer.encode(TEXT, add_special_tokens=True)
    assert all(0 < i < size for i in ids)
    if size >= 257:
        assert table.decode(ids) == TEXT.encode()
    assert len(set(table.token_bytes)) == size
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
    assert all(0 < i < size for i in chat)
    with pytest.raises(InvalidRequest, match="content"):
        tokenizer.apply_chat_template([{"role": "user"}])


def name_model(folder: Path, model_type: str, tokenizer_class: str | None) -> None:
    """Say in a folder's own files what model it is and what class its tokenizer has."""
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    settings["tokenizer_class"] = tokenizer_class
    path.write_text(json.dumps({key: value for key, value in settings.items() if value}))


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "phi3", "mistral"])
@pytest.mark.parametrize(
    "tokenizer_class",
    ["PreTrainedTokenizerFast", "TokenizersBackend", "LlamaTokenizerFast", "GPT2Tokenizer", None],
)
def test_the_backend_is_the_one_that_transformers_chooses(folder, model_type, tokenizer_class):
    """The short way for generic classes takes the same class, settings and ids as the long one."""
    name_model(folder, model_type, tokenizer_class)

    ours = load_backend(folder, False)
    theirs = AutoTokenizer.from_pretrained(folder)

    assert type(ours) is type(theirs)
    assert isinstance(ours, PreTrainedTokenizerFast)
    assert ours.backend_tokenizer.to_str() == theirs.backend_tokenizer.to_str()
    assert ours.encode(TEXT) == theirs.encode(TEXT)
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert ours.chat_template == theirs.chat_template


@pytest.mark.slow
def test_servers_and_generic_tokenizers_start_without_torch(folder):
    """Torch takes seconds and hundreds of megabytes: it is the device process's alone."""
    name_model(folder, "llama", "PreTrainedTokenizerFast")
    script = (
        "import sys\n"
        "from specserve.draft import server\n"
        "from specserve.gateway import server\n"
        "from specserve.orchestrator import server\n"
        "from specserve.target import server\n"
        "from specserve.config import EngineConfig\n"
        "from specserve.model.tokenizer import load_tokenizer\n"
        "load_tokenizer(EngineConfig(model='toy:vocab_size=96')).token_table()\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
        "tokenizer = load_tokenizer(EngineConfig(model=sys.argv[1]))\n"
        "assert tokenizer.apply_chat_template([{'role': 'user', 'content': 'hi'}])\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(folder)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": SOURCES},
    )

    assert done.returncode == 0, done.stderr
