"""The toy pair under Ray Serve, started and stopped by `specserve serve` as a user would."""

import contextlib
import os
import signal
import threading
import time

import grpc
import httpx
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from helpers.processes import left_running
from helpers.served import PROMPT, Served, text_of
from helpers.spans import attributes, children, coverage, receiving
from helpers.waiting import until
from specserve.gateway.api_keys import KeyRing, make_key
from specserve.rpc.v1 import generation_pb2, generation_pb2_grpc
from support.certificates import Authority, SecretVolume

STOP_TIMEOUT_S = 20

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def sink():
    """A collector that all processes export to; of requests nobody samples none is traced."""
    with receiving() as (sink, endpoint), pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        patch.setenv("SPECSERVE_TRACE_SAMPLE_RATIO", "0")
        yield sink


@pytest.fixture(scope="module")
def served(sink):
    served = Served("--num-target-replicas=2", "--num-draft-replicas=2")
    try:
        yield served
    finally:
        served.close()


def running_choices(served):
    """Read the gateway's gauge of choices being decoded."""
    lines = served.client.get("/metrics").text.splitlines()
    return sum(
        float(line.rpartition(" ")[2])
        for line in lines
        if "num_requests_running" in line and not line.startswith("#")
    )


def test_it_is_ready_when_it_says_so(served):
    """The ready line comes after /ready answers 200; pids and addresses are real."""
    answer = served.client.get("/ready")
    assert (answer.status_code, answer.json()["speculation_enabled"]) == (200, True)

    for role in ("orchestrator", "draft", "target"):
        pid, address = served.replica(role)
        os.kill(pid, 0)
        with grpc.insecure_channel(address) as channel:
            grpc.channel_ready_future(channel).result(timeout=10)


def test_speculation_changes_no_token(served):
    """The same text with and without, and draft tokens are counted only with."""
    on = served.complete(max_tokens=64, speculation_metrics="summary")
    off = served.complete(max_tokens=64, speculation_metrics="summary", num_speculative_tokens=0)

    assert on["choices"] == off["choices"]
    assert on["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0
    assert off["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0


def test_a_stream_comes_as_it_is_made(served):
    """Serve's proxy passes chunks on one by one instead of collecting them: the first one is there
    while the rest, 16 seconds of the target's steps, is still to be decoded."""
    stream = served.stream(max_tokens=4000, num_speculative_tokens=0)
    next(stream)
    assert running_choices(served) >= 1
    stream.close()

    chunks = list(served.stream(max_tokens=200))
    assert len(chunks) > 20
    assert text_of(chunks) == served.complete(max_tokens=200)["choices"][0]["text"]


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/completions", {"prompt": ""}, 400),
        ("/v1/completions", {"prompt": "x", "temperature": -1}, 400),
        ("/v1/completions", {"prompt": "x", "no_such_field": 1}, 400),
        ("/v1/completions", {"prompt": "x" * 10_000_000}, 413),
        ("/v1/nothing", {}, 404),
    ],
)
def test_errors_keep_openais_shape_through_serve(served, path, body, status):
    """Serve's proxy does not turn our errors into its own; the next request works."""
    answer = served.client.post(path, json=body)

    assert answer.status_code == status
    assert {"message", "type", "param", "code"} == set(answer.json()["error"])
    assert served.complete(max_tokens=2)["usage"]["completion_tokens"] == 2


def test_a_client_that_leaves_frees_its_choice(served):
    """A disconnect travels through Serve's proxy to the orchestrator."""
    stream = served.stream(max_tokens=3000)
    next(stream)
    next(stream)
    stream.close()

    until(lambda: running_choices(served) == 0, "no choice runs")


CALLER_TRACE = "5bf92f3577b34da6a3ce929d0e0e4736"
CALLER_SPAN = "00f067aa0ba902b7"


def target_of(served, request_id):
    """Return pid and id of the target that a running request is on, by what is remembered of it."""
    records = served.client.get(f"/v1/specserve/requests/{request_id}").json()["requests"]
    calls = [call for round_ in records[0]["rounds"] for call in round_["calls"]]
    replica_id = next(c["replica_id"] for c in reversed(calls) if c["service"] == "target")
    with grpc.insecure_channel(served.replica("orchestrator")[1]) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        status = stub.GetStatus(generation_pb2.GetStatusRequest(), timeout=10)
    return next(r.pid for r in status.replicas if r.replica_id == replica_id), replica_id


def test_a_request_is_one_trace_from_its_caller_through_a_failover(served, sink):
    """Serve's proxy, gateway, orchestrator, drafts and both targets: connected, and without gaps.

    B214, B217: the context goes through Serve's handles and our own streams alike. Of each span of
    ours the union of its children covers 95 %, of each single round, too. Serve's handles end their
    spans when a stream begins: of its proxy's span, and of the caller's time, it is all that lies
    below.
    """
    headers = {
        "traceparent": f"00-{CALLER_TRACE}-{CALLER_SPAN}-01",
        "x-request-id": "through-a-failover",
    }
    body = {**PROMPT, "max_tokens": 500, "stream": True}
    began = time.time_ns()
    lost = ""
    with served.client.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
        for number, _ in enumerate(answer.iter_lines()):
            if number == 40:
                pid, lost = target_of(served, "through-a-failover")
                os.kill(pid, signal.SIGKILL)
    caller = Span(
        span_id=bytes.fromhex(CALLER_SPAN),
        start_time_unix_nano=began,
        end_time_unix_nano=time.time_ns(),
    )
    # The replica's own span covers the proxy's and is no span's parent: nothing else tells of it.
    serves = ("proxy_http_request", "replica_handle_request")
    wanted = (*serves, "orchestrator.generate", "gateway.answer", "target.verify")

    def names_of_all() -> str:
        return " ".join(span.name for span in sink.in_trace(CALLER_TRACE))

    sink.wait_for(lambda: all(name in names_of_all() for name in wanted), within_s=60)
    spans = sink.in_trace(CALLER_TRACE)

    known = {CALLER_SPAN, *(span.span_id.hex() for span in spans)}
    assert {span.parent_span_id.hex() for span in spans} <= known
    names = [span.name for span in spans]
    assert any(name.startswith("proxy_http_request") for name in names)
    (generate,) = [span for span in spans if span.name == "orchestrator.generate"]
    assert attributes(generate)["specserve.num_target_reopens"] >= 1
    calls = [span for span in spans if span.name == "spec_verify"]
    assert len({attributes(span)["specserve.replica"] for span in calls}) == 2
    failed = [span for span in calls if attributes(span).get("error.type")]
    assert {attributes(span)["specserve.replica"] for span in failed} == {lost}
    links = {link.span_id for span in spans for link in span.links}
    assert {span.span_id for span in failed} <= links
    assert "spec_draft" in names
    assert {"target.verify", "draft.propose"} <= set(names)
    roles = ("proxy", "gateway", "orchestrator", "draft", "target")
    assert {f"specserve-{role}" for role in roles} <= sink.services
    ours = ("text_completion", "orchestrator.generate", "specserve.round")
    parents = [span for span in spans if span.name.startswith(ours)]
    shares = [coverage(span, children(span, spans)) for span in parents]
    (proxy,) = [span for span in spans if span.name.startswith("proxy_http_request")]
    shares += [coverage(span, spans) for span in (caller, proxy)]
    assert len(shares) > 20
    assert min(shares) >= 0.95, shares


def test_a_killed_draft_leaves_the_stream_running(served):
    """`kill -9` of the draft replica in mid-stream: the same text, then a new draft is found."""
    whole = served.complete(max_tokens=400)["choices"][0]["text"]

    chunks = []
    for number, chunk in enumerate(served.stream(max_tokens=400)):
        chunks.append(chunk)
        if number == 5:
            for pid, _ in served.replicas("draft"):
                os.kill(pid, signal.SIGKILL)

    assert text_of(chunks) == whole
    assert chunks[-1][1]["choices"][0]["finish_reason"] == "length"

    def drafts() -> int:
        answer = served.complete(max_tokens=16, speculation_metrics="summary")
        return answer["metrics"]["speculative_decoding"]["num_draft_tokens"]

    until(drafts, "a new draft is used", within_s=120)


def ray_process(served, name):
    """Find the pid of one of Ray's own actors; None while it is being started again."""
    for process in served.command.descendants():
        with contextlib.suppress(psutil.Error):
            if " ".join(process.cmdline()).startswith(f"ray::{name}"):
                return process.pid
    return None


def until_another(served, name, old):
    """Wait until Ray has started an actor anew."""
    until(lambda: ray_process(served, name) not in (None, old), f"{name} is back", 120, every_s=0.2)


def test_a_killed_controller_disturbs_nobody(served):
    """`kill -9` of Serve's controller in mid-stream: the stream goes on, and so do new requests."""
    whole = served.complete(max_tokens=300)["choices"][0]["text"]
    old = ray_process(served, "ServeController")

    chunks = []
    for number, chunk in enumerate(served.stream(max_tokens=300)):
        chunks.append(chunk)
        if number == 5:
            os.kill(old, signal.SIGKILL)

    assert text_of(chunks) == whole
    assert served.complete(max_tokens=300)["choices"][0]["text"] == whole
    until_another(served, "ServeController", old)


def test_a_killed_proxy_comes_back(served):
    """Connections are lost with it; the controller starts another, and requests are answered."""
    whole = served.complete(max_tokens=20)["choices"][0]["text"]
    old = ray_process(served, "ProxyActor")
    os.kill(old, signal.SIGKILL)
    until_another(served, "ProxyActor", old)

    def is_ready() -> bool:
        try:
            return served.client.get("/ready").status_code == 200
        except httpx.TransportError:
            return False

    until(is_ready, "the new proxy answers", 60)
    assert served.complete(max_tokens=20)["choices"][0]["text"] == whole


class Reading:
    """A streamed completion that another thread reads."""

    def __init__(self, served, **fields):
        self.chunks = []
        self.has_begun = threading.Event()
        self._thread = threading.Thread(target=self._read, args=(served, fields))
        self._thread.start()
        assert self.has_begun.wait(30)

    def _read(self, served, fields):
        for chunk in served.stream(**fields):
            self.chunks.append(chunk)
            self.has_begun.set()

    def to_its_end(self):
        """Return all chunks; fails if the stream was cut."""
        self._thread.join(STOP_TIMEOUT_S)
        assert not self._thread.is_alive()
        return self.chunks


def until_refused(served):
    """Ask until a new request is not taken any more; returns that answer."""
    refused = []

    def is_refused() -> bool:
        refused[:] = [served.client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})]
        return refused[0].status_code != 200

    until(is_refused, "new requests are refused")
    return refused[0]


def assert_it_ends(served, processes, started):
    """Exit code 0 within 20 s of `started`, and no process is left."""
    code = served.command.wait(STOP_TIMEOUT_S)

    assert code == 0, served.command.output
    assert time.monotonic() - started < STOP_TIMEOUT_S
    assert left_running(processes) == []
    assert len(processes) > 8


def test_a_stop_signal_cuts_no_live_stream(served):
    """SIGINT: new requests are told to come back, a live stream ends whole, then all is gone."""
    whole = served.complete(max_tokens=300)["choices"][0]["text"]
    reading = Reading(served, max_tokens=300)
    processes = served.command.descendants()
    started = time.monotonic()

    served.command.process.send_signal(signal.SIGINT)
    refused = until_refused(served)
    ready = served.client.get("/ready")
    chunks = reading.to_its_end()

    assert refused.status_code == 503
    assert refused.headers["retry-after"]
    assert refused.json()["error"]["code"] == "draining"
    assert (ready.status_code, ready.json()["ready"]) == (503, False)
    assert text_of(chunks) == whole
    assert chunks[-1][1]["choices"][0]["finish_reason"] == "length"
    assert_it_ends(served, processes, started)


def test_a_second_stop_signal_hurries_keys_and_mutual_tls_on(tmp_path):
    """The endless stream ends at once, with an event that says why; the clean-up is as complete.

    Behind it: without a key 401, and no gRPC port talks to a stranger.
    """
    volume = SecretVolume(tmp_path / "tls")
    volume.issue(Authority())
    text, key = make_key("alice")
    (tmp_path / "keys").write_text(KeyRing([key]).text())
    served = Served(
        "--shutdown-grace-s=600",
        f"--api-key-file={tmp_path / 'keys'}",
        f"--tls-dir={volume.folder}",
        api_key=text,
    )
    try:
        stranger = httpx.post(f"{served.url}/v1/completions", json={"prompt": "x"})
        assert (stranger.status_code, stranger.json()["error"]["code"]) == (401, "missing_api_key")
        for role in ("orchestrator", "draft", "target"):
            with grpc.insecure_channel(served.replica(role)[1]) as channel:
                stub = health_pb2_grpc.HealthStub(channel)
                with pytest.raises(grpc.RpcError, match="UNAVAILABLE"):
                    stub.Check(health_pb2.HealthCheckRequest(), timeout=10)
        reading = Reading(served, max_tokens=100_000)
        processes = served.command.descendants()
        served.command.process.send_signal(signal.SIGINT)
        until_refused(served)
        started = time.monotonic()

        served.command.process.send_signal(signal.SIGINT)
        chunks = reading.to_its_end()

        assert chunks[-1][1]["error"]["code"] == "draining"
        assert_it_ends(served, processes, started)
    finally:
        served.close()
