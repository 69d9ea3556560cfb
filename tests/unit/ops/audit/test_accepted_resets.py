"""An acceptance covers the jumps of one reset of one table, and nothing beside them."""

from __future__ import annotations

import pytest
from logferry.loaders.planning.ledger_entry import LOAD, RESET, LedgerEntry
from logferry.loaders.planning.plan import Range
from logferry.loaders.storage.ledger import new_entry
from logferry.ops.audit.digests.findings import Findings
from logferry.ops.audit.tables.accepted_resets import AcceptedResets, ResetName, named_batches
from logferry.ops.audit.tables.rows import check_ledger
from logferry.ops.cli.problems import UsageError

TOPIC = "dc1.nginx"


def entry(batch: int, start: int, end: int, kind: str = LOAD, run: str = "run") -> LedgerEntry:
    return new_entry(batch, "dc1", "lines/1", run, [Range(TOPIC, 0, "id", start, end)])._replace(kind=kind)


# A reset over 5 to 8, and a load that leaves 12 to 13 out.
LEDGER = [entry(0, 0, 5), entry(1, 9, 9, RESET), entry(2, 9, 12), entry(3, 14, 15)]


def kinds(accepted: AcceptedResets, entries: list[LedgerEntry] = LEDGER) -> list[str]:
    findings = Findings()
    check_ledger("t_ledger", entries, len(entries) - 1, len(entries) - 1, "dc1", {TOPIC: "id"}, findings, accepted)
    return [one.kind for one in findings]


def test_only_the_named_reset_is_accepted():
    assert kinds(AcceptedResets("t")) == ["ledger-gap", "ledger-gap"]
    assert kinds(AcceptedResets("t", {1})) == ["reset-accepted", "ledger-gap"]
    assert kinds(AcceptedResets("t", {1, 3})) == ["reset-accepted", "ledger-gap"], "a load is none"


def test_what_is_remembered_holds_for_the_same_offsets_of_the_same_entry_and_table():
    named = AcceptedResets("t", {1})
    kinds(named)
    assert kinds(AcceptedResets("t", (), named.met)) == ["reset-accepted", "ledger-gap"]
    assert kinds(AcceptedResets("u", (), named.met)) == ["ledger-gap", "ledger-gap"]
    first, _, *others = LEDGER
    for changed in (entry(1, 9, 9, RESET, run="another"), entry(1, 8, 8, RESET)):
        assert "reset-accepted" not in kinds(AcceptedResets("t", (), named.met), [first, changed, *others])


@pytest.mark.parametrize(("batch", "why"), [(7, "no such batch"), (3, "is no reset"), (4, "skipped no offsets")])
def test_an_acceptance_that_matches_nothing_is_an_error(batch: int, why: str):
    accepted, entries = AcceptedResets("t", {1, batch}), [*LEDGER, entry(4, 15, 15, RESET)]
    kinds(accepted, entries)
    with pytest.raises(UsageError, match=why):
        accepted.check("/t", entries)


@pytest.mark.parametrize("written", ["", "t", "t:", ":1", "t:-1", "t:x", "t:²"])
def test_a_name_has_a_table_and_a_batch(written: str):
    with pytest.raises(UsageError, match="--accept-reset"):
        ResetName.parse(written)


def test_a_name_is_that_of_an_audited_table():
    tables = ["/a/t", "s3://bucket/t"]
    names = [ResetName.parse(written) for written in ("/a/t:3", "s3://bucket/t:4", "s3://bucket/t:5")]
    assert named_batches(names, tables) == {"/a/t": {3}, "s3://bucket/t": {4, 5}}
    with pytest.raises(UsageError, match="not audited"):
        named_batches([ResetName.parse("s3://bucket/u:1")], tables)
