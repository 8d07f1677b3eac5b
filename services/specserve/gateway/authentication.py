"""Nobody gets past without a key: all paths are closed but those named here.

Stands before the routes, so that a new route is closed, and another spelling of an open path, too.
Knows ASGI and keys; knows no route's meaning.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from specserve.gateway.api_keys import ApiKey, KeyRing, load_keys
from specserve.gateway.config import GatewayConfig
from specserve.gateway.console import console_paths
from specserve.gateway.errors import HttpError
from specserve.gateway.metrics import GatewayMetrics
from specserve.gateway.receiving import Refusal
from specserve.gateway.tenants import set_key_tenant
from specserve.rpc.reloading import Reloading

logger = logging.getLogger(__name__)

PROBES = frozenset({"/health", "/ready"})
"""Who starts and stops processes has no key."""

_MISSING = HttpError(
    401,
    "invalid_request_error",
    "an API key was wanted, as the header Authorization: Bearer KEY",
    None,
    "missing_api_key",
)
_WRONG = HttpError(
    401, "invalid_request_error", "the API key is not valid here", None, "invalid_api_key"
)


class Authentication:
    """The ASGI application behind it, for whoever has a key."""

    def __init__(
        self,
        app: ASGIApp,
        keys: Reloading[KeyRing],
        metrics: GatewayMetrics,
        open_paths: Collection[str],
    ) -> None:
        self._app = app
        self._keys = keys
        self._metrics = metrics
        self._open_paths = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 401, or pass on, the tenant noted and the key taken out."""
        if scope["type"] == "lifespan" or scope.get("path") in self._open_paths:
            await self._app(scope, receive, send)
            return
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        key = self._key(given)
        if key is None:
            self._metrics.unauthorized.labels("wrong" if given else "missing").inc()
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
                return
            await Refusal(_WRONG if given else _MISSING)(scope, receive, send)
            return
        set_key_tenant(scope, key.tenant)
        # What comes after cannot log what it does not have.
        scope["headers"] = [item for item in scope["headers"] if item[0] != b"authorization"]
        await self._app(scope, receive, send)

    def _key(self, given: list[bytes]) -> ApiKey | None:
        keys = self._keys.current()
        self._metrics.api_key_file_failing.set(self._keys.failure is not None)
        if len(given) != 1:
            return None  # of two keys one would be checked and the other perhaps be meant
        scheme, _, key = given[0].partition(b" ")
        return keys.find(key.strip()) if scheme.lower() == b"bearer" else None


def watched_keys(config: GatewayConfig) -> Reloading[KeyRing] | None:
    """Read the configured file of keys; None where no key is asked for.

    Raises:
        ConfigurationError: it cannot be read, or a line of it is no key.
    """
    path = config.api_key_file
    if path is None:
        return None
    keys = Reloading("API keys", [Path(path)], lambda: load_keys(path))
    if not keys.current().keys:
        logger.warning("%s holds no key: every request will be answered 401", path)
    return keys


def open_paths(config: GatewayConfig) -> frozenset[str]:
    """Return the paths that need no key."""
    metrics = {"/metrics"} if config.metrics_without_key else set()
    console = console_paths() if config.console else set()
    return PROBES | metrics | console
