"""`specserve keys`: the file holds hashes, the terminal sees a key once."""

from __future__ import annotations

from pathlib import Path

import pytest

from specserve import cli
from specserve.gateway.api_keys import load_keys


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = cli.main(["keys", *words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_key_is_added_listed_and_revoked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "keys"
    file = f"--api-key-file={path}"

    code, key, _ = run(capsys, "add", file, "--name=alice", "--tenant=red")
    again, _, complaint = run(capsys, "add", file, "--name=alice")
    run(capsys, "add", file, "--name=bob")
    found = load_keys(str(path)).find(key.strip().encode())
    listed = run(capsys, "list", file)[1]
    wrong, _, hint = run(capsys, "revoke", file, "--name=alise")
    revoked, _, _ = run(capsys, "revoke", file, "--name=alice")

    assert (code, again, wrong, revoked) == (0, 2, 2, 0)
    assert found is not None
    assert (found.name, found.tenant) == ("alice", "red")
    assert key.strip() not in path.read_text() + listed
    assert [line.split() for line in listed.splitlines()[2:]] == [["alice", "red"], ["bob", "bob"]]
    assert "revoke it first" in complaint
    assert "alice" in hint
    assert [key.name for key in load_keys(str(path)).keys] == ["bob"]


def test_the_file_is_its_owner_s_and_keeps_the_mode_it_was_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "keys"
    run(capsys, "add", f"--api-key-file={path}", "--name=alice")
    first = path.stat().st_mode & 0o777
    path.chmod(0o640)
    run(capsys, "add", f"--api-key-file={path}", "--name=bob")

    assert (first, path.stat().st_mode & 0o777) == (0o600, 0o640)
    assert [child.name for child in tmp_path.iterdir()] == ["keys"]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("add", "--api-key-file=k"), "--name: missing"),
        (("add", "--api-key-file=k", "--name=a b"), "name: found 'a b'"),
        (("add", "--api-key-file=k", "--name=a", "--tenant=x\ny"), "tenant: found"),
        (("add", "--api-key-file=none/k", "--name=a"), "No such file"),
        (("list", "--api-key-file=k"), "cannot be read"),
        (("list", "--api-key-file=k", "--name=a"), "list takes none"),
        (("revoke", "--api-key-file=k", "--name=a", "--tenant=b"), "revoke takes none"),
        (("list",), "--api-key-file"),
    ],
)
def test_what_is_wrong_is_told(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    complaint: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = run(capsys, *words)

    assert code == 2
    assert complaint in err
