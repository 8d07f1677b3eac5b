"""No process of ours is forked from a live one: gRPC's channels do not survive that."""

from __future__ import annotations

import re
from pathlib import Path

import specserve

SOURCES = Path(specserve.__file__).parent


def test_children_are_new_programs_B184() -> None:
    """Devices are started by exec, and nothing forks: not multiprocessing, not os.fork, no pool."""
    forking = re.compile(r"^\s*(import|from) multiprocessing|\bos\.fork|ProcessPoolExecutor", re.M)
    found = [
        str(path.relative_to(SOURCES))
        for path in SOURCES.rglob("*.py")
        if forking.search(path.read_text(encoding="utf-8"))
    ]
    assert found == []
