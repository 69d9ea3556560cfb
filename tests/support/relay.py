"""A relay of TCP connections that can be cut, stopped or slowed down at any moment, in threads.

A Kafka whose link to others goes through a relay: it has a second address, where brokers name the relay's."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from base64 import urlsafe_b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from logferry.ops.stack.kafka_cluster import KafkaCluster
from logferry.ops.stack.processes import free_ports

_PATIENCE_S = 60


class Relay:
    """``with Relay(url) as relay``: ``relay.url`` leads there; `cut` ends every connection that is open.

    ``bytes_per_s``: of each connection's answers from now on, None: as fast as it goes.
    """

    def __init__(self, target: str) -> None:
        parts = urlsplit(target)
        self._target = (parts.hostname or "", parts.port or 80)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.bytes_per_s: int | None = None
        self._is_away = False
        self._flows = threading.Event()
        self._flows.set()
        self._open: set[socket.socket] = set()
        self._lock = threading.Condition()

    def __enter__(self) -> Relay:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut(wait=False)

    def cut(self, wait: bool = True) -> int:
        """How many ends were cut; it waits for some that can be."""
        with self._lock:
            while wait and not self._open:
                assert self._lock.wait(_PATIENCE_S), "nobody has connected"
            found, self._open = self._open, set()
        for end in found:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        return len(found)

    def go_away(self) -> int:
        """As a cut cable with a router that says so: open connections end, and new ones at once, until `come_back`."""
        self._is_away = True
        return self.cut()

    def hang(self) -> None:
        """As a cut cable that nobody tells of: connections stay open and carry nothing, until `come_back`."""
        self._flows.clear()

    def come_back(self) -> None:
        self._is_away = False
        self._flows.set()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                if self._is_away:
                    near.close()
                    continue
                far = socket.create_connection(self._target)
                with self._lock:
                    self._open |= {near, far}
                    self._lock.notify_all()
                for one, other in ((near, far), (far, near)):
                    threading.Thread(target=self._carry, args=(one, other, one is far), daemon=True).start()

    def _carry(self, one: socket.socket, other: socket.socket, is_answer: bool) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(65536):
                self._flows.wait()
                if is_answer and self.bytes_per_s is not None:
                    time.sleep(len(data) / self.bytes_per_s)
                other.sendall(data)
        for end in (one, other):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        with self._lock:
            self._open -= {one, other}
        one.close()


@contextmanager
def relayed(name: str, folder: Path) -> Iterator[tuple[KafkaCluster, Relay, str]]:
    """One broker, the relay before it, and the bootstrap address of those who come through the relay."""
    broker, controller, behind = free_ports(3)
    folder.mkdir()
    facts = {
        "format": 1,
        "cluster_id": urlsafe_b64encode(name.rjust(16, "c").encode()).decode().rstrip("="),
        "ports": {1: (broker, controller)},
    }
    (folder / "cluster.json").write_text(json.dumps(facts))
    with Relay(f"http://127.0.0.1:{behind}") as relay:
        near = f"PLAINTEXT://127.0.0.1:{broker}"
        settings = {
            "listeners": f"{near},CONTROLLER://127.0.0.1:{controller},FAR://127.0.0.1:{behind}",
            "advertised.listeners": f"{near},FAR://127.0.0.1:{relay.port}",
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,FAR:PLAINTEXT",
            "inter.broker.listener.name": "PLAINTEXT",
        }
        with KafkaCluster(name, folder, settings=settings) as cluster:
            assert cluster.bootstrap == f"127.0.0.1:{broker}", "the ports changed"
            yield cluster, relay, f"127.0.0.1:{relay.port}"
