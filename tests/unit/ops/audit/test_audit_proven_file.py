"""What an audit keeps: it comes back as it was, and a file that cannot be trusted is refused with the way on."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from logferry.ops.audit.compare.proven_file import (
    ProvenCopy,
    ProvenState,
    ProvenTable,
    read_state_file,
    write_state_file,
)
from logferry.ops.audit.digests.findings import Finding, Findings
from logferry.ops.audit.digests.sums import Cell, Ranges, Tally
from logferry.ops.audit.log.chain import Chain
from logferry.ops.audit.log.original_files import Pair, ProvenOriginal
from logferry.ops.audit.log.partition import MAX_FINDINGS, AuditSpan, LastRecord, PartitionLog, ProvenPartition
from logferry.ops.audit.tables.rows import FileFacts, FileId, FileStat, pooled
from logferry.ops.cli.problems import UsageError

SCOPE = {"dc": "dc1", "prefix": "logferry", "topics": ["nginx"]}
PLACE = ("dc1.nginx", 3)


def chain() -> Chain:
    found = Chain.begin(5, 100, 0)
    found.follow(6, 200, 150)
    found.note(100, is_settled=True)
    found.note(200, is_settled=False)
    found.settle_for_next([7])
    found.chunks, found.lines, found.size_bytes, found.digest, found.last_ms = 2, 9, 200, 1 << 127, 1_790_000_000_000
    return found


def kept() -> ProvenState:
    """Something of everything, names with odd letters among it."""
    finding = Finding("gap", "dc1.nginx-3", "prev is 150", "näher\n\u2028", 6, 6)
    odd = chain()
    odd.breaks = {"gap": 1}
    cell = Cell(*PLACE, "näher\n\u2028")
    file = FileFacts(FileStat(10, 20), 4, Tally(3, 30, 1 << 120), 1, {3600: Tally(3, 30, 5), -3600: Tally(1, 2, 3)})
    table = ProvenTable("id", 7, "dc1", {cell: 100})
    table.seen[PLACE] = Ranges([0, 9], [5, 12])
    table.not_loaded[PLACE] = 2
    table.cells = {cell: Tally(1, 2, 3), Cell(*PLACE, None): Tally(4, 5, 6)}
    table.files[FileId("main", "topic=a/x.parquet")] = file
    return ProvenState(
        SCOPE,
        {("dc1", PLACE): ProvenPartition("id", 12, LastRecord(11, 1 << 63), [finding], {"näher\n\u2028": odd})},
        {"/warehouse/t": table, "/warehouse/u": ProvenTable("other", -1, "dc2")},
        {("dc2", PLACE): ProvenCopy("a", "b", 12, 14, {"web1": Tally(1, 2, 3)})},
        {"/var/log/a.log": ProvenOriginal((1, 2), [Pair("dc1.nginx", "web1", True, True, 0, 5, 5, 1, "", 2, 1 << 99)])},
    )


def test_it_comes_back_as_it_was(tmp_path: Path):
    write_state_file(tmp_path / "kept", kept())
    assert read_state_file(tmp_path / "kept", SCOPE) == kept()
    assert [path.name for path in tmp_path.iterdir()] == ["kept"], "nothing is left beside it"


def test_there_is_none_yet(tmp_path: Path):
    assert read_state_file(tmp_path / "kept", SCOPE) == ProvenState(SCOPE)
    with pytest.raises(UsageError, match=r"the folder .* does not exist; create it"):
        read_state_file(tmp_path / "nowhere" / "kept", SCOPE)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not a state file of logferry audit; remove it"),
        ("something else\n", "not a state file of logferry audit"),
        ('{"format": 1, "proven": {}}', "format 1 is not supported, this version writes 'logferry audit 2'"),
        ('{"format": "logferry audit 3"}\n{"sha256": "?"}\n', "format 'logferry audit 3' is not supported"),
    ],
)
def test_another_file_is_refused(tmp_path: Path, text: str, said: str):
    (tmp_path / "kept").write_text(text)
    with pytest.raises(UsageError, match=said):
        read_state_file(tmp_path / "kept", SCOPE)


@given(st.data())
def test_a_damaged_file_is_refused(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject):
    file = tmp_path_factory.mktemp("kept") / "kept"
    write_state_file(file, kept())
    whole = file.read_bytes()
    at = data.draw(st.integers(0, len(whole) - 2))
    if data.draw(st.booleans()):
        file.write_bytes(whole[:at])
    else:
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    with pytest.raises(UsageError, match="remove it to start from the beginning"):
        read_state_file(file, SCOPE)


def test_a_file_of_another_audit_is_refused(tmp_path: Path):
    write_state_file(tmp_path / "kept", kept())
    with pytest.raises(UsageError, match=r"written by an audit of dc 'dc1'; use a separate state file for each audit"):
        read_state_file(tmp_path / "kept", {**SCOPE, "dc": "dc2"})


def test_one_that_cannot_be_written_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_state_file(tmp_path / "kept", kept())

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(UsageError, match="cannot be written: No space left on device"):
        write_state_file(tmp_path / "kept", ProvenState(SCOPE))
    assert read_state_file(tmp_path / "kept", SCOPE) == kept()
    assert len(list(tmp_path.iterdir())) == 1


# ---- resuming from it ------------------------------------------------------------------------------------


def log(start: int, end: int, before: ProvenPartition | None = None) -> PartitionLog:
    found = PartitionLog(*PLACE, AuditSpan(start, end, end), Findings())
    found.resume("id", before)
    return found


def test_a_chain_continues():
    found = chain()
    assert (found.settled, found.later) == (200, [])
    assert found.forgotten is not None
    assert list(found.forgotten.covered) == [(0, 100), (150, 200)], "what it had recorded, without the hole"
    assert found.follow(7, 260, 200) is None
    broken = found.follow(8, 130, 7, size_bytes=60)
    assert broken is not None
    assert (broken.kind, found.forgotten.used) == ("double", [7]), "it begins again, with the seqnos that it had before"
    found.settle_for_next([7, 9])
    assert found.forgotten.bases == [9]


def test_a_source_does_not_begin_again_at_a_base_whose_state_is_gone(tmp_path: Path):
    before = ProvenPartition("id", 9, chains={"web1": chain()})
    assert before.chains["web1"].forgotten is not None
    assert before.chains["web1"].forgotten.bases == [7]
    write_state_file(tmp_path / "kept", ProvenState(SCOPE, {("dc1", PLACE): before}))
    found = log(0, 30, read_state_file(tmp_path / "kept", SCOPE).partitions["dc1", PLACE])
    broken = found.chains["web1"].follow(9, 120, 7, size_bytes=1)
    assert broken is not None
    assert broken.refutes


@pytest.mark.parametrize(
    ("start", "end", "kind"), [(0, 12, None), (12, 20, None), (0, 11, "log-cut-back"), (0, 3, "log-cut-back")]
)
def test_a_log_that_ends_before_what_was_proven(start: int, end: int, kind: str | None):
    before = kept().partitions["dc1", PLACE]
    found = log(start, end, before)
    kinds = [finding.kind for finding in found.findings if finding.kind != "gap"]
    assert kinds == ([] if kind is None else [kind])
    after = found.to_state({("dc1.nginx", "näher\n\u2028")})
    assert (after is before) == (kind is not None), "the proof stays until the operator has run a full audit"


def test_findings_are_reported_again_until_their_records_are_gone():
    for start, told in ((0, 1), (6, 1), (7, 0)):
        found = log(start, 30, kept().partitions["dc1", PLACE])
        assert len(found.findings) == told
        assert len(found.to_state(()).findings) == told


def test_of_many_findings_the_number_is_kept():
    found = log(0, 30)
    found.found = [Finding("double", found.where, "again", "s", n, n) for n in range(MAX_FINDINGS + 7)]
    *first, rest = found.to_state(()).findings
    assert len(first) == MAX_FINDINGS
    assert (rest.kind, rest.count, rest.last, rest.refutes) == ("found-earlier", 7, MAX_FINDINGS + 6, True)


def test_a_source_whose_records_and_state_are_gone_is_forgotten():
    name = "näher\n\u2028"
    for start, states, stays in ((6, [], True), (7, [], False), (7, [("dc1.nginx", name)], True)):
        found = log(start, 30, kept().partitions["dc1", PLACE])
        assert (name in found.to_state(states).chains) == stays


def test_sums_of_forgotten_sources_are_kept_together():
    one, two, none = (Cell(*PLACE, name) for name in ("one", "two", None))
    cells = {one: Tally(1, 10, 100), two: Tally(2, 20, 200), none: Tally(4, 40, 400)}
    assert pooled(cells, lambda cell: cell == two) == {two: Tally(2, 20, 200), none: Tally(5, 50, 500)}


def test_a_recreated_topic_is_read_from_the_beginning():
    found = log(0, 30)
    found.resume("another", kept().partitions["dc1", PLACE])
    assert (found.proven, found.is_recreated, found.chains, found.chains_from) == (None, True, {}, 0)
