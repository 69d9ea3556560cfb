"""What an audit keeps: it comes back as it was, and a file that cannot be trusted is refused with the way on."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from logferry.ops.audit.compare.proven_file import (
    KEPT_FINDINGS,
    Kept,
    KeptCopy,
    KeptPartition,
    KeptTable,
    read_kept,
    write_kept,
)
from logferry.ops.audit.compare.resume import kept_partitions, resume
from logferry.ops.audit.digests.findings import Finding, Findings
from logferry.ops.audit.digests.ranges import Ranges
from logferry.ops.audit.digests.sums import Cell, Tally
from logferry.ops.audit.log.chain import Chain
from logferry.ops.audit.log.original_files import KeptFile
from logferry.ops.audit.log.partition import PartitionLog, Span, Tail
from logferry.ops.audit.tables.file_rows import FileFacts, pooled
from logferry.ops.audit.tables.table_reader import FileId, Stat
from logferry.ops.cli.problems import WrongUse

SCOPE = {"dc": "dc1", "prefix": "logferry", "topics": ["nginx"]}
PLACE = ("dc1.nginx", 3)


def chain() -> Chain:
    found = Chain.begin(5, 100, 0)
    found.follow(6, 200, 150)
    found.note(100, is_settled=True)
    found.note(200, is_settled=False)
    found.go_on([7])
    found.chunks, found.lines, found.size_bytes, found.digest, found.last_ms = 2, 9, 200, 1 << 127, 1_790_000_000_000
    return found


def kept() -> Kept:
    """Something of everything, names with odd letters among it."""
    finding = Finding("gap", "dc1.nginx-3", "prev is 150", "näher\n\u2028", 6, 6)
    odd = chain()
    odd.breaks = {"gap": 1}
    assert odd.forgotten is not None
    odd.forgotten.bases.clear()  # the states tell them again
    cell = Cell(*PLACE, "näher\n\u2028")
    file = FileFacts(Stat(10, 20), 4, Tally(3, 30, 1 << 120), 1, {3600: Tally(3, 30, 5), -3600: Tally(1, 2, 3)})
    table = KeptTable("id", 7, "dc1", {cell: 100})
    table.seen[PLACE] = Ranges([0, 9], [5, 12])
    table.not_loaded[PLACE] = 2
    table.cells = {cell: Tally(1, 2, 3), Cell(*PLACE, None): Tally(4, 5, 6)}
    table.files[FileId("main", "topic=a/x.parquet")] = file
    return Kept(
        SCOPE,
        {("dc1", PLACE): KeptPartition("id", 12, Tail(11, 1 << 63), [finding], {"näher\n\u2028": odd})},
        {"/warehouse/t": table, "/warehouse/u": KeptTable("other", -1, "dc2")},
        {("dc2", PLACE): KeptCopy("a", "b", 12, 14, {"web1": Tally(1, 2, 3)})},
        {"/var/log/a.log": KeptFile([1, 2], [["dc1.nginx", "web1", True, True, 0, 5, 5, 1, "", 2, 99]])},
    )


def test_it_comes_back_as_it_was(tmp_path: Path):
    write_kept(tmp_path / "kept", kept())
    assert read_kept(tmp_path / "kept", SCOPE) == kept()
    assert [path.name for path in tmp_path.iterdir()] == ["kept"], "nothing is left beside it"


def test_there_is_none_yet(tmp_path: Path):
    assert read_kept(tmp_path / "kept", SCOPE) == Kept(SCOPE)
    with pytest.raises(WrongUse, match="there is no folder"):
        read_kept(tmp_path / "nowhere" / "kept", SCOPE)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "it is not a file of logferry audit; remove it"),
        ("something else\n", "it is not a file of logferry audit"),
        ('{"format": 1, "proven": {}}', "its format is 1, this logferry writes 'logferry audit 1'"),
        ('{"format": "logferry audit 2"}\n{"sha256": "?"}\n', "its format is 'logferry audit 2'"),
    ],
)
def test_another_file_is_refused(tmp_path: Path, text: str, said: str):
    (tmp_path / "kept").write_text(text)
    with pytest.raises(WrongUse, match=said):
        read_kept(tmp_path / "kept", SCOPE)


@given(st.data())
def test_a_damaged_file_is_refused(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject):
    file = tmp_path_factory.mktemp("kept") / "kept"
    write_kept(file, kept())
    whole = file.read_bytes()
    at = data.draw(st.integers(0, len(whole) - 2))
    if data.draw(st.booleans()):
        file.write_bytes(whole[:at])
    else:
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    with pytest.raises(WrongUse, match="remove it to begin anew"):
        read_kept(file, SCOPE)


def test_a_file_of_another_audit_is_refused(tmp_path: Path):
    write_kept(tmp_path / "kept", kept())
    with pytest.raises(WrongUse, match=r"it is of an audit of dc 'dc1'; give each audit a file of its own"):
        read_kept(tmp_path / "kept", {**SCOPE, "dc": "dc2"})


def test_one_that_cannot_be_written_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_kept(tmp_path / "kept", kept())

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(WrongUse, match="it cannot be written: No space left on device"):
        write_kept(tmp_path / "kept", Kept(SCOPE))
    assert read_kept(tmp_path / "kept", SCOPE) == kept()
    assert len(list(tmp_path.iterdir())) == 1


# ---- going on from it ------------------------------------------------------------------------------------


def log(start: int, end: int) -> PartitionLog:
    return PartitionLog(*PLACE, Span(start, end, end), Findings())


def test_a_chain_goes_on():
    found = chain()
    assert (found.settled, found.later) == (200, [])
    assert found.forgotten is not None
    assert list(found.forgotten.covered) == [(0, 100), (150, 200)], "what it had recorded, without the hole"
    assert found.follow(7, 260, 200) is None
    broken = found.follow(8, 130, 7, size_bytes=60)
    assert broken is not None
    assert (broken.kind, found.forgotten.used) == ("double", [7]), "it begins anew, with what it had before"
    found.go_on([7, 9])
    assert found.forgotten.bases == [9]


@pytest.mark.parametrize(
    ("start", "end", "kind"), [(0, 12, None), (12, 20, None), (0, 11, "log-cut-back"), (0, 3, "log-cut-back")]
)
def test_a_log_that_ends_before_what_was_proven(start: int, end: int, kind: str | None):
    found = log(start, end)
    before = kept().partitions["dc1", PLACE]
    resumed = resume(found, "id", before)
    kinds = [finding.kind for finding in found.findings if finding.kind != "gap"]
    assert kinds == ([] if kind is None else [kind])
    after = kept_partitions({PLACE: found}, {PLACE: resumed}, {("dc1.nginx", "näher\n\u2028")})[PLACE]
    assert (after is before) == (kind is not None), "what was kept stays until somebody has looked at it"


def test_findings_are_told_again_until_their_records_are_gone():
    for start, told in ((0, 1), (6, 1), (7, 0)):
        found = log(start, 30)
        resumed = resume(found, "id", kept().partitions["dc1", PLACE])
        assert len(found.findings) == told
        assert len(kept_partitions({PLACE: found}, {PLACE: resumed}, ())[PLACE].findings) == told


def test_of_many_findings_the_number_is_kept():
    found = log(0, 30)
    resumed = resume(found, "id", None)
    found.found = [Finding("double", found.where, "again", "s", n, n) for n in range(KEPT_FINDINGS + 7)]
    *first, rest = kept_partitions({PLACE: found}, {PLACE: resumed}, ())[PLACE].findings
    assert len(first) == KEPT_FINDINGS
    assert (rest.kind, rest.count, rest.last, rest.refutes) == ("found-earlier", 7, KEPT_FINDINGS + 6, True)


def test_a_source_whose_records_and_state_are_gone_is_forgotten():
    name = "näher\n\u2028"
    for start, states, stays in ((6, [], True), (7, [], False), (7, [("dc1.nginx", name)], True)):
        found = log(start, 30)
        resumed = resume(found, "id", kept().partitions["dc1", PLACE])
        assert (name in kept_partitions({PLACE: found}, {PLACE: resumed}, states)[PLACE].chains) == stays


def test_sums_of_forgotten_sources_are_kept_together():
    one, two, none = (Cell(*PLACE, name) for name in ("one", "two", None))
    cells = {one: Tally(1, 10, 100), two: Tally(2, 20, 200), none: Tally(4, 40, 400)}
    assert pooled(cells, lambda cell: cell == two) == {two: Tally(2, 20, 200), none: Tally(5, 50, 500)}


def test_a_topic_created_anew_is_begun_anew():
    found = log(0, 30)
    resumed = resume(found, "another", kept().partitions["dc1", PLACE])
    assert (resumed.kept, resumed.is_anew, found.chains, found.chains_from) == (None, True, {}, 0)
