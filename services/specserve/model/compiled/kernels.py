"""Compile the inner loops for this processor, and lay weights out for them.

Knows the compiler and memory; knows no model.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from llvmlite import binding as llvm

from specserve.model.compiled.assembly import INT8_ZERO, MAX_ROWS, PANEL, matmul_text
from specserve.model.compiled.attention_assembly import MAX_HEADS, attention_text, max_mixed
from specserve.model.huge_pages import prefer_huge_pages

logger = logging.getLogger(__name__)

_FEATURES = ("avx512f", "avx512bw", "avx512vl", "avx512bf16")

INT8_STEPS = 63
"""Largest int8 weight, in steps of its output."""

_ALIGNMENT = 64
"""Bytes; a register is loaded whole."""


def processor_has_kernels() -> bool:
    """Whether this processor computes bfloat16 dot products in 512-bit registers."""
    try:
        features = dict(llvm.get_host_cpu_features())
    except RuntimeError:  # a processor that LLVM cannot ask
        return False
    return all(features.get(name, False) for name in _FEATURES)


@dataclass(frozen=True, slots=True)
class Kernels:
    """Addresses of compiled loops, by the number of rows, heads or vectors (index 0 is unused)."""

    matmul: npt.NDArray[np.int64]
    """[MAX_ROWS + 1]"""
    stream: npt.NDArray[np.int64]
    """The same for weights that are read once a forward."""
    matmul8: npt.NDArray[np.int64]
    """The same for int8 weights."""
    score: npt.NDArray[np.int64]
    """[MAX_ROWS + 1, MAX_HEADS + 1]"""
    mix: npt.NDArray[np.int64]
    """[max_mixed + 1]"""
    engine: Any
    """Owns the code: the addresses live as long as this."""


@cache
def compile_kernels(head_dim: int) -> Kernels:
    """Compile the loops for one head size (some 50 ms)."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    module = llvm.parse_assembly(matmul_text() + "\n" + attention_text(head_dim))
    module.verify()
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=3
    )
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()

    def addresses(name: str, count: int) -> npt.NDArray[np.int64]:
        found = [engine.get_function_address(f"{name}{i}") for i in range(1, count + 1)]
        return np.array([0, *found], np.int64)

    scores = [addresses(f"score_{rows}x", MAX_HEADS) for rows in range(1, MAX_ROWS + 1)]

    return Kernels(
        matmul=addresses("matmul_", MAX_ROWS),
        stream=addresses("stream_", MAX_ROWS),
        matmul8=addresses("matmul8_", MAX_ROWS),
        score=np.stack([np.zeros_like(scores[0]), *scores]),
        mix=addresses("mix_", max_mixed(head_dim)),
        engine=engine,
    )


def padded_outputs(num_outputs: int) -> int:
    """Round a weight's outputs up to whole panels."""
    return -(-num_outputs // PANEL) * PANEL


class PanelStore:
    """One stretch of memory, in huge pages where there are any, that holds packed weights."""

    def __init__(self, num_elements: int, *, is_int8: bool = False) -> None:
        """Reserve room for so many elements, panels counted whole.

        Args:
            is_int8: round weights to 63 steps each way, one scale an output; else bfloat16.
        """
        self._type = torch.uint8 if is_int8 else torch.bfloat16
        self._memory = torch.empty(num_elements + _ALIGNMENT, dtype=self._type)
        prefer_huge_pages(self._memory.data_ptr(), self._memory.nbytes)
        self._used = -self._memory.data_ptr() % _ALIGNMENT // self._type.itemsize
        self._scales: list[torch.Tensor] = []

    @property
    def element_bytes(self) -> int:
        """Bytes of a weight."""
        return self._type.itemsize

    @property
    def num_bytes(self) -> int:
        """Bytes of all packed weights."""
        return self._memory.nbytes

    def add(self, weight: torch.Tensor) -> tuple[int, int]:
        """Pack an [out, in] bfloat16 weight, missing outputs zero.

        Panels of [in / 2][4][16][2]: a register holds 16 outputs of two neighbouring inputs.

        Returns:
            The address of the panels, and that of the scales (0 where there are none).
        """
        outputs, inputs = weight.shape
        missing = padded_outputs(outputs) - outputs
        whole = torch.nn.functional.pad(weight.detach(), (0, 0, 0, missing))
        scales_address = 0
        is_int8 = self._type == torch.uint8
        if is_int8:
            scales = whole.abs().amax(1).float() / INT8_STEPS  # [out]; 0 keeps an output 0
            steps = whole.float() / scales.clamp_min(1e-30)[:, None]
            whole = (steps.round() + INT8_ZERO).to(torch.uint8)
            self._scales.append(scales)
            scales_address = scales.data_ptr()
        panels = whole.reshape(-1, PANEL // 16, 16, inputs // 2, 2)
        size = whole.numel()
        begin, self._used = self._used, self._used + size
        place = self._memory[begin : self._used]
        panels = panels.permute(0, 3, 1, 2, 4)  # [panels, in / 2, 4, 16, 2]
        if is_int8:
            # Eight bytes of one register, then eight of the next, as the loops take them apart.
            panels = panels.reshape(-1, inputs // 2, PANEL // 32, 2, 4, 8).transpose(-3, -2)
        place.view(panels.shape).copy_(panels)
        return self._memory.data_ptr() + begin * self.element_bytes, scales_address
