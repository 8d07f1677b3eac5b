"""A cluster made by hand: a head and a node of each worker group, with the application on them.

KubeRay's operator is played by one HTTP request, and by whoever adds and removes nodes. Knows pods
and Serve's dashboard; judges nothing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import yaml

from rehearsal import redis
from rehearsal.pods import NETWORK, ROOT, TOKEN, Pod
from specserve.serve_config import serve_config
from specserve.tools.config_file import parse_serve_args

SETTINGS = ROOT / "k8s" / "overlays" / "cpu-embedded" / "specserve.yaml"
TARGET = "toy:vocab_size=96,seed=7,step_ms=4"
DRAFT = "toy:vocab_size=96,seed=7,noise=0.7,noise_seed=1"
OVERLAY_K = "num_speculative_tokens: 5\n"
START_TIMEOUT_S = 180
PROMPT = {"prompt": "hello", "temperature": 0, "ignore_eos": True}


def settings() -> str:
    """Return the overlay's settings, with models that need no file."""
    text = SETTINGS.read_text(encoding="utf-8")
    for path, toy in (("/models/target", TARGET), ("/models/draft", DRAFT)):
        assert path in text
        text = text.replace(path, f'"{toy}"')
    return text


def scaled_settings(num_speculative_tokens: int = 4) -> str:
    """Return the same with two gateways and orchestrators, and targets that follow their load
    within seconds, 1 to 2."""
    scaled = "max_replicas: 2, upscale_delay_s: 0, downscale_delay_s: 2, target_load: 1.9"
    text = settings()
    assert text.count(OVERLAY_K) == 1
    text = text.replace(OVERLAY_K, f"num_speculative_tokens: {num_speculative_tokens}\n")
    for old, added in (
        ("target_pool: {", f"autoscaling: {{{scaled}}}, "),
        # A target takes its time to load on a busy machine, and the only one is replaced.
        ("gateway: {", "request_timeout_s: 300, "),
        ("orchestrator_pool: {", "num_replicas: 2, "),
        ("gateway_pool: {", "num_replicas: 2, "),
    ):
        assert text.count(old) == 1
        text = text.replace(old, old + added)
    return text + "orchestrator: {reopen_timeout_s: 180}\n"


def rendered(text: str) -> dict[str, Any]:
    """Render settings, through text, as the config reaches Serve."""
    config = serve_config(parse_serve_args(text, str(SETTINGS)))
    found: dict[str, Any] = yaml.safe_load(yaml.safe_dump(config))
    return found


def answers(client: httpx.Client, path: str) -> bool:
    """Tell whether somebody is there and says 200."""
    try:
        return client.get(path).status_code == 200
    except httpx.TransportError:
        return False


class Cluster:
    """A head and one node of each worker group, with the application on them."""

    def __init__(self, logs: Path, redis_address: str | None = None) -> None:
        self.logs = logs
        self.pods: dict[str, Pod] = {}
        self._numbers: dict[str, int] = {}
        self._redis_address = redis_address
        self.dashboard = httpx.Client(
            base_url=f"http://{NETWORK}.1:8265",
            headers={"Authorization": f"Bearer {TOKEN}"},
            timeout=30,
            trust_env=False,
        )

    def add(self, name: str, group: str) -> Pod:
        """Add a node; one of a name that was there before has its address again."""
        number = self._numbers.setdefault(name, len(self._numbers) + 1)
        state = self.state_in_redis(redis.PASSWORD) if group == "head" else {}
        pod = Pod(name, group, number, self.logs / f"{name}.log", env=state)
        self.pods[name] = pod
        return pod

    def join(self, name: str, group: str) -> Pod:
        """Add a node, and wait until it is one of the cluster's.

        Ray gives a node up that does not start in 30 s, as on a busy machine; it is replaced, as
        KubeRay's operator replaces a pod that has ended.
        """
        self.add(name, group)

        def has_joined() -> bool:
            pod = self.pods[name]
            if pod.has_ended(0.1):
                pod.remove()
                self.add(name, group)
                return False
            try:
                return pod.address in self.addresses()
            except (httpx.HTTPError, LookupError, ValueError):
                return False  # it is the head that is awaited

        until(has_joined, f"{name} joins", self, within_s=2 * START_TIMEOUT_S)
        return self.pods[name]

    def state_in_redis(self, password: str) -> Mapping[str, str]:
        """Return what KubeRay sets in a head's pod for `gcsFaultToleranceOptions`."""
        if self._redis_address is None:
            return {}
        return {
            "RAY_REDIS_ADDRESS": self._redis_address,
            "REDIS_PASSWORD": password,
            "RAY_external_storage_namespace": "rehearsal",
        }

    def deploy(self, config: dict[str, Any]) -> None:
        """Do what the operator does with serveConfigV2, once the head answers."""
        path = "/api/serve/applications/"
        until(lambda: answers(self.dashboard, path), "the head's dashboard", self)
        answer = self.dashboard.put(path, json=config)
        assert answer.status_code == 200, answer.text

    def addresses(self) -> set[str]:
        """Return the addresses of the nodes that are alive."""
        answer = self.dashboard.get("/api/v0/nodes", params={"limit": 100}).json()
        nodes = answer["data"]["result"]["result"]
        return {node["node_ip"] for node in nodes if node["state"] == "ALIVE"}

    def application(self) -> dict[str, Any]:
        """Return what Serve says of the application."""
        found = self.dashboard.get("/api/serve/applications/").json()["applications"]
        application: dict[str, Any] = found.get("specserve", {})
        return application

    def replicas(self, deployment: str, state: str = "RUNNING") -> list[dict[str, Any]]:
        """Return a deployment's replicas in a state."""
        found = self.application().get("deployments", {}).get(deployment, {}).get("replicas", [])
        return [replica for replica in found if replica["state"] == state]

    def gateway(self) -> httpx.Client:
        """Return a client of the gateway pod's proxy."""
        address = self.pods["gateway-0"].address
        return httpx.Client(base_url=f"http://{address}:8000", timeout=60, trust_env=False)

    def close(self) -> None:
        self.dashboard.close()
        for pod in reversed(self.pods.values()):
            pod.remove()

    def report(self) -> str:
        """Say how things stand, for a failure."""
        tails = [f"{name}: {pod.log.read_text()[-400:]}" for name, pod in self.pods.items()]
        try:
            application = json.dumps(
                {
                    name: [found["status"], found["message"], found["replicas"]]
                    for name, found in self.application()["deployments"].items()
                },
                indent=1,
            )
        except (httpx.HTTPError, ValueError, KeyError) as error:
            application = repr(error)
        return "\n".join([application, *tails])


def until(condition: Any, what: str, cluster: Cluster, within_s: float = START_TIMEOUT_S) -> None:
    """Poll until the condition holds; fail with the cluster's state."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"not in {within_s} s: {what}\n{cluster.report()}"
        time.sleep(0.5)


def complete(client: httpx.Client, **fields: Any) -> Any:
    """Ask for a completion, and return its body."""
    answer = client.post("/v1/completions", json={**PROMPT, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()
