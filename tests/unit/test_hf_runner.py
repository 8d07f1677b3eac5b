"""The Hugging Face runner against plain transformers, on tiny random models."""

from __future__ import annotations

import json
import logging
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, MambaConfig, T5Config

from specserve.config import EngineConfig
from specserve.errors import ConfigurationError, ModelUnavailable
from specserve.model import loading
from specserve.model.hf_model import longest_context
from specserve.model.hf_runner import HuggingFaceRunner
from specserve.model.loading import load_runner, resolve_device, resolve_dtype
from specserve.model.model_files import model_fingerprint
from specserve.model.runner import SequenceSlice
from support.tiny_models import VOCAB_SIZE, byte_tokenizer, plain_logits, save_tiny, tiny_config

KINDS = ["llama", "qwen2", "mistral", "gpt2", "qwen3"]
CPU = torch.device("cpu")
Save = Callable[..., Path]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Save:
    """Save each kind of model once."""
    folders: dict[str, Path] = {}

    def save(kind: str, **changes: object) -> Path:
        name = f"{kind}{sorted(changes.items())}"
        if name not in folders:
            folders[name] = save_tiny(tmp_path_factory.mktemp(kind), kind, **changes)
        return folders[name]

    return save


def load(
    folder: Path,
    dtype: torch.dtype = torch.float32,
    vocab_size: int = VOCAB_SIZE,
    **settings: object,
) -> HuggingFaceRunner:
    config = EngineConfig(
        **{"model": str(folder), "block_size": 4, "num_kv_blocks": 64, **settings}
    )
    return HuggingFaceRunner.load(config, folder, vocab_size, dtype, CPU)


def tokens(seed: int, count: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(VOCAB_SIZE) for _ in range(count)]


def whole(runner: HuggingFaceRunner, ids: Sequence[int], table: Sequence[int]) -> torch.Tensor:
    return runner.forward([SequenceSlice(ids, 0, table, len(ids))])


def error(left: torch.Tensor, right: torch.Tensor) -> float:
    assert left.shape == right.shape
    return float((left - right).abs().max()) if left.numel() else 0.0


@pytest.mark.parametrize("pack_weights", [True, False], ids=["packed", "plain"])
@pytest.mark.parametrize("kind", KINDS)
def test_ragged_batches_equal_each_sequence_alone_in_transformers(saved, kind, pack_weights):
    """Random pieces of random sequences over shuffled blocks: logits to 1e-5 in float32 (B116)."""
    folder = saved(kind)
    sequences = [tokens(i, n) for i, n in enumerate((3, 45, 21, 30, 9))]
    wanted = plain_logits(folder, sequences)
    runner = load(folder, pack_weights=pack_weights)
    source = random.Random(1)
    free = list(range(runner.info.num_blocks))
    source.shuffle(free)
    tables = [[free.pop() for _ in range(12)] for _ in sequences]
    done = [0] * len(sequences)
    while any(d < len(s) for d, s in zip(done, sequences, strict=True)):
        batch, rows = [], []
        for i, ids in enumerate(sequences):
            count = min(source.choice([0, 1, 1, 5, 3, 20]), len(ids) - done[i])
            if count:
                scored = source.randrange(count + 1)
                end = done[i] + count
                batch.append(SequenceSlice(ids[done[i] : end], done[i], tables[i], scored))
                rows.append(wanted[i][end - scored : end])
                done[i] = end
        if batch:
            assert error(runner.forward(batch), torch.cat(rows)) < 1e-5


def test_B116_a_neighbour_of_any_length_changes_nothing(saved):
    """Prompt A alone, beside 3 tokens and beside 60: the same logits."""
    runner = load(saved("llama"))
    prompt, table = tokens(1, 9), (40, 3, 17)
    alone = whole(runner, prompt, table)
    for count in (3, 60):
        other = SequenceSlice(tokens(2, count), 0, tuple(range(20, 39)), 1)
        part = SequenceSlice(prompt, 0, table, len(prompt))
        assert error(runner.forward([other, part])[1:], alone) < 1e-5
        assert error(runner.forward([part, other])[:-1], alone) < 1e-5


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_decode_batch_keeps_the_callers_order(saved, kind):
    """One token each, every row scored, lengths in no order: row i belongs to sequence i."""
    folder = saved(kind)
    sequences = [tokens(i, n) for i, n in enumerate((9, 31, 4, 50, 17, 9))]
    runner = load(folder, num_kv_blocks=128)
    tables = [tuple(range(13 * i, 13 * i + 13)) for i in range(len(sequences))]
    runner.forward([SequenceSlice(s[:-1], 0, t, 0) for s, t in zip(sequences, tables, strict=True)])
    logits = runner.forward(
        [SequenceSlice(s[-1:], len(s) - 1, t, 1) for s, t in zip(sequences, tables, strict=True)]
    )
    wanted = torch.stack([whole[-1] for whole in plain_logits(folder, sequences)])
    assert error(logits, wanted) < 1e-5


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_does_not_depend_on_how_many_rows_run_with_it(saved, kind, dtype):
    """Decoding one token equals verifying a block at the same positions (greedy on = off)."""
    runner = load(saved(kind), dtype)
    ids, table = tokens(4, 24), tuple(range(6))
    whole(runner, ids[:10], table)
    single = torch.cat(
        [runner.forward([SequenceSlice([ids[t]], t, table, 1)]) for t in range(10, 24)]
    )
    for size in (2, 5, 7, 14):
        blocks = [
            runner.forward([SequenceSlice(ids[t : t + size], t, table, size)])
            for t in range(10, 24, size)
            if t + size <= 24
        ]
        scored = torch.cat(blocks)
        difference = error(scored, single[: len(scored)])
        assert difference < (1e-5 if dtype == torch.float32 else 0.1)
        if dtype == torch.float32 and torch.backends.cpu.get_cpu_capability() == "AVX512":
            assert difference == 0.0


def test_rollback_is_a_length(saved):
    """Rejected tokens are overwritten: the state equals a fresh prefill, at every cut."""
    runner = load(saved("llama"))
    ids = tokens(5, 20)
    fresh = whole(runner, ids, (9, 8, 7, 6, 5))
    table = (1, 4, 2, 0, 3)
    for cut in range(1, 19):
        whole(runner, ids[:cut], table)
        runner.forward([SequenceSlice(tokens(6, 20 - cut), cut, table, 1)])  # all rejected
        rest = runner.forward([SequenceSlice(ids[cut:], cut, table, 20 - cut)])
        assert error(rest, fresh[cut:]) < 1e-5


def test_a_chunk_without_logits_and_a_copied_block(saved):
    """num_logit_rows 0 gives no rows; a copied block serves like the original."""
    runner = load(saved("llama"))
    ids = tokens(7, 11)
    fresh = whole(runner, ids, (0, 1, 2))
    assert runner.forward([SequenceSlice(ids[:10], 0, (5, 6, 7), 0)]).shape == (0, VOCAB_SIZE)
    runner.copy_block(7, 20)
    runner.forward([SequenceSlice([3], 10, (5, 6, 7), 1)])
    forked = runner.forward([SequenceSlice(ids[10:], 10, (5, 6, 20), 1)])
    assert error(forked, fresh[10:]) < 1e-5


def test_B089_padded_embedding_rows_never_become_columns(saved):
    """A matrix of 80 rows for 64 tokens: 64 columns, equal to transformers' first 64."""
    folder = saved("llama", vocab_size=80)
    ids = tokens(8, 7)
    runner = load(folder)
    assert runner.info.vocab_size == VOCAB_SIZE
    logits = whole(runner, ids, (0, 1))
    assert logits.shape == (7, VOCAB_SIZE)
    assert error(logits, plain_logits(folder, [ids])[0][:, :VOCAB_SIZE]) < 1e-5
    assert runner.logit_token_ids is None


def test_a_vocabulary_larger_than_the_matrix_is_refused(saved):
    with pytest.raises(ConfigurationError, match="65 tokens, the model 64 rows"):
        load(saved("llama"), vocab_size=65)


@pytest.mark.parametrize("pack_weights", [True, False], ids=["packed", "plain"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_draft_head_keeps_its_frequent_tokens(saved, tmp_path, tied, pack_weights):
    """draft_vocab.json cuts the columns, ascending by id; the embedding keeps all tokens."""
    folder = saved("llama", tie_word_embeddings=tied)
    ids = tokens(9, 6)
    wanted = plain_logits(folder, [ids])[0]
    for path in folder.iterdir():
        (tmp_path / path.name).symlink_to(path)
    frequent = [40, 2, 63, 17, 5]
    (tmp_path / "draft_vocab.json").write_text(json.dumps({"token_ids": frequent}))
    runner = load(tmp_path, pack_weights=pack_weights)
    assert runner.logit_token_ids is not None
    assert runner.logit_token_ids.tolist() == sorted(frequent)
    assert error(whole(runner, ids, (0, 1)), wanted[:, sorted(frequent)]) < 1e-5
    three = load(tmp_path, draft_vocab_size=3)
    assert three.logit_token_ids is not None
    assert three.logit_token_ids.tolist() == [2, 40, 63]
    with pytest.raises(ConfigurationError, match="lists 5 ids"):
        load(tmp_path, draft_vocab_size=6)
    assert load(tmp_path, draft_vocab_size=VOCAB_SIZE).logit_token_ids is None


@pytest.mark.parametrize("text", ["[1, 2]", '{"token_ids": [1, 64]}', '{"token_ids": [1, 1]}', "{"])
def test_a_damaged_draft_vocabulary_is_named(saved, tmp_path, text):
    for path in saved("llama").iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "draft_vocab.json").write_text(text)
    with pytest.raises(ModelUnavailable, match="draft_vocab"):
        load(tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_stays_near_float32(saved, kind):
    """Packed bfloat16 logits: within 5 % of their norm from float32's."""
    folder = saved(kind)
    ids = tokens(10, 30)
    runner = load(folder, torch.bfloat16)
    assert runner.info.dtype == "bfloat16"
    wanted = plain_logits(folder, [ids])[0]
    logits = whole(runner, ids, tuple(range(8)))
    assert logits.dtype == torch.float32
    assert float((logits - wanted).norm() / wanted.norm()) < 0.05


def test_what_a_broken_session_leaves_behind_reaches_nobody(saved, tmp_path, caplog):
    """NaN in one session's blocks: its own rows are NaN, the next owner of the blocks is clean."""
    folder = saved("llama")
    for path in folder.iterdir():
        (tmp_path / path.name).symlink_to(path)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][13] = float("nan")
    (tmp_path / "model.safetensors").unlink()
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    runner = load(tmp_path, pack_weights=False)
    good = [i for i in tokens(11, 9) if i != 13]
    wanted = plain_logits(folder, [good])[0]
    neighbour = SequenceSlice(good, 0, (0, 1, 2), len(good))
    logits = runner.forward([SequenceSlice([13] * 12, 0, (5, 6, 7), 12), neighbour])
    assert torch.isnan(logits[:12]).all()
    assert error(logits[12:], wanted) < 1e-5
    reused = SequenceSlice(good, 0, (7, 5, 6), len(good))
    with caplog.at_level(logging.WARNING):
        logits = runner.forward([SequenceSlice(good, 0, (0, 1, 2), 1), reused])
    assert error(logits[1:], wanted) < 1e-5
    assert "non-finite" in caplog.text


def test_the_pool_and_the_context_fit_each_other(saved, caplog):
    """Flags, model limit and memory: the smallest wins, and contradictions are refused."""
    folder = saved("llama")
    info = load(folder, num_kv_blocks=8).info
    assert (info.num_blocks, info.block_size, info.max_model_len) == (8, 4, 32)
    assert info.kv_cache_bytes == 8 * 4 * 2 * (2 * 2 * 8) * 4
    assert load(folder, num_kv_blocks=64).info.max_model_len == 128
    assert load(folder, max_model_len=50).info.max_model_len == 50
    sized = load(folder, num_kv_blocks=None, max_model_len=50, max_num_seqs=3).info
    assert sized.num_blocks == 39
    with pytest.raises(ConfigurationError, match="KV pool holds 32"):
        load(folder, num_kv_blocks=8, max_model_len=33)
    with pytest.raises(ConfigurationError, match="context is 128"):
        load(folder, max_model_len=129)


def test_the_fingerprint_follows_the_weights(saved):
    first, other = load(saved("llama")).info, load(saved("qwen2")).info
    assert len(first.weights_fingerprint) == 64
    assert first.weights_fingerprint == load(saved("llama")).info.weights_fingerprint
    assert first.weights_fingerprint != other.weights_fingerprint
    assert first.weights_bytes > 0


def test_the_fingerprint_follows_what_else_decides_tokens(saved, tmp_path):
    """Another configuration is another model, and so is other code; who wrote it is nothing."""
    folder = tmp_path / "model"
    shutil.copytree(saved("llama"), folder)
    settings = json.loads((folder / "config.json").read_text())

    def found(trust: bool = False, **changes: object) -> str:
        (folder / "config.json").write_text(json.dumps(settings | changes))
        return model_fingerprint(folder, is_dummy=False, trust_remote_code=trust)

    plain = found()
    assert found(transformers_version="9.9.9", _name_or_path="elsewhere") == plain
    assert found(rms_norm_eps=0.5) != plain
    assert found(rope_parameters={"rope_type": "linear", "factor": 2.0}) != plain
    (folder / "modeling_own.py").write_text("A = 1")
    assert found() == plain
    trusted = found(trust=True)
    (folder / "modeling_own.py").write_text("A = 2")
    assert len({plain, trusted, found(trust=True)}) == 3
    (folder / "config.json").write_text("[]")
    with pytest.raises(ModelUnavailable, match="config.json is damaged"):
        model_fingerprint(folder, is_dummy=False, trust_remote_code=False)


@pytest.mark.parametrize(
    ("kind", "settings", "named"),
    [
        ("doge", {"sliding_window": None}, "masks in a way of its own"),
        ("dory", {}, "attends more than once"),
        ("phimoe", {"sliding_window": 6, "num_local_experts": 2}, "the window of 6"),
    ],
)
def test_models_that_attend_in_ways_of_their_own_are_refused(tmp_path, kind, settings, named):
    """Else other tokens than the model's would come, on either side of every comparison."""
    wanted = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
    }
    config = AutoConfig.for_model(kind, **wanted, **settings)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigurationError, match=named):
        load(tmp_path, pack_weights=False)


def test_B122_models_whose_state_cannot_be_cut_are_refused(saved, tmp_path):
    """Recurrent, encoder-decoder and chunked-attention models are refused at load, in words."""
    folder = saved("llama")
    for name, config in (
        ("rolled back", MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1)),
        ("encoder-decoder", T5Config(vocab_size=64, d_model=16, num_layers=1)),
        (
            "linear_attention",
            tiny_config("qwen2", layer_types=["linear_attention", "full_attention"]),
        ),
    ):
        target = tmp_path / name
        target.mkdir()
        (target / "model.safetensors").symlink_to(folder / "model.safetensors")
        config.save_pretrained(target)
        with pytest.raises(ConfigurationError, match=name):
            load(target)


def test_only_safetensors_are_read(tmp_path):
    with pytest.raises(ModelUnavailable, match="no weights"):
        load(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelUnavailable, match=r"only pickled weights \(pytorch_model.bin\)"):
        load(tmp_path)
    with pytest.raises(ModelUnavailable, match="not a directory"):
        load(tmp_path / "missing")


def test_remote_code_is_refused_unless_trusted_B248(saved, tmp_path):
    """B248: nothing of it has run when it is refused."""
    folder = saved("llama")
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    settings = json.loads((folder / "config.json").read_text())
    settings["model_type"] = "unheard_of"
    settings["auto_map"] = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    (tmp_path / "code.py").write_text(f"open({str(tmp_path / 'canary')!r}, 'w').close()")
    with pytest.raises(ConfigurationError, match="its own Python code"):
        load(tmp_path)
    assert not (tmp_path / "canary").exists()


def test_damaged_weights_are_named(saved, tmp_path):
    for path in saved("llama").iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0notjson!")
    with pytest.raises(ModelUnavailable, match="header"):
        load(tmp_path)


def test_contexts_that_bend_with_the_batch_are_held_to_the_trained_length(caplog):
    config = tiny_config(
        "llama",
        rope_parameters={
            "rope_type": "dynamic",
            "rope_theta": 1e4,
            "factor": 2.0,
            "original_max_position_embeddings": 64,
        },
    )
    assert longest_context(config) == 64
    assert "64 of 128" in caplog.text
    assert longest_context(tiny_config("gpt2")) == 128


def test_load_runner_puts_it_together(saved, tmp_path):
    """A directory with a tokenizer of 260 ids over 272 rows; auto device and number type."""
    folder = saved("llama", vocab_size=272)
    tokenizer = byte_tokenizer()
    for path in folder.iterdir():
        (tmp_path / path.name).symlink_to(path)
    tokenizer.save_pretrained(tmp_path)
    config = EngineConfig(model=str(tmp_path), dtype="float32", device="cpu", num_kv_blocks=8)
    runner = load_runner(config)
    assert runner.info.vocab_size == 260
    assert runner.forward([SequenceSlice([1, 2], 0, (0,), 1)]).shape == (1, 260)
    toy = load_runner(EngineConfig(model="toy:vocab_size=8"))
    assert toy.info.vocab_size == 8
    with pytest.raises(ModelUnavailable, match="neither a directory nor a hub id"):
        load_runner(EngineConfig(model="nowhere"))
    with pytest.raises(ModelUnavailable, match="models pull --link-dir /no/such` lays"):
        load_runner(EngineConfig(model="/no/such/target"))


@pytest.mark.parametrize(("device", "may_plan"), [("cpu", True), ("cuda", False)])
def test_a_gpu_is_kept_from_attention_that_plans_for_each_shape(monkeypatch, device, may_plan):
    """cuDNN's is off before anything is loaded on a GPU, and left as it was for a CPU."""
    monkeypatch.setattr(loading, "resolve_device", torch.device)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    try:
        with pytest.raises(ModelUnavailable):
            load_runner(EngineConfig(model="nowhere", device=device))
        assert torch.backends.cuda.cudnn_sdp_enabled() is may_plan
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def test_devices_and_number_types():
    assert resolve_device("cpu") == CPU
    for wrong in ("tpu", "mps", "cuda:99"):
        with pytest.raises(ConfigurationError, match="device"):
            resolve_device(wrong)
    assert resolve_dtype("float32", CPU) == torch.float32
    assert resolve_dtype("bfloat16", CPU) == torch.bfloat16
    assert resolve_dtype("auto", CPU) in (torch.float32, torch.bfloat16)
