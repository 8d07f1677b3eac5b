"""`specserve doctor`: what it finds, how it says so, and its exit code."""

import contextlib
import http.server
import json
import socket
import threading

import pytest

from specserve import cli
from specserve.rpc.v1.common_pb2 import GetModelResponse
from specserve.rpc.verified_records import Evidence, VerifiedRecord, pair_keys, write_record
from specserve.speculation.types import AcceptanceRule
from specserve.tools.doctor import checks as doctor_checks
from specserve.tools.doctor import port as doctor_port

PAIR = ("toy:vocab_size=96,seed=7", "--port", "0")
pytestmark = pytest.mark.slow  # torch and transformers are imported


def doctor(capsys, *words):
    """Run the doctor; return its exit code and {name: (status, found)}."""
    code = cli.main(["doctor", "--json", *words])
    checks = json.loads(capsys.readouterr().out)
    return code, {check["name"]: (check["status"], check["found"]) for check in checks}


def with_draft(spec):
    return ("--speculative-config", json.dumps({"model": spec}))


def test_a_good_pair_has_no_problem(capsys):
    """Everything that serving needs is looked at, and found."""
    code, checks = doctor(capsys, *PAIR, *with_draft("toy:vocab_size=96,seed=7,noise=0.7"))

    assert code == 0
    assert checks["pair"] == ("ok", "every token id means the same to both")
    assert {"python", "torch", "transformers", "ray", "grpcio", "protobuf", "memory"} <= set(checks)
    assert "problem" not in {status for status, _ in checks.values()}


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_a_method_without_a_model_needs_no_draft(capsys, method):
    code, checks = doctor(capsys, *PAIR, "--speculative-config", json.dumps({"method": method}))

    assert code == 0
    assert checks["pair"] == ("ok", f"{method} needs no draft")
    assert "draft" not in checks


def test_another_vocabulary_is_refused_with_the_first_differing_id(capsys):
    code, checks = doctor(capsys, *PAIR, *with_draft("toy:vocab_size=64,seed=7"))

    assert code == 1
    status, found = checks["pair"]
    assert status == "problem"
    assert "first at token id 64" in found


def test_a_missing_model_is_a_problem(capsys, tmp_path):
    code, checks = doctor(capsys, str(tmp_path / "nowhere"), "--port", "0")

    assert code == 1
    assert checks["target"][0] == "problem"
    assert "nowhere" in checks["target"][1]


def test_a_taken_port_is_a_problem(capsys, monkeypatch):
    """Also when whoever has it never answers."""
    monkeypatch.setattr(doctor_port, "ANSWER_TIMEOUT_S", 0.1)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = str(listener.getsockname()[1])
        code, checks = doctor(capsys, "toy:vocab_size=96", "--port", port)

    assert code == 1
    assert checks[f"port {port}"][0] == "problem"


@contextlib.contextmanager
def listening(*, service, ready):
    """Answer the gateway's probes on a port of its own; yields the port."""

    class Probes(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            body = {"/health": {"status": "alive", "service": service}, "/ready": ready}[self.path]
            whole = json.dumps(body).encode()
            self.send_response(200 if self.path == "/health" or ready["ready"] else 503)
            self.send_header("content-length", str(len(whole)))
            self.end_headers()
            self.wfile.write(whole)

        def log_message(self, *args):
            """Say nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Probes) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield str(server.server_port)
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("ready", "shown"),
    [
        ({"ready": True, "reason": "", "target": "some-model"}, "(some-model)"),
        ({"ready": False, "reason": "no target"}, "(not ready: no target)"),
    ],
)
def test_a_port_that_specserve_itself_serves_on_is_no_problem(capsys, ready, shown):
    """Ready or not; what it serves is told."""
    with listening(service="specserve", ready=ready) as port:
        code, checks = doctor(capsys, "toy:vocab_size=96", "--port", port)

    assert code == 0
    status, found = checks[f"port {port}"]
    assert status == "note"
    assert f"specserve serves there already {shown}" in found


def test_a_port_that_another_server_has_is_a_problem(capsys):
    """It answers the same paths, and is something else."""
    with listening(service="other", ready={"ready": True, "target": "x"}) as port:
        code, checks = doctor(capsys, "toy:vocab_size=96", "--port", port)

    assert code == 1
    assert checks[f"port {port}"][0] == "problem"


def test_a_missing_embedded_pair_is_only_a_note(capsys, tmp_path):
    """`serve` would pull it, so nothing is wrong."""
    code, checks = doctor(capsys, "--port", "0", "--cache-dir", str(tmp_path))

    assert code == 0
    assert checks["embedded pair"][0] == "note"
    assert "specserve models pull" in checks["embedded pair"][1]


def test_an_old_library_is_a_problem(capsys, monkeypatch):
    """Versions are held against what the package declares."""
    wanted = {"grpcio": doctor_checks.SpecifierSet(">=999")}
    monkeypatch.setattr(doctor_checks, "_wanted_versions", lambda: wanted)

    code, checks = doctor(capsys, *PAIR)

    assert code == 1
    assert checks["grpcio"][0] == "problem"
    assert ">=999 is wanted" in checks["grpcio"][1]


def test_the_table_is_for_people(capsys):
    code = cli.main(["doctor", *PAIR])
    lines = capsys.readouterr().out.splitlines()

    assert code == 0
    assert lines[-1] == "0 problems"
    assert any(line.startswith("note") and "served alone" in line for line in lines)


def test_a_broken_record_of_verification_is_a_problem(capsys, tmp_path):
    """None is worth a note, one that was cut short is named."""
    where = ("--verified-dir", str(tmp_path))
    code, checks = doctor(capsys, *PAIR, *where)
    assert code == 0
    assert checks["verification"][0] == "note"

    broken = tmp_path / "0123.json"
    broken.write_text('{"passed": true, "key"')
    code, checks = doctor(capsys, *PAIR, *where)
    assert code == 1
    status, found = checks["verification"]
    assert status == "problem"
    assert broken.name in found


@pytest.mark.parametrize(("num_texts", "status"), [(200, "ok"), (199, "note")])
def test_a_record_that_serving_would_refuse_is_told_of(capsys, tmp_path, num_texts, status):
    """A pass on too little switches nothing on."""
    model = GetModelResponse(weights_fingerprint="aa", dtype="float32")
    (key,) = pair_keys(model, None, (), "ngram", [AcceptanceRule.GREEDY])
    evidence = Evidence(bias=0.005, num_parity_tokens=384, num_prefix_texts=num_texts)
    write_record(tmp_path, VerifiedRecord(key, True, 4, evidence, "2026-01-01", {}))

    _, checks = doctor(capsys, *PAIR, "--verified-dir", str(tmp_path))

    assert checks["verification"][0] == status
    assert ("on too little" in checks["verification"][1]) == (status == "note")
