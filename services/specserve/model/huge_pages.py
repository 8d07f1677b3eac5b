"""Ask the kernel to back this process's large allocations with huge pages.

Streaming a model's weights through 4 KiB pages spends a quarter of its time on address translation.
Linux leaves the choice to the program by default (`madvise`), and the allocators here do not make
it. Knows the operating system; knows no model. Whatever is refused is only slower.
"""

from __future__ import annotations

import ctypes
import logging
from pathlib import Path

logger = logging.getLogger(__name__)

HUGE_PAGE_BYTES = 2 << 20
_MADV_HUGEPAGE = 14
_MADV_COLLAPSE = 25
_MAPS = Path("/proc/self/maps")


def prefer_huge_pages(address: int, num_bytes: int) -> None:
    """Let memory that is not touched yet come in huge pages when it is."""
    start, length = _whole_pages(address, address + num_bytes)
    if length > 0 and _MAPS.exists():
        libc = ctypes.CDLL(None)
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _MADV_HUGEPAGE)


def collapse_to_huge_pages() -> int:
    """Move all large anonymous memory of this process to huge pages; return the bytes moved.

    Call it after weights are in their final place, and before memory is reserved that should stay
    untouched until used: what lies in the ranges becomes resident.
    """
    if not _MAPS.exists():
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    moved = 0
    for line in _MAPS.read_text().splitlines():
        extent, permissions, _, _, inode, *name = line.split(maxsplit=5)
        if not permissions.startswith("rw-p") or inode != "0" or name not in ([], ["[heap]"]):
            continue
        first, _, last = extent.partition("-")
        start, length = _whole_pages(int(first, 16), int(last, 16))
        if length <= 0:
            continue
        address, size = ctypes.c_void_p(start), ctypes.c_size_t(length)
        if libc.madvise(address, size, _MADV_HUGEPAGE) != 0:
            continue
        if libc.madvise(address, size, _MADV_COLLAPSE) == 0:
            moved += length
    logger.debug("%.0f MB lie in huge pages", moved / 1e6)
    return moved


def _whole_pages(start: int, end: int) -> tuple[int, int]:
    """Return start and length of the whole huge pages in a range; the length may be negative."""
    start = -(-start // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    return start, (end - start) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
