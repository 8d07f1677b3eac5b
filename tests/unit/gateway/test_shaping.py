"""Who watches the packets of a stream learns nothing of what each round accepted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

import pytest

from specserve.errors import PeerUnavailable
from specserve.gateway.shaping import MAX_DUE_BYTES, padded, shaped
from specserve.rpc.v1.generation_pb2 import GenerateRequest
from unit.gateway.fakes import STOP, Exchange, FakeBackend, Step, block, events_of, make_app

COMPLETIONS = "/v1/completions"


class Ticks:
    """Time that passes when the test says so."""

    def __init__(self) -> None:
        self.allowed = asyncio.Semaphore(0)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0)
        await self.allowed.acquire()


async def come_at_once(events: Sequence[bytes]) -> AsyncGenerator[bytes, None]:
    for event in events:
        yield event


def data_of(text: bytes) -> list[bytes]:
    """Read events as a client does: comments are skipped."""
    lines = text.split(b"\n")
    return [line.removeprefix(b"data: ") for line in lines if line.startswith(b"data: ")]


@pytest.mark.parametrize("length", [0, 1, 61, 62, 63, 64, 65, 127, 128, 1000])
def test_padding_fills_up_to_a_multiple_and_is_skipped(length: int) -> None:
    part = b"data: " + b"x" * length + b"\n\n"
    filled = padded(part, 64)

    assert len(filled) % 64 == 0
    assert len(filled) < len(part) + 64 + 3
    assert data_of(filled) == [b"x" * length]
    assert filled.endswith(b"\n\n")


def test_without_padding_nothing_is_added() -> None:
    assert padded(b"data: x\n\n", 0) == b"data: x\n\n"
    assert padded(b"", 0) == b""
    assert len(padded(b"", 64)) == 64


async def test_without_an_interval_every_event_is_written_as_it_comes() -> None:
    parts = [part async for part in shaped(come_at_once([b"a", b"bb"]), 0, 0)]

    assert parts == [b"data: a\n\n", b"data: bb\n\n"]


async def test_writes_do_not_tell_how_many_tokens_a_round_had() -> None:
    """Rounds of one token and of eight, fast and slow: the same number of writes, equally large."""

    async def sizes(rounds: Sequence[Sequence[bytes]]) -> list[int]:
        ticks = Ticks()
        go_on = asyncio.Semaphore(0)

        async def events() -> AsyncGenerator[bytes, None]:
            for number, events_of_round in enumerate(rounds):
                if number:
                    await go_on.acquire()
                for event in events_of_round:
                    yield event

        found: list[int] = []
        async for part in shaped(events(), 0.05, 1024, ticks.sleep):
            found.append(len(part))
            go_on.release()
            for _ in range(5):
                await asyncio.sleep(0)  # let the round come
            ticks.allowed.release()
        return found

    one = await sizes([[b"a"]] * 4)
    eight = await sizes([[b"a"] * 8, [b"a token"], [], [b"and a long one, too" * 3]])

    assert one == eight
    assert set(one) == {1024}


async def test_silence_is_written_too() -> None:
    """A target that takes long for a round does not show as a gap."""
    ticks, go_on = Ticks(), asyncio.Event()

    async def events() -> AsyncGenerator[bytes, None]:
        yield b"a"
        await go_on.wait()
        yield b"b"

    parts = shaped(events(), 0.05, 256, ticks.sleep)
    found = [await anext(parts)]
    for _ in range(3):
        ticks.allowed.release()
        found.append(await anext(parts))
    go_on.set()
    ticks.allowed.release()
    found += [part async for part in parts if ticks.allowed.release() is None]

    assert {len(part) for part in found} == {256}
    assert [data_of(part) for part in found[:4]] == [[b"a"], [], [], []]
    assert data_of(b"".join(found)) == [b"a", b"b"]


async def test_what_goes_wrong_before_the_first_event_is_raised() -> None:
    async def events() -> AsyncGenerator[bytes, None]:
        raise PeerUnavailable("target", "gone")
        yield b""

    with pytest.raises(PeerUnavailable):
        await anext(shaped(events(), 0.05, 64))


async def test_what_goes_wrong_later_comes_after_what_was_due() -> None:
    async def events() -> AsyncGenerator[bytes, None]:
        yield b"a"
        raise PeerUnavailable("target", "gone")

    parts = shaped(events(), 0.001, 0)
    first = await anext(parts)
    with pytest.raises(PeerUnavailable):
        await anext(parts)

    assert data_of(first) == [b"a"]


async def test_leaving_closes_the_events() -> None:
    closed = asyncio.Event()

    async def events() -> AsyncGenerator[bytes, None]:
        try:
            yield b"a"
            await asyncio.Event().wait()
        finally:
            closed.set()

    parts = shaped(events(), 0.05, 0, Ticks().sleep)
    await anext(parts)
    await parts.aclose()

    assert closed.is_set()


async def test_a_reader_that_does_not_read_stops_the_decoding() -> None:
    """What waits for the next write is bounded."""
    taken = 0

    async def events() -> AsyncGenerator[bytes, None]:
        nonlocal taken
        for _ in range(1000):
            taken += 1
            yield bytes(4096)

    parts = shaped(events(), 0.05, 0, Ticks().sleep)
    await anext(parts)
    for _ in range(100):
        await asyncio.sleep(0)

    assert taken <= 2 * (MAX_DUE_BYTES // 4096 + 2)
    await parts.aclose()


@pytest.mark.parametrize("fails", [False, True])
async def test_a_whole_stream_is_shaped_its_end_and_its_errors_too(fails: bool) -> None:
    def script(request: GenerateRequest) -> Sequence[Step]:
        if fails:
            return [block(b"Hel"), PeerUnavailable("target", "gone")]
        return [block(b"Hel"), block(b"lo", STOP)]

    app = make_app(FakeBackend(script), stream_pad_bytes=1024, stream_interval_ms=1)
    exchange = Exchange(app, COMPLETIONS, {"prompt": "x", "stream": True})
    exchange.read_all()
    await exchange.start()

    events = events_of("".join(f"data: {d.decode()}\n\n" for d in data_of(exchange.body)))
    assert exchange.status == 200
    assert len(exchange.body) % 1024 == 0
    if fails:
        assert events[-1]["error"]["code"] == "unavailable"
    else:
        assert events[-1] == "[DONE]"
        assert "".join(e["choices"][0]["text"] for e in events[:-1]) == "Hello"
