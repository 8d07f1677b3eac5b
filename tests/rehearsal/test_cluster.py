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

import httpx
import pytest

from rehearsal import redis
from rehearsal.cluster import (
    PROMPT,
    Cluster,
    answers,
    complete,
    rendered,
    scaled_settings,
    settings,
    until,
)
from rehearsal.load import Load
from rehearsal.pods import NETWORK, Network, Pod, missing
from specserve.tools.config_file import parse_serve_args
from specserve.tools.drain_node import serving

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing()), reason=missing() or "all there"),
]


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[redis.Redis | None]:
    """Serve what the head keeps its state in; None where this machine has no Redis."""
    with Network():
        if redis.missing():
            yield None
        else:
            with redis.Redis(f"{NETWORK}.254", tmp_path_factory.mktemp("redis")) as server:
                yield server


@pytest.fixture(scope="module")
def cluster(
    redis_server: redis.Redis | None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    address = None if redis_server is None else redis_server.address
    cluster = Cluster(tmp_path_factory.mktemp("logs"), address)
    try:
        cluster.add("head", "head")
        for name in ("draft-0", "target-0", "gateway-0", "gateway-1"):
            cluster.add(name, name.partition("-")[0])
        cluster.deploy(rendered(scaled_settings()))
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
    spare = cluster.join("target-1", "target")
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


@pytest.fixture
def load(cluster: Cluster) -> Iterator[Load]:
    """Keep streams going, which must all be whole and each the text of its prompt."""
    load = Load(f"http://{cluster.pods['gateway-0'].address}:8000", num_tokens=400)
    try:
        yield load
    finally:
        load.stop()
    assert load.failures == []
    assert load.num_done > 0


def test_targets_follow_their_load_and_outlive_a_node(cluster: Cluster, load: Load) -> None:
    """More streams want a second target, which comes with a node of its group and goes with it,
    killed at once; the drafts stay as they are. The application's own policy decides."""

    def wanted() -> int:
        return int(cluster.application()["deployments"]["target"]["target_num_replicas"])

    load.keep(3)  # more than the 1.9 that one is to have
    until(lambda: wanted() == 2, "a second target is wanted", cluster)
    cluster.join("target-2", "target")  # as the autoscaler has KubeRay do
    until(lambda: len(cluster.replicas("target")) == 2, "two targets", cluster)
    nodes = {replica["node_ip"] for replica in cluster.replicas("target")}
    assert nodes == {cluster.pods[name].address for name in ("target-1", "target-2")}
    assert len(cluster.replicas("draft")) == 1
    done = load.num_done
    until(lambda: load.num_done > done + 6, "streams with two targets", cluster)

    cluster.pods["target-2"].remove()
    done = load.num_done
    until(lambda: load.num_done > done + 6, "streams after the loss of one", cluster)
    load.keep(1)
    until(lambda: wanted() == 1, "one target is enough", cluster)


def test_changed_settings_are_taken_in_place(cluster: Cluster, load: Load) -> None:
    """Another K, by the same request that the operator makes. Serve replaces every replica, each
    after its drain; with two gateways, and as many orchestrators, no stream of meanwhile fails."""
    before = {replica["replica_id"] for replica in cluster.replicas("orchestrator")}
    load.keep(2)

    cluster.deploy(rendered(scaled_settings(num_speculative_tokens=2)))

    def has_changed() -> bool:
        now = {replica["replica_id"] for replica in cluster.replicas("orchestrator")}
        is_running = cluster.application()["status"] == "RUNNING"
        return is_running and len(now) == 2 and not now & before

    until(has_changed, "other replicas", cluster)
    with cluster.gateway() as client:
        assert client.get("/ready").json()["num_speculative_tokens"] == 2


def test_requests_go_on_while_the_head_is_gone_B196_B199(cluster: Cluster) -> None:
    """The head dies at once: of the requests to the workers' proxies none fails."""
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


@pytest.mark.skipif(bool(redis.missing()), reason=redis.missing() or "all there")
def test_a_head_that_comes_back_finds_its_cluster_in_redis_B197(
    cluster: Cluster, redis_server: redis.Redis, load: Load
) -> None:
    """At its old address, after Redis itself was started anew: the workers and their replicas are
    those of before, no request failed meanwhile, and new settings are taken again. With a wrong
    password a head ends at once, and says why."""
    load.keep(1)
    redis_server.stop()
    redis_server.start()
    wrong = Pod(
        "wrong", "head", 99, cluster.logs / "wrong.log", env=cluster.state_in_redis("wrong")
    )
    try:
        assert wrong.has_ended(60)
    finally:
        wrong.remove()
    assert "WRONGPASS" in wrong.log.read_text()

    cluster.join("head", "head")

    path = "/api/serve/applications/"
    until(lambda: answers(cluster.dashboard, path), "the head's dashboard", cluster)
    until(lambda: cluster.application().get("status") == "RUNNING", "the application", cluster)
    load.stop()
    cluster.deploy(rendered(scaled_settings(num_speculative_tokens=3)))
    with cluster.gateway() as client:
        until(
            lambda: client.get("/ready").json().get("num_speculative_tokens") == 3,
            "the new K",
            cluster,
        )
