"""The verdict, and what is shown of it."""

from __future__ import annotations

import io
import json

import pytest
from logferry.ops.audit.compare.report import JSON_SOURCES, Report, SourceReport, TableAuditReport
from logferry.ops.audit.digests.findings import MAX_KEPT, Finding, Findings
from logferry.ops.audit.log.original_files import FileReport
from logferry.ops.audit.render import SHOWN_FINDINGS, SHOWN_SOURCES, show
from rich.console import Console


def source(source_id: str, size_bytes: int = 10, *, gaps: int = 0, is_cut: bool = False) -> SourceReport:
    return SourceReport(
        topic="dc1.nginx",
        source_id=source_id,
        partition=2,
        chunks=3,
        lines=4,
        size_bytes=size_bytes,
        base=0,
        first=10,
        last=30,
        is_cut=is_cut,
        rows=4,
        gaps=gaps,
        overlaps=0,
        doubles=0,
        out_of_order=0,
    )


def report(sources: list[SourceReport], *findings: Finding, files: tuple[FileReport, ...] = ()) -> Report:
    found = Findings()
    for finding in findings:
        found.add(finding)
    table = TableAuditReport("/data/t", 2, 8, 7, 1, 5)
    return Report("dc1", ["dc1.nginx"], 6, 8, 1234567, sources, [table], list(files), found, 1.0)


def shown(told: Report) -> list[str]:
    out = io.StringIO()
    show(told, Console(file=out, width=160))
    return out.getvalue().splitlines()


GAP = Finding("gap", "dc1.nginx-2", "prev is 9", "web2", 5, 7, 3)
NOTE = Finding("state-forgotten", "dc1.nginx-2", "forgotten", "web1", refutes=False)


def test_exact():
    told = report([source("web1"), source("web2")])
    assert told.exact
    assert told.verdict == "exact: 6 chunks of 2 sources, 8 lines, 1,234,567 bytes: nothing lost, nothing doubled"


def test_notes_refute_nothing():
    told = report([source("web1")], NOTE)
    assert told.exact
    assert any("state-forgotten: dc1.nginx-2 web1: forgotten" in line for line in shown(told))


def test_not_exact():
    told = report([source("web1"), source("web2", gaps=3)], GAP, GAP, NOTE)
    assert not told.exact
    assert told.verdict == "NOT exact: 2 × gap"
    lines = shown(told)
    assert lines[-1] == told.verdict
    assert "  gap: dc1.nginx-2 offsets 5 to 7 web2: prev is 9 (3×)" in lines


def test_the_worst_come_first():
    blamed = Finding("state-ahead", "dc1.nginx-2", "lost", "small")
    sources = [source("large", 500), source("small", 1), source("broken", 5, gaps=2), source("middle", 50)]
    told = report(sources, blamed)
    assert [one.source_id for one in told.worst_first()] == ["broken", "small", "large", "middle"]


def test_many_sources_and_findings_are_cut_short():
    sources = [source(f"web{number}") for number in range(JSON_SOURCES + 1)]
    told = report(sources, *[GAP] * (MAX_KEPT + 50))
    lines = shown(told)
    assert sum("│ web" in line for line in lines) == SHOWN_SOURCES
    assert f"and {len(sources) - SHOWN_SOURCES:,} more" in "".join(lines)
    assert sum(line.startswith("  gap") for line in lines) == SHOWN_FINDINGS
    assert f"  … and {MAX_KEPT + 50 - SHOWN_FINDINGS} more" in lines
    assert lines[-1] == f"NOT exact: {MAX_KEPT + 50} × gap"
    printed = told.as_dict()
    assert len(printed["sources"]) == JSON_SOURCES
    assert len(printed["findings"]) == MAX_KEPT
    assert printed["counts"]["findings"] == {"gap": MAX_KEPT + 50}
    assert printed["counts"]["sources"] == len(sources)


def test_columns_without_anything_to_say_are_left_out():
    text = "\n".join(shown(report([source("web1")])))
    assert "gaps" in text
    assert "doubles" in text
    assert "overlaps" not in text


def test_parts_that_were_not_compared_are_reported():
    file = FileReport("/var/log/a.log", "dc1.nginx", "web1", 50, 0, 40, 10, "")
    lines = shown(report([source("web1", is_cut=True)], files=(file,)))
    assert any("…10 → 30" in line for line in lines)
    assert "retention: 1 sources are truncated (…): their retained part is proven" in lines
    assert (
        "table /data/t: 2 batches, 8 rows: 7 compared with the log, 1 not comparable, "
        "5 chunks of the log not loaded yet"
    ) in lines
    assert "file /var/log/a.log: bytes 0 to 40 are stored unchanged; not sent yet: 10 bytes" in lines


@pytest.mark.parametrize("name", ["[bold]web[/bold]", "näher", "[/]"])
def test_names_are_shown_as_they_are(name: str):
    finding = Finding("gap", "dc1.nginx-2", "why", name)
    assert any(name in line for line in shown(report([source(name)], finding)) if "gap: " in line)


def test_control_characters_are_shown_escaped():
    name, seen = "a\x1b]0;x\x07\x1b[2J\x9b\u202e", "a\\x1b]0;x\\x07\\x1b[2J\\x9b\\u202e"
    finding = Finding("gap", "dc1.nginx-2", name, name)
    file = FileReport(name, "dc1.nginx", name, 50, 0, 40, 10, name)
    text = "\n".join(shown(report([source(name)], finding, files=(file,))))
    assert text.count(seen) >= 4
    assert not any(sign in text for sign in "\x1b\x07\x9b\u202e")


def test_json():
    file = FileReport("/var/log/a.log", "dc1.nginx", "web1", 50, 0, 40, 10, "")
    told = json.loads(json.dumps(report([source("web1")], GAP, NOTE, files=(file,)).as_dict()))
    assert told["verdict"] == "NOT exact: 1 × gap"
    assert told["counts"]["refuting"] == {"gap": 1}
    assert told["counts"]["findings"] == {"gap": 1, "state-forgotten": 1}
    assert told["files"][0]["equal"] is True
    assert told["table"]["rows"] == 8
    assert (told["findings"][0]["first"], told["findings"][0]["last"]) == (5, 7)
