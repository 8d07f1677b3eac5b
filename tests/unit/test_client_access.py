"""Commands that are clients of a gateway with keys: the key comes from a file."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from specserve import cli
from specserve.errors import ConfigurationError
from specserve.gateway.api_keys import KeyRing, make_key
from specserve.tools.bench.http import reached_by_url
from specserve.tools.client_access import add_key_flag, key_headers
from specserve.tools.flags import Parser
from unit.gateway.fakes import FakeBackend
from unit.gateway.test_server import gateway


def headers_of(*words: str) -> dict[str, str]:
    parser = Parser("test", "")
    add_key_flag(parser)
    return key_headers(parser.parse(words).api_key_from)


async def test_the_key_of_the_file_is_sent(tmp_path: Path) -> None:
    text, key = make_key("alice")
    (tmp_path / "keys").write_text(KeyRing([key]).text())
    (tmp_path / "key").write_text(text + "\n")
    async with gateway(FakeBackend(), api_key_file=str(tmp_path / "keys")) as running:
        headers = headers_of(f"--api-key-from={tmp_path / 'key'}")
        async with httpx.AsyncClient(base_url=running.url, headers=headers) as client:
            with_key = await client.get("/v1/models")
        async with reached_by_url("system", running.url, headers) as system:
            facts = system.facts
        async with httpx.AsyncClient(base_url=running.url, headers=headers_of()) as client:
            without = await client.get("/v1/models")

    assert (with_key.status_code, without.status_code) == (200, 401)
    assert text not in str(facts)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "holds no key"),
        (b"two words", "holds no key"),
        (b"\xff", "no UTF-8"),
        (None, "No such"),
    ],
)
def test_a_file_without_a_key_is_told(
    tmp_path: Path, content: bytes | None, complaint: str
) -> None:
    path = tmp_path / "key"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigurationError, match=complaint):
        headers_of(f"--api-key-from={path}")


def test_a_key_for_nobody_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["chat", "--api-key-from=key"]) == 2
    assert "goes with --url" in capsys.readouterr().err
