"""`specserve support-bundle` by itself: what it takes out and refuses, what it says is missing.

That a whole bundle of a running pair holds no secret: `tests/contract/test_client_verbs.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from specserve import cli
from specserve.gateway.api_keys import make_key
from specserve.tools.support_bundle import archive
from specserve.tools.support_bundle.collection import Collection
from specserve.tools.support_bundle.here import environment, settings
from specserve.tools.support_bundle.redaction import REDACTED, Redactor, secrets_of

KEY, STORED = make_key("alice")


@pytest.mark.parametrize(
    ("text", "rest"),
    [
        (f"--api-key={KEY}.", f"--api-key={REDACTED}."),
        (STORED.line(), f"alice alice sha256 {REDACTED}"),
        ("Authorization: Bearer abc.def-123", f"Authorization: Bearer {REDACTED}"),
        (
            "http://me:pass@host:1/x and https://h/a@b",
            f"http://{REDACTED}@host:1/x and https://h/a@b",
        ),
        ("a -----BEGIN PRIVATE KEY-----\nMIG\n-----END PRIVATE KEY----- b", f"a {REDACTED} b"),
        ("-----BEGIN CERTIFICATE-----\ncut off", REDACTED),
        ("x correct horse y", f"x {REDACTED} y"),
        ('"qu\\"ote\\n"', f'"{REDACTED}"'),
        (
            "max_tokens 3, api_key_file keys, bearer of news",
            "max_tokens 3, api_key_file keys, bearer of news",
        ),
    ],
    # Made anew in each of the workers, which would else not agree on the tests' names.
    ids=["key", "line", "bearer", "url", "pem", "cut", "words", "quoted", "none"],
)
def test_secrets_are_taken_out(text: str, rest: str) -> None:
    redactor = Redactor(["correct horse", "correct", 'qu"ote\n', "", "pat"])

    assert redactor.text(text) == rest


def test_environment_is_told_by_a_list_of_names() -> None:
    environ = {
        "HF_HUB_OFFLINE": "1",
        "RAY_AUTH_TOKEN": "secret-1",
        "AWS_SECRET_ACCESS_KEY": "secret-2",
        "https_proxy": "http://secret-3",
        "MONKEY": "no secret",
        "OTEL_EXPORTER_OTLP_HEADERS": "secret-4",
    }

    assert environment(environ) == {"HF_HUB_OFFLINE": "1"}
    assert sorted(secrets_of(environ)) == ["http://secret-3", "secret-1", "secret-2", "secret-4"]


def test_broken_settings_are_not_quoted(tmp_path: Path) -> None:
    """The parser's complaint shows the line; a bundle says where to see it."""
    path = tmp_path / "specserve.yaml"
    path.write_text("target: {model: x}\ntarget: hunter-the-second: [\n")
    found = Collection(Redactor())

    found.take("settings.json", lambda: settings(str(path)))
    found.take("none.json", lambda: settings(str(tmp_path / "none.yaml")))
    found.take("broken.json", lambda: 1 / 0)
    text = found.contents("made", [])

    assert "specserve config check" in found.missing["settings.json"]
    assert "No such file" in found.missing["none.json"]
    assert "ZeroDivisionError" in found.missing["broken.json"]
    assert "hunter" not in text
    assert (found.num_failures, found.files) == (3, {})


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--num-requests=0"], "--num-requests: found 0"),
        (["--api-key-from=none", "--url=http://x"], "--api-key-from: none"),
        (["--orchestrator-address=x"], "wanted HOST:PORT"),
        (["--tls-dir=none", "--orchestrator-address=127.0.0.1:1"], "--tls-dir: none"),
        (["--output=there"], "is there already"),
        (["--output=no/such/folder.tar.gz"], "cannot make no/such"),
    ],
)
def test_wrong_use_is_told_before_anything_is_asked(
    words: list[str],
    complaint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").write_text("kept")

    assert cli.main(["support-bundle", *words]) == 2

    assert complaint in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_what_does_not_answer_is_a_line_and_the_rest_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Into a folder, for its owner alone; exit code 1 says that something asked for is missing."""
    bundle = tmp_path / "bundle"

    code = cli.main(
        [
            *("support-bundle", "--no-doctor", f"--output={bundle}", "--url=http://127.0.0.1:1"),
            *("--orchestrator-address=127.0.0.1:1", "--metrics-url=nonsense"),
        ]
    )
    out = capsys.readouterr().out
    contents = (bundle / "contents.txt").read_text()

    assert code == 1
    assert contents.strip() in out
    for missing in ("gateway/ready.json", "orchestrator-1/status.json", "metrics-1.txt"):
        assert missing in contents.partition("does not hold:")[2]
    assert (bundle / "versions.json").is_file()
    assert bundle.stat().st_mode & 0o077 == 0


def test_nothing_asked_for_nothing_missed(tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"

    assert cli.main(["support-bundle", "--no-doctor", f"--output={bundle}"]) == 0
    assert "not asked for: --url" in (bundle / "contents.txt").read_text()


def test_a_bundle_never_replaces_another(tmp_path: Path) -> None:
    path = tmp_path / "a.tar.gz"
    archive.reserve(path)
    archive.write(path, {"x": "1"})

    assert cli.main(["support-bundle", "--no-doctor", f"--output={path}"]) == 2
