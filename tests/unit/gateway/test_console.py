"""The page's files, what they may do, and the pool they show."""

from __future__ import annotations

import json
import re
from pathlib import Path

from specserve.gateway import console
from specserve.gateway.api_keys import KeyRing, make_key
from specserve.rpc.v1 import common_pb2, generation_pb2
from specserve.rpc.v1.generation_pb2 import GetStatusResponse, ReplicaStatus
from unit.gateway.fakes import FakeBackend, make_client

PAGE = Path(console.__file__).parent / "page"


async def test_page_and_all_that_it_names_are_served_and_come_from_here_alone() -> None:
    async with make_client(FakeBackend()) as client:
        index = await client.get("/console")
        named = re.findall(r'(?:href|src)="([^"]+)"', index.text)
        assert len(named) == 3
        for path in named:
            assert (await client.get(f"/{path}")).status_code == 200
        assert "default-src 'none'" in index.headers["content-security-policy"]
        for source in PAGE.glob("*.js"):
            got = await client.get(f"/console/{source.name}")
            assert got.text == source.read_text()
            assert got.headers["content-type"].startswith("text/javascript")
            for imported in re.findall(r'from "\./([^"]+)"', got.text):
                assert (PAGE / imported).exists()
            assert "innerHTML" not in got.text, "text goes in as text"
        for path in ("/console/", "/console/index.html", "/console/../http.py", "/console/x.js"):
            assert (await client.get(path)).status_code == 404
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", _all_files())


async def test_switch_turns_it_off() -> None:
    async with make_client(FakeBackend(), console=False) as client:
        for path in ("/console", "/console/main.js", "/v1/specserve/pool"):
            assert (await client.get(path)).status_code == 404


async def test_page_needs_no_key_and_what_it_shows_does(tmp_path: Path) -> None:
    text, key = make_key("alice")
    (tmp_path / "keys").write_text(KeyRing([key]).text())
    async with make_client(FakeBackend(), api_key_file=str(tmp_path / "keys")) as client:
        assert (await client.get("/console")).status_code == 200
        assert (await client.get("/console/main.js")).status_code == 200
        assert (await client.get("/v1/specserve/pool")).status_code == 401
        client.headers["authorization"] = f"Bearer {text}"
        assert (await client.get("/v1/specserve/pool")).status_code == 200


async def test_pool_shows_each_replica_once_and_what_was_accepted() -> None:
    backend = FakeBackend()
    lost = ReplicaStatus(role="draft", replica_id="d-1", state="connecting")
    draft = ReplicaStatus(
        role="draft",
        replica_id="d-1",
        state="connected",
        load=common_pb2.Load(num_blocks=100, num_free_blocks=75, num_sessions=3, num_waiting=2),
    )
    target = ReplicaStatus(role="target", replica_id="t-1", state="draining")
    unknown = ReplicaStatus(role="target", address="10.1.2.3:7002", state="connecting")
    backend.statuses = [
        GetStatusResponse(
            orchestrator_id="o-1",
            num_running=4,
            replicas=[lost, target],
            speculation_mode=generation_pb2.SPECULATION_MODE_AUTO,
        ),
        GetStatusResponse(orchestrator_id="o-2", replicas=[draft, target, unknown]),
    ]
    async with make_client(backend) as client:
        await client.post("/v1/completions", json={"prompt": "hi"})
        view = (await client.get("/v1/specserve/pool")).json()
        scraped = (await client.get("/metrics")).text

    assert [(one["orchestrator_id"], one["speculation_mode"]) for one in view["orchestrators"]] == [
        ("o-1", "auto"),
        ("o-2", "unknown"),
    ]
    assert [(one["replica_id"], one["state"]) for one in view["replicas"]] == [
        ("d-1", "connected"),
        ("", "connecting"),
        ("t-1", "draining"),
    ]
    assert "10.1.2.3" not in json.dumps(view) + scraped
    assert view["replicas"][0] == {
        "role": "draft",
        "replica_id": "d-1",
        "state": "connected",
        "num_sessions": 3,
        "num_waiting": 2,
        "kv_cache_usage": 0.25,
    }
    assert (view["num_drafts"], view["num_draft_tokens"]) == (2, 6)
    assert view["num_accepted_draft_tokens"] == 3
    assert view["accepted_per_position"] == [2, 1, 0]


def _all_files() -> str:
    return "".join(path.read_text() for path in PAGE.iterdir())
