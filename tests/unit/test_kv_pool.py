"""How much of a GPU a KV pool takes: its process's own share, whatever others hold."""

from __future__ import annotations

import pytest
import torch

from specserve.config import EngineConfig
from specserve.errors import ConfigurationError
from specserve.model.kv_pool import LayerShape, kv_room_bytes, size_pool

GIB = 1 << 30
TOTAL = 80 * GIB
CONTEXTS = GIB
"""What the driver keeps of a GPU for its processes."""
TARGET_WEIGHTS, TARGET_SHARE = 16 * GIB, 0.675
DRAFT_WEIGHTS, DRAFT_SHARE = 2 * GIB, 0.225
ACTIVATIONS = GIB


def room(free: int, reserved: int, share: float) -> int:
    return kv_room_bytes(free=free, total=TOTAL, reserved=reserved, utilization=share)


def test_a_draft_finds_its_share_beside_a_target_that_took_its_own() -> None:
    """Target first, draft second: each takes share x total, its weights and activations in it."""
    free = TOTAL - CONTEXTS - TARGET_WEIGHTS
    target = room(free, TARGET_WEIGHTS, TARGET_SHARE)
    draft = room(free - target - DRAFT_WEIGHTS, DRAFT_WEIGHTS, DRAFT_SHARE)

    assert target + TARGET_WEIGHTS + ACTIVATIONS == int(TARGET_SHARE * TOTAL)
    assert draft + DRAFT_WEIGHTS + ACTIVATIONS == int(DRAFT_SHARE * TOTAL)


def test_one_that_restarts_takes_what_it_had() -> None:
    """A target that comes second, beside the draft of the one before, gets no more and no less."""
    free = TOTAL - CONTEXTS - TARGET_WEIGHTS
    first = room(free, TARGET_WEIGHTS, TARGET_SHARE)

    assert room(free - int(DRAFT_SHARE * TOTAL), TARGET_WEIGHTS, TARGET_SHARE) == first


def test_what_is_not_free_is_not_taken() -> None:
    """A predecessor that has not ended yet leaves less than the share, and activations stay."""
    assert room(5 * GIB, TARGET_WEIGHTS, TARGET_SHARE) == 5 * GIB - ACTIVATIONS


@pytest.mark.parametrize(
    ("free", "reserved"), [(60 * GIB, 54 * GIB), (GIB // 2, 16 * GIB), (60 * GIB, 70 * GIB)]
)
def test_too_little_is_nothing(free: int, reserved: int) -> None:
    """Never a negative room: weights that fill the share, or a GPU that is full."""
    assert room(free, reserved, TARGET_SHARE) == 0


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A GPU of 80 GiB, a target on it, and 2 GiB of this process's own."""
    free = TOTAL - CONTEXTS - int(TARGET_SHARE * TOTAL) - DRAFT_WEIGHTS
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, TOTAL))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: DRAFT_WEIGHTS)
    return monkeypatch


LAYERS = [LayerShape(8, 64, 64)] * 16
BLOCK_BYTES = 16 * 16 * 8 * 128 * 2


def size(share: float) -> int:
    config = EngineConfig(model="draft", gpu_memory_utilization=share)
    return size_pool(config, LAYERS, 4096, torch.bfloat16, torch.device("cuda")).num_blocks


@pytest.mark.usefixtures("gpu")
def test_a_pool_is_sized_by_what_this_process_holds_and_by_what_is_free() -> None:
    """Blocks of the draft's share, not of what is left of the whole GPU."""
    wanted = int(DRAFT_SHARE * TOTAL) - DRAFT_WEIGHTS - ACTIVATIONS

    assert size(DRAFT_SHARE) == wanted // BLOCK_BYTES


@pytest.mark.usefixtures("gpu")
def test_a_share_that_the_weights_fill_is_refused() -> None:
    """In words, before anything is allocated."""
    with pytest.raises(ConfigurationError, match="no memory for KV: 0 blocks"):
        size(0.03)
