"""Image, compose file and dashboards: no engine builds or runs them here, so what can be known is.

The Dockerfile is linted, and every name that one file takes from another is looked up there.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from specserve.one_machine import place_on_one_machine
from specserve.serve_args import ServeArgs
from specserve.tools.config_file import load_serve_args

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
OURS = ("specserve", "models")
OTHERS = ("collector", "prometheus", "grafana")


@pytest.fixture(scope="module")
def compose() -> Any:
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def settings() -> ServeArgs:
    return load_serve_args(str(DEPLOY / "compose" / "specserve.yaml"))


@pytest.fixture(scope="module")
def collector() -> Any:
    return yaml.safe_load((DEPLOY / "compose" / "collector.yaml").read_text(encoding="utf-8"))


def version() -> str:
    return str(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"])


def stages() -> dict[str, str]:
    """Return the Dockerfile's stages: {name: text}, comments left out."""
    text = re.sub(r"^#.*\n", "", DOCKERFILE, flags=re.MULTILINE)
    parts = re.split(r"^FROM (\S+) AS (\S+)\n", text, flags=re.MULTILINE)
    return {
        name: f"FROM {base}\n{body}"
        for base, name, body in zip(*[iter(parts[1:])] * 3, strict=True)
    }


@pytest.mark.slow
def test_dockerfile_is_clean_to_its_linter() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run(
        [str(hadolint), "--no-color", str(DEPLOY / "Dockerfile")],
        capture_output=True,
        text=True,
        check=False,
    )

    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new", "code"),
    [
        ("ARG BASE=python:3.11.14-slim-bookworm", "ARG BASE=x\nFROM python:latest AS y", "DL3007"),
        ("--no-install-recommends ", "", "DL3015"),
        ("WORKDIR /home/specserve", "WORKDIR home", "DL3000"),
        ('CMD ["specserve", "--help"]', "CMD specserve --help", "DL3025"),
    ],
)
def test_linter_finds_a_fault(tmp_path: Path, old: str, new: str, code: str) -> None:
    assert old in DOCKERFILE
    (tmp_path / "Dockerfile").write_text(DOCKERFILE.replace(old, new))

    done = subprocess.run(
        [str(Path(sys.executable).with_name("hadolint")), str(tmp_path / "Dockerfile")],
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode
    assert code in done.stdout


def test_image_has_a_target_for_processors_and_one_for_gpus() -> None:
    """Both are what runs plus nothing but settings; what built it stays behind."""
    found = stages()

    assert list(found) == ["build", "runtime", "cpu", "cuda"]
    assert all(found[name].startswith("FROM runtime\n") for name in ("cpu", "cuda"))
    assert not re.search(r"\b(gcc|g\+\+|clang|build-essential|git|curl)\b", found["runtime"])
    assert "COPY --from=build /opt/specserve /opt/specserve" in found["runtime"]
    assert "RUN" not in found["cpu"] + found["cuda"]


def test_image_runs_as_the_user_that_the_manifests_name() -> None:
    manifest = (ROOT / "k8s" / "base" / "rayservice.yaml").read_text(encoding="utf-8")
    (user,) = re.findall(r"^USER (\d+):\1$", stages()["runtime"], re.MULTILINE)

    assert f"runAsUser: {user}\n" in manifest
    assert f"runAsGroup: {user}\n" in manifest
    assert "HOME, value: /home/specserve" in manifest
    assert "useradd --uid 10001" in DOCKERFILE
    assert "--create-home" in DOCKERFILE


def test_image_has_what_kuberays_probes_call() -> None:
    """The operator's readiness probe of a worker is `bash -c 'wget ... | grep success'`."""
    runtime = stages()["runtime"]

    assert "wget" in runtime
    assert "slim-bookworm" in DOCKERFILE  # Debian: bash and grep are essential there


def test_a_login_shell_has_the_images_python(tmp_path: Path) -> None:
    """The operator's job that cleans Redis runs `python` with Ray in one; its PATH starts anew."""
    (command,) = re.findall(
        r"^RUN (echo .+) > /etc/profile\.d/\w+\.sh$", stages()["runtime"], re.MULTILINE
    )
    (home,) = re.findall(r"^ENV PATH=(\S+):\$PATH ", stages()["runtime"], re.MULTILINE)
    profile = tmp_path / "specserve.sh"

    subprocess.run(["sh", "-euc", f"{command} > {profile}"], check=True)
    words = ["sh", "-euc", f'PATH=/usr/local/bin:/usr/bin; . {profile}; echo "$PATH"']
    told = subprocess.run(words, capture_output=True, text=True, check=True).stdout

    assert told == f"{home}:/usr/local/bin:/usr/bin\n"
    assert f"COPY --from=build {Path(home).parent} " in stages()["runtime"]


def test_image_leaves_gpus_to_who_runs_it() -> None:
    """A pod without a limit sees no GPU: the image names none, and what the driver is to bring."""
    instructions = "".join(stages().values())

    assert "VISIBLE_DEVICES" not in instructions
    assert "NVIDIA_DRIVER_CAPABILITIES=compute,utility\n" in instructions


def test_base_is_pinned_by_tag() -> None:
    (base,) = re.findall(r"^ARG BASE=(\S+)$", DOCKERFILE, re.MULTILINE)

    assert re.fullmatch(r"python:3\.1[1-9]\.\d+-slim-bookworm(@sha256:[0-9a-f]{64})?", base)
    froms = re.findall(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE)
    assert set(froms) == {"${BASE}", "runtime"}


def test_everything_that_the_image_copies_is_let_through() -> None:
    """The ignore file lets in what COPY names, and that is there."""
    allowed = {
        line[1:]
        for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    copied = {
        word
        for line in re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE, re.MULTILINE)
        for word in line.split()[:-1]
    }

    assert copied == allowed
    assert all((ROOT / path).exists() for path in copied)


@pytest.mark.parametrize("name", OURS + OTHERS)
def test_services_of_compose_may_do_little(compose: Any, name: str) -> None:
    service = compose["services"][name]

    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert not service.get("privileged")
    for port in service.get("ports", []):
        assert port.startswith("127.0.0.1:"), "open to this machine alone"
    image = service["image"]
    if name in OURS:
        assert image == f"specserve:{version()}-cpu"
    else:
        assert re.fullmatch(r"[\w./-]+:v?\d+\.\d+\.\d+(@sha256:[0-9a-f]{64})?", image)


def test_images_of_the_manifests_have_the_projects_version() -> None:
    for overlay in (ROOT / "k8s").rglob("kustomization.yaml"):
        for tag in re.findall(r"newTag: (\S+)", overlay.read_text(encoding="utf-8")):
            assert tag.rpartition("-")[0] == version(), overlay


def test_files_that_compose_mounts_are_there(compose: Any) -> None:
    volumes = [v for s in compose["services"].values() for v in s.get("volumes", [])]

    for volume in volumes:
        source = volume.split(":")[0]
        if source.startswith("."):
            assert (DEPLOY / source).exists(), source
        else:
            assert source in compose["volumes"]


def test_compose_serves_the_settings_that_it_mounts(compose: Any, settings: ServeArgs) -> None:
    """Port, grace and models agree; the one machine has room for it."""
    service = compose["services"]["specserve"]
    path = service["command"][-1].removeprefix("--config=")

    assert f"./compose/specserve.yaml:{path}:ro" in service["volumes"]
    assert service["ports"] == [f"127.0.0.1:8000:{settings.gateway.port}"]
    assert settings.gateway.host == "0.0.0.0"
    grace_s = float(service["stop_grace_period"].removesuffix("s"))
    assert grace_s > settings.gateway.shutdown_grace_s + settings.server.drain_deadline_s
    links = compose["services"]["models"]["command"]
    assert "--link-dir=/models" in links
    assert settings.target.model == "/models/target"
    assert settings.speculative is not None
    assert settings.speculative.model == "/models/draft"
    place_on_one_machine(settings, num_cpus=2, num_gpus=0)


def test_prometheus_asks_where_somebody_answers(compose: Any, settings: ServeArgs) -> None:
    config = yaml.safe_load((DEPLOY / "compose" / "prometheus.yml").read_text(encoding="utf-8"))
    asked = {
        job["job_name"]: job["static_configs"][0]["targets"][0] for job in config["scrape_configs"]
    }

    assert asked == {
        "gateway": f"specserve:{settings.gateway.port}",
        "orchestrator": f"specserve:{settings.orchestrator_metrics_port}",
        "draft": f"specserve:{settings.draft_metrics_port}",
        "target": f"specserve:{settings.target_metrics_port}",
        "spans": "collector:8889",
    }
    assert {target.split(":")[0] for target in asked.values()} <= set(compose["services"])
    assert settings.server.host == "0.0.0.0"


def test_spans_arrive_and_leave(compose: Any, collector: Any) -> None:
    """The endpoint is the collector's; what it is made of: `test_collector.py`."""
    endpoint = compose["services"]["specserve"]["environment"]["OTEL_EXPORTER_OTLP_ENDPOINT"]
    port = collector["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"].rpartition(":")[2]

    assert endpoint == f"http://collector:{port}"
    assert collector["exporters"]["prometheus"]["endpoint"].endswith(":8889")


def test_the_dashboard_asks_the_prometheus_that_there_is() -> None:
    """That its metrics exist a running pair proves (tests/integration/test_metric_totals.py)."""
    folder = DEPLOY / "compose" / "grafana"
    board = json.loads((folder / "dashboards" / "specserve.json").read_text(encoding="utf-8"))
    source = yaml.safe_load((folder / "datasources" / "prometheus.yaml").read_text())

    assert len(board["panels"]) >= 8
    for panel in board["panels"]:
        assert panel["datasource"]["uid"] == source["datasources"][0]["uid"]


@pytest.fixture
def pin_digests() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pin_digests", DEPLOY / "pin_digests.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class TestPinDigests:
    """`make pin-digests`, with a program in the place of Docker that answers as it does."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        for name in ("Dockerfile", "compose.yaml"):
            (tmp_path / name).write_text((DEPLOY / name).read_text())
        return tmp_path

    def answer(self, folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
        (folder / "bin").mkdir(exist_ok=True)
        docker = folder / "bin" / "docker"
        docker.write_text(f"#!/bin/sh\n{script}\n")
        docker.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")

    def test_every_foreign_image_gets_its_digest(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, pin_digests: ModuleType
    ) -> None:
        """Tags stay for people; a second run renews the digests and changes nothing else."""
        self.answer(folder, monkeypatch, 'echo "$4" | sha256sum | sed "s/^/sha256:/;s/ .*//"')

        pinned = pin_digests.pin(folder)
        once = {name: (folder / name).read_text() for name in ("Dockerfile", "compose.yaml")}
        again = pin_digests.pin(folder)

        assert len(pinned) == 4
        assert again == pinned
        assert once == {name: (folder / name).read_text() for name in once}
        text = "".join(once.values())
        assert all(reference in text for reference in pinned)
        assert text.count("@sha256:") == 4
        assert "image: specserve:0.1.0-cpu\n" in text

    def test_nothing_changes_where_one_is_not_found(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, pin_digests: ModuleType
    ) -> None:
        before = {name: (folder / name).read_text() for name in ("Dockerfile", "compose.yaml")}
        self.answer(
            folder,
            monkeypatch,
            'case "$4" in prom*) echo "not found" >&2; exit 1;; *) echo sha256:'
            + "0" * 64
            + ";; esac",
        )

        with pytest.raises(LookupError, match="prom/prometheus:v3.5.0: not found"):
            pin_digests.pin(folder)

        assert before == {name: (folder / name).read_text() for name in before}
