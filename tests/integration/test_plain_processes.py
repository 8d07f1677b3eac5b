"""The four services as plain processes: ready lines, signals, refusals, and the commands on top."""

import json
import os
import signal
import socket
import subprocess

import httpx
import pytest

from helpers.processes import CommandLine, left_running
from specserve.tools.local import PairSpec, run_pair

TARGET = "toy:vocab_size=96,seed=7,step_ms=2"
DRAFT = "toy:vocab_size=96,seed=7,noise=0.7,noise_seed=1"
START_TIMEOUT_S = 120
STOP_TIMEOUT_S = 20

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pair():
    with run_pair(PairSpec(TARGET, DRAFT)) as pair:
        yield pair


@pytest.fixture
def client(pair):
    with httpx.Client(base_url=f"http://{pair.gateways[0].address}", timeout=60) as client:
        yield client


@pytest.fixture
def command():
    """Start commands; whatever is left of them ends with the test."""
    started = []

    def start(*words, **options):
        started.append(CommandLine(words, **options))
        return started[-1]

    yield start
    for one in started:
        one.kill()


def test_a_pair_of_processes_serves(pair, client):
    """Four processes, one completion, drafted tokens in it."""
    assert len({service.pid for service in pair.services}) == 4

    answer = client.post(
        "/v1/completions",
        json={"prompt": "hi", "max_tokens": 32, "seed": 3, "speculation_metrics": "summary"},
    )

    assert answer.status_code == 200, answer.text
    assert answer.json()["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_no_draft_process_is_needed_without_a_draft_model(method):
    """Target, orchestrator, gateway; a request may choose among what needs no draft."""
    config = json.dumps({"method": method, "num_speculative_tokens": 4})
    spec = PairSpec(TARGET, None, speculative_config=config)
    with run_pair(spec) as pair, httpx.Client(timeout=60) as client:
        assert len({service.pid for service in pair.services}) == 3
        url = f"http://{pair.gateways[0].address}/v1/completions"
        body = {"prompt": "na na na", "max_tokens": 64, "temperature": 0, "ignore_eos": True}
        plain = client.post(url, json={**body, "num_speculative_tokens": 0}).json()
        for named in (None, "ngram", "suffix"):
            fields = {"speculation_metrics": "summary", "speculative_method": named}
            answer = client.post(url, json={**body, **fields}).json()
            figures = answer["metrics"]["speculative_decoding"]
            assert answer["choices"][0]["text"] == plain["choices"][0]["text"]
            assert set(figures["proposers"]) == {named or method}
            assert figures["num_accepted_draft_tokens"] > 0
        refused = client.post(url, json={**body, "speculative_method": "draft_model"})
        assert refused.status_code == 400
        assert "ngram or suffix" in refused.json()["error"]["message"]


def test_a_draft_process_of_a_method_without_a_model_is_refused(command):
    """`specserve draft` says where the method runs instead."""
    draft = command("draft", '--speculative-config={"method": "suffix"}')

    assert draft.wait(START_TIMEOUT_S) != 0
    assert "suffix runs in the orchestrator" in "".join(draft.output)


def test_chat_shows_the_answer_and_the_acceptance(pair, command):
    """`specserve chat --url` streams one answer and sums up where its tokens came from."""
    chat = command(
        "chat",
        f"--url=http://{pair.gateways[0].address}",
        "--message=hello there",
        "--max-tokens=24",
    )

    assert chat.wait(START_TIMEOUT_S) == 0, chat.output
    assert "draft tokens accepted" in chat.output[-1]
    assert "accepted" in chat.output[-1].split(";")[0]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_drains_and_stops_a_service(command, number):
    """Exit code 0, within 20 s, and the device process goes too."""
    target = command("target", TARGET)
    ready = target.wait_event("ready", START_TIMEOUT_S)
    processes = target.descendants()

    target.process.send_signal(number)

    assert target.wait(STOP_TIMEOUT_S) == 0, target.output
    assert left_running(processes) == []
    assert ready["service"] == "target"
    assert ready["pid"] == target.process.pid


def test_a_second_signal_hurries_a_gateway(pair, command):
    """An endless stream ends with an event that says why; exit code 0."""
    gateway = command(
        "gateway",
        f"--tokenizer={TARGET}",
        f"--orchestrator-address={pair.orchestrators[0].address}",
        "--port=0",
        "--shutdown-grace-s=600",
    )
    address = gateway.wait_event("ready", START_TIMEOUT_S)["address"]
    body = {"prompt": "hi", "max_tokens": 100_000, "ignore_eos": True, "stream": True}

    with (
        httpx.Client(base_url=f"http://{address}", timeout=60) as client,
        client.stream("POST", "/v1/completions", json=body) as answer,
    ):
        lines = answer.iter_lines()
        next(lines)
        gateway.process.send_signal(signal.SIGINT)
        while client.get("/ready").status_code == 200:
            pass
        gateway.process.send_signal(signal.SIGINT)
        events = [line for line in lines if line]

    assert "draining" in events[-1]
    assert gateway.wait(STOP_TIMEOUT_S) == 0, gateway.output


def test_a_service_ends_with_the_program_that_started_it(command):
    """The end of stdin stops it: a killed test or benchmark leaves nothing behind."""
    orchestrator = command(
        "orchestrator",
        "--target-address=127.0.0.1:1",
        "--stop-on-eof",
        stdin=subprocess.PIPE,
    )
    orchestrator.wait_event("ready", START_TIMEOUT_S)

    orchestrator.process.stdin.close()

    assert orchestrator.wait(STOP_TIMEOUT_S) == 0, orchestrator.output


def test_a_killed_service_leaves_no_device_process(command):
    """`kill -9`: the device's pipe ends, and so does the device."""
    target = command("target", TARGET)
    target.wait_event("ready", START_TIMEOUT_S)
    processes = target.descendants()

    os.kill(target.process.pid, signal.SIGKILL)
    target.wait(STOP_TIMEOUT_S)

    assert len(processes) > 1
    assert left_running(processes, timeout_s=10) == []


def test_a_taken_port_is_refused_by_name(command):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        for words in (
            ("serve", "toy:vocab_size=96", f"--port={port}"),
            ("orchestrator", "--target-address=127.0.0.1:1", f"--port={port}"),
        ):
            refused = command(*words)
            assert refused.wait(START_TIMEOUT_S) == 2, refused.output
            assert f"127.0.0.1:{port}" in refused.output[-1]


def test_a_pair_with_two_vocabularies_is_refused_at_start(command):
    """B094: before anything is started, naming the first token id that differs."""
    refused = command(
        "serve",
        "toy:vocab_size=96,seed=7",
        "--port=0",
        '--speculative-config={"model": "toy:vocab_size=64,seed=7"}',
    )

    assert refused.wait(START_TIMEOUT_S) == 1, refused.output
    assert "first at token id 64" in refused.output[-1]


def test_a_killed_draft_leaves_the_stream_running(pair, client):
    """Last in this file: the module's draft is gone afterwards."""
    body = {"prompt": "hi", "max_tokens": 400, "temperature": 0, "ignore_eos": True}
    whole = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
    text = ""
    with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
        for number, line in enumerate(answer.iter_lines()):
            if number == 10:
                pair.drafts[0].kill()
            if line.startswith("data: {"):
                text += httpx.Response(200, text=line[6:]).json()["choices"][0]["text"]

    assert text == whole
    assert client.get("/ready").json()["ready"] is True
