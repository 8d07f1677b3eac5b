"""The GPU check's step times: told one by one, and never eager ones under the name of graphs."""

from __future__ import annotations

import json

import pytest
import torch

from specserve.model.cuda_graphs import EAGER_FROM_NOW_ON
from specserve.speculation.scoring import TargetRow, TargetRowScore
from specserve.tools.gpu_check import step_process
from specserve.tools.gpu_check.services import require_graphs
from specserve.tools.gpu_check.stages import CheckFailed, Figures
from specserve.tools.gpu_check.steps import take
from specserve.tools.local import LocalPair, PairSpec

JOB = {
    "models": {"target": "toy:vocab_size=8", "draft": "toy:vocab_size=8"},
    "device": "cpu",
    "dtype": "float32",
    "rows": [1, 5],
    "batches": [1, 2],
    "context_length": 0,
    "num_repeats": 1,
    "num_kv_blocks": 64,
    "copy_bytes": 1 << 12,
    "vocab_size": 8,
    "embedding_bytes": {"target": 0, "draft": 0},
    "enforce_eager": True,
}


def test_a_cell_is_told_as_soon_as_it_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that ends in the target's third cell has told its first two, and all of the draft's."""
    score_rows = step_process.score_rows

    def fail_in_third(logits: torch.Tensor, rows: list[TargetRow]) -> list[TargetRowScore]:
        if len(rows) == 2:
            raise RuntimeError("the device is gone")
        return score_rows(logits, rows)

    monkeypatch.setattr(step_process, "score_rows", fail_in_third)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    with pytest.raises(RuntimeError, match="the device is gone"):
        step_process.main(json.dumps(JOB))
    figures: Figures = {}
    for line in capsys.readouterr().out.splitlines():
        take(figures, line.encode())

    steps = figures["steps"]
    assert isinstance(steps, list)
    assert [(cell["model"], cell["batch"], cell["rows"]) for cell in steps] == [
        ("draft", 1, 1),
        ("draft", 2, 1),
        ("target", 1, 1),
        ("target", 1, 5),
    ]


def counts_line(num_graphs: int, *, is_broken: bool) -> bytes:
    values = {"model": "draft", "num_graphs": num_graphs, "is_broken": is_broken}
    return json.dumps({"kind": "graphs", **values}).encode()


def test_graphs_are_counted_by_model() -> None:
    """The last count of each is kept, and a library's own words are none."""
    figures: Figures = {}
    for count in (1, 2):
        take(figures, counts_line(count, is_broken=False))
    take(figures, b"no JSON\n")

    assert figures == {"graphs": {"draft": 2}}


@pytest.mark.parametrize("is_broken", [False, True])
def test_steps_that_are_no_graphs_end_their_stage(is_broken: bool) -> None:
    """Be it that a capture failed, or that nothing was captured."""
    with pytest.raises(CheckFailed, match=r"draft: .*CUDA graph"):
        take({}, counts_line(0, is_broken=is_broken))


class Service:
    """A service that has logged something."""

    def __init__(self, role: str, log: str) -> None:
        self.role = role
        self._log = log

    def log_tail(self) -> str:
        return self._log


@pytest.mark.parametrize("broken", ["target", "draft", None])
def test_a_pair_that_has_given_up_its_graphs_is_refused(broken: str | None) -> None:
    """By the line that its device logs; the reason is in it."""
    pair = LocalPair(PairSpec("target", "draft"))
    for role, services in (("target", pair.targets), ("draft", pair.drafts)):
        line = f"no CUDA graph of some (a reason): {EAGER_FROM_NOW_ON}"
        services.append(Service(role, f"Traceback\n{line}\nmore" if role == broken else "loaded"))

    if broken is None:
        require_graphs(pair)
    else:
        with pytest.raises(CheckFailed, match=rf"^{broken}: no CUDA graph of some \(a reason\)"):
            require_graphs(pair)
