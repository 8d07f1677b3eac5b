"""The child's side of a device process: load, say so, serve the pipe, exit with the parent.

Started by `device_pipe.ProcessDevice` as `python -c BOOT`; never imported by a server.
"""

from __future__ import annotations

import gc
import logging
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Iterable
from typing import cast

from specserve.config import EngineConfig, SpeculativeConfig
from specserve.errors import ModelUnavailable, PeerUnavailable, SpecServeError
from specserve.model.batch_record import BatchRecord, open_shared
from specserve.model.device_loop import build_engine, run_device
from specserve.model.framing import RECEIVE_BYTES, FrameReader, encode
from specserve.model.messages import EngineOutput, Message, ModelInfo, Role, Shutdown
from specserve.model.toy import PREFIX as TOY_PREFIX

logger = logging.getLogger(__name__)

Start = tuple[EngineConfig, Role, SpeculativeConfig | None]
"""What to load: the first frame."""


class SocketChannel:
    """The device's end of the pipe."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._reader = FrameReader()
        self._early: list[object] = []
        """Frames that came together with the first one."""
        self._ending = threading.Lock()
        self._exit_code: int | None = None

    def receive(self, timeout_s: float | None) -> Iterable[Message]:
        """Wait up to timeout_s (None: for ever, 0: not at all) and take what has come."""
        if timeout_s and not self._early:
            select.select([self._sock], [], [], timeout_s)
        try:
            frames = self._receive(0 if timeout_s is None else socket.MSG_DONTWAIT)
        except BlockingIOError:
            return ()
        batches = cast(list[tuple[Message, ...]], frames)
        return [message for batch in batches for message in batch]

    def receive_start(self) -> Start:
        """Wait for the first frame: what to load."""
        while not (frames := self._receive()):
            pass
        start, *self._early = frames
        return cast(Start, start)

    def farewell(self) -> int:
        """Give the exit code of a device whose server is gone, and say so, once.

        0, and silent, when Shutdown waits unread: the server has not died, it has closed us. Both
        the loop and the loader's watch may come here.
        """
        with self._ending:
            if self._exit_code is None:
                self._exit_code = 0 if self._was_told_to_stop() else 1
                if self._exit_code:
                    logger.warning("the server is gone, and its device ends too")
            return self._exit_code

    def _was_told_to_stop(self) -> bool:
        try:
            while True:
                for batch in self._receive(socket.MSG_DONTWAIT):
                    if any(isinstance(message, Shutdown) for message in cast(tuple[object], batch)):
                        return True
        except (EOFError, BlockingIOError):
            return False

    def _receive(self, flags: int = 0) -> list[object]:
        """Read the frames that are complete.

        Raises:
            EOFError: the server is gone, be it that it closed the pipe or was killed with our
                replies unread.
        """
        if self._early:
            early, self._early = self._early, []
            return early
        try:
            data = self._sock.recv(RECEIVE_BYTES, flags)
        except ConnectionResetError as error:
            raise EOFError from error
        if not data:
            raise EOFError
        return self._reader.feed(data)

    def send(self, output: EngineOutput | ModelInfo | SpecServeError) -> None:
        """Write one frame; blocks while the server is slow to read."""
        try:
            self._sock.sendall(encode(output))
        except (BrokenPipeError, ConnectionResetError) as error:
            raise EOFError from error


def main(fd: int, record_fd: int) -> None:
    """Serve the socket `fd`; the first frame on it is (config, role, speculative).

    Args:
        record_fd: memory that the server reads when this process has died (`batch_record.py`).
    """
    # Ctrl-C reaches the whole terminal group; stopping is the server's business.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sock = socket.socket(fileno=fd)
    channel = SocketChannel(sock)
    loaded = threading.Event()
    try:
        start = channel.receive_start()
        # Not before: of two who read, one would have what the other looks for.
        watch = threading.Thread(
            target=_exit_with_parent, args=(sock, channel, loaded), daemon=True
        )
        watch.start()
        serve(start, channel, loaded, open_shared(record_fd))
    except EOFError:
        sys.exit(channel.farewell())
    finally:
        sock.close()


def serve(
    start: Start, channel: SocketChannel, loaded: threading.Event, record: BatchRecord
) -> None:
    """Load the engine, report it or its failure, then run the loop."""
    config, role, speculative = start
    try:
        if config.model.startswith(TOY_PREFIX) and config.num_threads is None:
            # Its tensors are tiny: waking a second thread costs more than it saves.
            config = config.model_copy(update={"num_threads": 1})
        engine = build_engine(config, role, speculative, record)
    except SpecServeError as error:
        channel.send(error)
        return
    except Exception as error:
        logger.exception("loading %s failed", config.model)
        channel.send(ModelUnavailable(f"{config.model}: {type(error).__name__}: {error}"))
        return
    # What was loaded stays: no collection needs to look at it again.
    gc.collect()
    gc.freeze()
    loaded.set()
    channel.send(engine.info)
    try:
        run_device(engine, channel.receive, channel.send, record)
    except EOFError:
        raise
    except Exception as error:
        logger.exception("the device loop failed")
        channel.send(PeerUnavailable("device", f"{type(error).__name__}: {error}"))
        sys.exit(1)


def _exit_with_parent(sock: socket.socket, channel: SocketChannel, loaded: threading.Event) -> None:
    """End the process if the parent goes while a model loads; the loop itself sees it later."""
    poll = select.poll()
    poll.register(sock, select.POLLRDHUP)
    while not loaded.is_set():
        if poll.poll(200) and not loaded.is_set():
            os._exit(channel.farewell())
