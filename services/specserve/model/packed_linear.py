"""Linear layers in the CPU's own weight layout (oneDNN), alone or joined.

A plain bfloat16 product of few rows reads its weights at a quarter of the memory's speed; a packed
one comes near it. Packed for 8 rows and called with `LEAST_ROWS` or more, a row's result has the
same bits however many rows run with it (measured on AVX-512 processors, both number types;
elsewhere it may differ by roundings): what greedy speculation needs to equal plain decoding. Knows
tensors and modules; knows no model.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

_PACKED_FOR_ROWS = 8
"""Packing for one row picks kernels that add up in another order for one row than for several."""

LEAST_ROWS = 4
"""Fewest rows of a product, the rest zeros: a single row adds up in another order, and one to three
rows take longer than four."""


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this processor and build of torch have the packed kernels for a number type."""
    return torch.backends.mkldnn.is_available() and (
        dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


def pad_rows(rows: torch.Tensor) -> torch.Tensor:
    """Append rows of zeros to [R, n] until there are `LEAST_ROWS`."""
    missing = LEAST_ROWS - rows.shape[0]
    return nn.functional.pad(rows, (0, 0, 0, missing)) if missing > 0 else rows


def pack_weight(weight: torch.Tensor) -> torch.Tensor:
    """Copy an [out, in] weight into the packed layout (an opaque tensor)."""
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(
        weight.detach().contiguous(), _PACKED_FOR_ROWS
    )
    return packed


def packed_product(
    rows: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, activation: str = "none"
) -> torch.Tensor:
    """Return activation(rows @ weight.T + bias).

    Args:
        rows: [..., in].
        activation: "none" or "swish".
    """
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
        rows, packed, bias, activation, [], ""
    )
    return result


def packed_product_with(
    rows: torch.Tensor,
    other: torch.Tensor,
    packed: torch.Tensor,
    bias: torch.Tensor | None,
    operation: str,
) -> torch.Tensor:
    """Return (rows @ weight.T + bias) combined with other, [..., out], by "add" or "mul"."""
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise.binary(
        rows, other, packed, bias, operation
    )
    return result


def _any_product(
    rows: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Return the product of any number of rows, [..., in] to [..., out]."""
    flat = rows.reshape(-1, rows.shape[-1])
    result = packed_product(pad_rows(flat), packed, bias)[: flat.shape[0]]
    return result.view(*rows.shape[:-1], -1)


class PackedLinear(nn.Module):
    """Stands in for an nn.Linear; forward only."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.packed = pack_weight(linear.weight)
        self.bias = linear.bias

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """[..., in] to [..., out]."""
        return _any_product(rows, self.packed, self.bias)


class JoinedLinear:
    """Several linear layers of one input, computed as one product.

    Holds the last input and result only until its last part was asked for.
    """

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        self.packed = pack_weight(torch.cat([linear.weight.detach() for linear in linears]))
        biases = [tensor.detach() for linear in linears if (tensor := _bias(linear)) is not None]
        self.bias = torch.cat(biases) if biases else None
        self._sizes = [linear.out_features for linear in linears]
        self._input: torch.Tensor | None = None
        self._parts: tuple[torch.Tensor, ...] = ()

    def part(self, index: int, rows: torch.Tensor) -> torch.Tensor:
        """Return part `index` of the product with rows, [..., in]."""
        if self._input is not rows:
            self._input = rows
            self._parts = torch.split(
                _any_product(rows, self.packed, self.bias), self._sizes, dim=-1
            )
        part = self._parts[index]
        if index == len(self._sizes) - 1:
            self._input, self._parts = None, ()
        return part


class JoinedPart(nn.Module):
    """One of the layers a `JoinedLinear` computes; stands in for an nn.Linear."""

    def __init__(self, joined: JoinedLinear, index: int, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self._joined = joined
        self._index = index

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """[..., in] to [..., out]."""
        return self._joined.part(self._index, rows)


_SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def pack_linears(model: nn.Module) -> None:
    """Replace every nn.Linear of a model by a packed one, q/k/v and gate/up joined.

    The joined ones are those whose parent owns all siblings under the usual names, equal in input
    size and bias; a parent that gives them different inputs still gets right answers, only later.
    """
    for module in list(model.modules()):
        for names in _SIBLINGS:
            linears = [getattr(module, name, None) for name in names]
            if _can_join(linears):
                found = [linear for linear in linears if isinstance(linear, nn.Linear)]
                joined = JoinedLinear(found)
                for index, (name, linear) in enumerate(zip(names, found, strict=True)):
                    setattr(module, name, JoinedPart(joined, index, linear))
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                setattr(module, name, PackedLinear(child))


def _can_join(linears: Sequence[object]) -> bool:
    """Whether all are plain linear layers that agree on their input and on having a bias."""
    if not all(type(linear) is nn.Linear for linear in linears):
        return False
    found = [linear for linear in linears if isinstance(linear, nn.Linear)]
    return (
        len({linear.in_features for linear in found}) == 1
        and len({_bias(linear) is None for linear in found}) == 1
    )


def _bias(linear: nn.Linear) -> torch.Tensor | None:
    """Return the bias; torch declares it a tensor where it may be None."""
    return linear.bias
