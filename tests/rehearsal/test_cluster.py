"""The rendered Serve config on a cluster of several Ray nodes, each as confined as a pod would be.

No Kubernetes: the nodes are made by hand (`pods.py`), KubeRay's operator is played by one HTTP
request. What is real: Ray with token authentication, placement by worker group, Serve's proxies,
the data plane between addresses, a read-only root without privileges, and the preStop hook.
Takes some minutes: `make rehearsal`.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from rehearsal.pods import ROOT, TOKEN, Network, Pod, missing
from specserve.serve_config import serve_config
from specserve.tools.config_file import parse_serve_args
from specserve.tools.drain_node import serving

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing()), reason=missing() or "all there"),
]

SETTINGS = ROOT / "k8s" / "overlays" / "cpu-embedded" / "specserve.yaml"
TARGET = "toy:vocab_size=96,seed=7,step_ms=4"
DRAFT = "toy:vocab_size=96,seed=7,noise=0.7,noise_seed=1"
START_TIMEOUT_S = 180
PROMPT = {"prompt": "hello", "temperature": 0, "ignore_eos": True}


def settings() -> str:
    """Return the overlay's settings, with models that need no file."""
    text = SETTINGS.read_text(encoding="utf-8")
    for path, toy in (("/models/target", TARGET), ("/models/draft", DRAFT)):
        assert path in text
        text = text.replace(path, f'"{toy}"')
    return text


def answers(client: httpx.Client, path: str) -> bool:
    """Tell whether somebody is there and says 200."""
    try:
        return client.get(path).status_code == 200
    except httpx.TransportError:
        return False


class Cluster:
    """A head and one node of each worker group, with the application on them."""

    def __init__(self, logs: Path) -> None:
        self.logs = logs
        self.pods: dict[str, Pod] = {}
        self.dashboard = httpx.Client(
            base_url="http://10.77.0.1:8265",
            headers={"Authorization": f"Bearer {TOKEN}"},
            timeout=30,
            trust_env=False,
        )

    def add(self, name: str, group: str) -> Pod:
        pod = Pod(name, group, len(self.pods) + 1, self.logs / f"{name}.log")
        self.pods[name] = pod
        return pod

    def deploy(self, config: dict[str, Any]) -> None:
        """Do what the operator does with serveConfigV2, once the head answers."""
        path = "/api/serve/applications/"
        until(lambda: answers(self.dashboard, path), "the head's dashboard", self)
        answer = self.dashboard.put(path, json=config)
        assert answer.status_code == 200, answer.text

    def nodes(self) -> int:
        """Count the nodes that are alive."""
        answer = self.dashboard.get("/api/v0/nodes", params={"limit": 100}).json()
        nodes = answer["data"]["result"]["result"]
        return sum(node["state"] == "ALIVE" for node in nodes)

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


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("logs"))
    with Network():
        try:
            cluster.add("head", "head")
            for group in ("draft", "target", "gateway"):
                cluster.add(f"{group}-0", group)
            # Through text, as the config reaches Serve.
            text = yaml.safe_dump(serve_config(parse_serve_args(settings(), str(SETTINGS))))
            cluster.deploy(yaml.safe_load(text))
            until(
                lambda: cluster.application().get("status") == "RUNNING",
                "the application runs",
                cluster,
            )
            with cluster.gateway() as client:
                until(lambda: answers(client, "/ready"), "/ready", cluster)
            yield cluster
        finally:
            cluster.close()


def test_dashboard_does_nothing_without_the_token_B241_B242(cluster: Cluster) -> None:
    """Neither a job nor the end of the application is to be had from an unknown caller."""
    with httpx.Client(base_url="http://10.77.0.1:8265", trust_env=False) as stranger:
        answers = [
            stranger.post("/api/jobs/", json={"entrypoint": "id"}),
            stranger.delete("/api/serve/applications/"),
            stranger.put("/api/serve/applications/", json={"applications": []}),
        ]

    assert [answer.status_code in (401, 403) for answer in answers] == [True] * 3, answers
    assert cluster.application()["status"] == "RUNNING"


def test_every_replica_is_in_its_worker_group(cluster: Cluster) -> None:
    """Labels place: draft and target apart, orchestrator and gateway together, none on the head."""
    groups = {pod.address: pod.group for pod in cluster.pods.values()}
    placed = {
        name: {groups[replica["node_ip"]] for replica in deployment["replicas"]}
        for name, deployment in cluster.application()["deployments"].items()
    }

    assert placed == {
        "draft": {"draft"},
        "target": {"target"},
        "orchestrator": {"gateway"},
        "gateway": {"gateway"},
    }


def complete(client: httpx.Client, **fields: Any) -> Any:
    answer = client.post("/v1/completions", json={**PROMPT, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_speculation_across_nodes_changes_no_token(cluster: Cluster) -> None:
    """Draft and target are reached on their own addresses and ports; the text is the target's."""
    with cluster.gateway() as client:
        on = complete(client, max_tokens=64, speculation_metrics="summary")
        off = complete(client, max_tokens=64, num_speculative_tokens=0)

    assert on["choices"] == off["choices"]
    assert on["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0


def names_in(pod: Pod) -> list[str]:
    """Return what the processes of a pod call themselves."""
    return pod.run(["ps", "-eo", "args="], timeout_s=10).stdout.splitlines()


def listening_ports(pod: Pod) -> set[int]:
    """Read the kernel's own table of the pod's network."""
    table = pod.run(["cat", "/proc/net/tcp", "/proc/net/tcp6"], timeout_s=10).stdout
    rows = [line.split() for line in table.splitlines()]
    return {int(row[1].rpartition(":")[2], 16) for row in rows if len(row) > 3 and row[3] == "0A"}


def test_fixed_ports_and_metrics_are_where_the_manifests_say(cluster: Cluster) -> None:
    """What NetworkPolicies and PodMonitors name is what listens."""
    args = parse_serve_args(settings(), "settings")
    for pod, port in (
        ("draft-0", args.draft_metrics_port),
        ("target-0", args.target_metrics_port),
        ("gateway-0", args.orchestrator_metrics_port),
    ):
        address = cluster.pods[pod].address
        answer = httpx.get(f"http://{address}:{port}/metrics", trust_env=False)
        assert (answer.status_code, "specserve_" in answer.text) == (200, True)
    listening = {pod.group: listening_ports(pod) for pod in cluster.pods.values()}
    assert args.draft_port in listening["draft"]
    assert args.target_port in listening["target"]
    assert args.orchestrator_port in listening["gateway"]
    # Only ours are in the range that the NetworkPolicies close to the other groups.
    ours = {args.draft_port, args.target_port, args.orchestrator_port}
    for ports in listening.values():
        assert {port for port in ports if 21000 <= port < 22000} <= ours


def test_pod_that_ends_hands_its_work_over_first_B209(cluster: Cluster) -> None:
    """preStop on the only target's pod, a second pod of the group being there: a live stream goes
    on to its end with the same tokens, and the pod is empty when the hook returns."""
    with cluster.gateway() as client:
        whole = complete(client, max_tokens=3000)["choices"][0]["text"]
    leaving = cluster.pods["target-0"]
    spare = cluster.add("target-1", "target")
    until(lambda: cluster.nodes() == 5, "the second target's node", cluster)
    # B208: no proxy where there is no replica, so that the autoscaler sees an idle node as one.
    assert serving(names_in(spare)) == []
    texts: list[str] = []
    begun = threading.Event()

    def read() -> None:
        body = {**PROMPT, "max_tokens": 3000, "stream": True}
        with cluster.gateway() as client, client.stream("POST", "/v1/completions", json=body) as s:
            for line in s.iter_lines():
                if line.startswith("data: {"):
                    texts.append(json.loads(line.removeprefix("data: "))["choices"][0]["text"])
                    begun.set()

    reading = threading.Thread(target=read)
    reading.start()
    assert begun.wait(30)

    started = time.monotonic()
    hook = leaving.run(["specserve", "drain-node", "--timeout-s=100"], timeout_s=130)
    took_s = time.monotonic() - started
    left = serving(names_in(leaving))
    leaving.remove()
    reading.join(120)

    print(f"\ndrain-node took {took_s:.1f} s: {hook.stdout.strip()}")
    assert hook.returncode == 0, hook.stdout + hook.stderr + cluster.report()
    assert left == []
    assert not reading.is_alive()
    assert "".join(texts) == whole
    (replica,) = cluster.replicas("target")
    assert replica["node_ip"] == cluster.pods["target-1"].address
    with cluster.gateway() as client:
        assert whole.startswith(complete(client, max_tokens=64)["choices"][0]["text"])


def test_requests_go_on_while_the_head_is_gone_B196_B199(cluster: Cluster) -> None:
    """The head dies at once: of the requests to the workers' proxies none fails, and streams go on.

    What it comes back to (Redis) is not rehearsed; the workers wait for it as KubeRay has them do.
    """
    with cluster.gateway() as client:
        whole = complete(client, max_tokens=400)["choices"][0]["text"]
        cluster.pods["head"].remove()
        ended = time.monotonic() + 20
        count = 0
        while time.monotonic() < ended:
            assert complete(client, max_tokens=400)["choices"][0]["text"] == whole
            count += 1

    print(f"\n{count} requests without a head")
    assert count > 3
