"""Writes a bundle: one .tar.gz, or a folder; for its owner's eyes alone.

Knows files and names; knows nothing of what is in them.
"""

from __future__ import annotations

import io
import os
import tarfile
import time
from collections.abc import Mapping
from pathlib import Path

from specserve.errors import ConfigurationError

SUFFIX = ".tar.gz"


def reserve(path: Path) -> None:
    """Make the empty file or folder, so that one that cannot be made is told of at once.

    Raises:
        ConfigurationError: it is there already, or cannot be made.
    """
    try:
        if path.name.endswith(SUFFIX):
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        else:
            path.mkdir(mode=0o700)
    except FileExistsError as error:
        raise ConfigurationError(f"--output: {path} is there already; name another") from error
    except OSError as error:
        raise ConfigurationError(f"--output: cannot make {path}: {error.strerror}") from error


def write(path: Path, files: Mapping[str, str]) -> None:
    """Fill what was reserved.

    Raises:
        ConfigurationError: there is no room, or the folder has gone.
    """
    try:
        if path.name.endswith(SUFFIX):
            _write_archive(path, files)
        else:
            _write_folder(path, files)
    except OSError as error:
        raise ConfigurationError(f"--output: cannot write {path}: {error.strerror}") from error


def _write_archive(path: Path, files: Mapping[str, str]) -> None:
    top = path.name.removesuffix(SUFFIX)
    with tarfile.open(path, "w:gz") as archive:
        for name, text in files.items():
            data = text.encode()
            info = tarfile.TarInfo(f"{top}/{name}")
            info.size, info.mode, info.mtime = len(data), 0o600, int(time.time())
            archive.addfile(info, io.BytesIO(data))


def _write_folder(path: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        (path / name).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        (path / name).write_text(text, encoding="utf-8")
