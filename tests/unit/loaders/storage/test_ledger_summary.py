"""Old entries of a ledger are merged: the offsets, and all that is not a plain load, stay as they were."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from logferry.loaders.errors import LedgerBroken, Overtaken
from logferry.loaders.location import Location
from logferry.loaders.planning.ledger_entry import (
    DROP,
    LOAD,
    MOVE,
    RELOAD,
    REQUARANTINE,
    RESET,
    LedgerEntry,
    OriginOffset,
    TablePaths,
)
from logferry.loaders.planning.plan import Range
from logferry.loaders.planning.position_plan import known_originals
from logferry.loaders.planning.reload_plan import held_offsets
from logferry.loaders.storage import ledger_summary
from logferry.loaders.storage.files import open_table
from logferry.loaders.storage.ledger import Ledger, last_batch, new_entry, pinned_table
from logferry.loaders.storage.ledger_summary import merge_entries
from logferry.ops.audit.digests.findings import Findings
from logferry.ops.audit.tables.rows import check_ledger

IDS = {"dc1.a": "id", "dc1.b": "id"}


def load(batch: int, ends: Sequence[tuple[int, int]], kind: str = LOAD, parser: str = "lines/1") -> LedgerEntry:
    ranges = [Range("dc1.a", number, "id", start, end) for number, (start, end) in enumerate(ends)]
    return new_entry(batch, "dc1", parser, f"run{batch}", ranges, kind=kind)


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    made = Ledger(TablePaths.of(tmp_path / "logs").ledger)
    made.create()
    return made


def filled(ledger: Ledger, entries: Sequence[LedgerEntry]) -> list[LedgerEntry]:
    return [ledger.put(entry) for entry in entries]


def files(ledger: Ledger) -> int:
    return len(pinned_table(ledger.path).file_uris())


def test_old_loads_become_one_entry_and_the_newest_stay(ledger: Ledger):
    entries = filled(ledger, [load(n, [(10 * n, 10 * n + 10), (n // 2, (n + 1) // 2)]) for n in range(12)])
    assert merge_entries(ledger.path, keep=4) == 8
    found = ledger.entries()
    assert found[0].batches == range(7)
    assert found[0].ranges == (Range("dc1.a", 0, "id", 0, 70), Range("dc1.a", 1, "id", 0, 3))
    assert (found[0].run, found[0].planned) == (entries[6].run, entries[6].planned), "those of the last"
    # The successor of the one before the newest four is not looked at.
    assert found[1:] == entries[7:]
    assert ledger.put(entries[11]) == entries[11]
    assert files(ledger) == 5


def test_a_partition_that_is_added_begins_where_it_began(ledger: Ledger):
    filled(ledger, [load(0, [(0, 5)]), load(1, [(5, 6), (3, 4)]), load(2, [(6, 6), (4, 9)]), load(3, [(6, 7), (9, 9)])])
    merge_entries(ledger.path, keep=0)
    assert ledger.entries()[0].ranges == (Range("dc1.a", 0, "id", 0, 6), Range("dc1.a", 1, "id", 3, 9))


@pytest.mark.parametrize("kind", [RESET, DROP, REQUARANTINE, RELOAD, MOVE])
def test_other_kinds_are_never_merged(ledger: Ledger, kind: str):
    entries = filled(ledger, [load(n, [(n, n + 1)], kind if n == 3 else LOAD) for n in range(7)])
    for _ in range(2):
        merge_entries(ledger.path, keep=0)
    found = ledger.entries()
    # What was planned before a move may have been read elsewhere, so it stays, too.
    merged = [range(2), range(2, 3)] if kind == MOVE else [range(3)]
    assert [entry.batches for entry in found] == [*merged, range(3, 4), range(4, 6), range(6, 7)]
    assert found[len(merged)] == entries[3]


@pytest.mark.parametrize("other", [{"parser": "json/1"}, {"dc": "dc2"}, {"settings": "{}"}])
def test_loads_of_another_parser_or_centre_are_not_merged(ledger: Ledger, other: dict[str, Any]):
    filled(ledger, [load(n, [(n, n + 1)])._replace(**(other if n > 2 else {})) for n in range(6)])
    merge_entries(ledger.path, keep=0)
    assert [entry.batches for entry in ledger.entries()] == [range(3), range(3, 5), range(5, 6)]


@pytest.mark.parametrize("damage", [(31, 40), (29, 40)])
def test_a_gap_or_overlap_stays_for_the_audit_to_find(ledger: Ledger, damage: tuple[int, int]):
    entries = filled(ledger, [load(n, [damage if n == 3 else (10 * n, 10 * n + 10)]) for n in range(6)])
    merge_entries(ledger.path, keep=0)
    assert ledger.entries() == entries
    findings = Findings()
    check_ledger("ledger", ledger.entries(), 5, 5, "dc1", IDS, findings)
    assert [one.kind for one in findings] == ["ledger-gap" if damage[0] > 30 else "ledger-overlap"]


def test_a_topic_that_was_recreated_is_not_merged(ledger: Ledger):
    changed = [Range("dc1.a", 0, "other", 20, 30)]
    entries = filled(ledger, [load(0, [(0, 10)]), load(1, [(10, 20)]), load(2, [])._replace(ranges=tuple(changed))])
    entries += filled(ledger, [load(3, [])._replace(ranges=tuple(r.at_rest for r in changed))])
    merge_entries(ledger.path, keep=0)
    assert ledger.entries() == entries


def test_the_originals_of_positions_stay(ledger: Ledger):
    def copy(batch: int, end: int, original: int | None) -> LedgerEntry:
        known = () if original is None else (OriginOffset("dc2.a", 0, "theirs", original),)
        return new_entry(
            batch, "dc1", "lines/1", "run", [Range("dc2.a", 0, "id", max(0, end - 1), end)], originals=known
        )

    rest = Range("dc2.a", 0, "id", 3, 3)
    quiet = new_entry(3, "dc1", "lines/1", "run", [rest])
    filled(ledger, [copy(0, 1, 7), copy(1, 2, None), copy(2, 3, 9), quiet, quiet._replace(batch=4)])
    merge_entries(ledger.path, keep=0)
    merged, single = ledger.entries()
    assert merged.originals == (OriginOffset("dc2.a", 0, "theirs", 9),)
    assert known_originals([rest], "dc1", [merged, single]) == ([OriginOffset("dc2.a", 0, "theirs", 9)], [])


def test_a_batch_that_was_merged_has_no_entry_of_its_own(ledger: Ledger):
    """A loader that was frozen asks for it: it is behind, and the ledger is not broken."""
    filled(ledger, [load(n, [(n, n + 1)]) for n in range(6)])
    merge_entries(ledger.path, keep=2)
    with pytest.raises(Overtaken, match="summed up"):
        ledger.get(1)
    with pytest.raises(LedgerBroken):
        ledger.get(6)


def test_a_faster_commit_wins_and_a_later_merge_makes_up_for_it(ledger: Ledger, monkeypatch: pytest.MonkeyPatch):
    entries = filled(ledger, [load(n, [(n, n + 1)]) for n in range(6)])

    def then_another_commits(path: Location) -> object:
        table = pinned_table(path)
        entries.extend(filled(Ledger(path), [load(6, [(6, 7)])]))
        return table

    monkeypatch.setattr(ledger_summary, "pinned_table", then_another_commits)
    assert merge_entries(ledger.path, keep=2) == 0
    assert ledger.entries() == entries
    monkeypatch.undo()
    assert merge_entries(ledger.path, keep=2) == 5


def test_a_merge_reads_the_new_entries_and_one_file_more(ledger: Ledger):
    """The number of files stays bounded, and so do the rows that each merge reads."""
    read = []
    for batch in range(120):
        ledger.put(load(batch, [(batch, batch + 1)], RESET if batch % 30 == 29 else LOAD))
        if batch % 10 == 0:
            read.append(merge_entries(ledger.path, keep=20))
    assert max(read) <= 12
    assert files(ledger) <= 20 + 10 + 6
    assert sum(len(entry.batches) for entry in ledger.entries()) == 120
    assert len(ledger.entries()) <= 20 + 10 + 2 * 4 + 2


KINDS = st.sampled_from([LOAD] * 8 + [RESET, DROP, REQUARANTINE, MOVE])
STEPS = st.lists(st.tuples(KINDS, st.lists(st.integers(0, 3), min_size=1, max_size=3), st.booleans()), max_size=12)


@settings(max_examples=20, deadline=None)
@given(steps=STEPS)
def test_nobody_notices_the_merges(tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, list[int], bool]]):
    """What an audit and a reload take from the ledger is the same with and without merges."""
    paths = TablePaths.of(tmp_path_factory.mktemp("ledger") / "logs")
    ledger, entries, positions = Ledger(paths.ledger), list[LedgerEntry](), dict[int, int]()
    ledger.create()
    for batch, (kind, sizes, is_merged) in enumerate(steps):
        starts = {number: positions.get(number, 0) for number in {*positions, *range(len(sizes))}}
        grown = {n: start + (sizes[n] if n < len(sizes) and kind == LOAD else 0) for n, start in starts.items()}
        entry = load(batch, [(starts[n], grown[n]) for n in sorted(starts)], kind)
        entries.append(ledger.put(entry))
        positions = grown
        if is_merged:
            merge_entries(paths.ledger, keep=2)
    if not entries:
        return
    found = ledger.entries()
    assert [b for entry in found for b in entry.batches] == list(range(len(entries)))
    assert last_batch(open_table(paths.ledger)) == len(entries) - 1
    both = []
    for some in (entries, found):
        findings = Findings()
        loaded = check_ledger("ledger", some, entries[-1].batch, entries[-1].batch, "dc1", IDS, findings)
        both.append((loaded, [(f.kind, f.where, f.first, f.last) for f in findings], held_offsets(some, entries[-1])))
    assert both[0] == both[1]
    assert [entry for entry in found if entry.kind != LOAD] == [entry for entry in entries if entry.kind != LOAD]
