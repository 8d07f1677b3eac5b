"""Alert rules: promtool proves each, and Kubernetes is given the same ones."""

from __future__ import annotations

import inspect
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from specserve import errors
from specserve.gateway import errors as gateway_errors
from specserve.telemetry import CANCELLED

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "observability"


@pytest.fixture(scope="module")
def promtool() -> str:
    """Find Prometheus' own checker: Debian has it in the package `prometheus`."""
    found = shutil.which("promtool")
    if found is None and os.environ.get("CI") != "true":
        pytest.skip("promtool is not installed; CI has it")
    assert found is not None, "promtool is missing: apt-get install prometheus"
    return found


def test_rules_are_rules_and_each_alert_is_tried(promtool: str) -> None:
    """Each alert fires in one of the cases, and keeps still in another."""
    for words in (["check", "rules", "rules.yaml"], ["test", "rules", "rules_test.yaml"]):
        done = subprocess.run(
            [promtool, *words], cwd=FOLDER, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr

    rules = yaml.safe_load((FOLDER / "rules.yaml").read_text(encoding="utf-8"))
    cases = yaml.safe_load((FOLDER / "rules_test.yaml").read_text(encoding="utf-8"))["tests"]
    every = [rule for group in rules["groups"] for rule in group["rules"]]
    alerts = {rule["alert"] for rule in every if "alert" in rule}
    tried = [test for case in cases for test in case.get("alert_rule_test", [])]
    assert {test["alertname"] for test in tried if test["exp_alerts"]} == alerts
    assert {test["alertname"] for test in tried if not test["exp_alerts"]} == alerts


def test_promtool_finds_a_rule_that_never_fires(promtool: str, tmp_path: Path) -> None:
    """The cases fail when an alert's threshold is out of reach."""
    text = (FOLDER / "rules.yaml").read_text(encoding="utf-8")
    broken = text.replace("acceptance_rate:5m < 0.2", "acceptance_rate:5m < 0")
    (tmp_path / "rules.yaml").write_text(broken, encoding="utf-8")
    shutil.copy(FOLDER / "rules_test.yaml", tmp_path)
    done = subprocess.run(
        [promtool, "test", "rules", "rules_test.yaml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode != 0
    assert "SpecserveAcceptanceCollapsed" in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("", "", ""),
        ("scrape_interval", "scrape_intervall", "scrape_intervall not found"),
        ("rules.yaml", "no_rules.yaml", "no_rules.yaml"),
        ("specserve:8000", "http://specserve:8000", "is not a valid hostname"),
    ],
    ids=["right", "key", "file", "target"],
)
def test_promtool_reads_the_configuration(
    promtool: str, tmp_path: Path, old: str, new: str, complaint: str
) -> None:
    """With the rules beside it, as compose mounts them; of spoilt copies it names the fault."""
    text = (ROOT / "deploy" / "compose" / "prometheus.yml").read_text(encoding="utf-8")
    assert old in text
    (tmp_path / "prometheus.yml").write_text(text.replace(old, new, 1) if old else text)
    shutil.copy(FOLDER / "rules.yaml", tmp_path)

    done = subprocess.run(
        [promtool, "check", "config", "prometheus.yml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )

    assert bool(done.returncode) == bool(complaint), done.stdout + done.stderr
    assert complaint in done.stdout + done.stderr


def test_kubernetes_and_compose_have_the_same_rules() -> None:
    rules = yaml.safe_load((FOLDER / "rules.yaml").read_text(encoding="utf-8"))
    path = ROOT / "k8s" / "components" / "observability" / "rules.yaml"
    operator = yaml.safe_load(path.read_text(encoding="utf-8"))
    compose = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text(encoding="utf-8"))
    prometheus = yaml.safe_load((ROOT / "deploy" / "compose" / "prometheus.yml").read_text())

    assert operator["spec"]["groups"] == rules["groups"]
    mounted = "./observability/rules.yaml:/etc/prometheus/rules.yaml:ro"
    assert mounted in compose["services"]["prometheus"]["volumes"]
    assert prometheus["rule_files"] == ["rules.yaml"]


def test_the_error_budget_leaves_out_what_clients_can_mend() -> None:
    """Every error that is answered below 500, and a client that left; Overloaded is ours."""
    text = (FOLDER / "rules.yaml").read_text(encoding="utf-8")
    (left_out,) = set(re.findall(r'error!~"([^"]+)"', text))
    classes = [
        kind
        for module in (errors, gateway_errors)
        for _, kind in inspect.getmembers(module, inspect.isclass)
        if issubclass(kind, errors.SpecServeError)
    ]
    theirs = {kind.__name__ for kind in classes if gateway_errors.status_of(kind.__name__) < 500}

    assert set(left_out.split("|")) == {CANCELLED, *theirs} - {"Overloaded"}
    assert "Overloaded" in theirs


def test_no_rule_and_no_panel_asks_for_a_scrape_job() -> None:
    """Jobs have the names of compose's file there, and names of the Prometheus operator's else."""
    rules = yaml.safe_load((FOLDER / "rules.yaml").read_text(encoding="utf-8"))
    boards = (ROOT / "deploy" / "compose" / "grafana" / "dashboards").glob("*.json")
    panels = [panel for board in boards for panel in json.loads(board.read_text())["panels"]]
    asked = [rule["expr"] for group in rules["groups"] for rule in group["rules"]]
    asked += [target[key] for p in panels for target in p["targets"] for key in target]

    assert [text for text in map(str, asked) if re.search(r"\bjob\b", text)] == []
