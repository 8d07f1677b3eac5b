"""The GPU check's comparisons on a device: here they pass, and mistakes are found."""

from __future__ import annotations

import pytest
import torch

from specserve.model import logit_edits
from specserve.model.attention import PagedBatch
from specserve.model.paged_batch import SequenceGroup
from specserve.model.row_top import RowTops
from specserve.tools.gpu_check import sampler_check
from specserve.tools.gpu_check.attention_check import LARGEST_ERROR, compare_attention
from specserve.tools.gpu_check.sampler_check import compare_sampler
from specserve.tools.gpu_check.sampler_rows import ROW_KINDS

CPU = torch.device("cpu")
VOCAB_SIZE = 2048
"""Too large for the small path."""


@pytest.mark.parametrize("on_cpu", [True, False], ids=["as a CPU", "as an accelerator"])
def test_the_sampler_is_the_reference_s_on_this_device(
    monkeypatch: pytest.MonkeyPatch, on_cpu: bool
) -> None:
    """Every kind of row and edit, over a whole head and a cut one; no logit changes."""
    original = logit_edits._Page.__init__

    def as_wanted(page: logit_edits._Page, logits: torch.Tensor) -> None:
        original(page, logits)
        page._on_cpu = on_cpu

    monkeypatch.setattr(logit_edits._Page, "__init__", as_wanted)
    report = compare_sampler(VOCAB_SIZE, CPU)

    assert report.passed, report
    assert report.num_rows == len(ROW_KINDS) == 48


@pytest.mark.parametrize(
    ("owner", "name", "fault", "figure"),
    [
        (logit_edits, "banned", lambda values: values, "num_different_draws"),
        (logit_edits, "biased", lambda values, _: values, "num_different_scores"),
        (logit_edits._Page, "restore", lambda _: None, "num_changed_logits"),
        (
            sampler_check,
            "row_confidences",
            lambda logits: [0.5] * len(logits),
            "largest_confidence_error",
        ),
        (
            sampler_check,
            "RowTops",
            lambda logits, *rest: RowTops(-logits, *rest),
            "num_different_tops",
        ),
    ],
    ids=["bans", "biases", "restoring", "confidences", "heads"],
)
def test_a_wrong_sampler_is_found(
    monkeypatch: pytest.MonkeyPatch, owner: object, name: str, fault: object, figure: str
) -> None:
    """Each mistake shows in its own figure, though every other one may be right."""
    monkeypatch.setattr(owner, name, fault)
    report = compare_sampler(VOCAB_SIZE, CPU)

    assert not report.passed
    assert getattr(report, figure) > 0


@pytest.mark.slow
def test_the_attention_is_the_reference_s_on_this_device() -> None:
    """Every batch of it, in bfloat16, far within the tolerance."""
    report = compare_attention(CPU)

    assert report.passed, report
    assert report.num_batches == 72
    assert report.largest_error < LARGEST_ERROR / 2


@pytest.mark.slow
def test_attention_that_sees_a_wrong_key_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last one of all instead of its own, where there is a mask."""
    original = PagedBatch._mask

    def one_off(
        paged: PagedBatch, number: int, group: SequenceGroup, repeats: int, window: int | None
    ) -> torch.Tensor | None:
        mask = original(paged, number, group, repeats, window)
        return mask if mask is None else mask.roll(-1, dims=-1)

    monkeypatch.setattr(PagedBatch, "_mask", one_off)

    assert not compare_attention(CPU).passed
