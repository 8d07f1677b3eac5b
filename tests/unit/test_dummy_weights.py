"""Random weights by `load_format dummy`: always the same, shared by name and shape, never read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specserve.config import EngineConfig
from specserve.errors import ModelUnavailable
from specserve.model.hf_runner import HuggingFaceRunner
from specserve.model.loading import load_runner
from specserve.model.runner import Runner, SequenceSlice
from specserve.tools.gpu_check.shapes import TINY_SMALL, write_model

IDS = (3, 9, 4, 4, 12, 7)


def load(folder: Path, dtype: str = "float32", load_format: str = "dummy") -> Runner:
    return load_runner(
        EngineConfig.model_validate(
            {
                "model": str(folder),
                "load_format": load_format,
                "dtype": dtype,
                "device": "cpu",
                "num_threads": 1,
                "num_kv_blocks": 8,
            }
        )
    )


def logits_of(runner: Runner) -> torch.Tensor:
    return runner.forward([SequenceSlice(IDS, 0, (0,), len(IDS))]).clone()


def test_a_folder_without_weights_gives_the_same_model_each_time(tmp_path: Path) -> None:
    """Two loads agree to the last bit, and say so by their fingerprint; the rows differ."""
    folder = write_model(TINY_SMALL, tmp_path)
    first, second = load(folder), load(folder)

    assert isinstance(first, HuggingFaceRunner)
    assert torch.equal(logits_of(first), logits_of(second))
    assert first.info.weights_fingerprint == second.info.weights_fingerprint
    assert logits_of(first).std() > 0.1
    assert len(logits_of(first).argmax(dim=1).unique()) > 1


def test_weights_in_common_are_shared(tmp_path: Path) -> None:
    """A model cut short is its first layers: logits are close to the whole one's, not equal."""
    whole = logits_of(load(write_model(TINY_SMALL, tmp_path)))
    cut = logits_of(load(write_model(TINY_SMALL.cut(2), tmp_path)))
    alike = torch.nn.functional.cosine_similarity(whole, cut).mean()

    assert not torch.equal(whole, cut)
    assert alike > 0.5


def test_bfloat16_is_the_number_type_throughout(tmp_path: Path) -> None:
    """No weight stays in another type: the memory is half that of float32."""
    folder = write_model(TINY_SMALL, tmp_path)
    halved = load(folder, "bfloat16").info

    assert halved.dtype == "bfloat16"
    assert halved.weights_bytes == pytest.approx(load(folder).info.weights_bytes / 2, rel=0.01)


def test_without_the_flag_weights_are_wanted(tmp_path: Path) -> None:
    """Nobody gets a random model unasked."""
    with pytest.raises(ModelUnavailable, match="no weights"):
        load(write_model(TINY_SMALL, tmp_path), load_format="auto")
