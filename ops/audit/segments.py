"""The table of segments against the rows: of each window of event time, as many rows and bytes as it says. Pure.

Which window a row is of is what its own ``event_time`` says; that each row is a line of a chunk, and each line a row,
was found before. So the digest of a window is one of lines out of the log.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime

from logferry.loaders.planning.segment_states import Segment
from logferry.ops.audit.compare.report import SegmentReport
from logferry.ops.audit.digests.findings import Finding, Findings
from logferry.ops.audit.digests.sums import Tally, shown


def compare_segments(
    table: str, windows: Mapping[int, Tally], segments: Mapping[int, Segment], findings: Findings
) -> list[SegmentReport]:
    """By their start. ``windows`` and ``segments``: by the start in seconds since 1970."""
    reports = []
    for start in sorted(windows.keys() | segments.keys()):
        tally, segment = windows.get(start, Tally()), segments.get(start)
        name = _name(start)
        if segment is None:
            detail = f"segment {name}: {tally.lines} rows, of which the table of segments says nothing"
            findings.add(Finding("segment-missing", table, detail, count=tally.lines))
        elif (tally.lines, tally.size_bytes) != (segment.rows, segment.bytes):
            detail = (
                f"segment {name}: the table has {tally.lines} rows of {tally.size_bytes} bytes, the table of segments "
                f"says {segment.rows} of {segment.bytes}"
            )
            findings.add(Finding("segment-differs", table, detail, count=abs(tally.lines - segment.rows) or 1))
        state, version, rows, size = ("", 0, 0, 0) if segment is None else segment[2:3] + segment[1:2] + segment[3:5]
        reports.append(
            SegmentReport(name, state, version, tally.lines, tally.size_bytes, shown(tally.digest), rows, size)
        )
    return reports


def _name(start: int) -> str:
    try:
        return datetime.fromtimestamp(start, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    except (ValueError, OverflowError, OSError):
        return f"{start} s since 1970"
