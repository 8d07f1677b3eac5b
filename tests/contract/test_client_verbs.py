"""Every command that is a client reaches what is locked, by the same flags, and is refused without.

One toy pair: its orchestrator speaks mutual TLS alone, its gateway wants a key, and before that
stands an ingress with a certificate of the company's own authority.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

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
}
BY_ADDRESS = {
    "speculation": [],
    "trace": [],
    "load": [*BY_URL["load"], TOKENIZER],
    "bench": [*BY_URL["bench"], TOKENIZER],
    "verify": [*BY_URL["verify"], "--no-record"],
}


def test_every_client_is_tried() -> None:
    """A command that names a gateway or an orchestrator is one of those below."""
    servers = {"gateway", "serve"}
    found: dict[str, set[str]] = {"--url": set(), "--orchestrator-address": set()}
    for name in cli.COMMANDS:
        if name == "distill":
            continue  # its parser takes torch along, and it asks nobody
        flags = cli.parser_of(name)._option_string_actions
        for flag, names in found.items():
            if flag in flags and name not in servers:
                names.add(name)
                assert ("--api-key-from" if flag == "--url" else "--tls-dir") in flags, name

    assert found == {"--url": {*BY_URL}, "--orchestrator-address": {*BY_ADDRESS}}


@pytest.mark.parametrize("name", BY_URL)
def test_client_of_a_gateway_shows_its_key(
    name: str, locked: Locked, capfd: pytest.CaptureFixture[str]
) -> None:
    """Over HTTPS, with an authority of one's own; the key is told nowhere."""
    words = [name, f"--url={locked.url}", *BY_URL[name]]

    code = cli.main([*words, f"--api-key-from={locked.key_file}"])
    told = capfd.readouterr()
    refused = cli.main(words)
    complaint = capfd.readouterr()

    assert code in (0, 3, 4), told.err
    assert refused not in (0, 2)
    assert "401" in complaint.err + complaint.out or "key" in complaint.err
    assert locked.key not in json.dumps([*told, *complaint])


@pytest.mark.parametrize("name", BY_ADDRESS)
def test_client_of_an_orchestrator_shows_its_certificate(
    name: str, locked: Locked, capfd: pytest.CaptureFixture[str]
) -> None:
    words = [name, f"--orchestrator-address={locked.orchestrator}", *BY_ADDRESS[name]]

    code = cli.main([*words, f"--tls-dir={locked.tls_dir}"])

    assert code in (0, 3, 4), capfd.readouterr().err


@pytest.mark.parametrize("name", sorted({*BY_URL} & {*BY_ADDRESS}))
def test_flags_of_the_other_way_are_refused(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    """A key that nobody is shown, or certificates that nobody asks for, are told of."""
    url, address = "--url=http://x", "--orchestrator-address=x:1"
    for words, complaint in (
        ([url, "--tls-dir=y"], "--tls-dir: goes with"),
        ([address, "--api-key-from=y"], "--api-key-from: goes with"),
        ([url, address], "--url: leave it out"),
    ):
        assert cli.main([name, *words, *BY_ADDRESS[name]]) == 2
        assert complaint in capfd.readouterr().err
