"""Every command that is a client reaches what is locked, by the same flags, and is refused without.

One toy pair: its orchestrator speaks mutual TLS alone, its gateway wants a key, and before that
stands an ingress with a certificate of the company's own authority.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import tarfile
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import httpx
import pytest

from helpers.pair import TARGET, engine, is_ready
from helpers.waiting import eventually
from specserve import cli
from specserve.config import OrchestratorConfig, ServerConfig, TargetConfig
from specserve.gateway.api_keys import KeyRing, make_key
from specserve.gateway.config import GatewayConfig
from specserve.gateway.grpc_backend import GrpcBackend
from specserve.gateway.server import serve_gateway
from specserve.model.tokenizer import load_tokenizer
from specserve.orchestrator.server import start_orchestrator
from specserve.rpc.tls import MutualTls
from specserve.target.server import start_target
from support.certificates import Authority, SecretVolume

pytestmark = pytest.mark.slow


@dataclass(frozen=True, slots=True)
class Locked:
    """Where everything is, and what opens it."""

    url: str
    orchestrator: str
    key_file: Path
    tls_dir: Path
    key: str


async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()
    writer.close()


@contextlib.asynccontextmanager
async def ingress(folder: Path, authority: Authority, host: str, port: int) -> AsyncIterator[str]:
    """Stand before a gateway as an ingress does: TLS to clients, clear text behind."""
    certificate, key = authority.sign(["localhost"])
    (folder / "ingress.crt").write_bytes(certificate)
    (folder / "ingress.key").write_bytes(key)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(folder / "ingress.crt", folder / "ingress.key")

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        behind = await asyncio.open_connection(host, port)
        await asyncio.gather(_pipe(reader, behind[1]), _pipe(behind[0], writer))

    async with await asyncio.start_server(take, "127.0.0.1", 0, ssl=context) as server:
        yield f"https://localhost:{server.sockets[0].getsockname()[1]}"


@contextlib.asynccontextmanager
async def locked_pair(folder: Path) -> AsyncIterator[Locked]:
    authority = Authority()
    volume = SecretVolume(folder / "tls")
    volume.issue(authority)
    text, key = make_key("alice")
    (folder / "keys").write_text(KeyRing([key]).text())
    (folder / "key").write_text(text)
    (folder / "authority.crt").write_bytes(authority.pem)
    server = ServerConfig(tls_dir=str(volume.folder))
    target = await start_target(TargetConfig(engine=engine(TARGET), server=server))
    orchestrator = await start_orchestrator(
        OrchestratorConfig.model_validate(
            {
                "speculative": {"method": "ngram"},
                "target_addresses": (target.address,),
                "server": server,
            }
        )
    )
    listening: asyncio.Future[tuple[str, int]] = asyncio.get_running_loop().create_future()
    config = GatewayConfig(port=0, api_key_file=str(folder / "keys"))
    backend = GrpcBackend([orchestrator.address], tls=MutualTls.of(server))
    serving = asyncio.create_task(
        serve_gateway(
            config, backend, load_tokenizer(engine(TARGET)), lambda *at: listening.set_result(at)
        )
    )
    try:
        await eventually(lambda: is_ready(orchestrator), "the pair is ready", within_s=60)
        async with ingress(folder, authority, *await listening) as url:
            yield Locked(url, orchestrator.address, folder / "key", volume.folder, text)
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        await orchestrator.stop()
        await target.stop()


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Locked]:
    """Serve in a thread: commands have loops and signals of their own."""
    folder = tmp_path_factory.mktemp("locked")
    up: list[Locked] = []
    ready, done = threading.Event(), threading.Event()

    async def serve() -> None:
        async with locked_pair(folder) as pair:
            up.append(pair)
            ready.set()
            await asyncio.to_thread(done.wait)

    def run() -> None:
        try:
            asyncio.run(serve())
        finally:
            ready.set()

    thread = threading.Thread(target=run)
    thread.start()
    ready.wait(120)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("SSL_CERT_FILE", str(folder / "authority.crt"))
        try:
            assert up, "the pair did not come up"
            yield up[0]
        finally:
            done.set()
            thread.join(60)


FEW = ["--num-prompts=1", "--max-tokens=4"]
TOKENIZER = f"--target={TARGET}"

BY_URL = {
    "chat": ["--message=hi", "--max-tokens=4"],
    "trace": [],
    "load": ["--rate=40", "--duration-s=0.1", "--warm-up=0", *FEW],
    "bench": ["--suite=serving", "--no-padding", "--pairs=1", *FEW],
    "verify": ["--suite=parity", "--num-prompts=1", "--max-tokens=64"],
    "support-bundle": ["--no-doctor", "--output=NEW"],
    "doctor": [],
}
URL_FLAG = {"doctor": "--running"}
"""Where a gateway is not named by --url."""

BY_ADDRESS = {
    "speculation": [],
    "trace": [],
    "load": [*BY_URL["load"], TOKENIZER],
    "bench": [*BY_URL["bench"], TOKENIZER],
    "verify": [*BY_URL["verify"], "--no-record"],
    "support-bundle": BY_URL["support-bundle"],
}


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., int]:
    """Run a command; where its words say NEW, it is given a name that is not taken."""
    number = count()

    def run_command(*words: str) -> int:
        return cli.main([word.replace("NEW", f"{tmp_path}/{next(number)}") for word in words])

    return run_command


def test_every_client_is_tried() -> None:
    """A command that names a gateway or an orchestrator is one of those below."""
    servers = {"gateway", "serve", "demo", "draft", "target", "orchestrator"}
    found: dict[str, set[str]] = {"--api-key-from": set(), "--tls-dir": set()}
    for name in cli.COMMANDS:
        if name in servers or name == "distill":
            continue  # the parser of distill takes torch along, and it asks nobody
        flags = cli.parser_of(name)._option_string_actions.keys()
        for flag, names in found.items():
            if flag in flags:
                names.add(name)
        assert not {"--url", "--running"} & flags or name in found["--api-key-from"]
        assert "--orchestrator-address" not in flags or name in found["--tls-dir"]

    assert found == {"--api-key-from": {*BY_URL}, "--tls-dir": {*BY_ADDRESS}}


@pytest.mark.parametrize("name", BY_URL)
def test_client_of_a_gateway_shows_its_key(
    name: str, locked: Locked, run: Callable[..., int], capfd: pytest.CaptureFixture[str]
) -> None:
    """Over HTTPS, with an authority of one's own; the key is told nowhere."""
    words = [name, f"{URL_FLAG.get(name, '--url')}={locked.url}", *BY_URL[name]]

    code = run(*words, f"--api-key-from={locked.key_file}")
    told = capfd.readouterr()
    refused = run(*words)
    complaint = capfd.readouterr()

    # The doctor may well find a problem, in a pair whose requests are a few tokens long.
    assert code in ((0, 1) if name == "doctor" else (0, 3, 4)), told.err
    assert "key" not in told.err
    assert refused != 0
    assert "401" in complaint.err + complaint.out or "key" in complaint.err
    assert locked.key not in json.dumps([*told, *complaint])


@pytest.mark.parametrize("name", BY_ADDRESS)
def test_client_of_an_orchestrator_shows_its_certificate(
    name: str, locked: Locked, run: Callable[..., int], capfd: pytest.CaptureFixture[str]
) -> None:
    words = [name, f"--orchestrator-address={locked.orchestrator}", *BY_ADDRESS[name]]

    code = run(*words, f"--tls-dir={locked.tls_dir}")

    assert code in (0, 3, 4), capfd.readouterr().err


@pytest.mark.parametrize("name", sorted({*BY_URL} & {*BY_ADDRESS}))
def test_flags_of_the_other_way_are_refused(
    name: str, run: Callable[..., int], capfd: pytest.CaptureFixture[str]
) -> None:
    """A key that nobody is shown, or certificates that nobody asks for, are told of."""
    url, address = "--url=http://x", "--orchestrator-address=x:1"
    wrong = [
        ([url, "--tls-dir=y"], "--tls-dir: goes with"),
        ([address, "--api-key-from=y"], "--api-key-from: goes with"),
    ]
    if name != "support-bundle":  # it asks both
        wrong.append(([url, address], "--url: leave it out"))
    for words, complaint in wrong:
        assert run(name, *words, *BY_ADDRESS[name]) == 2
        assert complaint in capfd.readouterr().err


MARKER = "marker9c41"


def test_a_bundle_holds_neither_secrets_nor_text(
    locked: Locked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Callable[..., int]
) -> None:
    """From everything at once, after a request with a marker, with secrets planted all around."""
    monkeypatch.setenv("RAY_AUTH_TOKEN", "ray-token-planted")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=planted-header")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://user:planted-password@collector:4317")
    monkeypatch.setenv("NOBODY_KNOWS", "planted-elsewhere")
    monkeypatch.setenv("HF_HOME", "/home/ray-token-planted/hub")
    settings = tmp_path / "specserve.yaml"
    settings.write_text(
        f"target: {{model: '{TARGET}'}}\n"
        "speculative: {method: ngram}\n"
        f"server: {{tls_dir: {locked.tls_dir}}}\n"
        f"gateway: {{port: 0, api_key_file: {locked.key_file.with_name('keys')}}}\n"
    )
    with httpx.Client(
        base_url=locked.url,
        headers={"authorization": f"Bearer {locked.key}"},
        verify=ssl.create_default_context(cafile=locked.key_file.with_name("authority.crt")),
    ) as client:
        body = {"prompt": MARKER, "max_tokens": 40, "ignore_eos": True, "return_token_ids": True}
        choice = client.post("/v1/completions", json=body).json()["choices"][0]
    bundle = tmp_path / "bundle.tar.gz"

    code = run(
        *("support-bundle", f"--output={bundle}", f"--config={settings}", f"--url={locked.url}"),
        *(f"--api-key-from={locked.key_file}", f"--orchestrator-address={locked.orchestrator}"),
        *(f"--tls-dir={locked.tls_dir}", f"--metrics-url={locked.url}/metrics"),
    )

    files = read_bundle(bundle)
    assert code == 1  # of a gateway's own /metrics the bare URL gets a 401
    everything = "\n".join(files.values())
    key_file = locked.key_file.with_name("keys").read_text().split()
    tokens = ", ".join(map(str, choice["token_ids"][:6]))
    for secret in (
        *(MARKER, choice["text"], tokens, tokens.replace(" ", "")),
        *(locked.key, *key_file[-2:], "BEGIN", "planted"),
        (locked.tls_dir / "tls.key").read_text().splitlines()[1],
    ):
        assert len(secret) > 4
        assert secret not in everything, secret
    assert bundle.stat().st_mode & 0o077 == 0
    # And it helps: each part is there and says what is asked of it.
    assert json.loads(files["settings.json"])["target"]["model"] == TARGET
    assert json.loads(files["environment.json"])["HF_HOME"] == "/home/[redacted]/hub"
    assert "1 keys of 1 tenants" in files["secret-files.json"]
    assert {check["name"] for check in json.loads(files["doctor.json"])} >= {"python", "pair"}
    assert "specserve_num_requests" in files["gateway/metrics.txt"]
    assert json.loads(files["gateway/pool.json"])["replicas"][0]["role"] == "target"
    assert {check["name"] for check in json.loads(files["gateway/doctor.json"])["checks"]}
    for name in ("gateway", "orchestrator-1"):
        (view, *_) = json.loads(files[f"{name}/requests.json"])
        assert view["rounds"][0]["num_emitted_tokens"] > 0
    assert json.loads(files["orchestrator-1/status.json"])["pair"]["target"]["modelId"] == TARGET
    assert set(json.loads(files["versions.json"])) >= {"protocol", "versions", "packages"}
    for name in files:
        assert name == "contents.txt" or name in files["contents.txt"]
    assert "metrics-1.txt" in files["contents.txt"]
    assert "--api-key-from" in files["contents.txt"]


def read_bundle(path: Path) -> dict[str, str]:
    """Read every file of a bundle."""
    with tarfile.open(path) as archive:
        found = {}
        for member in archive.getmembers():
            file = archive.extractfile(member)
            assert file is not None
            found[member.name.partition("/")[2]] = file.read().decode()
    return found
