"""Documents claim nothing that is not so: `make docs-check`, and a part of `make test`."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from support.documents import Document

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


@pytest.mark.parametrize("page", [pytest.param(p, id=str(p.relative_to(ROOT))) for p in PAGES])
def test_links_files_commands_and_flags_are_there(page: Path) -> None:
    assert list(Document(page, ROOT).problems()) == []


def test_every_page_is_led_to() -> None:
    """From the README, in one step or over another page: nobody reads a folder's listing."""
    led_to = {ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"}
    texts = {page: page.read_text(encoding="utf-8") for page in PAGES}
    for _ in PAGES:
        led_to |= {
            other
            for page in led_to
            for other in PAGES
            if f"]({_from(page, other)}" in texts[page] or f"`{_from(page, other)}`" in texts[page]
        }

    assert set(PAGES) - led_to == set()


def test_every_alert_names_its_part_of_the_runbook() -> None:
    """Whoever is woken at night finds what to look at; no part is left over."""
    path = ROOT / "deploy" / "observability" / "rules.yaml"
    groups = yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]
    alerts = [rule for group in groups for rule in group["rules"] if "alert" in rule]
    runbook = Document(ROOT / "docs" / "runbook.md", ROOT)
    named = {rule["alert"]: rule["annotations"]["runbook_url"] for rule in alerts}

    assert alerts
    for name, url in named.items():
        assert url == f"docs/runbook.md#{name.lower()}"
        assert url.rpartition("#")[2] in runbook.anchors()
    parts = re.findall(r"^### (Specserve\w+)$", runbook.path.read_text("utf-8"), re.MULTILINE)
    assert set(parts) == set(named)


def _from(page: Path, other: Path) -> str:
    if page.parent == other.parent:
        return other.name
    return f"docs/{other.name}" if page.parent == ROOT else f"../{other.name}"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("see [it](no/such.md)", "no such file"),
        ("see [it](../../outside.md)", "outside of the repository"),
        ("see [it](http://example.com)", "https was wanted"),
        ("# One\nsee [it](#two)", "no heading of this name"),
        ("see [it](other.md#three)", "no heading of this name"),
        ("see `tests/no_such_test.py`", "no such file"),
        ("see `services/specserve/{cli,clo}.py`, `tests/*/nothing_*.py`", "no such file"),
        ("run `specserve sreve`", "no such command"),
        ("run `specserve serve --prot=1`", "no such flag"),
        ("```\nspecserve gateway \\\n  --tokenizer x --api-key-fil=y\n```", "--api-key-fil"),
        ("   ```\n   specserve keys add --nam=x\n   ```", "--nam"),
        ("run `make chekc test`", "no such verb"),
        ("see `specserve_num_sesions`", "no such metric"),
        ("```\nX=1 make nothing\n```", "no such verb"),
    ],
)
def test_a_wrong_claim_is_found(tmp_path: Path, text: str, complaint: str) -> None:
    root = tmp_path / "root"
    for name in ("Makefile", "services/specserve/cli.py", "docs/other.md"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("test: # nothing\n" if name == "Makefile" else "# Two\n")
    (tmp_path / "outside.md").write_text("")
    (root / "docs" / "page.md").write_text(text)

    found = list(Document(root / "docs" / "page.md", root).problems())

    assert any(complaint in problem for problem in found), found


def test_right_claims_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "Makefile").write_text("check: # nothing\ntest: # nothing\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "page.md").write_text(
        "# A `code` heading, twice\n# A `code` heading, twice\n"
        "[one](#a-code-heading-twice) [two](#a-code-heading-twice-1) [out](https://example.com)\n"
        "`make check test`, `make test ARGS=...`, `specserve serve --port 1`, `specserve -h`,\n"
        "`tests/`, `not/ours.py`\n"
        "```\nspecserve config check --config FILE   # specserve sreve\n```\n"
    )

    assert list(Document(tmp_path / "page.md", tmp_path).problems()) == []


def test_the_commands_that_change_settings_make_what_the_page_says(tmp_path: Path) -> None:
    """docs/kubernetes.md, "The same on one machine first": its `sed` lines, as they stand there."""
    text = (ROOT / "docs/kubernetes.md").read_text(encoding="utf-8")
    first, second = re.findall(r"^ *(sed .*mine\.yaml)$", text, re.MULTILINE)
    (tmp_path / "k8s").symlink_to(ROOT / "k8s")
    made = tmp_path / "mine.yaml"

    subprocess.run(["bash", "-euc", first], cwd=tmp_path, check=True)
    settings = yaml.safe_load(made.read_text(encoding="utf-8"))
    assert settings["target"]["model"] == f"{tmp_path}/models/target"
    assert settings["speculative"]["model"] == f"{tmp_path}/models/draft"
    assert settings["target_pool"]["num_cpus"] == settings["draft_pool"]["num_cpus"] == 0.5

    subprocess.run(["bash", "-euc", second], cwd=tmp_path, check=True)
    settings = yaml.safe_load(made.read_text(encoding="utf-8"))
    assert settings["gateway"]["api_key_file"] == f"{tmp_path}/keys"
