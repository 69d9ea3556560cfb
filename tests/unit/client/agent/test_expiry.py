"""A gateway that forgot a source because it was silent: the checkpoint knows what is recorded."""

from __future__ import annotations

import time
from typing import Any

import pytest
from logferry.client.files.checkpoint import EXPIRED_AFTER_MS

HOUR_MS = 3_600_000


def forget(gateway: Any) -> None:
    """The topic still has the chunks; the state is gone."""
    for stored in gateway.sources.values():
        stored.recorded = stored.base = None


def silent_for(client: Any, ms: int) -> None:
    """The client was down for so long."""
    assert client.agent.remember(client.now)
    client.close()
    client.begin()
    for entry in client.checkpoint.entries.values():
        assert entry.heard_ms
        entry.heard_ms -= ms


@pytest.mark.parametrize("client", [{}, {"once": True}], indirect=True)
def test_an_expired_source_resumes_at_the_checkpoints_position(
    client: Any, gateway: Any, caplog: pytest.LogCaptureFixture
) -> None:
    client.write("a.log", b"one\n")
    client.write("b.log", b"unchanged\n")
    client.restart()
    client.settle()
    silent_for(client, EXPIRED_AFTER_MS)
    forget(gateway)
    gateway.is_one_of_many = True  # a heartbeat is at a position that it does not know
    client.write("a.log", b"two\n")
    client.settle()
    assert sorted(client.stored()) == [b"one\ntwo\n", b"unchanged\n"]
    assert "source-expired" in caplog.text
    client.restart()  # also when it was heard of only now, and nothing new is recorded
    client.settle()
    assert sorted(client.stored()) == [b"one\ntwo\n", b"unchanged\n"]


@pytest.mark.parametrize(
    ("retention_ms", "silent_ms", "is_expired"),
    [
        (6 * HOUR_MS, 12 * HOUR_MS, True),
        (6 * HOUR_MS, 6 * HOUR_MS - 10_000, True),  # the checkpoint is written some seconds after the answer
        (6 * HOUR_MS, 5 * HOUR_MS, False),
        (14 * EXPIRED_AFTER_MS, 12 * HOUR_MS, False),
        (None, 12 * HOUR_MS, False),
    ],
)
@pytest.mark.parametrize("client", [{"once": True}], indirect=True)
def test_a_source_expires_by_the_retention_that_the_gateway_names(
    client: Any,
    gateway: Any,
    caplog: pytest.LogCaptureFixture,
    retention_ms: int | None,
    silent_ms: int,
    is_expired: bool,
) -> None:
    gateway.source_retention_ms = retention_ms
    client.write("a.log", b"one\n")
    client.settle()
    for line in (b"two\n", b"three\n"):
        silent_for(client, silent_ms)
        forget(gateway)
        gateway.is_one_of_many = True
        client.write("a.log", line)
        client.settle()
    assert client.stored() == [b"one\ntwo\nthree\n" if is_expired else b"one\none\ntwo\none\ntwo\nthree\n"]
    assert ("source-expired" in caplog.text, "gateway-forgot" in caplog.text) == (is_expired, not is_expired)


def test_a_client_killed_after_it_asked_still_knows_that_the_source_expired(client: Any, gateway: Any) -> None:
    client.write("a.log", b"one\n")
    client.settle()
    silent_for(client, EXPIRED_AFTER_MS)
    forget(gateway)
    gateway.is_one_of_many = True
    client.write("a.log", b"two\n")
    client.step()  # it asks
    gateway.faults.append("cut before")
    client.step()  # the chunk is lost
    client.restart()
    client.settle()
    assert client.stored() == [b"one\ntwo\n"]


def test_a_gateway_that_lost_what_it_acknowledged_an_hour_ago_gets_it_again(
    client: Any, gateway: Any, caplog: pytest.LogCaptureFixture
) -> None:
    client.write("a.log", b"one\n")
    client.settle()
    silent_for(client, 3_600_000)
    forget(gateway)
    next(iter(gateway.sources.values())).chunks.clear()
    client.settle()
    assert client.stored() == [b"one\n"]
    assert "gateway-forgot" in caplog.text


def test_heartbeats_alone_keep_a_source_known(client: Any) -> None:
    client.write("a.log", b"one\n")
    client.settle()
    assert client.agent.remember(client.now)
    (entry,) = client.checkpoint.entries.values()
    entry.heard_ms -= EXPIRED_AFTER_MS
    for _ in range(3):
        client.step(300.0)
        client.step(6.0)
    client.restart()
    (entry,) = client.checkpoint.entries.values()
    assert time.time() * 1000 - entry.heard_ms < 60_000
