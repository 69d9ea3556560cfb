"""``--status``: what the client writes down of its files, and what the command makes of it."""

from __future__ import annotations

import json

import pytest
from logferry.client.agent import agent
from logferry.client.agent.agent import STATUS_EVERY_S
from logferry.client.agent.inspect import FILE


@pytest.fixture
def rows(client):
    """What is written down now, by file name."""

    def read() -> dict[str, dict[str, object]]:
        client.step(STATUS_EVERY_S)
        content = json.loads((client.root / "state" / FILE).read_text())
        return {str(row["path"]).rpartition("/")[2]: row for row in content["files"]}

    return read


def shown(client, capsys, *options: str) -> tuple[int, str]:
    status = agent.main(["--status", "--state-dir", str(client.root / "state"), *options])
    return status, capsys.readouterr().out.replace(f"{client.root}/", "")


def test_all_is_well(client, rows, capsys):
    client.write("a.log", b"one\n")
    client.settle()
    row = rows()["a.log"]
    assert (row["topic"], row["position"], row["size"], row["lag_bytes"]) == ("t", 4, 4, 0)
    assert (row["waits_for"], row["error"], row["behind_s"]) == ("more lines", "", 0.0)
    status, text = shown(client, capsys)
    assert status == 0
    assert "a.log -> t: 4 of 4, all sent\n    waits for more lines, for " in text
    assert "1 files, 0 bytes behind" in text


def test_what_is_behind_says_for_how_long_and_why(client, gateway, rows, capsys):
    client.write("a.log", b"one\n")
    client.settle()
    client.write("a.log", b"two\n" * 10)
    gateway.faults.extend(["503"] * 100)
    rows()
    for _ in range(5):
        row = rows()["a.log"]
    assert (row["position"], row["size"], row["lag_bytes"]) == (4, 44, 40)
    assert row["behind_s"] == 5 * STATUS_EVERY_S
    assert row["waits_for"] in ("the next try", "the gateway's answer")
    assert row["error"] == '503 overloaded: {"type": "overloaded"}'
    status, text = shown(client, capsys)
    assert status == 1
    assert "a.log -> t: 4 of 44, 40 bytes behind for 25 s" in text
    assert "last error: 503 overloaded" in text
    gateway.faults.clear()
    for _ in range(5):
        row = rows()["a.log"]
    assert (row["error"], row["lag_bytes"], row["behind_s"]) == ("", 0, 0.0)


@pytest.mark.parametrize(
    ("content", "expected"),
    [(b"one\ntw", "the end of its last line"), (b"one\n", "more lines"), (b"", "more lines")],
)
def test_what_a_file_waits_for(client, rows, content, expected):
    client.write("a.log", content)
    for _ in range(3):
        client.step(0.1)
    assert rows()["a.log"]["waits_for"] == expected


def test_what_a_file_without_a_name_waits_for(client, rows):
    client.write("a.log", b"one\n")
    client.settle()
    (client.root / "a.log").unlink()
    rows()
    assert rows()["a.log"]["waits_for"] == "its writer to be done with it"


def test_a_stopped_source_says_so(client, gateway, rows, capsys):
    client.write("a.log", b"one\n")
    client.settle()
    for stored in gateway.sources.values():
        stored.session += 5
    client.write("a.log", b"two\n")
    client.step()
    client.step(0.1)
    for stored in gateway.sources.values():
        stored.session += 5
    client.step(0.1)
    row = rows()["a.log"]
    assert row["waits_for"] == "a new start of the client"
    assert "another client writes this source" in row["error"]
    assert shown(client, capsys)[0] == 1


def test_json_for_machines(client, rows, capsys):
    client.write("a.log", b"one\n")
    client.settle()
    rows()
    status, text = shown(client, capsys, "--json")
    content = json.loads(text)
    assert (status, content["runs"], [row["size"] for row in content["files"]]) == (0, True, [4])


def test_without_a_client_it_says_so(client, rows, capsys):
    client.write("a.log", b"one\n")
    client.settle()
    rows()
    client.close()
    status, text = shown(client, capsys)
    assert (status, "NO CLIENT RUNS" in text) == (3, True)
    (client.root / "state" / FILE).write_text("{")
    assert shown(client, capsys) == (3, "state: no client runs on this state folder\n")
    client.begin()
    assert shown(client, capsys) == (0, "state: the client has only just begun\n")


def test_a_disk_that_is_full_does_not_end_the_client(client, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("logferry.client.agent.inspect.write", full)
    client.write("a.log", b"one\n")
    client.settle()
    assert client.stored() == [b"one\n"]
