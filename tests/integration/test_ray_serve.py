"""The toy pair under Ray Serve, started and stopped by `specserve serve` as a user would."""

import json
import os
import re
import signal
import threading
import time

import grpc
import httpx
import pytest

from helpers.processes import CommandLine, left_running
from specserve.tools.local_process import free_port

TARGET = "toy:vocab_size=96,seed=7,step_ms=4"
DRAFT = "toy:vocab_size=96,seed=7,noise=0.7,noise_seed=1"
START_TIMEOUT_S = 300
STOP_TIMEOUT_S = 20
PROMPT = {"prompt": "hello", "temperature": 0, "ignore_eos": True}

pytestmark = pytest.mark.slow


class Served:
    """What `specserve serve` said about itself."""

    def __init__(self):
        port = free_port()
        self.command = CommandLine(
            [
                "serve",
                TARGET,
                f"--port={port}",
                "--speculative-config",
                json.dumps({"model": DRAFT}),
            ]
        )
        ready = self.command.wait_event("ready", START_TIMEOUT_S)
        self.url = str(ready["address"])
        self.client = httpx.Client(base_url=self.url, timeout=60)

    def replica(self, role):
        """Return pid and address as printed for people."""
        pattern = re.compile(rf"{role} +pid (\d+) +grpc (\S+)")
        found = [match for line in self.command.output if (match := pattern.search(line))]
        assert found, self.command.output
        return int(found[0][1]), found[0][2]

    def complete(self, **fields):
        answer = self.client.post("/v1/completions", json={**PROMPT, **fields})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def stream(self, **fields):
        """Yield (seconds since the start, chunk) of a streamed completion."""
        started = time.monotonic()
        body = {**PROMPT, "stream": True, **fields}
        with self.client.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    yield time.monotonic() - started, json.loads(line.removeprefix("data: "))


@pytest.fixture(scope="module")
def served():
    served = Served()
    try:
        yield served
    finally:
        served.client.close()
        served.command.kill()


def text_of(chunks):
    return "".join(choice["text"] for _, chunk in chunks for choice in chunk["choices"])


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
    """Serve's proxy passes chunks on one by one instead of collecting them."""
    chunks = list(served.stream(max_tokens=200))
    times = [seconds for seconds, _ in chunks]

    assert len(times) > 20
    assert times[len(times) // 4] < times[-1] / 2
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


def running_choices(served):
    """Read the gateway's gauge of choices being decoded."""
    lines = served.client.get("/metrics").text.splitlines()
    return sum(
        float(line.rpartition(" ")[2])
        for line in lines
        if "num_requests_running" in line and not line.startswith("#")
    )


def test_a_client_that_leaves_frees_its_choice(served):
    """A disconnect travels through Serve's proxy to the orchestrator."""
    stream = served.stream(max_tokens=3000)
    next(stream)
    next(stream)
    stream.close()

    deadline = time.monotonic() + 10
    while running_choices(served) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert running_choices(served) == 0


def test_a_killed_draft_leaves_the_stream_running(served):
    """`kill -9` of the draft replica in mid-stream: the same text, then a new draft is found."""
    whole = served.complete(max_tokens=400)["choices"][0]["text"]
    pid, _ = served.replica("draft")

    chunks = []
    for number, chunk in enumerate(served.stream(max_tokens=400)):
        chunks.append(chunk)
        if number == 5:
            os.kill(pid, signal.SIGKILL)

    assert text_of(chunks) == whole
    assert chunks[-1][1]["choices"][0]["finish_reason"] == "length"
    deadline = time.monotonic() + 120
    drafted = 0
    while not drafted and time.monotonic() < deadline:
        answer = served.complete(max_tokens=16, speculation_metrics="summary")
        drafted = answer["metrics"]["speculative_decoding"]["num_draft_tokens"]
        time.sleep(0.2)
    assert drafted > 0


def test_a_signal_stops_everything(served):
    """SIGINT with a stream open: over within 20 s, exit code 0, and no process is left."""

    streaming = threading.Event()

    def read():
        try:
            for _ in served.stream(max_tokens=4000):
                streaming.set()
        except httpx.HTTPError:
            pass

    reading = threading.Thread(target=read)
    reading.start()
    assert streaming.wait(30)
    processes = served.command.descendants()
    started = time.monotonic()

    served.command.process.send_signal(signal.SIGINT)
    code = served.command.wait(STOP_TIMEOUT_S)

    assert code == 0, served.command.output
    assert time.monotonic() - started < STOP_TIMEOUT_S
    assert left_running(processes) == []
    assert len(processes) > 8
    reading.join(10)
