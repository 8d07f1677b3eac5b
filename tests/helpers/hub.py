"""A stand-in for the Hugging Face hub: the real client talks to it over HTTP.

Speaks what `huggingface_hub` asks for: a repository's files with their sizes and checksums, and
each file's content. Knows no model.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LFS_SUFFIX = ".safetensors"
NONSENSE = b'["please", "log", "in"]'


@dataclass(slots=True)
class Hub:
    """One repository."""

    repo_id: str
    files: Mapping[str, bytes]
    lies_about: str = ""
    """A file whose listed sha256 is another one's."""
    is_portal: bool = False
    """It answers every question with the same page, as the network of a hotel does."""
    asked: list[str] = field(default_factory=list)
    """Paths that were asked for."""
    url: str = ""

    def listing(self) -> dict[str, object]:
        """Give what the API tells of the repository."""
        siblings = []
        for name, data in self.files.items():
            entry: dict[str, object] = {"rfilename": name, "size": len(data), "blobId": _sha(data)}
            if name.endswith(LFS_SUFFIX):
                told = b"something else" if name == self.lies_about else data
                entry["lfs"] = {"sha256": _sha(told), "size": len(data), "pointerSize": 134}
            siblings.append(entry)
        return {"id": self.repo_id, "modelId": self.repo_id, "sha": COMMIT, "siblings": siblings}

    def tree(self) -> list[dict[str, object]]:
        """Give the same as a list of paths."""
        return [
            {"type": "file", "path": name, "size": len(data), "oid": _sha(data)}
            for name, data in self.files.items()
        ]


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """Serve a repository on a free port of this machine."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

        def _answer(self, *, with_body: bool) -> None:
            path = self.path.partition("?")[0]
            hub.asked.append(path)
            if path.startswith(f"/api/models/{hub.repo_id}"):
                told = hub.tree() if "/tree/" in path else hub.listing()
                body = NONSENSE if hub.is_portal else json.dumps(told).encode()
                self._send(body, {}, with_body=with_body)
                return
            name = path.removeprefix(f"/{hub.repo_id}/resolve/").partition("/")[2]
            if name not in hub.files:
                self.send_response(404)
                self.send_header("X-Error-Code", "EntryNotFound")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            data = hub.files[name]
            headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{_sha(data)}"'}
            self._send(data, headers, with_body=with_body)

        def _send(self, data: bytes, headers: dict[str, str], *, with_body: bool) -> None:
            self.send_response(200)
            for name, value in (*headers.items(), ("Content-Length", str(len(data)))):
                self.send_header(name, value)
            self.end_headers()
            if with_body:
                self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
