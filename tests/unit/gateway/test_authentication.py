"""With keys on, nobody gets past without one, whatever path they take."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from specserve.errors import ConfigurationError
from specserve.gateway import authentication
from specserve.gateway.api_keys import ApiKey, KeyRing, load_keys, make_key, parse_keys
from specserve.gateway.config import GatewayConfig
from specserve.gateway.console import console_paths
from specserve.gateway.http import create_http_app
from specserve.gateway.metrics import GatewayMetrics
from specserve.gateway.tenants import resolve_tenant
from specserve.rpc.reloading import Reloading
from unit.gateway.fakes import ByteTokenizer, FakeBackend, make_app, make_client
from unit.gateway.test_server import gateway

COMPLETIONS = "/v1/completions"
BODY = {"prompt": "hi"}


class Keys:
    """A file with the keys of two tenants."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "keys"
        self.texts: dict[str, str] = {}
        self._ring: list[ApiKey] = []
        self.add("alice", "red")
        self.add("bob", "blue")

    def add(self, name: str, tenant: str) -> None:
        self.texts[name], key = make_key(name, tenant)
        self._ring.append(key)
        self.path.write_text(KeyRing(self._ring).text())

    def header(self, name: str = "alice") -> dict[str, str]:
        return {"authorization": f"Bearer {self.texts[name]}"}


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path)


@pytest.fixture
def looks_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at the file with every request, not once a second."""

    def reloading(*args: Any) -> Reloading[KeyRing]:
        return Reloading(*args, period_s=0)

    monkeypatch.setattr(authentication, "Reloading", reloading)


async def test_with_a_key_a_request_is_answered(keys: Keys) -> None:
    async with make_client(FakeBackend(), api_key_file=str(keys.path)) as client:
        answer = await client.post(COMPLETIONS, json=BODY, headers=keys.header())
        other_case = await client.post(
            COMPLETIONS, json=BODY, headers={"Authorization": f"bearer {keys.texts['bob']}"}
        )

    assert (answer.status_code, other_case.status_code) == (200, 200)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda _: {},
        lambda key: {"authorization": key},
        lambda key: {"authorization": f"Basic {key}"},
        lambda key: {"authorization": f"Bearer {key[:-1]}"},
        lambda key: {"authorization": f"Bearer {key}x"},
        lambda key: {"authorization": f"Bearer {key} {key}"},
        lambda key: {"authorization": f"Bearer {key.upper()}"},
        lambda _: {"authorization": "Bearer"},
        lambda _: {"authorization": "Bearer "},
        lambda _: {"authorization": "Bearer " + "x" * 10_000},
        lambda _: {"authorization": "Bearer \xff\xfe".encode("latin-1")},
        lambda key: [("authorization", f"Bearer {key}"), ("authorization", f"Bearer {key}")],
        lambda key: {"x-api-key": key},
        lambda key: {"cookie": f"authorization=Bearer {key}"},
    ],
)
async def test_without_the_right_key_it_is_a_401_in_openai_s_shape(keys: Keys, spoil: Any) -> None:
    backend = FakeBackend()
    async with make_client(backend, api_key_file=str(keys.path)) as client:
        answer = await client.post(COMPLETIONS, json=BODY, headers=spoil(keys.texts["alice"]))

    error = answer.json()["error"]
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"].startswith("Bearer")
    assert error["type"] == "invalid_request_error"
    assert error["code"] in ("missing_api_key", "invalid_api_key")
    assert keys.texts["alice"] not in answer.text
    assert backend.requests == []


async def test_b244_every_route_wants_a_key_but_the_probes_and_the_page(keys: Keys) -> None:
    """B244: whatever is routed, documented or not; a probe has no key, a page's file no secret."""
    app = make_app(FakeBackend(), api_key_file=str(keys.path))
    paths = {getattr(route, "path", "") for route in app.routes}
    assert {"/v1/completions", "/v1/chat/completions", "/v1/models", "/tokenize"} <= paths
    statuses: dict[str, set[int]] = {}
    async with make_client(FakeBackend(), app) as client:
        for path in paths:
            for method in ("GET", "POST", "HEAD", "OPTIONS", "DELETE"):
                answer = await client.request(method, path.replace("{name:path}", "x"))
                statuses.setdefault(path, set()).add(answer.status_code)

    open_to_all = {path for path, seen in statuses.items() if seen != {401}}
    assert open_to_all == {"/health", "/ready"} | console_paths()


@pytest.mark.parametrize(
    "path",
    [
        "//v1/completions",
        "/V1/completions",
        "/v1/../v1/completions",
        "/v1/completions/",
        "/health/../v1/completions",
        "/health//v1/completions",
        "/health%2f..%2fv1/completions",
        "/ready/",
        "/HEALTH",
        "/health;/v1/completions",
        "/-/routes",
        "/metrics",
        "/openapi.json",
        "/docs",
        "*",
    ],
)
async def test_b245_another_spelling_is_closed_too(keys: Keys, path: str) -> None:
    """B245: what is not exactly an open path wants a key, be it routed or not."""
    app = make_app(FakeBackend(), api_key_file=str(keys.path))
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [],
    }
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    await app(scope, receive, send)

    assert sent[0]["status"] == 401


async def test_a_websocket_is_closed(keys: Keys) -> None:
    app = make_app(FakeBackend(), api_key_file=str(keys.path))
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "websocket", "path": COMPLETIONS, "headers": [], "root_path": ""}
    await app(scope, None, send)  # type: ignore[arg-type]

    assert sent == [{"type": "websocket.close", "code": 1008}]


async def test_metrics_can_be_opened(keys: Keys) -> None:
    async with make_client(
        FakeBackend(), api_key_file=str(keys.path), metrics_without_key=True
    ) as client:
        answer = await client.get("/metrics")

    assert answer.status_code == 200
    assert "specserve_requests_unauthorized" in answer.text


async def test_a_large_body_without_a_key_is_refused_before_it_is_read(keys: Keys) -> None:
    """Over a real socket: the client sees the 401, and the server holds nothing."""
    async with (
        gateway(FakeBackend(), api_key_file=str(keys.path)) as running,
        httpx.AsyncClient(base_url=running.url) as client,
    ):
        answer = await client.post(COMPLETIONS, content=bytes(10_000_000))

    assert answer.status_code == 401


@pytest.mark.usefixtures("looks_always")
async def test_keys_come_and_go_without_a_restart(keys: Keys) -> None:
    async with make_client(FakeBackend(), api_key_file=str(keys.path)) as client:
        keys.add("carol", "red")
        new = await client.post(COMPLETIONS, json=BODY, headers=keys.header("carol"))
        left = [key for key in load_keys(str(keys.path)).keys if key.name != "alice"]
        keys.path.write_text(KeyRing(left).text())
        revoked = await client.post(COMPLETIONS, json=BODY, headers=keys.header("alice"))
        kept = await client.post(COMPLETIONS, json=BODY, headers=keys.header("carol"))

    assert [answer.status_code for answer in (new, revoked, kept)] == [200, 401, 200]


@pytest.mark.usefixtures("looks_always")
async def test_a_broken_file_keeps_the_old_keys_and_says_so(
    keys: Keys, caplog: pytest.LogCaptureFixture
) -> None:
    """A key in clear text, put there by mistake, is not repeated in the log."""
    metrics = GatewayMetrics()
    app = make_app(FakeBackend(), metrics, api_key_file=str(keys.path))
    with caplog.at_level(logging.INFO):
        async with make_client(FakeBackend(), app) as client:
            keys.path.write_text("sk-in-clear-text\n")
            kept = await client.post(COMPLETIONS, json=BODY, headers=keys.header())
            refused = await client.post(
                COMPLETIONS, json=BODY, headers={"authorization": "Bearer sk-in-clear-text"}
            )

    assert (kept.status_code, refused.status_code) == (200, 401)
    assert "specserve_api_key_file_failing 1.0" in metrics.render().decode()
    assert "line 1" in caplog.text
    assert "sk-in-clear-text" not in caplog.text


async def test_b251_no_key_gets_into_a_log(keys: Keys, caplog: pytest.LogCaptureFixture) -> None:
    """B251: right or wrong, at the debug level too, errors included."""
    backend = FakeBackend(lambda _: [RuntimeError("broken")])
    with caplog.at_level(logging.DEBUG):
        async with make_client(backend, api_key_file=str(keys.path)) as client:
            await client.post(COMPLETIONS, json=BODY, headers=keys.header())
            await client.post(
                COMPLETIONS, json=BODY, headers={"authorization": "Bearer sk-wrong-canary"}
            )

    assert keys.texts["alice"] not in caplog.text
    assert "canary" not in caplog.text


async def test_the_key_s_tenant_salts_what_the_backend_is_asked(keys: Keys) -> None:
    backend = FakeBackend()
    async with make_client(backend, api_key_file=str(keys.path)) as client:
        for name in ("alice", "bob"):
            await client.post(
                COMPLETIONS,
                json=BODY,
                # What the client itself says of its tenant has no say.
                headers={**keys.header(name), "x-tenant": "blue", "x-specserve-tenant": "blue"},
            )

    config = GatewayConfig()
    wanted = [resolve_tenant({}, config, name).salt for name in ("red", "blue")]
    assert [request.tenant_salt for request in backend.requests] == wanted
    assert len({*wanted, b""}) == 3
    with pytest.raises(ValidationError, match="tenant_header has no say"):
        GatewayConfig(api_key_file="keys", tenant_header="x-tenant")


async def test_limits_are_those_of_the_key_s_tenant(keys: Keys) -> None:
    """Two keys of one tenant share what it may have; another tenant has its own."""
    keys.add("carol", "red")
    options = {"api_key_file": str(keys.path), "limits": {"requests_per_minute": 1}}
    async with make_client(FakeBackend(), **options) as client:
        answers = [
            await client.post(COMPLETIONS, json=BODY, headers=keys.header(name))
            for name in ("alice", "carol", "bob")
        ]

    assert [answer.status_code for answer in answers] == [200, 429, 200]


async def test_without_keys_everybody_is_the_common_tenant() -> None:
    backend = FakeBackend()
    async with make_client(backend) as client:
        answer = await client.post(COMPLETIONS, json=BODY, headers={"authorization": "Bearer x"})

    assert answer.status_code == 200
    assert backend.requests[0].tenant_salt == b""


def test_a_key_is_kept_as_a_hash_and_found_by_itself_alone() -> None:
    text, key = make_key("alice")
    other_text, other = make_key("bob")
    ring = parse_keys(KeyRing([key, other]).text(), "keys")

    assert text not in ring.text()
    assert (key.tenant, other.tenant) == ("alice", "bob")
    assert ring.find(text.encode()) == key
    assert ring.find(other_text.encode()) == other
    assert ring.find(b"") is None
    assert ring.find(key.digest.hex().encode()) is None


def test_every_key_is_compared_whichever_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the place of a key in the file nor a right beginning shows in the time."""
    pairs = [make_key(f"key{number}") for number in range(5)]
    ring = KeyRing([key for _, key in pairs])
    compared: list[int] = []

    class Watched:
        @staticmethod
        def compare_digest(a: bytes, b: bytes) -> bool:
            compared.append(len(a))
            return a == b

    monkeypatch.setattr("specserve.gateway.api_keys.hmac", Watched)
    for given in (pairs[0][0], pairs[4][0], "sk-wrong"):
        ring.find(given.encode())

    assert compared == [32] * 15


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("sk-specserve-abc\n", "line 1 is no line"),
        ("a a sha256 00 00\n", "line 1 is no line"),
        ("# fine\na a md5 " + "0" * 32 + " " + "0" * 64, "line 2 is no line"),
        ("a/b a sha256 " + "0" * 32 + " " + "0" * 64, "line 1 is no line"),
        (("a a sha256 " + "0" * 32 + " " + "0" * 64 + "\n") * 2, "a is there twice"),
    ],
)
def test_a_file_that_is_wrong_is_refused_at_start(
    tmp_path: Path, text: str, complaint: str
) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    config = GatewayConfig(api_key_file=str(path))

    with pytest.raises(ConfigurationError, match=complaint):
        create_http_app(FakeBackend(), ByteTokenizer(), config)
    with pytest.raises(ConfigurationError, match="cannot be read"):
        create_http_app(
            FakeBackend(), ByteTokenizer(), GatewayConfig(api_key_file=str(tmp_path / "none"))
        )


async def test_a_file_without_keys_lets_nobody_in(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys"
    path.write_text("")
    async with make_client(FakeBackend(), api_key_file=str(path)) as client:
        answer = await client.post(COMPLETIONS, json=BODY, headers={"authorization": "Bearer "})

    assert answer.status_code == 401
    assert "holds no key" in caplog.text


async def test_health_answers_while_strangers_knock(keys: Keys) -> None:
    async with make_client(FakeBackend(), api_key_file=str(keys.path)) as client:
        answers = await asyncio.gather(
            *(client.post(COMPLETIONS, json=BODY) for _ in range(50)),
            client.get("/health"),
            client.get("/ready"),
        )

    assert [answer.status_code for answer in answers] == [401] * 50 + [200, 200]
