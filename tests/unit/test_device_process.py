"""The child's side of a device process: how it ends when its server does."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from specserve.config import EngineConfig
from specserve.model.batch_record import create_shared
from specserve.model.device_pipe import _BOOT
from specserve.model.framing import RECEIVE_BYTES, FrameReader, encode
from specserve.model.messages import EngineOutput, ModelInfo, Shutdown
from support.engines import Caller

TOY = EngineConfig(model="toy:vocab_size=16,step_ms=200", num_kv_blocks=64, max_model_len=64)
TIMEOUT_S = 120.0

_WATCHED_READER = """
import threading
from specserve.model.device_process import SocketChannel
from specserve.model.framing import FrameReader
farewell, feed = SocketChannel.farewell, FrameReader.feed
has_read, has_looked = threading.Event(), threading.Event()
def look(self):
    has_read.wait(5)
    code = farewell(self)
    has_looked.set()
    return code
def read(self, data):
    frames = feed(self, data)
    has_read.set()
    has_looked.wait(0.5)
    return frames
SocketChannel.farewell, FrameReader.feed = look, read
"""
"""Has the loader's watch look for what the loader has just taken off the pipe, if it can."""

pytestmark = pytest.mark.slow


class Server:
    """The server's side of the pipe, in the test's hand."""

    def __init__(self, before: str = "") -> None:
        """Start the device; `before` is run in it once its path is set."""
        boot = _BOOT.replace("from specserve", f"exec({before!r}); from specserve", 1)
        self.sock, theirs = socket.socketpair()
        self.sock.settimeout(TIMEOUT_S)
        record_fd, _ = create_shared()
        fds = [theirs.fileno(), record_fd]
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", boot, json.dumps(sys.path), *map(str, fds)],
                pass_fds=fds,
                stderr=subprocess.PIPE,
                text=True,
            )
        os.close(record_fd)
        self.send((TOY, "target", None))

    def send(self, message: object) -> None:
        self.sock.sendall(encode(message))

    def wait_for(self, kind: type) -> None:
        """Read until the device has said such a thing."""
        reader = FrameReader()
        while data := self.sock.recv(RECEIVE_BYTES):
            if any(isinstance(said, kind) for said in reader.feed(data)):
                return
        pytest.fail("the device hung up")

    def wait_readable(self) -> None:
        """Wait until there is something to read, and leave it unread."""
        assert self.sock.recv(1, socket.MSG_PEEK)

    def ended(self) -> tuple[int, list[str]]:
        """Wait for the end; the exit code, and what the device had to say."""
        _, text = self.process.communicate(timeout=TIMEOUT_S)
        return self.process.returncode, text.splitlines()


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.sock.close()
    server.process.kill()
    server.process.communicate()


def test_server_killed_with_replies_unread_is_one_line(server: Server) -> None:
    """The kernel resets the pipe of a killed reader: the device ends in plain words, not with a
    trace, and its exit code says that this was no ordinary end."""
    server.wait_readable()
    server.sock.close()
    code, lines = server.ended()
    assert code == 1
    assert lines == ["the server is gone, and its device ends too"]


def test_server_that_hung_up_is_one_line(server: Server) -> None:
    """Nothing is unread: the end of the pipe says the same."""
    server.wait_for(ModelInfo)
    server.sock.close()
    code, lines = server.ended()
    assert code == 1
    assert lines == ["the server is gone, and its device ends too"]


def test_server_killed_while_the_model_loads_is_one_line(server: Server) -> None:
    """Whoever sees it first, the loader's watch or the first frame to be written."""
    server.sock.close()
    code, lines = server.ended()
    assert code == 1
    assert lines == ["the server is gone, and its device ends too"]


def test_told_to_stop_is_silent(server: Server) -> None:
    """An ordinary end has exit code 0 and no word."""
    server.wait_for(ModelInfo)
    server.send((Shutdown(),))
    assert server.ended() == (0, [])


def test_told_to_stop_while_the_model_loads_is_silent_too(server: Server) -> None:
    """A start that was given up is no fault."""
    server.send((Shutdown(),))
    server.sock.close()
    assert server.ended() == (0, [])


def test_only_one_reads_the_first_frame_and_what_came_with_it() -> None:
    """The watch finds the pipe closed while what it says is being read: it was told to stop."""
    server = Server(_WATCHED_READER)
    server.send((Shutdown(),))
    server.sock.close()
    assert server.ended() == (0, [])


def test_told_to_stop_in_mid_forward_is_silent_too(server: Server) -> None:
    """The server closes the pipe at once: what the forward gave finds nobody, and that is fine."""
    server.wait_for(ModelInfo)
    server.send((Caller("a", [1]).verify(num_decode_steps=20),))
    server.wait_for(EngineOutput)
    server.send((Shutdown(),))
    server.sock.close()
    assert server.ended() == (0, [])
