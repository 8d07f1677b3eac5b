"""A device in a process of its own, behind a socket pair.

protobuf and asyncio never fight it for the interpreter lock, a hung device can be told from a hung
server, and a crash takes no stream down. Knows the event loop and the pipe; knows no model.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence

from specserve.errors import ModelUnavailable, PeerUnavailable
from specserve.model.batch_record import create_shared
from specserve.model.device_base import BaseDevice
from specserve.model.framing import RECEIVE_BYTES, FrameReader, encode
from specserve.model.messages import Message, Shutdown

_CLOSE_S = 5.0
"""How long a closed device may finish its forward before it is killed."""

_EXIT_S = 1.0
"""How long a device that hung up may take to end."""

_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from specserve.model.device_process import main; main(*map(int, sys.argv[2:]))"
)
"""A child of subprocess, not of multiprocessing: spawn would import the server's main module (Ray,
gRPC) into the device and start a resource tracker beside it."""


class ProcessDevice(BaseDevice):
    """An engine in a process of its own, behind a socket pair."""

    async def start(self) -> None:
        """Spawn the process and wait until its model is loaded."""
        loop = asyncio.get_running_loop()
        self._ready, self.failed = loop.create_future(), loop.create_future()
        self._reader = FrameReader()
        self._unsent = bytearray()
        self._sock, theirs = socket.socketpair()
        self._sock.setblocking(False)
        record_fd, self._record = create_shared()
        fds = [theirs.fileno(), record_fd]
        try:
            # Starting takes a fork and an exec, some ms, once.
            self._process = subprocess.Popen(  # noqa: ASYNC220
                [sys.executable, "-c", _BOOT, json.dumps(sys.path), *map(str, fds)],
                pass_fds=fds,
                # Threads that spin between kernels take the core another engine needs.
                env={"OMP_WAIT_POLICY": "PASSIVE", **os.environ},
            )
        finally:
            theirs.close()
            os.close(record_fd)
        loop.add_reader(self._sock, self._on_readable)
        self._write_frame(encode((self._config, self._role, self._speculative)))
        try:
            self.info = await self._ready
        except BaseException:
            await self.close()
            raise

    @property
    def pid(self) -> int:
        """Process id of the device."""
        return self._process.pid

    async def close(self) -> None:
        """Ask for the end, wait for it, and kill what does not listen."""
        if self._is_closed:
            return
        if self._process.poll() is None:
            self._outgoing.append(Shutdown())
            self.flush()
        self._is_closed = True
        self._disconnect()
        await asyncio.get_running_loop().run_in_executor(None, self._reap, _CLOSE_S)

    def _reap(self, patience_s: float) -> int:
        """Wait for the process, so that none is left as a zombie."""
        try:
            return self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def _write(self, batch: Sequence[Message]) -> None:
        self._write_frame(encode(batch))

    def _write_frame(self, data: bytes) -> None:
        if self._sock.fileno() < 0:
            return  # the device is gone, and `failed` says so
        # The device may be in a long forward: never block the event loop on a full pipe.
        if not self._unsent:
            data = data[self._send_now(data) :]
        if data:
            if not self._unsent:
                asyncio.get_running_loop().add_writer(self._sock, self._on_writable)
            self._unsent += data

    def _send_now(self, data: bytes | bytearray) -> int:
        try:
            return self._sock.send(data)
        except BlockingIOError:
            return 0
        except OSError:
            return len(data)  # the device is gone; the reader sees it too and reports

    def _on_writable(self) -> None:
        del self._unsent[: self._send_now(self._unsent)]
        if not self._unsent:
            asyncio.get_running_loop().remove_writer(self._sock)

    def _on_readable(self) -> None:
        try:
            data = self._sock.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return
        except ConnectionResetError:
            data = b""
        if data:
            for message in self._reader.feed(data):
                self._received(message)
            return
        self._disconnect()
        loop = asyncio.get_running_loop()
        loop.run_in_executor(None, self._reap, _EXIT_S).add_done_callback(self._on_exit)

    def _on_exit(self, reaped: asyncio.Future[int]) -> None:
        died = f"device process {self.pid} ended with exit code {reaped.result()}"
        self._died(
            PeerUnavailable("device", died) if self._ready.done() else ModelUnavailable(died)
        )

    def _disconnect(self) -> None:
        if self._sock.fileno() >= 0:
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._sock)
            loop.remove_writer(self._sock)
            self._sock.close()
