"""Devices: the engine behind a pipe or in a thread, its start, its end and its death."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable

import pytest

from helpers.waiting import eventually
from specserve.config import EngineConfig, SpeculativeConfig
from specserve.errors import ConfigurationError, ModelUnavailable, PeerUnavailable
from specserve.model import device_loop
from specserve.model.batch_record import BatchRecord
from specserve.model.device import Device, ProcessDevice, ThreadDevice, create_device
from specserve.model.framing import FrameReader, encode
from specserve.model.messages import (
    EngineLoad,
    EngineOutput,
    Release,
    Reply,
    Role,
    Shutdown,
    VerifyReply,
)
from specserve.model.toy_runner import ToyRunner
from support.engines import Caller

TOY = EngineConfig(model="toy:vocab_size=16,eos_bias=-1000", block_size=4, num_kv_blocks=64)
HANGING = "toy:vocab_size=16,eos_bias=-1000,step_ms=600000"
MODES = ["thread", pytest.param("process", marks=pytest.mark.slow)]

Start = Callable[..., "asyncio.Future[Device]"]


class Replies:
    """Collects a device's replies; await `take` for the next ones."""

    def __init__(self, device: Device) -> None:
        self._queue: asyncio.Queue[Reply] = asyncio.Queue()
        device.on_output = self._put

    def _put(self, output: EngineOutput) -> None:
        for reply in output.replies:
            self._queue.put_nowait(reply)

    async def take(self, count: int = 1) -> list[Reply]:
        async with asyncio.timeout(60):
            return [await self._queue.get() for _ in range(count)]


@pytest.fixture
async def started() -> AsyncIterator[Start]:
    devices: list[Device] = []

    async def start(
        mode: str,
        role: Role = "target",
        config: EngineConfig = TOY,
        speculative: SpeculativeConfig | None = None,
    ) -> Device:
        config = config.model_copy(update={"device_mode": mode})
        device = create_device(config, role, speculative)
        devices.append(device)
        await device.start()
        return device

    yield start  # type: ignore[misc]
    for device in devices:
        await device.close()
        await device.close()


@pytest.mark.parametrize("mode", MODES)
async def test_calls_go_in_and_replies_come_out(started, mode):
    device = await started(mode)
    assert isinstance(device, ProcessDevice if mode == "process" else ThreadDevice)
    assert (device.info.vocab_size, device.info.num_blocks) == (16, 64)
    replies, callers = Replies(device), [Caller(str(i), [i + 1, 2, 3]) for i in range(5)]
    for caller in callers:
        device.send(caller.verify([4, 5], num_decode_steps=1))
    answers = await replies.take(5)
    assert {reply.session_id for reply in answers} == {"0", "1", "2", "3", "4"}
    assert all(isinstance(reply, VerifyReply) for reply in answers)
    assert device.load.num_sessions == 5
    assert device.load.num_iterations > 0
    for caller in callers:
        device.send(Release(caller.session_id))
    device.send(Caller("last", [1]).verify())
    await replies.take()
    assert device.load.num_sessions == 1
    assert not device.failed.done()


@pytest.mark.parametrize("mode", MODES)
async def test_a_start_up_error_comes_back_as_what_it_was(started, mode):
    config = EngineConfig(model="toy:vocabsize=3")
    with pytest.raises(ConfigurationError, match="did you mean 'vocab_size'"):
        await started(mode, config=config)


@pytest.mark.slow
async def test_a_killed_process_is_reported_and_leaves_no_zombie(started):
    device = await started("process", config=TOY.model_copy(update={"model": HANGING}))
    assert device.computed == frozenset()
    device.send(Caller("a", [1]).verify())
    device.send(Caller("b", [2]).verify())
    await eventually(lambda: device.computed == {"a", "b"}, "the forward of both runs", within_s=60)
    os.kill(device.pid, signal.SIGKILL)
    error = await asyncio.wait_for(device.failed, 60)
    assert device.computed == {"a", "b"}  # it cannot say so any more
    assert isinstance(error, PeerUnavailable)
    assert "exit code -9" in str(error)
    with pytest.raises(ChildProcessError):
        os.waitpid(device.pid, os.WNOHANG)  # noqa: ASYNC222
    device.send(Caller("a", [1]).verify())  # dropped, not raised
    await asyncio.sleep(0)


@pytest.mark.slow
async def test_interrupts_are_the_servers_business(started):
    device = await started("process")
    os.kill(device.pid, signal.SIGINT)
    replies = Replies(device)
    device.send(Caller("a", [1]).verify())
    assert isinstance((await replies.take())[0], VerifyReply)


@pytest.mark.slow
async def test_close_ends_the_process_and_is_no_failure(started):
    device = await started("process")
    await device.close()
    assert not device.failed.done()
    with pytest.raises(ProcessLookupError):
        os.kill(device.pid, 0)


@pytest.mark.slow
async def test_a_process_that_dies_while_loading_fails_the_start():
    device = ProcessDevice(TOY, "target", None)
    starting = asyncio.create_task(device.start())
    await asyncio.sleep(0)
    os.kill(device.pid, signal.SIGKILL)
    with pytest.raises(ModelUnavailable, match="exit code -9"):
        await starting


@pytest.mark.slow
async def test_a_prompt_larger_than_the_pipe_does_not_block_the_server(started):
    """256 KiB pieces queue behind a busy device; the event loop stays free, all arrive."""
    config = TOY.model_copy(
        update={"max_model_len": 400_000, "num_kv_blocks": 2000, "block_size": 256}
    )
    device = await started("process", config=config)
    replies = Replies(device)
    for i in range(4):
        device.send(Caller(str(i), [i + 1, 2, 3, 4] * 25_000).verify(append_only=True))
    await asyncio.sleep(0)
    answers = await replies.take(4)
    assert all(isinstance(r, VerifyReply) and r.cached_length == 100_000 for r in answers)


def test_frames_survive_any_cut():
    messages = [("a", 1), Shutdown(), EngineOutput((), EngineLoad(1, 2, 3, 4, 5)), b"x" * 1000]
    stream = b"".join(encode(message) for message in messages)
    for size in (1, 3, 8, 9, 100, len(stream)):
        reader = FrameReader()
        received = [
            message
            for start in range(0, len(stream), size)
            for message in reader.feed(stream[start : start + size])
        ]
        assert received == messages


def test_long_work_without_replies_still_reports_progress(monkeypatch):
    """A hung device is told from a busy one by the iterations that move."""

    class Prefilling:
        """An engine that works for ever and never has anything to say."""

        num_iterations = 0

        @property
        def load(self) -> EngineLoad:
            return EngineLoad(0, 0, 1, 0, self.num_iterations)

        def submit(self, message: object) -> None: ...

        def wait_s(self) -> float:
            return 0.0

        def step(self) -> None:
            self.num_iterations += 1

    now = iter(range(1000))
    monkeypatch.setattr(device_loop.time, "monotonic", lambda: next(now) * 0.03)
    sent: list[EngineOutput] = []
    turns = iter([()] * 20 + [(Shutdown(),)])
    device_loop.run_device(Prefilling(), lambda _: next(turns), sent.append, BatchRecord())  # type: ignore[arg-type]
    assert 3 <= len(sent) <= 7
    assert [output.load.num_iterations for output in sent] == sorted(
        {output.load.num_iterations for output in sent}
    )


class Panic(BaseException):
    """What a library's panic looks like: no Exception."""


async def test_a_thread_that_a_library_panics_in_is_reported(started, monkeypatch):
    """It ends with a word, and so can be started anew at once."""
    device = await started("thread")

    def panics(*_: object) -> None:
        raise Panic("index out of bounds")

    monkeypatch.setattr(ToyRunner, "forward", panics)
    device.send(Caller("a", [1, 2, 3]).verify())
    error = await asyncio.wait_for(device.failed, 60)

    assert isinstance(error, PeerUnavailable)
    assert "Panic: index out of bounds" in str(error)
