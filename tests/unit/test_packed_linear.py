"""Packed and joined linear layers against nn.Linear."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import nn

from specserve.model.huge_pages import collapse_to_huge_pages, prefer_huge_pages
from specserve.model.packed_linear import (
    JoinedPart,
    PackedLinear,
    can_pack,
    pack_linears,
    pack_weight,
    packed_product,
    packed_product_with,
    pad_rows,
)

DTYPES = [torch.float32, torch.bfloat16]
ROWS = (1, 2, 3, 5, 8, 17, 33)

needs_packing = pytest.mark.skipif(
    not can_pack(torch.bfloat16), reason="this processor has no packed bfloat16 kernels"
)
pytestmark = needs_packing


def close(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two results differ by roundings of their number type only."""
    bound = 1e-5 if left.dtype == torch.float32 else 2e-2
    return float((left.float() - right.float()).norm()) <= bound * float(right.float().norm())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@torch.inference_mode()
def test_a_packed_layer_equals_its_original(dtype, bias):
    torch.manual_seed(1)
    linear = nn.Linear(48, 40, bias=bias, dtype=dtype)
    packed = PackedLinear(linear)
    for rows in ROWS:
        given = torch.randn(1, rows, 48, dtype=dtype)
        assert packed(given).shape == (1, rows, 40)
        assert close(packed(given), linear(given))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [(960, 576), (576, 1536), (4096, 576), (40, 48)], ids=str)
@torch.inference_mode()
def test_a_row_does_not_depend_on_the_number_of_rows(dtype, size):
    """What makes a verified block equal plain decoding: no kernel choice by row count shows.

    To the last bit where that was measured; elsewhere up to roundings.
    """
    torch.manual_seed(2)
    packed = pack_weight(torch.randn(size, dtype=dtype))
    given = torch.randn(64, size[1], dtype=dtype)
    wanted = packed_product(given, packed, None)
    for rows in ROWS:
        result = packed_product(pad_rows(given[:rows]), packed, None)[:rows]
        assert close(result, wanted[:rows])
        if torch.backends.cpu.get_cpu_capability() == "AVX512":
            assert torch.equal(result, wanted[:rows])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@torch.inference_mode()
def test_activation_and_second_operand_ride_along(dtype):
    torch.manual_seed(3)
    linear = nn.Linear(48, 40, dtype=dtype)
    packed = pack_weight(linear.weight)
    given, other = torch.randn(5, 48, dtype=dtype), torch.randn(5, 40, dtype=dtype)
    swished = packed_product(given, packed, linear.bias, "swish")
    assert close(swished, nn.functional.silu(linear(given)))
    assert close(
        packed_product_with(given, other, packed, linear.bias, "add"), linear(given) + other
    )
    assert close(
        packed_product_with(given, other, packed, linear.bias, "mul"), linear(given) * other
    )


class Block(nn.Module):
    """Layers under the names that models give them."""

    def __init__(self, dtype: torch.dtype, key_bias: bool = True) -> None:
        super().__init__()
        self.q_proj = nn.Linear(48, 32, dtype=dtype)
        self.k_proj = nn.Linear(48, 16, bias=key_bias, dtype=dtype)
        self.v_proj = nn.Linear(48, 16, dtype=dtype)
        self.gate_proj = nn.Linear(48, 24, bias=False, dtype=dtype)
        self.up_proj = nn.Linear(48, 24, bias=False, dtype=dtype)
        self.other = nn.Linear(48, 8, dtype=dtype)


NAMES = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "other")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@torch.inference_mode()
def test_joined_siblings_answer_as_before(dtype):
    """The same input to all, other inputs, any order, one left out: always the right answer."""
    torch.manual_seed(4)
    plain, packed = nn.Sequential(Block(dtype)), nn.Sequential(Block(dtype))
    packed.load_state_dict(plain.state_dict())
    pack_linears(packed)
    assert isinstance(packed[0].q_proj, JoinedPart)
    assert isinstance(packed[0].other, PackedLinear)
    one, two = torch.randn(2, 5, 48, dtype=dtype)
    for given, names in product((one, two), (NAMES, NAMES[::-1], ("q_proj", "q_proj", "up_proj"))):
        for name in names:
            assert close(getattr(packed[0], name)(given), getattr(plain[0], name)(given))
    mixed = [packed[0].q_proj(one), packed[0].k_proj(two), packed[0].v_proj(one)]
    wanted = [plain[0].q_proj(one), plain[0].k_proj(two), plain[0].v_proj(one)]
    assert all(close(a, b) for a, b in zip(mixed, wanted, strict=True))


def test_siblings_that_differ_in_bias_are_packed_alone():
    model = nn.Sequential(Block(torch.float32, key_bias=False))
    pack_linears(model)
    assert isinstance(model[0].q_proj, PackedLinear)
    assert isinstance(model[0].gate_proj, JoinedPart)


@pytest.mark.slow
def test_huge_pages_leave_memory_as_it_was():
    """Whatever the kernel grants, contents and addresses stay; tiny ranges are left alone."""
    kept = torch.arange(1_000_000)
    prefer_huge_pages(kept.data_ptr(), kept.nbytes)
    prefer_huge_pages(kept.data_ptr(), 8)
    assert collapse_to_huge_pages() >= 0
    assert torch.equal(kept, torch.arange(1_000_000))
