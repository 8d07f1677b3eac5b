"""Whether what listens on a port is specserve itself. Knows the gateway's probes alone."""

from __future__ import annotations

import httpx

ANSWER_TIMEOUT_S = 3.0


def running_specserve(base_url: str) -> str | None:
    """Return what a specserve at this address says about itself; None when it is none.

    A gateway answers /health whatever it waits for, and /ready with the pair or with the reason
    why there is none.
    """
    try:
        # Proxies are for the way out, and nothing but this very address is asked.
        with httpx.Client(
            base_url=base_url, timeout=ANSWER_TIMEOUT_S, trust_env=False, follow_redirects=False
        ) as client:
            health = client.get("/health")
            if health.status_code != httpx.codes.OK:
                return None
            if health.json().get("service") != "specserve":
                return None
            ready = client.get("/ready").json()
            return str(ready["target"]) if ready["ready"] else f"not ready: {ready['reason']}"
    except (httpx.HTTPError, ValueError, AttributeError, KeyError, TypeError):
        return None
