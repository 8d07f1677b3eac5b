"""Add to every pinned image tag the digest that it means in the registry now (`make pin-digests`).

Asks Docker, and writes only when every image has been found: run it where a registry is reached,
look at the change, and commit it. Images of our own are left out. Run again, it renews digests.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

FILES = ("Dockerfile", "compose.yaml")
REFERENCE = re.compile(
    r"(?P<before>^ARG BASE=|^ +image: )(?P<tag>[\w./-]+:[\w.-]+)(?P<digest>@sha256:[0-9a-f]{64})?$",
    re.MULTILINE,
)
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
OURS = "specserve:"


def digest_of(tag: str) -> str:
    """Ask the registry for a tag's digest.

    Raises:
        LookupError: Docker is missing, or does not find it; with what it said.
    """
    words = ["docker", "buildx", "imagetools", "inspect", tag, "--format", "{{.Manifest.Digest}}"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LookupError(f"{tag}: {error}") from error
    found = DIGEST.fullmatch(done.stdout.strip())
    if done.returncode or found is None:
        raise LookupError(f"{tag}: {(done.stderr or done.stdout).strip()}")
    return found[0]


def pin(folder: Path) -> list[str]:
    """Pin every image named in the folder's files; return what was pinned.

    Raises:
        LookupError: one was not found; no file has been changed.
    """
    texts = {path: path.read_text(encoding="utf-8") for path in map(folder.joinpath, FILES)}
    tags = {
        match["tag"]
        for text in texts.values()
        for match in REFERENCE.finditer(text)
        if not match["tag"].startswith(OURS)
    }
    digests = {tag: digest_of(tag) for tag in sorted(tags)}

    def pinned(match: re.Match[str]) -> str:
        digest = digests.get(match["tag"])
        return match[0] if digest is None else f"{match['before']}{match['tag']}@{digest}"

    for path, text in texts.items():
        path.write_text(REFERENCE.sub(pinned, text), encoding="utf-8")
    return [f"{tag}@{digest}" for tag, digest in digests.items()]


def main() -> int:
    """Pin the images of this folder."""
    try:
        found = pin(Path(__file__).parent)
    except LookupError as error:
        print(f"nothing was changed: {error}", file=sys.stderr)
        return 1
    print("\n".join(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
