"""Whose request it is. The one place where a request gets its tenant.

Today a header that a trusted proxy sets names it. Knows headers; knows no limit's state.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass

from specserve.errors import InvalidRequest
from specserve.gateway.config import GatewayConfig, TenantLimits

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


def resolve_tenant(headers: Mapping[str, str], config: GatewayConfig) -> Tenant:
    """Return the tenant of a request.

    Raises:
        InvalidRequest: the header holds no name.
    """
    header = config.tenant_header
    name = headers.get(header, "") if header is not None else ""
    if name and not _NAME.fullmatch(name):
        raise InvalidRequest(
            header or "", "up to 128 letters, digits, dots, dashes and underscores were wanted"
        )
    return Tenant(name, config.tenant_limits.get(name, config.limits))
