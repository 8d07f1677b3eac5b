"""`specserve bench` and `specserve load` on toy pairs: real processes, and figures that add up.

Speeds are not judged here: what is checked is that the record says what happened.
"""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from helpers.processes import CommandLine, left_running
from helpers.waiting import eventually
from specserve import cli
from specserve.tools.bench.agreement import read_record
from specserve.tools.local import PairSpec, run_pair

pytestmark = pytest.mark.slow

TARGET = "toy:vocab_size=96,seed=7,step_ms=4"
"""Slow enough for a draft on a busy machine to have read the prompt before the request is over."""
DRAFT = "toy:vocab_size=96,seed=7,noise=0.7,noise_seed=1"
SAME = "toy:vocab_size=96,seed=7"
MAX_TOKENS = 16
NUM_PROMPTS = 4

PAIR = ("--target", TARGET, "--dtype=float32", f"--max-tokens={MAX_TOKENS}", "--num-prompts=4")
ON = ("--speculative-config", json.dumps({"model": DRAFT, "num_speculative_tokens": 3}))
BUSY = ("--threshold=max_others_cpu_share=none", "--threshold=max_half_difference=100")
"""Other tests may run beside these."""


def bench(tmp_path: Path, *words: str) -> tuple[int, dict[str, Any], str]:
    """Run a suite; return the exit code, the record and the page."""
    paths = tmp_path / "bench.json", tmp_path / "bench.html"
    code = cli.main(["bench", *words, f"--json={paths[0]}", f"--report={paths[1]}"])
    return code, read_record(paths[0]), paths[1].read_text()


def side(level: dict[str, Any], name: str) -> dict[str, Any]:
    """Return one side's summary."""
    (found,) = (arm["summary"] for arm in level["arms"] if arm["name"] == name)
    return found


def test_serving_measures_both_sides_of_the_same_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both sides decode as many tokens of the same prompts; only one drafts; the counts add up."""
    code, record, page = bench(
        tmp_path, *PAIR, *ON, *BUSY, "--concurrency", "1", "2", "--arrival-rate", "50", "--pairs=4"
    )

    (section,) = record["sections"]
    out = capsys.readouterr().out
    assert code in (0, 3)
    assert section["decision"]["verdict"] == {0: "enable", 3: "keep target-only"}[code]
    assert out.index("declared before the run: min_speedup 1.05") < out.index("Rates;")
    assert record["complete"]
    assert [len(level["arms"]) for level in section["levels"]] == [2, 2, 2]
    for level, per_wave in zip(section["levels"], (1, 2, 4), strict=True):
        on, off = side(level, "speculative"), side(level, "target-only")
        for each in (on, off):
            assert each["num_requests"] == 4 * per_wave
            assert each["num_failed"] == 0
            assert each["num_output_tokens"] == 4 * per_wave * MAX_TOKENS
            assert sum(each["tokens_by_origin"].values()) == each["num_output_tokens"]
            assert each["e2e_s"]["p50"] <= each["e2e_s"]["p95"] <= each["e2e_s"]["p99"]
            assert each["ttft_s"]["p50"] < each["e2e_s"]["p50"]
            assert each["num_cached_prompt_tokens"] > 0, "every prompt was sent once before"
        assert off["acceptance"]["num_drafts"] == 0
        assert off["tokens_by_origin"]["plain"] == off["num_output_tokens"]
        positions = on["acceptance"]["by_position"]
        assert len(positions) == 3
        assert sum(p["num_verified"] for p in positions) == on["acceptance"]["num_draft_tokens"]
        assert sum(p["num_accepted"] for p in positions) == on["tokens_by_origin"]["accepted"]
        assert on["num_prompt_tokens"] == off["num_prompt_tokens"]
        assert level["padding_credit"] >= 1
        assert {stage["name"] for stage in on["stages"]} >= {"draft_s", "verify_s"}
        # Waiting for the target is part of the request, on the side without drafts too.
        assert sum(stage["share_of_e2e"] for stage in off["stages"]) < 1.05
    (deployment,) = section["conditions"]["deployments"]
    assert [model["role"] for model in deployment["models"]] == ["target", "draft"]
    assert all(len(model["weights_fingerprint"]) == 64 for model in deployment["models"])
    assert deployment["resident_bytes"] > 0
    assert page.count("<svg") >= 12
    assert "Decision matrix" in page


def test_a_repeat_of_the_same_counts_agrees(tmp_path: Path) -> None:
    """Acceptance is a count: a second run gives the same, and `--compare` says so.

    A draft that is the target has every token accepted; prompt lookup needs no draft service, and
    guesses little of a toy's text. Tokens are the same whatever the method.
    """
    methods = (
        "--methods",
        json.dumps({"method": "draft_model", "model": SAME, "num_speculative_tokens": 3}),
        "ngram",
    )
    words = ("--suite", "acceptance", *PAIR, *ON, *methods)

    code, record, _ = bench(tmp_path, *words)
    first = tmp_path / "bench.json"
    kept = first.rename(tmp_path / "first.json")
    again = cli.main(["bench", *words, f"--compare={kept}"])

    (section,) = record["sections"]
    perfect, lookup = (result["summary"] for result in section["methods"])
    assert (code, again) == (0, 0)
    assert len(section["conditions"]["deployments"]) == 2
    assert perfect["acceptance"]["acceptance_rate"] == 1.0
    assert 3 < perfect["acceptance"]["mean_acceptance_length"] <= 4
    assert 1 <= lookup["acceptance"]["mean_acceptance_length"] < 3
    for each in (perfect, lookup):
        assert each["num_output_tokens"] == NUM_PROMPTS * MAX_TOKENS
        assert each["num_failed"] == 0
        assert each["acceptance"]["num_late_proposals"] == 0


def test_auto_is_compared_with_the_better_fixed_side(tmp_path: Path) -> None:
    """One deployment takes turns with itself; what it learns is not from the other sides."""
    code, record, page = bench(
        tmp_path,
        "--suite=auto",
        *PAIR,
        *ON,
        "--concurrency=2",
        "--pairs=3",
        "--threshold=min_dynamic_ratio=0.01",
    )

    (section,) = record["sections"]
    (level,), (result,) = section["levels"], section["auto"]
    assert code == 0
    assert {arm["name"]: arm["deployment"] for arm in level["arms"]} == {
        "auto": "dynamic K",
        "always-on": "dynamic K",
        "always-off": "dynamic K",
    }
    best = max(("always-on", "always-off"), key=lambda name: side(level, name)["tokens_per_s"])
    assert result["best"] == best
    ratio = side(level, "auto")["tokens_per_s"] / side(level, best)["tokens_per_s"]
    assert result["ratio"]["value"] == pytest.approx(ratio)
    assert result["ratio"]["low"] < ratio < result["ratio"]["high"]
    assert len(side(level, "always-on")["acceptance"]["by_position"]) == 3
    assert side(level, "always-off")["acceptance"]["num_drafts"] == 0
    assert "Auto / best of on and off" in page


def test_sweep_tries_one_thing_at_a_time(tmp_path: Path) -> None:
    """Every step is told, with what was kept; K of a step is the K that was asked for."""
    code, record, page = bench(
        tmp_path, "--suite=sweep", *PAIR, *ON, *BUSY, "--concurrency", "1", "2",
        "--k-values", "2", "--auto-config", '{"num_speculative_tokens": 1}', "--pairs=3",
    )  # fmt: skip

    (section,) = record["sections"]
    stages = [step["stage"] for step in section["steps"]]
    assert code == (0 if section["chosen"]["num_speculative_tokens"] else 3)
    assert stages == ["concurrency", "concurrency", "fixed K", "dynamic K"]
    assert section["chosen"] == section["steps"][-1]["kept"]
    assert section["steps"][2]["setting"]["num_speculative_tokens"] == 2
    fixed = section["levels"][2]["arms"][0]["summary"]["acceptance"]
    assert len(fixed["by_position"]) == 2
    assert "Last verified setting" in page


def test_a_running_system_is_measured_over_http_and_loaded(tmp_path: Path) -> None:
    """The gateway's own account adds up to what came, and objectives are judged from outside."""
    spec = PairSpec(TARGET, DRAFT, speculative_config='{"num_speculative_tokens": 3}')
    with run_pair(spec) as pair:
        url = f"http://{pair.gateways[0].address}"
        code, record, _ = bench(
            tmp_path, f"--url={url}", *BUSY, "--num-prompts=3", "--max-tokens=12", "--pairs=3"
        )
        loose = _load(tmp_path, url, "--rate", "20", "40", "--slo", "ttft_ms=60000")
        tight = _load(tmp_path, url, "--rate", "20", "--slo", "ttft_ms=0.001")
        grpc = cli.main(
            ["load", f"--orchestrator-address={pair.orchestrators[0].address}", "--target", TARGET,
             "--rate=20", "--duration-s=0.3", "--max-tokens=4", "--ignore-eos"]
        )  # fmt: skip

    (level,) = record["sections"][0]["levels"]
    on, off = side(level, "speculative"), side(level, "target-only")
    assert code in (0, 3)
    for each in (on, off):
        assert (each["num_failed"], each["num_output_tokens"]) == (0, 36)
        assert sum(each["tokens_by_origin"].values()) == 36
    assert len(on["acceptance"]["by_position"]) == 3
    assert off["acceptance"]["num_drafts"] == 0
    assert on["num_prompt_tokens"] > 0

    code, values = loose
    assert code in (0, 4)  # 4: this machine is too busy to be on time itself
    assert [step["arrival_rate"] for step in values["steps"]] == [20.0, 40.0]
    for step in values["steps"]:
        assert step["attainment"]["share"] == 1.0
        assert step["summary"]["num_failed"] == 0
        assert step["summary"]["num_output_tokens"] == 8 * step["summary"]["num_requests"]
    code, values = tight
    assert code in (3, 4)
    assert values["highest_rate"] is None
    assert values["steps"][0]["attainment"]["missed"]["ttft_ms"] > 0
    assert grpc in (0, 4)


def _load(tmp_path: Path, url: str, *words: str) -> tuple[int, dict[str, Any]]:
    path = tmp_path / "load.json"
    code = cli.main(
        ["load", f"--url={url}", *words, "--duration-s=0.5", "--max-tokens=8", "--ignore-eos",
         "--unique", f"--json={path}", f"--report={tmp_path / 'load.html'}"]
    )  # fmt: skip
    assert "specserve load" in (tmp_path / "load.html").read_text()
    return code, json.loads(path.read_text())


def test_an_interrupted_run_keeps_what_it_measured(tmp_path: Path) -> None:
    """Ctrl-C in the second level: the first is in the files, and no process is left."""
    json_path, html_path = tmp_path / "bench.json", tmp_path / "bench.html"
    command = CommandLine(
        ["bench", "--suite=serving", *PAIR, *ON, "--no-padding", "--concurrency", "1", "2",
         "--pairs=4", "--requests-per-wave=15", f"--json={json_path}", f"--report={html_path}"]
    )  # fmt: skip
    try:
        asyncio.run(eventually(json_path.exists, "the first level", within_s=240))
        processes = command.descendants()
        command.process.send_signal(signal.SIGINT)
        code = command.wait(60)
    finally:
        command.kill()

    record = read_record(json_path)
    assert code == 130, "\n".join(command.output)
    assert record["complete"] is False
    levels = record["sections"][0]["levels"]
    assert levels[0]["complete"]
    assert side(levels[0], "speculative")["num_requests"] == 60
    assert "Cut short" in html_path.read_text()
    assert left_running([p for p in processes if isinstance(p, psutil.Process)], 10) == []
