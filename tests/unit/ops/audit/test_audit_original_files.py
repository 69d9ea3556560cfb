"""Original files against chunks: the right source is found, and each difference at its position."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from logferry.ops.audit.digests.findings import Findings
from logferry.ops.audit.digests.sums import MODULUS, chunk_digest, shown
from logferry.ops.audit.log.original_files import FileReport, OriginalFiles
from logferry.ops.audit.records.formats import StoredChunk
from logferry.ops.cli.problems import UsageError

TOPIC = "dc1.nginx"
LOG = b"".join(b"line number %d of this file\n" % number for number in range(60))


def cut(data: bytes, size: int = 400, start: int = 0, **attributes: str) -> Iterator[StoredChunk]:
    for at in range(start, len(data), size):
        part = data[at : at + size]
        yield StoredChunk("", at + len(part), at, 1, 1, tuple(attributes.items()), part)


def compare(path: Path, *sources: tuple[str, list[StoredChunk]], topic: str = TOPIC) -> list[FileReport]:
    files = OriginalFiles([path])
    try:
        for source_id, chunks in sources:
            for number, chunk in enumerate(chunks):
                files.take(topic, chunk._replace(source_id=source_id), number)
        return files.reports(Findings())
    finally:
        files.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "access.log"
    found.write_bytes(LOG)
    return found


def test_equal(path: Path):
    (report,) = compare(path, (f"web1:{path}#1", list(cut(LOG))))
    assert report[:8] == FileReport(str(path), TOPIC, f"web1:{path}#1", len(LOG), 0, len(LOG), 0, "")[:8]
    parts = list(cut(LOG))
    expected = sum(chunk_digest(chunk.seqno, chunk.data) for chunk in parts) % MODULUS
    assert (report.chunks, report.hash) == (len(parts), shown(expected))
    assert report.equal


def test_found_by_the_attribute_too(path: Path):
    (report,) = compare(path, ("anything", list(cut(LOG, path=str(path)))))
    assert report.equal
    assert report.source_id == "anything"


@pytest.mark.parametrize("at", [0, 1, 399, 400, 1000, len(LOG) - 1])
def test_a_changed_byte_is_found_where_it_is(path: Path, at: int):
    path.write_bytes(LOG[:at] + bytes([LOG[at] ^ 1]) + LOG[at + 1 :])
    (report,) = compare(path, (f"web1:{path}#1", list(cut(LOG))))
    assert report.flaw == f"the first difference is at position {at}"
    assert not report.equal


def test_what_is_not_sent_yet_refutes_nothing(path: Path):
    (report,) = compare(path, (f"web1:{path}#1", list(cut(LOG[:1000]))))
    assert report.equal
    assert report.not_sent_bytes == len(LOG) - 1000


def test_a_file_that_is_shorter_than_what_is_stored(path: Path):
    path.write_bytes(LOG[:1000])
    (report,) = compare(path, (f"web1:{path}#1", list(cut(LOG))))
    assert report.flaw == "the file ends at 1000, but more is stored"


def test_a_chunk_that_is_missing_in_the_middle(path: Path):
    chunks = list(cut(LOG))
    (report,) = compare(path, (f"web1:{path}#1", [*chunks[:2], *chunks[3:]]))
    assert report.flaw == "the bytes 800 to 1199 are not stored"


def test_a_chunk_that_is_stored_twice_is_equal_here(path: Path):
    """The chain says that it is there twice; the bytes are right."""
    chunks = list(cut(LOG))
    (report,) = compare(path, (f"web1:{path}#1", [*chunks[:3], chunks[1], *chunks[3:]]))
    assert report.equal


def test_a_source_whose_beginning_retention_removed(path: Path):
    (report,) = compare(path, (f"web1:{path}#1", list(cut(LOG, start=800))))
    assert report.equal
    assert (report.begin, report.recorded) == (800, len(LOG))


def test_seqnos_that_are_no_positions_go_end_to_end(path: Path):
    chunks = [StoredChunk("", number, None, 1, 1, (), chunk.data) for number, chunk in enumerate(cut(LOG))]
    (report,) = compare(path, (f"web1:{path}#1", chunks))
    assert report.equal
    (report,) = compare(path, (f"web1:{path}#1", [*chunks[:1], *chunks[2:]]))
    assert report.flaw == "the first difference is at position 400"


def test_the_incarnation_with_these_bytes_is_the_file(path: Path):
    older = LOG.replace(b"this file", b"that file")
    sources = [(f"web1:{path}#1", list(cut(older))), (f"web1:{path}#2", list(cut(LOG)))]
    for order in (sources, sources[::-1]):
        (report,) = compare(path, *order)
        assert report.equal
        assert report.source_id == f"web1:{path}#2"


def test_an_older_incarnation_that_is_a_prefix_does_not_hide_a_difference(path: Path):
    path.write_bytes(LOG[:900] + b"?" + LOG[901:])
    (report,) = compare(path, (f"web1:{path}#1", list(cut(LOG[:400]))), (f"web1:{path}#2", list(cut(LOG))))
    assert report.flaw == "the first difference is at position 900"
    assert report.source_id == f"web1:{path}#2"


def test_a_rotated_file_is_found_by_its_bytes(path: Path):
    rotated = path.with_name("access.log.1")
    path.rename(rotated)
    newer = LOG.replace(b"this file", b"next file")
    (report,) = compare(rotated, (f"web1:{path}#1", list(cut(LOG))), (f"web1:{path}#2", list(cut(newer))))
    assert report.equal
    assert report.source_id == f"web1:{path}#1"


def test_a_file_that_nothing_is_stored_of(path: Path, tmp_path: Path):
    other = tmp_path / "other.log"
    other.write_bytes(b"unknown\n")
    (report,) = compare(other, (f"web1:{path}#1", list(cut(LOG))))
    assert report.flaw == "no source holds the beginning of this file"


def test_an_empty_file_has_nothing_to_be_stored(tmp_path: Path):
    empty = tmp_path / "empty.log"
    empty.touch()
    (report,) = compare(empty)
    assert report.equal


def test_a_file_that_goes_into_two_topics_is_two_promises(path: Path):
    files = OriginalFiles([path])
    damaged = list(cut(LOG[:500] + b"?" + LOG[501:]))
    for topic, chunks in (("dc1.a", list(cut(LOG))), ("dc1.b", damaged)):
        for chunk in chunks:
            files.take(topic, chunk._replace(source_id=f"web1:{path}#1"), 1)
    reports = files.reports(Findings())
    files.close()
    assert [(one.topic, one.equal) for one in reports] == [("dc1.a", True), ("dc1.b", False)]


def test_names_with_odd_characters(tmp_path: Path):
    path = tmp_path / "50% näher\n.log"
    path.write_bytes(LOG)
    source_id = f"web1:{tmp_path}/50%25 näher%0A.log#1"
    (report,) = compare(path, (source_id, list(cut(LOG))))
    assert report.equal
    assert report.source_id == source_id


def test_by_a_symbolic_link(path: Path, tmp_path: Path):
    link = tmp_path / "elsewhere" / "current"
    link.parent.mkdir()
    link.symlink_to(path)
    (report,) = compare(link, (f"web1:{path}#1", list(cut(LOG))))
    assert report.equal
    assert report.source_id == f"web1:{path}#1"


def test_a_file_that_is_not_there(tmp_path: Path, path: Path):
    with pytest.raises(UsageError, match="no such file"):
        OriginalFiles([path, tmp_path / "missing"])
