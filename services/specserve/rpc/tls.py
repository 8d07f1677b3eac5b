"""Mutual TLS on a gRPC link: both ends show a certificate of one authority, and one name.

The files are those that cert-manager lays into a Secret: ca.crt, tls.crt, tls.key. They are read
anew when they change: a server shows the new ones from the next handshake on, a client dials with
them; connections that are open stay so. Knows gRPC's credentials; knows no service.
"""

from __future__ import annotations

import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from specserve.config import TlsSettings
from specserve.errors import ConfigurationError
from specserve.rpc.reloading import Reloading

CA_FILE = "ca.crt"
CERTIFICATE_FILE = "tls.crt"
KEY_FILE = "tls.key"

_SAN = "x509_subject_alternative_name"

Admit = Callable[[grpc.aio.ServicerContext[Any, Any]], Awaitable[None]]
"""Lets a call in, or ends it."""


@dataclass(frozen=True, slots=True)
class Certificates:
    """What one process shows, and by what it knows others; each in PEM."""

    authorities: bytes
    """Whoever signed a peer's certificate; several while authorities change."""
    chain: bytes
    """This process's own certificate first, then what leads up to an authority."""
    key: bytes = field(repr=False)
    """Its private key."""


def load_certificates(folder: Path) -> Certificates:
    """Read a folder's three files.

    Raises:
        ConfigurationError: one is missing, or no PEM, or the key is another certificate's.
    """
    paths = [folder / name for name in (CA_FILE, CERTIFICATE_FILE, KEY_FILE)]
    parts: list[bytes] = []
    for path in paths:
        try:
            parts.append(path.read_bytes())
        except OSError as error:
            raise ConfigurationError(f"--tls-dir: {path}: {error.strerror}") from error
    checked = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        checked.load_verify_locations(cadata=parts[0].decode("ascii"))
    except (ssl.SSLError, ValueError) as error:
        raise ConfigurationError(f"--tls-dir: {paths[0]} holds no certificate in PEM") from error
    try:
        # An encrypted key would be asked for at the terminal.
        checked.load_cert_chain(paths[1], paths[2], password=lambda: "")
    except (ssl.SSLError, ValueError, OSError) as error:
        raise ConfigurationError(
            f"--tls-dir: {paths[1]} and {paths[2]} are no certificate and its key in PEM"
        ) from error
    return Certificates(*parts)


class MutualTls:
    """One process's end of its links, be it server, client or both. Threads may share it."""

    def __init__(self, folder: Path, server_name: str, **options: Any) -> None:
        """Read the files.

        Args:
            server_name: name (SAN) that every peer's certificate must carry; "" takes any name
                from clients, and from servers the host that was dialled.
            options: for `Reloading`.

        Raises:
            ConfigurationError: the files are missing or do not fit together.
        """
        paths = [folder / name for name in (CA_FILE, CERTIFICATE_FILE, KEY_FILE)]
        self._server_name = server_name
        self._files: Reloading[Certificates] = Reloading(
            "certificates", paths, lambda: load_certificates(folder), **options
        )

    @classmethod
    def of(cls, settings: TlsSettings) -> MutualTls | None:
        """Return what the settings ask for; None where links are clear text.

        Raises:
            ConfigurationError: the files are missing or do not fit together.
        """
        if settings.tls_dir is None:
            return None
        return cls(Path(settings.tls_dir), settings.tls_server_name)

    def generation(self) -> int:
        """Count the changes of the files; a channel of an older one dials with old files."""
        self._files.current()
        return self._files.generation

    def server_credentials(self) -> grpc.ServerCredentials:
        """Return a server's credentials: they follow the files, and refuse whoever shows none."""
        return grpc.dynamic_ssl_server_credentials(
            self._server_configuration(), self._server_configuration, True
        )

    def _server_configuration(self) -> grpc.ServerCertificateConfiguration:
        # Asked for with every handshake, by a thread of gRPC's.
        files = self._files.current()
        return grpc.ssl_server_certificate_configuration(
            [(files.key, files.chain)], root_certificates=files.authorities
        )

    def channel(self, address: str, options: list[tuple[str, Any]]) -> grpc.aio.Channel:
        """Open a channel to host:port with the files as they are now."""
        files = self._files.current()
        credentials = grpc.ssl_channel_credentials(files.authorities, files.key, files.chain)
        if self._server_name:
            options = [*options, ("grpc.ssl_target_name_override", self._server_name)]
        return grpc.aio.secure_channel(address, credentials, options=options)

    def admit(self) -> Admit | None:
        """Return what a server asks of each call; None where the handshake has said it all.

        The handshake proves who signed; an authority may sign for others than us, too.
        """
        if not self._server_name:
            return None
        wanted = self._server_name.encode()

        async def named(context: grpc.aio.ServicerContext[Any, Any]) -> None:
            if wanted not in context.auth_context().get(_SAN, ()):
                await context.abort(
                    grpc.StatusCode.PERMISSION_DENIED,
                    f"the certificate is not one of {self._server_name}",
                )

        return named
