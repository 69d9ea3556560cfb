"""Ports that are given out are free, and given once: what is to listen there may not have begun."""

from __future__ import annotations

import socket

import pytest
from logferry.ops.stack import processes


def test_no_port_is_given_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_given", set[int]())
    monkeypatch.setattr(processes, "_first_ephemeral_port", lambda: processes._LOWEST + 400)
    given = [port for _ in range(20) for port in processes.free_ports(5)]
    block = processes.free_ports(10)[0]
    given += range(block, block + 10)
    assert len(set(given)) == 110


def test_a_port_with_a_listener_is_not_free() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        assert not processes.is_free(listener.getsockname()[1])
