"""Compiled code on disk, kept for exactly the sources that it was compiled from.

numba keeps a function's code by the contents of the file it stands in. What is compiled here calls
functions of other files and freezes their constants, so code from before an upgrade would be taken
for today's. Its stamp is therefore the contents of this whole folder. Knows numba's cache and
files; knows no arithmetic.
"""

from __future__ import annotations

import hashlib
import os
from functools import cache
from pathlib import Path
from typing import Any

from numba.core import caching

FOLDER = Path(__file__).parent


def can_keep_code() -> bool:
    """Whether compiled code can be kept for the next start; numba refuses to load where not."""
    named = os.environ.get("NUMBA_CACHE_DIR")
    places = [Path(named)] if named else []
    home = Path(os.path.expanduser("~"))
    return any(map(can_make, [*places, FOLDER, home]))


def can_make(folder: Path) -> bool:
    """Whether a folder is there to write into, or could be made."""
    found = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    return found.is_dir() and os.access(found, os.W_OK)


def stamp_of(folder: Path) -> bytes:
    """Digest the Python sources of a folder, names included."""
    digest = hashlib.sha256()
    for source in sorted(folder.glob("*.py")):
        data = source.read_bytes()
        digest.update(f"{source.name} {len(data)}\n".encode() + data)
    return digest.digest()


@cache
def package_stamp() -> bytes:
    """Digest the sources of this folder, once."""
    return stamp_of(FOLDER)


def stamp_whole_folder() -> None:
    """Let numba keep the code of this folder's functions by all of its sources. Idempotent.

    Other users of numba in the process see no change: the new locators pass on their files.
    """
    known = caching.CacheImpl._locator_classes
    if not any(issubclass(locator, _OfThisFolder) for locator in known):
        known[:0] = [_stamped(locator) for locator in known[:3]]


class _OfThisFolder:
    """What the locators of this folder share."""


def _stamped(locator: Any) -> Any:
    class Stamped(_OfThisFolder, locator):  # type: ignore[misc]
        """The same places on disk, another stamp."""

        @classmethod
        def from_function(cls, function: Any, source: str) -> Any:
            return super().from_function(function, source) if _is_ours(source) else None

        def get_source_stamp(self) -> bytes:
            return package_stamp()

    return Stamped


def _is_ours(source: str) -> bool:
    return Path(source).parent == FOLDER
