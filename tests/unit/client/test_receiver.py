"""The receiving end of push delivery: signatures, and each chunk once, whatever comes again."""

from __future__ import annotations

import sqlite3
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

if sys.version_info < (3, 11):
    pytest.skip("the gateway needs Python 3.11", allow_module_level=True)

from logferry.client.receiver import Delivery, Receiver, Refused
from logferry.gateway.delivery.batch import signature

BODY = b"body"


def headers(first: int = 0, last: int = 9, **others: object) -> dict[str, str]:
    named = {"Subscription": "s", "Token": f"dc1.a/b/0/{first}-{last}", "Epoch": 1, "Replay": 0, "Shard": 0, **others}
    return {f"X-Logferry-{name}": str(value) for name, value in named.items()}


@pytest.fixture
def connection(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(tmp_path / "db")) as made:
        yield made


@pytest.fixture
def receiver(connection: sqlite3.Connection) -> Receiver:
    made = Receiver(connection, [b"new", b"old"], clock=lambda: 1000.0)
    made.create_table()
    return made


def place(first: int, last: int, *, epoch: int = 1, replay: int = 0, shard: int = 0) -> Delivery:
    return Delivery("s", "dc1.a", 0, shard, replay, epoch, first, last, BODY)


@pytest.mark.parametrize("key", [b"new", b"old"])
def test_a_signature_of_each_key_is_good(receiver: Receiver, key: bytes) -> None:
    signed = {**headers(3, 7), "X-Logferry-Signature": signature([BODY], [key], 1000)}
    found = receiver.check(signed, BODY)
    assert (found.topic, found.partition, found.first, found.last) == ("dc1.a/b", 0, 3, 7)
    lower = {name.lower(): value for name, value in signed.items()}
    assert receiver.check(lower, BODY) == found


@pytest.mark.parametrize(
    "text",
    [
        "",
        "t=1000",
        "v1=00",
        "t=x,v1=00",
        "t=1000,t=1000,v1=00",
        signature([BODY], [b"other"], 1000),
        signature([b"another body"], [b"new"], 1000),
        signature([BODY], [b"new"], 1),
        signature([BODY], [b"new"], 2000),
        signature([BODY], [b"new"], 1000).replace("t=1000", "t=1001"),
        "t=99999999999999999999,v1=00",
        "t=1000,v1=é",
    ],
)
def test_a_bad_signature_is_refused(receiver: Receiver, text: str) -> None:
    with pytest.raises(Refused) as refused:
        receiver.check({**headers(), "X-Logferry-Signature": text}, BODY)
    assert refused.value.status == 401


@pytest.mark.parametrize("missing", ["Subscription", "Token", "Epoch", "Replay", "Shard"])
def test_a_request_that_is_no_delivery_is_refused(connection: sqlite3.Connection, missing: str) -> None:
    receiver = Receiver(connection)
    wrong = headers()
    del wrong[f"X-Logferry-{missing}"]
    with pytest.raises(Refused) as refused:
        receiver.check(wrong, BODY)
    assert refused.value.status == 400
    with pytest.raises(Refused):
        receiver.check({**headers(), "X-Logferry-Token": "x"}, BODY)


def test_what_was_taken_is_not_taken_again(receiver: Receiver) -> None:
    assert receiver.take(place(0, 9)) == 0
    assert receiver.take(place(0, 9)) is None
    assert receiver.take(place(5, 19)) == 10
    assert receiver.take(place(20, 29, shard=1)) == 0
    assert receiver.take(place(0, 9, replay=1)) == 0
    assert receiver.take(place(10, 19, replay=1, epoch=2)) == 10


def test_a_worker_that_was_replaced_is_refused(receiver: Receiver) -> None:
    receiver.take(place(0, 9, epoch=5))
    with pytest.raises(Refused) as refused:
        receiver.take(place(10, 19, epoch=4))
    assert refused.value.status == 409


def test_what_is_rolled_back_was_not_taken(connection: sqlite3.Connection) -> None:
    receiver = Receiver(connection)
    receiver.create_table()
    receiver.take(place(0, 9))
    connection.rollback()
    assert receiver.take(place(0, 9)) == 0


def test_two_requests_at_once_take_it_once(tmp_path: Path, connection: sqlite3.Connection) -> None:
    """Two processes, or two threads with a connection each."""
    Receiver(connection).create_table()
    found: list[int | None] = []

    def take() -> None:
        with closing(sqlite3.connect(tmp_path / "db", timeout=30)) as own, own:
            found.append(Receiver(own).take(place(0, 9)))

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(map(str, found)) == ["0"] + ["None"] * 7


def test_a_wrong_table_or_style_is_refused() -> None:
    with pytest.raises(ValueError, match="style"):
        Receiver(None, style=":1")
    with pytest.raises(ValueError, match="table"):
        Receiver(None, table="x; DROP TABLE y")
