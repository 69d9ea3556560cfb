"""Messages as programs, rsyslog and hosts of other kinds write them, and what becomes of each."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from logferry.client.inputs.syslog_message import json_line

NEW = {"facility": "auth", "severity": "crit", "time": "2003-10-11T22:14:15.003Z", "host": "h.example", "app": "su"}
OLD = {"facility": "auth", "severity": "crit", "bsd_time": "Oct 11 22:14:15", "host": "mymachine", "app": "su"}


def fields(message: bytes, peer: str = "", has_host: bool = True) -> dict[str, Any]:
    line = json_line(message, "2026-01-01T00:00:00.000Z", peer, has_host)
    assert line.count(b"\n") == 1
    found: dict[str, Any] = json.loads(line)
    assert found.pop("received") == "2026-01-01T00:00:00.000Z"
    return found


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (
            b"<34>1 2003-10-11T22:14:15.003Z h.example su - ID47 - \xef\xbb\xbf'su root' failed",
            {**NEW, "msgid": "ID47", "message": "'su root' failed"},
        ),
        (
            rb'<34>1 2003-10-11T22:14:15.003Z h.example su 9 - [a@1 x="1" y="q\"\]\\"][b] hi',
            {**NEW, "pid": "9", "sd": {"a@1": {"x": "1", "y": 'q"]\\'}, "b": {}}, "message": "hi"},
        ),
        (b"<34>1 2003-10-11T22:14:15.003Z h.example su - - [a", {**NEW, "message": "[a"}),
        (b"<34>1 2003-10-11T22:14:15.003Z h.example su - - [a]", {**NEW, "sd": {"a": {}}, "message": ""}),
        (b"<13>1 - - - - - -", {"facility": "user", "severity": "notice", "message": ""}),
        (b"<34>Oct 11 22:14:15 mymachine su: failed", {**OLD, "message": "failed"}),
        (b"<34>Oct 11 22:14:15 mymachine su[12]:failed\r\n", {**OLD, "pid": "12", "message": "failed"}),
        (
            b"<34>2003-10-11T22:14:15.003Z h.example su: x",
            {**NEW, "message": "x"},
        ),
        (b"<0>x", {"facility": "kern", "severity": "emerg", "message": "x"}),
        (b"<191>x: y", {"facility": "local7", "severity": "debug", "app": "x", "message": "y"}),
        (b"<192>x", {"message": "<192>x"}),
        (b"<012>x", {"message": "<012>x"}),
        (b"no priority", {"message": "no priority"}),
        (b"<13>a\nb\0c", {"facility": "user", "severity": "notice", "message": "a\nb\0c"}),
    ],
)
def test_a_message_and_its_parts(message: bytes, expected: dict[str, Any]) -> None:
    assert fields(message) == expected


def test_a_program_of_this_host_names_no_host() -> None:
    expected = {"facility": "user", "severity": "notice", "bsd_time": "Oct  1 22:14:15"}
    assert fields(b"<13>Oct  1 22:14:15 app[1]: x", has_host=False) == {
        **expected, "app": "app", "pid": "1", "message": "x",
    }  # fmt: skip
    assert fields(b"<13>Oct  1 22:14:15 two words", has_host=False) == {**expected, "message": "two words"}


def test_bytes_that_are_no_text_are_kept_beside_it() -> None:
    found = fields(b"<13>caf\xe9", "10.0.0.1")
    assert (found["message"], found["peer"]) == ("caf\N{REPLACEMENT CHARACTER}", "10.0.0.1")
    assert base64.b64decode(found["raw"]) == b"<13>caf\xe9"


@pytest.mark.parametrize("byte", [b"\x01", b"\xff", b"[", b'"', b"\\", b"<", b" ", b"1 "])
def test_the_worst_message_fits_a_line(byte: bytes) -> None:
    for head in (b"", b"<13>", b"<13>1 - - - - - ", b"<13>1 - - - - - [a"):
        line = json_line((head + byte * (64 << 10))[: 64 << 10], "T", "p")
        assert len(line) < 1 << 20
        json.loads(line)
