"""``--status``: what the client writes down of its files, and what the command makes of it."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
from logferry.client.agent.agent import STATUS_EVERY_S
from logferry.client.agent.main import main
from logferry.client.agent.status import FILE


@pytest.fixture
def rows(client: Any) -> Any:
    """What is written down now, by file name."""

    def read() -> dict[str, dict[str, object]]:
        client.step(STATUS_EVERY_S)
        content = json.loads((client.root / "state" / FILE).read_text())
        return {str(row["path"]).rpartition("/")[2]: row for row in content["files"]}

    return read


def shown(client: Any, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str]:
    status = main(["--status", "--state-dir", str(client.root / "state"), *options])
    return status, capsys.readouterr().out.replace(f"{client.root}/", "")


def test_all_is_well(client: Any, rows: Any, capsys: pytest.CaptureFixture[str]) -> None:
    client.write("a.log", b"one\n")
    client.settle()
    row = rows()["a.log"]
    assert (row["topic"], row["position"], row["size"], row["lag_bytes"]) == ("t", 4, 4, 0)
    assert (row["waits_for"], row["error"], row["behind_s"]) == ("more lines", "", 0.0)
    status, text = shown(client, capsys)
    assert status == 0
    assert "a.log -> t: 4 of 4, all sent\n    waits for more lines, for " in text
    assert "1 files, 0 bytes behind" in text


def test_what_is_behind_says_for_how_long_and_why(
    client: Any, gateway: Any, rows: Any, capsys: pytest.CaptureFixture[str]
) -> None:
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
def test_what_a_file_waits_for(client: Any, rows: Any, content: bytes, expected: str) -> None:
    client.write("a.log", content)
    for _ in range(3):
        client.step(0.1)
    assert rows()["a.log"]["waits_for"] == expected


def test_what_a_file_without_a_name_waits_for(client: Any, rows: Any) -> None:
    client.write("a.log", b"one\n")
    client.settle()
    (client.root / "a.log").unlink()
    rows()
    assert rows()["a.log"]["waits_for"] == "its writer to close it"


def test_a_source_that_another_client_writes_says_so(
    client: Any, gateway: Any, rows: Any, capsys: pytest.CaptureFixture[str]
) -> None:
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
    assert row["waits_for"] == "the next try"
    assert "another client writes this source" in row["error"]
    assert shown(client, capsys)[0] == 1


def test_json_for_machines(client: Any, rows: Any, capsys: pytest.CaptureFixture[str]) -> None:
    client.write("a.log", b"one\n")
    client.settle()
    rows()
    status, text = shown(client, capsys, "--json")
    content = json.loads(text)
    assert (status, content["runs"], [row["size"] for row in content["files"]]) == (0, True, [4])


def test_without_a_client_it_says_so(client: Any, rows: Any, capsys: pytest.CaptureFixture[str]) -> None:
    client.write("a.log", b"one\n")
    client.settle()
    rows()
    client.close()
    status, text = shown(client, capsys)
    assert (status, "NO CLIENT RUNS" in text) == (3, True)
    (client.root / "state" / FILE).write_text("{")
    assert shown(client, capsys) == (3, "state: no client runs on this state folder\n")
    client.begin()
    assert shown(client, capsys) == (0, "state: the client has just started\n")


def test_a_disk_that_is_full_does_not_end_the_client(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("logferry.client.agent.agent.write_status", full)
    client.write("a.log", b"one\n")
    client.settle()
    assert client.stored() == [b"one\n"]


def test_names_and_answers_cannot_write_to_the_terminal(
    client: Any, gateway: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Control characters in a name, and a name that is no UTF-8."""
    client.write("a\x1b[2J\udcff.log", b"one\n")
    client.step()
    client.agent.tick(client.now + 60)
    _, text = shown(client, capsys)
    assert "a\\x1b[2J\\udcff.log" in text
    assert "\x1b" not in text


def test_the_state_is_written_by_its_owner_alone(client: Any) -> None:
    before = os.umask(0)
    try:
        client.write("a.log", b"one\n")
        client.settle()
        assert client.agent.remember(client.now)
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (client.root / "state").iterdir()}
    assert not [name for name, mode in modes.items() if mode & 0o022], modes
    assert {"checkpoint.json", "status.json"} <= modes.keys()
