"""Every gRPC link under mutual TLS: peers get in, strangers do not, certificates are replaced."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from helpers.pair import DRAFT, TARGET, engine, greedy_tokens, is_ready, make_request
from helpers.waiting import eventually
from specserve.config import (
    DraftConfig,
    OrchestratorConfig,
    ServerConfig,
    TargetConfig,
)
from specserve.draft.server import start_draft
from specserve.errors import ConfigurationError
from specserve.gateway.grpc_backend import GrpcBackend
from specserve.orchestrator.server import RunningOrchestrator, start_orchestrator
from specserve.rpc import reloading
from specserve.rpc.channel import open_channel
from specserve.rpc.codec import unpack_ids
from specserve.rpc.tls import MutualTls, load_certificates
from specserve.rpc.v1 import common_pb2, target_pb2_grpc
from specserve.target.server import start_target
from specserve.tools.generation_client import GenerationClient
from specserve.tools.speculation import ask_all
from support.certificates import NAME, Authority, SecretVolume


@pytest.fixture
def looks_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at the files with every handshake, not once a second."""
    init = reloading.Reloading.__init__

    def always(self: Any, *args: Any, **options: Any) -> None:
        init(self, *args, **{**options, "period_s": 0})

    monkeypatch.setattr(reloading.Reloading, "__init__", always)


@pytest.fixture
def authority() -> Authority:
    return Authority()


@pytest.fixture
def volume(tmp_path: Path, authority: Authority) -> SecretVolume:
    """What all services of one deployment mount."""
    volume = SecretVolume(tmp_path / "tls")
    volume.issue(authority)
    return volume


class Secured:
    """A toy pair whose every link is mutual TLS, and a gateway's end of it."""

    def __init__(self, services: dict[str, Any], backend: GrpcBackend) -> None:
        self.services = services
        self.backend = backend

    @property
    def orchestrator(self) -> RunningOrchestrator:
        found = self.services["orchestrator"]
        assert isinstance(found, RunningOrchestrator)
        return found

    async def tokens(self, num_tokens: int = 24) -> list[int]:
        """Decode as a gateway does."""
        found: list[int] = []
        async for response in self.backend.generate(make_request(max_tokens=num_tokens)):
            found += unpack_ids(response.token_ids, "token_ids")
        return found


@asynccontextmanager
async def secured(volume: SecretVolume) -> AsyncIterator[Secured]:
    """Start target, draft and orchestrator."""
    server = ServerConfig(tls_dir=str(volume.folder))
    target = await start_target(TargetConfig(engine=engine(TARGET), server=server))
    draft = await start_draft(DraftConfig(engine=engine(DRAFT), server=server))
    orchestrator = await start_orchestrator(
        OrchestratorConfig.model_validate(
            {
                "speculative": {"model": "draft"},
                "target_addresses": (target.address,),
                "draft_addresses": (draft.address,),
                "server": server,
                "draft_timeout_s": 5.0,
                "heartbeat_s": 0.2,
            }
        )
    )
    backend = GrpcBackend([orchestrator.address], tls=MutualTls.of(server))
    services = {"target": target, "draft": draft, "orchestrator": orchestrator}
    try:
        await eventually(lambda: is_ready(orchestrator), "the pair is ready", within_s=60)
        yield Secured(services, backend)
    finally:
        await backend.close()
        await orchestrator.stop()
        await draft.stop()
        await target.stop()


async def refusal(address: str, channel: grpc.aio.Channel) -> grpc.StatusCode:
    """Return how a server ends a call that anybody might make."""
    async with channel:
        try:
            await health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=60
            )
        except grpc.aio.AioRpcError as error:
            return error.code()
    raise AssertionError(f"{address} answered")


async def test_b247_a_request_goes_through_and_strangers_do_not(
    volume: SecretVolume, authority: Authority
) -> None:
    """B247: tokens are those without TLS; each internal port refuses whoever is none of ours."""
    other = Authority("other")
    certificate, key = other.sign()
    async with secured(volume) as pair:
        assert await pair.tokens() == greedy_tokens(TARGET, (5, 6, 7), 24)
        address = pair.orchestrator.address
        (state,) = await ask_all([address], None, pair.backend._pool._tls)
        (refused,) = await ask_all([address], None)
        assert not isinstance(state, str)
        assert "UNAVAILABLE" in str(refused)
        async with GenerationClient(address, tls=pair.backend._pool._tls) as client:
            assert (await client.wait_ready(timeout_s=30)).ready
        for service in pair.services.values():
            address = service.address
            clear = grpc.aio.insecure_channel(address)
            assert await refusal(address, clear) is grpc.StatusCode.UNAVAILABLE
            options = [("grpc.ssl_target_name_override", NAME)]
            for shown in (
                grpc.ssl_channel_credentials(authority.pem),
                grpc.ssl_channel_credentials(authority.pem, key, certificate),
            ):
                channel = grpc.aio.secure_channel(address, shown, options=options)
                assert await refusal(address, channel) is grpc.StatusCode.UNAVAILABLE
        assert await pair.tokens() == greedy_tokens(TARGET, (5, 6, 7), 24)


async def test_a_certificate_of_another_name_calls_nothing(
    volume: SecretVolume, authority: Authority
) -> None:
    """A company's authority signs for others too: theirs is a handshake, and no call."""
    certificate, key = authority.sign(["billing.internal"])
    credentials = grpc.ssl_channel_credentials(authority.pem, key, certificate)
    options = [("grpc.ssl_target_name_override", NAME)]
    async with secured(volume) as pair:
        for role, service in pair.services.items():
            address = service.address
            channel = grpc.aio.secure_channel(address, credentials, options=options)
            assert await refusal(address, channel) is grpc.StatusCode.PERMISSION_DENIED
            if role != "target":
                continue
            async with grpc.aio.secure_channel(address, credentials, options=options) as channel:
                stub = target_pb2_grpc.TargetServiceStub(channel)
                with pytest.raises(grpc.aio.AioRpcError, match="PERMISSION_DENIED"):
                    await stub.GetModel(common_pb2.GetModelRequest())
                with pytest.raises(grpc.aio.AioRpcError, match="PERMISSION_DENIED"):
                    await stub.Verify().read()


async def test_a_client_refuses_a_server_of_another_name(
    tmp_path: Path, authority: Authority
) -> None:
    """Whoever answers at the address must be one of ours, or it would read every prompt."""
    theirs, ours = SecretVolume(tmp_path / "theirs"), SecretVolume(tmp_path / "ours")
    theirs.issue(authority, ["billing.internal"])
    ours.issue(authority)
    server = ServerConfig(tls_dir=str(theirs.folder), tls_server_name="billing.internal")
    target = await start_target(TargetConfig(engine=engine(TARGET), server=server))
    try:
        channel = open_channel(target.address, MutualTls(ours.folder, NAME))
        assert await refusal(target.address, channel) is grpc.StatusCode.UNAVAILABLE
    finally:
        await target.stop()


async def test_without_a_name_the_host_that_is_dialled_is_checked(
    tmp_path: Path, authority: Authority
) -> None:
    """For certificates with a name per pod."""
    volume = SecretVolume(tmp_path / "tls")
    volume.issue(authority, ["localhost"])
    server = ServerConfig(tls_dir=str(volume.folder), tls_server_name="", host="localhost")
    target = await start_target(TargetConfig(engine=engine(TARGET), server=server))
    try:
        port = target.address.rpartition(":")[2]
        async with open_channel(f"localhost:{port}", MutualTls(volume.folder, "")) as channel:
            stub = target_pb2_grpc.TargetServiceStub(channel)
            assert (await stub.GetModel(common_pb2.GetModelRequest())).vocab_size == 48
        by_number = open_channel(f"127.0.0.1:{port}", MutualTls(volume.folder, ""))
        assert await refusal(target.address, by_number) is grpc.StatusCode.UNAVAILABLE
    finally:
        await target.stop()


@pytest.mark.usefixtures("looks_always")
async def test_certificates_are_replaced_under_a_live_stream(
    volume: SecretVolume, authority: Authority
) -> None:
    """The stream goes on; whoever dials afterwards shows the new, and the old is refused."""
    new = Authority("new")
    old = MutualTls(volume.folder, NAME)
    old_files = load_certificates(volume.folder)
    async with secured(volume) as pair:
        stream = pair.backend.generate(make_request(max_tokens=400))
        found: list[int] = []
        replaced = False
        async for response in stream:
            found += unpack_ids(response.token_ids, "token_ids")
            if not replaced and len(found) >= 20:
                replaced = True
                volume.issue(new)
                # Another request of the same gateway, which dials anew; both streams run.
                assert await pair.tokens() == greedy_tokens(TARGET, (5, 6, 7), 24)
        assert found == greedy_tokens(TARGET, (5, 6, 7), 400)

        for service in pair.services.values():
            address = service.address
            shown = grpc.ssl_channel_credentials(
                old_files.authorities, old_files.key, old_files.chain
            )
            options = [("grpc.ssl_target_name_override", NAME)]
            channel = grpc.aio.secure_channel(address, shown, options=options)
            assert await refusal(address, channel) is grpc.StatusCode.UNAVAILABLE
        # The orchestrator's own links too, once they are opened anew.
        for pool in (pair.orchestrator.pair.targets, pair.orchestrator.pair.drafts):
            assert pool is not None
            (link,) = pool.links.values()
            async with link.open_channel() as channel:
                await link.kind.make_stub(channel).GetModel(common_pb2.GetModelRequest())
        assert old.generation() == 1


@pytest.mark.usefixtures("looks_always")
async def test_certificates_that_do_not_fit_are_left_alone(
    volume: SecretVolume, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    """A Secret spoilt by hand cuts nobody off, and the log says so."""
    certificate, _ = authority.sign()
    _, other_key = authority.sign()
    async with secured(volume) as pair:
        with caplog.at_level(logging.ERROR):
            volume.write(authority.pem, certificate, other_key)
            channel = open_channel(pair.services["target"].address, pair.backend._pool._tls)
            async with channel:
                stub = target_pb2_grpc.TargetServiceStub(channel)
                await stub.GetModel(common_pb2.GetModelRequest())

    assert "the old one stays in use" in caplog.text
    assert "PRIVATE" not in caplog.text


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda ca, crt, key: (b"", crt, key), "ca.crt holds no certificate"),
        (lambda ca, crt, key: (b"\xff", crt, key), "ca.crt holds no certificate"),
        (lambda ca, crt, key: (ca, b"no PEM", key), "tls.crt"),
        (lambda ca, crt, key: (ca, crt, b"no PEM"), "tls.key"),
        (lambda ca, crt, key: (ca, crt, Authority().sign()[1]), "and its key"),
    ],
)
async def test_a_server_does_not_start_on_files_that_are_wrong(
    tmp_path: Path, authority: Authority, spoil: Any, complaint: str
) -> None:
    volume = SecretVolume(tmp_path / "tls")
    volume.write(*spoil(authority.pem, *authority.sign()))
    server = ServerConfig(tls_dir=str(volume.folder))

    with pytest.raises(ConfigurationError, match=complaint):
        await start_orchestrator(OrchestratorConfig(server=server))


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="ca.crt: No such file"):
        load_certificates(tmp_path)


def test_a_key_is_not_shown(volume: SecretVolume) -> None:
    assert "PRIVATE" not in repr(load_certificates(volume.folder))


async def test_b239_a_clear_text_port_takes_nothing_but_protobuf() -> None:
    """B239 is in the unit tests; here: TLS by mistake to a clear-text port harms nobody."""
    target = await start_target(TargetConfig(engine=engine(TARGET)))
    try:
        channel = grpc.aio.secure_channel(target.address, grpc.ssl_channel_credentials())
        assert await refusal(target.address, channel) is grpc.StatusCode.UNAVAILABLE
        async with open_channel(target.address) as channel:
            stub = target_pb2_grpc.TargetServiceStub(channel)
            assert (await stub.GetModel(common_pb2.GetModelRequest())).vocab_size == 48
    finally:
        await target.stop()
