"""Takes secrets out of text: those whose very words are known, and whatever has a secret's form.

The second line of defence: a bundle is made of sources that hold no secret to begin with. Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping

from specserve.gateway.api_keys import PREFIX

REDACTED = "[redacted]"

MIN_SECRET_CHARACTERS = 6
"""A shorter word is taken out nowhere: it would stand in half of all other words."""

ENVIRONMENT = (
    "CUDA_VISIBLE_DEVICES",
    "HF_HOME",
    "HF_HUB_OFFLINE",
    "NUMBA_CACHE_DIR",
    "NVIDIA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "OTEL_EXPORTER_OTLP_ENDPOINT",
    "OTEL_METRICS_EXPORTER",
    "OTEL_SERVICE_NAME",
    "OTEL_TRACES_SAMPLER",
    "OTEL_TRACES_SAMPLER_ARG",
    "PYTORCH_CUDA_ALLOC_CONF",
    "RAY_ADDRESS",
    "RAY_AUTH_MODE",
    "RAY_NODE_TYPE_NAME",
    "RAY_USE_TLS",
    "SSL_CERT_FILE",
    "TOKENIZERS_PARALLELISM",
)
"""Variables whose value is told; of every other not even the name is."""

_SECRET_NAME = re.compile(
    r"(^|_)(API_?KEY|KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|HEADERS)(_|$)"
)
_HIDING_NAMES = re.compile(r"PROXY$")  # http://user:password@proxy

_FORMS = (
    re.compile(r"-----BEGIN [A-Z ]+-----.*?(-----END [A-Z ]+-----|\Z)", re.DOTALL),
    re.compile(re.escape(PREFIX) + r"[A-Za-z0-9_-]+"),
    re.compile(r"(?<=\bsha256 )[0-9a-f]{16,} [0-9a-f]{16,}"),  # a line of the file of keys
    re.compile(r"(?i)(?<=\bbearer )[A-Za-z0-9._~+/=-]{6,}"),
    re.compile(r"(?<=://)[^/\s\"'@]+(?=@)"),  # user and password in a URL
)


def secrets_of(environ: Mapping[str, str]) -> list[str]:
    """Return the values of variables whose name says that they are secret."""
    return [
        value
        for name, value in environ.items()
        if _SECRET_NAME.search(name.upper()) or _HIDING_NAMES.search(name.upper())
    ]


class Redactor:
    """Takes secrets out."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        """Know some by their words."""
        words = {secret for secret in secrets if len(secret) >= MIN_SECRET_CHARACTERS}
        # As JSON writes them, too; the longest first, for one may be part of another.
        words |= {json.dumps(word)[1:-1] for word in words}
        self._words = sorted(words, key=len, reverse=True)

    def text(self, text: str) -> str:
        """Return the text without them."""
        for word in self._words:
            text = text.replace(word, REDACTED)
        for form in _FORMS:
            text = form.sub(REDACTED, text)
        return text
