"""What the settings read from Secrets is mounted where they say, and can be replaced in place."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import PurePosixPath

from specserve.config import TlsSettings
from support.manifests.documents import Document, Group, Manifests
from support.manifests.operator_rules import Rule

_CERTIFICATE_FIELDS = {
    "secretName",
    "dnsNames",
    "usages",
    "duration",
    "renewBefore",
    "privateKey",
    "issuerRef",
    "isCA",
    "commonName",
}
_USAGES = {"server auth", "client auth"}


def mutual_tls(manifests: Manifests) -> Iterator[str]:
    """Every worker has the certificates where the settings say, by the name that peers ask for."""
    server = manifests.serve_args.get("server") or {}
    folder = server.get("tls_dir")
    issued = {
        c["spec"].get("secretName"): c["spec"]
        for c in manifests.of_kind("Certificate")
        if not c["spec"].get("isCA")
    }
    if folder is None:
        yield from (f"Secret {name} is issued, and server.tls_dir is not set" for name in issued)
        return
    name = server.get("tls_server_name", TlsSettings().tls_server_name)
    for group in manifests.workers:
        secret = _mounted_secret(group, folder)
        if secret is None:
            yield f"{group.name}: no Secret is mounted at {folder}"
        elif secret not in issued:
            yield f"{group.name}: no Certificate makes the Secret {secret}"
        elif name and name not in (issued[secret].get("dnsNames") or []):
            yield f"{group.name}: {secret} is not for {name}, which peers ask for"


def certificates(manifests: Manifests) -> Iterator[str]:
    """A Certificate serves both ends, is renewed long before its end, and has an issuer here."""
    issuers = {i["metadata"]["name"]: i["spec"] for i in manifests.of_kind("Issuer")}
    made = {c["spec"].get("secretName") for c in manifests.of_kind("Certificate")}
    for certificate in manifests.of_kind("Certificate"):
        name, spec = certificate["metadata"]["name"], certificate["spec"]
        if certificate["apiVersion"] != "cert-manager.io/v1":
            yield f"{name}: apiVersion {certificate['apiVersion']}, wanted cert-manager.io/v1"
        yield from (f"{name}: unknown field {key}" for key in set(spec) - _CERTIFICATE_FIELDS)
        if not spec.get("isCA") and set(spec.get("usages") or []) != _USAGES:
            yield f"{name}: usages {spec.get('usages')}, wanted those of server and client"
        duration, before = (_hours(spec.get(key)) for key in ("duration", "renewBefore"))
        if not 24 <= before < duration:
            yield f"{name}: lives {duration} h, is renewed {before} h before its end"
        issuer = issuers.get((spec.get("issuerRef") or {}).get("name"))
        if issuer is None:
            yield f"{name}: no issuer {spec.get('issuerRef')}"
        elif "ca" in issuer and issuer["ca"].get("secretName") not in made:
            yield f"{name}: nothing makes its issuer's Secret {issuer['ca'].get('secretName')}"


def api_keys(manifests: Manifests) -> Iterator[str]:
    """Gateways find the file of keys in a mounted Secret."""
    path = (manifests.serve_args.get("gateway") or {}).get("api_key_file")
    if path is None:
        return
    folder = str(PurePosixPath(path).parent)
    for group in manifests.workers:
        if group.name == "gateway" and _mounted_secret(group, folder) is None:
            yield f"{group.name}: no Secret is mounted at {folder}"


def secrets_are_replaced(manifests: Manifests) -> Iterator[str]:
    """A Secret is mounted as a folder, read-only, for the pod's own group: it can be replaced."""
    for group in manifests.groups:
        secrets = {v["name"]: v["secret"] for v in group.pod.get("volumes") or [] if "secret" in v}
        for mount in group.ray_container.get("volumeMounts") or []:
            secret = secrets.get(mount["name"])
            if secret is None:
                continue
            if "subPath" in mount:
                yield f"{group.name}: {mount['mountPath']} is a subPath, which is never replaced"
            if mount.get("readOnly") is not True:
                yield f"{group.name}: {mount['mountPath']} can be written"
            if secret.get("defaultMode") != 0o440:
                yield f"{group.name}: {mount['mountPath']} has another mode than 0440"


def _mounted_secret(group: Group, folder: str) -> str | None:
    volumes: dict[str, Document] = {v["name"]: v for v in group.pod.get("volumes") or []}
    for mount in group.ray_container.get("volumeMounts") or []:
        secret = volumes.get(mount["name"], {}).get("secret")
        if secret is not None and mount["mountPath"] == folder:
            return str(secret["secretName"])
    return None


def _hours(text: str | None) -> int:
    match = re.fullmatch(r"(\d+)h", text or "")
    return int(match[1]) if match else 0


SECRET_RULES: tuple[Rule, ...] = (mutual_tls, certificates, api_keys, secrets_are_replaced)
