"""Audits that continue from the proof of an earlier one: they read new data, and find damage since then."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import CommitProperties, DeltaTable, Transaction
from logferry.gateway.contract.names import printed_topic_id
from logferry.loaders.planning.ledger_entry import DROP, TablePaths
from logferry.loaders.planning.plan import Range
from logferry.loaders.storage.ledger import APP, Ledger, new_entry
from logferry.ops.audit.compare.proven_file import ProvenState, read_state_file, write_state_file
from logferry.ops.audit.compare.report import ReadReport, Report
from logferry.ops.audit.log.partition import LastRecord
from logferry.ops.audit.tables.rows import FileId, FileStat
from logferry.ops.stack.kafka_cluster import KafkaCluster

from tests.support.audit import DC, MAIN, PARTITIONS, QUARANTINE, Plan, World, commit, rows_of

CHUNKS = 4


class Site:
    """A topic, its table, and audits of both with one kept file."""

    def __init__(self, world: World, folder: Path) -> None:
        self.world, self.folder = world, folder
        self.table, self.state_file = folder / "t", folder / "audit.state"
        self.loaded = [0] * PARTITIONS
        self.batch = -1
        self.plan = Plan([], {})

    async def begin(self) -> None:
        """Twelve chunks of three sources, all but the last of each are written and loaded, and proven."""
        await self.world.create()
        self.plan = self.world.plan(chunks=CHUNKS)
        first = self.plan.records[: 3 * (CHUNKS - 1)]
        await self.write(first)
        self.world.load().write(self.table)
        self.batch = 1
        self.loaded = [max((s.offset + 1 for s in self.world.stored if s.partition == p), default=0) for p in (0, 1)]
        report = await self.audit()
        assert report.exact, [str(finding) for finding in report.findings]
        assert report.read is not None
        assert (report.read.incremental, report.read.records) == (False, 9)

    async def write(self, records: list[Any]) -> None:
        plan = Plan(records, {})
        for source, state in self.plan.states.items():
            assert state is not None
            written = [one.chunk.seqno for one in (*self.world.stored, *records) if one.source_id == source.source_id]
            plan.states[source] = state._replace(recorded=max(written))
        await self.world.write(plan)

    async def write_rest(self) -> None:
        await self.write(self.plan.records[3 * (CHUNKS - 1) :])

    def load_rest(self, change: Callable[[list[dict[str, Any]]], None] = lambda _rows: None) -> None:
        """One more batch with all that is not loaded. ``change``: of its rows."""
        self.batch += 1
        world = self.world
        ends = [max((s.offset + 1 for s in world.stored if s.partition == p), default=0) for p in range(PARTITIONS)]
        topic_id = printed_topic_id(world.topic_id)
        ranges = [Range(world.topic, p, topic_id, self.loaded[p], ends[p]) for p in range(PARTITIONS)]
        paths = TablePaths.of(self.table)
        Ledger(paths.ledger).put(new_entry(self.batch, DC, "lines/1", "run", ranges))
        rows = [
            row for one in world.stored if one.offset >= self.loaded[one.partition] for row in rows_of(world.topic, one)
        ]
        change(rows)
        commit(Path(paths.quarantine), self.batch, pa.Table.from_pylist([], schema=QUARANTINE))
        commit(Path(paths.main), self.batch, pa.Table.from_pylist(rows, schema=MAIN))
        self.loaded = ends

    def drop(self, where: str) -> None:
        """As retention does: a batch of the ledger, and the rows go."""
        self.batch += 1
        world, cutoff = self.world, datetime(2026, 9, 1, tzinfo=UTC)
        topic_id = printed_topic_id(world.topic_id)
        ranges = [Range(world.topic, p, topic_id, end, end) for p, end in enumerate(self.loaded)]
        paths = TablePaths.of(self.table)
        Ledger(paths.ledger).put(new_entry(self.batch, DC, "lines/1", "run", ranges, kind=DROP, cutoff=cutoff))
        properties = CommitProperties(app_transactions=[Transaction(APP, self.batch)])
        self.delta().delete(where, commit_properties=properties)

    async def audit(self, **options: Any) -> Report:
        return await self.world.audit(table=self.table, state_file=self.state_file, **options)

    def kept(self) -> ProvenState:
        scope = {"dc": DC, "prefix": self.world.prefix, "topics": [self.world.name]}
        return read_state_file(self.state_file, scope)

    def delta(self) -> DeltaTable:
        return DeltaTable(str(self.table))


@pytest.fixture
async def site(kafka: KafkaCluster, topic_name: str, tmp_path: Path) -> Site:
    found = Site(World(kafka.bootstrap, topic_name), tmp_path)
    await found.begin()
    return found


def refuting(report: Report) -> dict[str, int]:
    return dict(report.findings.refuting)


def read(report: Report) -> ReadReport:
    assert report.read is not None
    return report.read


async def test_the_next_audit_reads_what_is_new(site: Site):
    """Of each partition the last record is looked at once more: that it is still there."""
    again = await site.audit()
    assert again.exact
    assert read(again).incremental
    assert (read(again).records, read(again).files, read(again).rows) == (PARTITIONS, 0, 0)
    await site.write_rest()
    site.load_rest()
    third = await site.audit()
    assert third.exact
    assert (read(third).records, read(third).rows) == (PARTITIONS + 3, 12)
    whole = await site.audit(full=True)
    assert whole.exact
    assert (read(whole).records, read(whole).rows) == (12, 48)
    for name in ("chunks", "lines", "size_bytes"):
        assert getattr(third, name) == getattr(whole, name)
    assert sorted(third.sources) == sorted(whole.sources), "hashes, too"
    assert third.table is not None
    assert third.table == whole.table


@pytest.mark.long
async def test_a_table_that_lags_is_read_up_to_later(site: Site):
    await site.write_rest()
    second = await site.audit()
    assert second.exact
    assert second.table is not None
    assert (second.table.not_loaded, read(second).records) == (3, PARTITIONS + 3)
    third = await site.audit()
    assert third.table is not None
    assert (third.table.not_loaded, read(third).records) == (3, PARTITIONS)
    site.load_rest()
    fourth = await site.audit()
    assert fourth.exact
    assert fourth.table is not None
    assert (fourth.table.not_loaded, fourth.table.compared) == (0, 48)


# ---- what goes wrong in the new part ---------------------------------------------------------------------


def lose(rows: list[dict[str, Any]]) -> None:
    del rows[2]


def double(rows: list[dict[str, Any]]) -> None:
    rows.append(rows[2])


def alter(rows: list[dict[str, Any]]) -> None:
    rows[2] = {**rows[2], "text": "forged"}


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        pytest.param(lose, "missing-row", marks=pytest.mark.long),
        pytest.param(double, "doubled-row", marks=pytest.mark.long),
        (alter, "changed-row"),
    ],
)
async def test_what_is_wrong_in_a_new_batch_is_found_until_it_is_mended(
    site: Site, change: Callable[[list[dict[str, Any]]], None], kind: str
):
    await site.write_rest()
    site.load_rest(change)
    second = await site.audit()
    assert refuting(second) == {kind: 1}
    (found,) = second.findings
    assert found.first is not None
    assert ", line 2" in found.detail
    assert refuting(await site.audit()) == {kind: 1}, "it is not forgotten"
    where = f"source_id = '{found.source_id}' and offset = {found.first} and line = 2"
    site.delta().delete(where)
    stored = next(one for one in site.world.stored if (one.source_id, one.offset) == (found.source_id, found.first))
    right = [row for row in rows_of(site.world.topic, stored) if row["line"] == 2]
    commit(site.table, site.batch, pa.Table.from_pylist(right, schema=MAIN))
    mended = await site.audit()
    assert mended.exact, [str(finding) for finding in mended.findings]


@pytest.mark.long
async def test_a_double_in_the_log_is_reported_by_each_audit(site: Site):
    """It cannot be mended, and it is read once."""
    await site.write([site.plan.records[4]])
    site.load_rest()
    assert refuting(await site.audit()) == {"double": 1}
    again = await site.audit()
    assert (refuting(again), read(again).records) == ({"double": 1}, PARTITIONS)


@pytest.mark.long
async def test_a_chunk_that_is_missing_after_what_was_proven(site: Site):
    """The next chunk of a source follows on one that is not there."""
    rest = site.plan.records[3 * (CHUNKS - 1) :]
    chunk = rest[0].chunk
    assert chunk.prev is not None
    await site.write([rest[0]._replace(chunk=chunk._replace(prev=chunk.prev + 5, seqno=chunk.seqno + 5)), *rest[1:]])
    assert "gap" in refuting(await site.audit())


# ---- what goes wrong in what was proven ------------------------------------------------------------------


async def test_rows_taken_out_of_a_proven_file_are_found(site: Site):
    """Delta rewrites the file without them. The proven file is gone, so the audit compares the sums."""
    row = site.world.stored[0]
    site.delta().delete(f"source_id = '{row.source_id}' and seqno = {row.chunk.seqno} and line = 1")
    second = await site.audit()
    assert refuting(second) == {"missing-row": 1}
    assert next(iter(second.findings)).source_id == row.source_id
    assert refuting(await site.audit()) == {"missing-row": 1}


@pytest.mark.long
async def test_rows_changed_in_a_proven_file_are_found(site: Site):
    row = site.world.stored[0]
    where = f"source_id = '{row.source_id}' and seqno = {row.chunk.seqno} and line = 1"
    site.delta().update(predicate=where, new_values={"text": "'forged'"})
    assert refuting(await site.audit()) == {"changed-row": 1}


async def test_a_compaction_is_proven_by_its_new_files_alone(site: Site):
    await site.write_rest()
    site.load_rest()
    site.delta().optimize.compact()
    second = await site.audit()
    assert second.exact
    assert (read(second).files, read(second).rows) == (1, 48)
    assert (await site.audit()).exact


async def test_a_loss_in_what_the_log_has_no_more(site: Site):
    """Kafka's retention removed the records; what was proven of them still stands for them."""
    for partition in range(PARTITIONS):
        await site.world.remove_before(partition, site.loaded[partition])
    again = await site.audit()
    assert again.exact
    assert again.table is not None
    assert (again.table.compared, again.table.not_comparable) == (36, 0)
    row = site.world.stored[0]
    site.delta().delete(f"source_id = '{row.source_id}' and seqno = {row.chunk.seqno} and line = 1")
    report = await site.audit()
    assert refuting(report) == {"missing-row": 1}
    (found,) = (finding for finding in report.findings if finding.refutes)
    assert found.source_id == row.source_id
    assert "the records are not in the log any more" in found.detail
    assert "gone or changed since the last audit: main/" in found.detail
    whole = await site.audit(full=True)
    assert whole.exact, "a full audit has nothing to compare them with"
    assert whole.table is not None
    assert whole.table.not_comparable == 35


async def test_rows_that_retention_dropped_are_reported_and_not_blamed(site: Site):
    site.drop("line = 1")
    second = await site.audit()
    assert second.exact, [str(finding) for finding in second.findings]
    (note,) = second.findings
    assert (note.kind, note.count) == ("dropped-by-retention", 9)
    assert note.detail == "9 rows from before 2026-09-01T00:00:00Z were dropped by retention (batch 2): not checked"
    third = await site.audit()
    assert (third.exact, len(third.findings), read(third).rows) == (True, 0, 0), "said once, and no row read again"
    await site.write_rest()
    site.load_rest()
    assert (await site.audit()).exact
    whole = await site.audit(full=True)
    assert whole.exact
    assert [finding.count for finding in whole.findings] == [9]
    # What goes now was dropped by no batch.
    row = site.world.stored[0]
    where = f"source_id = '{row.source_id}' and seqno = {row.chunk.seqno}"
    site.delta().delete(f"{where} and line = 2")
    lost = await site.audit()
    assert refuting(lost) == {"missing-row": 1}
    assert [finding.source_id for finding in lost.findings if finding.refutes] == [row.source_id]


@pytest.mark.long
async def test_what_is_wrong_beside_what_retention_dropped(site: Site):
    row = site.world.stored[0]
    where = f"source_id = '{row.source_id}' and seqno = {row.chunk.seqno} and line = 2"
    site.delta().update(predicate=where, new_values={"text": "forged"})
    site.drop("line = 1")
    assert refuting(await site.audit()) == {"changed-row": 1, "missing-row": 1}
    assert "changed-row" in refuting(await site.audit(full=True))


@pytest.mark.long
async def test_a_file_changed_behind_the_tables_back(site: Site):
    """Seen by its size or its time. Where both are as they were, only a full audit reads it."""
    path = next(site.table.glob("*.parquet"))
    before, rows = path.stat().st_size, pq.read_table(path)
    texts = ["forged", *rows["text"].to_pylist()[1:]]
    pq.write_table(rows.set_column(rows.schema.get_field_index("text"), "text", pa.array(texts)), path)
    for commits in site.table.glob("_delta_log/*.json"):
        text = commits.read_text()
        if path.name in text:
            commits.write_text(text.replace(f'"size":{before}', f'"size":{path.stat().st_size}'))
    assert refuting(await site.audit()) == {"changed-row": 1}
    kept = site.kept()
    (table,) = kept.tables.values()
    table.files[FileId("main", path.name)].stat = FileStat(path.stat().st_size, path.stat().st_mtime_ns)
    write_state_file(site.state_file, kept)
    assert refuting(await site.audit()) == {}
    assert refuting(await site.audit(full=True)) == {"changed-row": 1}


@pytest.mark.long
async def test_a_ledger_that_says_less_than_was_proven(site: Site):
    for name in sorted((site.table / "_delta_log").glob("*.json"))[2:]:
        name.unlink()
    assert "table-put-back" in refuting(await site.audit())


@pytest.mark.long
async def test_a_recreated_table(site: Site):
    for path in TablePaths.of(site.table):
        Path(path).rename(path.with_name(f"old-{path.name}")) if Path(path).exists() else None
    site.world.load().write(site.table)
    assert refuting(await site.audit()) == {"table-recreated": 1}
    assert (await site.audit()).exact, "said once"


@pytest.mark.long
async def test_a_log_that_was_truncated_and_rewritten(site: Site):
    """As after an unclean election: other records at the offsets that were proven."""
    kept = site.kept()
    for partition in kept.partitions.values():
        if partition.tail is not None:
            partition.tail = partition.tail._replace(digest=partition.tail.digest + 1)
    write_state_file(site.state_file, kept)
    assert refuting(await site.audit()) == {"log-rewritten": 2}
    assert refuting(await site.audit()) == {"log-rewritten": 2}, "until the operator has run a full audit"
    assert (await site.audit(full=True)).exact
    assert (await site.audit()).exact
    for partition in kept.partitions.values():
        if partition.tail is not None:
            partition.end, partition.tail = partition.end + 7, LastRecord(partition.end + 6, 1)
    write_state_file(site.state_file, kept)
    assert refuting(await site.audit()) == {"log-cut-back": 2}


@pytest.mark.long
async def test_a_recreated_topic(site: Site):
    kept = site.kept()
    for partition in kept.partitions.values():
        partition.topic_id = "older"
    write_state_file(site.state_file, kept)
    assert refuting(await site.audit()) == {"topic-recreated": 1}
    assert (await site.audit()).exact, "said once"
