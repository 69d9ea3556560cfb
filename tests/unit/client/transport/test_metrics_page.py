"""The page for Prometheus is served at the address that was asked for, and at no other."""

from __future__ import annotations

import urllib.error
import urllib.request
from contextlib import closing

import pytest
from logferry.client.transport.metrics_page import MetricsServer


def fetched(host: str, port: int) -> bytes:
    with urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=20) as answer:
        found: bytes = answer.read()
        return found


@pytest.mark.parametrize(
    ("host", "reached", "refused"),
    [
        ("127.0.0.1", ["127.0.0.1"], ["127.0.0.2", "[::1]"]),
        ("127.0.0.2", ["127.0.0.2"], ["127.0.0.1"]),
        ("0.0.0.0", ["127.0.0.1", "127.0.0.2"], []),
        ("::1", ["[::1]"], ["127.0.0.1"]),
    ],
)
def test_it_is_served_at_one_address_or_all(host: str, reached: list[str], refused: list[str]) -> None:
    try:
        server = MetricsServer(0, lambda: "page\n", host)
    except OSError as error:
        if ":" not in host:
            raise
        pytest.skip(f"this machine has no IPv6: {error}")
    with closing(server):
        assert [fetched(address, server.port) for address in reached] == [b"page\n"] * len(reached)
        for address in refused:
            with pytest.raises(urllib.error.URLError):
                fetched(address, server.port)


def test_an_address_of_another_machine_is_an_error() -> None:
    with pytest.raises(OSError, match="Cannot assign requested address"):
        MetricsServer(0, lambda: "", "192.0.2.1")
