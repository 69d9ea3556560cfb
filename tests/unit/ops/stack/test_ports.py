"""Ports that are given out are free, and given once: what is to listen there may not have begun."""

from __future__ import annotations

import json
import socket
import subprocess
import sys

import pytest
from logferry.ops.stack import processes


def test_no_port_is_given_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_given", set[int]())
    monkeypatch.setattr(processes, "_first_ephemeral_port", lambda: processes._LOWEST + 400)
    given = [port for _ in range(20) for port in processes.free_ports(5)]
    block = processes.free_ports(10)[0]
    given += range(block, block + 10)
    assert len(set(given)) == 110


_OTHER = """
import json, sys
from logferry.ops.stack import processes
low, high = map(int, sys.argv[1:])
processes._LOWEST, processes._first_ephemeral_port = low, lambda: high
print(json.dumps([*processes.free_ports(5)]), flush=True)
sys.stdin.read()
"""


def test_no_port_is_given_to_two_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of twenty, another process has five, which are free again when it has ended."""
    low = processes.free_ports(1)[0] + 1
    command = [sys.executable, "-c", _OTHER, str(low), str(low + 20)]
    monkeypatch.setattr(processes, "_LOWEST", low)
    monkeypatch.setattr(processes, "_first_ephemeral_port", lambda: low + 20)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        taken = json.loads(other.stdout.readline())
        for _ in range(50):
            monkeypatch.setattr(processes, "_given", set[int]())
            assert not {*processes.free_ports(5)} & {*taken}
        assert not processes._locks.take(range(taken[0], taken[-1] + 1))
    assert processes._locks.take(range(taken[0], taken[-1] + 1))


def test_a_port_with_a_listener_is_not_free() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        assert not processes.is_free(listener.getsockname()[1])
