"""`make audit`: known vulnerabilities of what is installed, and a bill of materials (CycloneDX).

Runs in an environment of its own, so that the tools are no part of what they look at. pip-audit
alone ends well where it could ask nobody: it calls a package without an answer skipped. Here
that is a failure, and says so. Knows the two tools; imports nothing of specserve.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

EXIT_VULNERABLE = 1
EXIT_NOT_ASKED = 2

_LIST = (
    "import json, importlib.metadata as m; "
    "print(json.dumps(sorted({d.name: d.version for d in m.distributions()}.items())))"
)


def main(arguments: list[str]) -> int:
    """Write the bill of materials, and ask for advisories unless told not to."""
    parser = argparse.ArgumentParser(prog="make audit")
    parser.add_argument("--python", required=True, help="interpreter whose packages are meant")
    parser.add_argument("--sbom", default="sbom.cdx.json", help="where the bill of materials goes")
    parser.add_argument("--offline", action="store_true", help="the bill alone: ask nobody")
    args = parser.parse_args(arguments)
    print(f"{args.sbom}: {write_sbom(args.python, Path(args.sbom))} components")
    if args.offline:
        print("offline: no advisory was looked at; this says nothing of vulnerabilities")
        return 0
    packages = installed(args.python)
    problems, code = judge(ask(packages), {name for name, _ in packages})
    for problem in problems:
        print(problem, file=sys.stderr)
    if not code:
        print(f"{len(packages)} packages, no advisory against any of them")
    return code


def installed(python: str) -> list[tuple[str, str]]:
    """List the packages of an interpreter, ours left out, with the versions an index knows."""
    done = subprocess.run([python, "-c", _LIST], capture_output=True, text=True, check=True)
    found: list[tuple[str, str]] = json.loads(done.stdout)
    # 2.13.0+cpu is the 2.13.0 that advisories speak of.
    return [(name, version.partition("+")[0]) for name, version in found if name != "specserve"]


def write_sbom(python: str, path: Path) -> int:
    """Write a CycloneDX bill of an interpreter's packages; return how many it has."""
    words = ["environment", "--output-reproducible", "--of", "JSON", "--pyproject=pyproject.toml"]
    subprocess.run(
        [sys.executable, "-m", "cyclonedx_py", *words, "-o", str(path), python], check=True
    )
    return len(json.loads(path.read_text(encoding="utf-8"))["components"])


def ask(packages: list[tuple[str, str]]) -> dict[str, Any] | None:
    """Return pip-audit's report; None when it could not make one."""
    with tempfile.TemporaryDirectory() as folder:
        wanted, report = Path(folder) / "requirements.txt", Path(folder) / "report.json"
        lines = (f"{name}=={version}\n" for name, version in packages)
        wanted.write_text("".join(lines), encoding="utf-8")
        words = ["--requirement", str(wanted), "--no-deps", "--disable-pip", "--format", "json"]
        words += ["--output", str(report), "--progress-spinner", "off"]
        # Its exit code is 1 for a vulnerability and for any trouble of its own; the report tells.
        subprocess.run([sys.executable, "-m", "pip_audit", *words], check=False)
        if not report.is_file():
            return None
        found: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
        return found


def judge(report: dict[str, Any] | None, names: set[str]) -> tuple[list[str], int]:
    """Say what is wrong: vulnerabilities, and every package that nobody gave an answer for."""
    rows = (report or {}).get("dependencies", [])
    problems = [
        f"{row['name']} {row['version']}: {vulnerability['id']}; "
        f"mended in {', '.join(vulnerability.get('fix_versions') or []) or 'no version yet'}"
        for row in rows
        for vulnerability in row.get("vulns") or []
    ]
    code = EXIT_VULNERABLE if problems else 0
    answered = {_canonical(row["name"]) for row in rows if "skip_reason" not in row}
    silent = sorted(name for name in names if _canonical(name) not in answered)
    if silent:
        problems.append(
            f"NOT AUDITED: no advisory service answered for {len(silent)} of {len(names)} packages "
            f"({', '.join(silent[:5])}{', …' if len(silent) > 5 else ''}). This is no pass. "
            "`make audit ARGS=--offline` writes the bill of materials alone"
        )
        code = code or EXIT_NOT_ASKED
    return problems, code


def _canonical(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
