"""The JSON lines of the push-client's inputs, read as the guide configures the loader's parser."""

from __future__ import annotations

import struct

import pyarrow as pa
from logferry.client.inputs.journal_export import ExportParser
from logferry.client.inputs.syslog_message import json_line
from logferry.loaders.parsing.settings import ParserSettings
from logferry.loaders.query.parsed_lines import parse_lines

TIME = {"column": "time", "formats": ["iso"]}


def test_both_shapes_become_rows() -> None:
    message = b"two\nlines\0\xff"
    field = b"MESSAGE\n" + struct.pack("<Q", len(message)) + message + b"\n"
    export = b"__CURSOR=c\n__REALTIME_TIMESTAMP=1795753045103881\nPRIORITY=6\nX=1\nX=2\n" + field + b"\n"
    ((_, entry),) = ExportParser().feed(export)
    syslog = json_line(b'<34>1 2026-11-27T04:17:25Z h app - - [a b="c"] \xffx', "2026-11-27T04:17:26.000Z", "10.0.0.1")
    for line, columns in (
        (entry, {"PRIORITY": "6", "MESSAGE": "two\nlines\0\N{REPLACEMENT CHARACTER}"}),
        (syslog, {"severity": "crit", "app": "app", "message": "\N{REPLACEMENT CHARACTER}x"}),
    ):
        kinds = dict.fromkeys(("time", *columns), "string")
        raw = {"format": "json", "columns": kinds, "rescued": True, "event_time": TIME}
        made = pa.array([0], pa.timestamp("us")).cast(pa.int64())
        lines = pa.array([line.rstrip(b"\n")], pa.binary())
        table, reasons = parse_lines(lines, ParserSettings.model_validate(raw), made)
        assert reasons.to_pylist() == [None]
        (row,) = table.to_pylist()
        assert {name: row[name] for name in columns} == columns
        assert row["event_time"].isoformat().startswith("2026-11-27T04:17:25")
        assert '"_raw"' in row["rescued"] or '"raw"' in row["rescued"]
