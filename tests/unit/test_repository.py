"""What holds for the tree as a whole: it is finished, runs anywhere, and its documents are true."""

from __future__ import annotations

import fnmatch
import os
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
THIS = Path(__file__).relative_to(ROOT)

UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX)\b")
MACHINE_PATHS = re.compile(r"(?<![\w.-])/(work|tmp/env|opt/(pypi|wheels))\b")
REGISTRY_HOSTS = re.compile(
    r"\b(pypi\.org|pythonhosted\.org|npmjs\.(org|com)|download\.pytorch\.org|crates\.io)\b"
)
SHARED_FOLDER = re.compile(r"\.\./shared\b")


def _ignored(name: str, *, is_directory: bool, patterns: list[str]) -> bool:
    return name == ".git" or any(
        fnmatch.fnmatch(name, pattern.rstrip("/"))
        for pattern in patterns
        if is_directory or not pattern.endswith("/")
    )


@cache
def _texts() -> dict[Path, str]:
    """Return every text file of the tree that git would not ignore, by its path from the root."""
    patterns = [line for line in (ROOT / ".gitignore").read_text().splitlines() if line]
    texts = {}
    for folder, directories, files in os.walk(ROOT):
        directories[:] = [
            name for name in directories if not _ignored(name, is_directory=True, patterns=patterns)
        ]
        for name in files:
            path = Path(folder, name)
            if _ignored(name, is_directory=False, patterns=patterns):
                continue
            try:
                texts[path.relative_to(ROOT)] = path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue  # weights and pictures
    return texts


def _lines_matching(pattern: re.Pattern[str]) -> Iterator[str]:
    """Yield "path:line: text" of each match; this file, which spells the patterns, left out."""
    for path, text in _texts().items():
        if path == THIS or not pattern.search(text):
            continue
        for number, line in enumerate(text.splitlines(), start=1):
            if pattern.search(line):
                yield f"{path}:{number}: {line.strip()[:100]}"


@pytest.mark.parametrize(
    "pattern",
    [
        pytest.param(UNFINISHED, id="notes-of-unfinished-work"),
        pytest.param(MACHINE_PATHS, id="paths-of-one-machine"),
        pytest.param(REGISTRY_HOSTS, id="package-registry-hosts"),
    ],
)
def test_tree_is_free_of(pattern: re.Pattern[str]) -> None:
    """The tree is finished, and a clone works on any machine with any mirror."""
    found = list(_lines_matching(pattern))

    assert not found, "\n".join(found)


def test_only_ci_knows_the_folder_beside_the_checkout() -> None:
    """Tests and tools learn where large data lies from the environment that .ci/run sets."""
    found = [line for line in _lines_matching(SHARED_FOLDER) if not line.startswith(".ci/run:")]

    assert not found, "\n".join(found)


def test_make_verbs_in_the_documents_exist() -> None:
    """A reader who types what a document says gets a verb, not an error."""
    makefile = _texts()[Path("Makefile")]
    verbs = set(re.findall(r"^([a-z][\w-]*):", makefile, flags=re.MULTILINE))
    unknown = [
        f"{path}: make {verb}"
        for path, text in _texts().items()
        if path.suffix == ".md"
        for code in re.findall(r"```.*?```|`[^`]+`", text, flags=re.DOTALL)
        for command in re.findall(r"\bmake((?: +[a-z][\w-]*)+)", code)
        for verb in command.split()
        if verb not in verbs
    ]
    assert verbs
    assert not unknown


def test_files_named_to_contributors_exist() -> None:
    """Who is told to write a module beside another finds that one."""
    places = [ROOT, ROOT / "tests", ROOT / "services" / "specserve"]
    places += [path for path in places[-1].rglob("*") if path.is_dir()]
    places += [ROOT / "protos" / "specserve" / "rpc" / "v1"]
    names = re.findall(
        r"`([\w./-]+(?:/|\.(?:py|md|proto|toml|txt)))`", _texts()[Path("CONTRIBUTING.md")]
    )
    missing = [name for name in names if not any((place / name).exists() for place in places)]

    assert names
    assert not missing


def test_every_verb_is_phony_and_has_a_line_of_help() -> None:
    """A file that happens to be called `test` stops nothing, and `make help` is complete."""
    makefile = _texts()[Path("Makefile")]
    phony = set(" ".join(re.findall(r"^\.PHONY:(.*)$", makefile, flags=re.MULTILINE)).split())
    helped = set(re.findall(r"^([a-z-]+):.*## ", makefile, flags=re.MULTILINE))

    assert helped == phony - {"buf-lint"}


def test_help_tells_the_variables_that_a_user_sets() -> None:
    """`make help` prints the lines at the head of the Makefile: arguments, interpreter, torch."""
    makefile = _texts()[Path("Makefile")]
    told = set(re.findall(r"^#   make .*?\b([A-Z_0-9]+)=", makefile, flags=re.MULTILINE))
    settable = set(re.findall(r"^([A-Z_]+) \?=", makefile, flags=re.MULTILINE))

    assert {"ARGS", "PYTHON"} <= told
    assert settable - told <= {"BUF_VERSION"}


def test_an_environment_that_is_a_link_is_ignored_too() -> None:
    """A trailing slash would cover the folder alone, and a worktree may link another's."""
    patterns = (ROOT / ".gitignore").read_text().splitlines()

    assert _ignored(".venv", is_directory=False, patterns=patterns)
    assert _ignored("node_modules", is_directory=False, patterns=patterns)


def test_version_is_one() -> None:
    """pyproject.toml, the installed package and the newest entry of the changelog agree."""
    version = tomllib.loads(_texts()[Path("pyproject.toml")])["project"]["version"]
    newest = re.search(r"^## \[(\d+\.\d+\.\d+)\]", _texts()[Path("CHANGELOG.md")], re.MULTILINE)

    assert newest is not None
    assert newest[1] == version
    assert metadata.version("specserve") == version


def test_ci_is_executable() -> None:
    """CI starts the file itself."""
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
