"""Ports chosen for other processes: nobody else takes them before, between or after."""

import socket
import sys

import grpc
import pytest

from specserve.rpc.channel import SERVER_OPTIONS
from specserve.tools.held_port import HOST, HeldPort

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a hold is Linux's")


def refuses(port: int) -> bool:
    """Say whether a program that looks for a free port finds this one taken."""
    with socket.socket() as other:
        try:
            other.bind((HOST, port))
        except OSError:
            return True
    return False


async def test_held_port_is_its_servers_and_its_successors_alone():
    with HeldPort() as held:
        for _ in range(2):
            assert refuses(held.number)
            server = grpc.aio.server(options=SERVER_OPTIONS)
            assert server.add_insecure_port(f"{HOST}:{held.number}") == held.number
            await server.start()
            assert refuses(held.number)
            await server.stop(None)
    assert not refuses(held.number)


def test_two_holds_are_two_ports(monkeypatch: pytest.MonkeyPatch):
    """Even where both choosers look at the same ports in the same order."""

    class Alike:
        @staticmethod
        def sample(ports: range, count: int) -> range:
            return ports[:count]

    monkeypatch.setattr("specserve.tools.held_port._chance", Alike)
    with HeldPort() as first, HeldPort() as second:
        assert first.number != second.number


def test_no_free_port_is_said(monkeypatch: pytest.MonkeyPatch):
    with HeldPort() as held:
        only = range(held.number, held.number + 1)
        monkeypatch.setattr("specserve.tools.held_port._RANGE", only)
        with pytest.raises(OSError, match=f"no port from {held.number} to {held.number} is free"):
            HeldPort()
