"""Certificate authorities and what they sign, laid out as cert-manager lays a Secret into a pod."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

NAME = "specserve.internal"
"""What `tls_server_name` is by default."""

_DAY = timedelta(days=1)


class Authority:
    """One that signs."""

    def __init__(self, name: str = "authority") -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _named(name)
        constraints = x509.BasicConstraints(ca=True, path_length=None)
        self._certificate = (
            _builder(self._name, self._name, self._key.public_key())
            .add_extension(constraints, critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.pem = self._certificate.public_bytes(serialization.Encoding.PEM)

    def sign(self, names: Sequence[str] = (NAME,)) -> tuple[bytes, bytes]:
        """Return a certificate for these names and its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        alternative = x509.SubjectAlternativeName([x509.DNSName(name) for name in names])
        certificate = (
            _builder(_named("leaf"), self._name, key.public_key())
            .add_extension(alternative, critical=False)
            .sign(self._key, hashes.SHA256())
        )
        return (
            certificate.public_bytes(serialization.Encoding.PEM),
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            ),
        )


class SecretVolume:
    """A mounted Secret: the files are links through `..data`, a link that is swapped as a whole."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._numbers = count()
        folder.mkdir()
        for name in ("ca.crt", "tls.crt", "tls.key"):
            (folder / name).symlink_to(f"..data/{name}")

    def write(self, authorities: bytes, certificate: bytes, key: bytes) -> None:
        """Put other files in place, all three at once, as the kubelet does."""
        part = self.folder / f"..{next(self._numbers)}"
        part.mkdir()
        (part / "ca.crt").write_bytes(authorities)
        (part / "tls.crt").write_bytes(certificate)
        (part / "tls.key").write_bytes(key)
        (self.folder / "..next").symlink_to(part.name)
        os.replace(self.folder / "..next", self.folder / "..data")

    def issue(self, authority: Authority, names: Sequence[str] = (NAME,)) -> None:
        """Put a certificate of this authority in place."""
        self.write(authority.pem, *authority.sign(names))


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _DAY)
        .not_valid_after(now + _DAY)
    )
