"""Files under a running process: taken up when they change, kept out when they are wrong."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from specserve.errors import ConfigurationError
from specserve.rpc.reloading import Reloading


class Clock:
    """Time that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Number:
    """A file that holds a number, the file's reader, and how often it was read."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "number"
        self.path.write_text("1")
        self.num_reads = 0
        self.clock = Clock()
        self.value = Reloading("number", [self.path], self.load, period_s=1, clock=self.clock)

    def load(self) -> int:
        self.num_reads += 1
        try:
            return int(self.path.read_text())
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"no number: {type(error).__name__}") from error

    def replace(self, text: str) -> None:
        """Put another file in place, and let the time of the next look come."""
        other = self.path.with_name("other")
        other.write_text(text)
        other.replace(self.path)
        self.clock.now += 2


@pytest.fixture
def number(tmp_path: Path) -> Number:
    return Number(tmp_path)


def test_a_changed_file_is_taken_up(number: Number) -> None:
    number.replace("2")

    assert number.value.current() == 2
    assert number.value.generation == 1


def test_an_unchanged_file_is_read_once(number: Number) -> None:
    for _ in range(3):
        number.clock.now += 2
        assert number.value.current() == 1

    assert number.num_reads == 1


def test_files_are_looked_at_once_a_period(number: Number) -> None:
    """A busy gateway asks the file system once a second, not once a request."""
    number.replace("2")
    number.clock.now -= 1.5

    assert number.value.current() == 1


@pytest.mark.parametrize("spoil", ["text", "gone"])
def test_a_broken_file_keeps_the_old_value_and_says_so_once(
    number: Number, spoil: str, caplog: pytest.LogCaptureFixture
) -> None:
    if spoil == "text":
        number.replace("two")
    else:
        number.path.unlink()
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            number.clock.now += 2
            assert number.value.current() == 1

    assert number.value.failure is not None
    assert [record.message.partition(":")[0] for record in caplog.records] == ["number"]
    number.replace("3")
    assert (number.value.current(), number.value.failure) == (3, None)


def test_a_file_that_is_wrong_at_first_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "number"

    def load() -> int:
        raise ConfigurationError("there is none")

    with pytest.raises(ConfigurationError, match="there is none"):
        Reloading("number", [path], load)


def test_files_that_change_while_they_are_read_are_read_again(tmp_path: Path) -> None:
    """Two files of a Secret that is swapped between them: never one of each."""
    for name in ("old", "new"):
        folder = tmp_path / name
        folder.mkdir()
        for part in ("a", "b"):
            (folder / part).write_text(name)
    link = tmp_path / "data"
    link.symlink_to("old")
    paths = [link / "a", link / "b"]
    swaps = iter([True])

    def load() -> tuple[str, str]:
        first = paths[0].read_text()
        if next(swaps, False):
            (tmp_path / "next").symlink_to("new")
            os.replace(tmp_path / "next", link)
        return first, paths[1].read_text()

    assert Reloading("pair", paths, load).current() == ("new", "new")
