"""Whose request it is. The one place where a request gets its tenant.

Where API keys are asked for, the key names it, and a header has no say; else a header may, which a
trusted proxy sets. Knows headers; knows no limit's state.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass

from starlette.types import Scope

from specserve.errors import InvalidRequest
from specserve.gateway.config import GatewayConfig, TenantLimits

_KEY_TENANT = "key_tenant"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True, slots=True)
class Tenant:
    """Who asks: shares limits with itself, and caches with nobody else."""

    name: str
    """Empty for the common tenant, which every request without a name belongs to."""
    limits: TenantLimits

    @property
    def salt(self) -> bytes:
        """What keeps its prefixes and past outputs apart; empty for the common tenant."""
        return hashlib.sha256(self.name.encode()).digest()[:16] if self.name else b""


def set_key_tenant(scope: Scope, name: str) -> None:
    """Note whose key came with a request; for whoever has checked it."""
    scope.setdefault("state", {})[_KEY_TENANT] = name


def key_tenant(scope: Scope) -> str | None:
    """Return whose key came with a request; None where no key was asked for."""
    name = scope.get("state", {}).get(_KEY_TENANT)
    return name if isinstance(name, str) else None


def resolve_tenant(
    headers: Mapping[str, str], config: GatewayConfig, of_key: str | None = None
) -> Tenant:
    """Return the tenant of a request.

    Args:
        of_key: the tenant of the key that came with it; None where no key is asked for.

    Raises:
        InvalidRequest: the header holds no name.
    """
    if of_key is not None:
        return Tenant(of_key, config.tenant_limits.get(of_key, config.limits))
    header = config.tenant_header
    name = headers.get(header, "") if header is not None else ""
    if name and not _NAME.fullmatch(name):
        raise InvalidRequest(
            header or "", "up to 128 letters, digits, dots, dashes and underscores were wanted"
        )
    return Tenant(name, config.tenant_limits.get(name, config.limits))
