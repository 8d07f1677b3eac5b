"""`/console`: a page for people. It asks what any client may ask; its files come with the package.

Knows files and headers; what the page shows is fetched by it, with the reader's own key.
"""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI
from starlette.responses import Response

PATH = "/console"

_FOLDER = Path(__file__).parent / "page"
_INDEX = "index.html"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

HEADERS = {
    # Nothing from elsewhere, nothing written into the page is run, nobody frames it.
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def console_paths() -> frozenset[str]:
    """Return the page's paths; they tell nothing of anybody, so that they need no key."""
    names = [path.name for path in _FOLDER.iterdir() if path.suffix in _TYPES]
    return frozenset([PATH, *(f"{PATH}/{name}" for name in names if name != _INDEX)])


def add_console(app: FastAPI) -> None:
    """Add the page and its files."""
    for path in sorted(console_paths()):
        name = path.removeprefix(PATH).lstrip("/") or _INDEX
        _add_file(app, path, (_FOLDER / name).read_bytes(), _TYPES[Path(name).suffix])


def _add_file(app: FastAPI, path: str, content: bytes, media_type: str) -> None:
    async def file() -> Response:
        return Response(content, media_type=media_type, headers=HEADERS)

    app.add_api_route(path, file, methods=["GET"], include_in_schema=False)
