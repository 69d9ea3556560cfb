"""The audit itself: what is stored is read in an order that makes it comparable, and judged.

The order of looking, which lets everything go on meanwhile without a false word:

1. the table's version, then its ledger: every range of that version lies below the ends that are taken next;
2. the committed ends of the partitions (the fences);
3. the states, up to an end at which every transaction is decided;
4. the partitions, likewise, up to ends taken after the states;
5. the rows of the table's version.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from logferry.gateway.fetch import CorruptBatch, KafkaRecord
from logferry.gateway.kafka import EARLIEST, LATEST, Kafka
from logferry.gateway.metadata import TopicView
from logferry.ops.audit.account import Account
from logferry.ops.audit.agreement import compare
from logferry.ops.audit.chunks import name_damaged
from logferry.ops.audit.files import FileReport, OriginalFiles
from logferry.ops.audit.findings import Finding, Findings
from logferry.ops.audit.loaded import Loaded, Place, check_ledger, printed_id
from logferry.ops.audit.partition import Expected, PartitionLog, Span
from logferry.ops.audit.ranges import Ranges
from logferry.ops.audit.reading import committed, connected, high_watermarks
from logferry.ops.audit.report import Report, TableReport, source_reports
from logferry.ops.audit.rows import RowCounts, beyond_the_log, take_off
from logferry.ops.audit.scope import audited_topics, only_dc, state_topic_of
from logferry.ops.audit.states import Known, States
from logferry.ops.audit.tables import ChunkRows, Tables
from logferry.ops.problems import Unavailable

# Called with a stage (`STAGES`) and how much of it is done, of how much.
Progress = Callable[[str, int, int], None]
ByTopic = dict[str, list[Known]]
SOURCE_RETENTION_MS: Final = 14 * 86_400_000
STAGES: Final = ("states", "log", "table")


async def audit(
    bootstrap: str,
    dc: str | None = None,
    *,
    topics: Sequence[str] = (),
    table: Path | None = None,
    files: Sequence[Path] = (),
    prefix: str = "logferry",
    source_retention_ms: int = SOURCE_RETENTION_MS,
    security: Mapping[str, Any] | None = None,
    progress: Progress = lambda _stage, _done, _total: None,
) -> Report:
    """Proves or refutes the promise over what is stored now. Reads only; safe at any time and again.

    ``dc``: None for the only one that the cluster has. ``topics``: as writers name them, none for all of the dc.
    ``prefix`` and ``source_retention_ms``: the gateway's settings. ``security``: options of Kafka's clients.
    Raises WrongUse for a topic, dc or file that is not there, Unavailable when Kafka or the table cannot be read.
    """
    with ExitStack() as stack:
        originals = OriginalFiles(files)
        stack.callback(originals.close)
        tables = Tables.open(table) if table is not None else None
        async with connected({**(security or {}), "bootstrap_servers": bootstrap}) as kafka:
            views = (await kafka.describe()).topics
            dc = dc or only_dc(views, prefix)
            state_topic, audited = state_topic_of(views, dc, prefix), audited_topics(views, dc, topics)
            expired_ms = int(time.time() * 1000) - source_retention_ms
            proof = _Proof(kafka, dc, state_topic, audited, not topics, expired_ms, tables, originals, progress)
            return await proof.run()


@dataclass
class _Proof:
    """``is_whole``: all topics of the data centre are audited, so that what is missing among them is noticed.

    ``expired_ms``: a source that was silent since then may have been forgotten.
    """

    kafka: Kafka
    dc: str
    state_topic: TopicView
    topics: dict[str, TopicView]
    is_whole: bool
    expired_ms: int
    tables: Tables | None
    originals: OriginalFiles
    progress: Progress
    findings: Findings = field(default_factory=Findings)
    logs: dict[Place, PartitionLog] = field(default_factory=dict)

    async def run(self) -> Report:
        started = time.monotonic()
        loaded = self._ledger()
        places = [(topic, p.partition) for topic, view in self.topics.items() for p in view.partitions]
        starts = await self.kafka.offsets(places, EARLIEST)
        fences = await self.kafka.offsets(places, LATEST)
        states = await self._states()
        known = self._by_topic(states)
        ends = await high_watermarks(self.kafka, places)
        spans = {place: Span(starts[place], fences[place], ends[place]) for place in places}
        self._prepare(spans, loaded, states, known)
        await self._read("log", spans, self._take, self._overtaken)
        existing = await self._still_there()
        self._agree(states, known, existing)
        rows = await self._table(loaded, ends)
        files = self._files()
        sources = source_reports(self.logs.values(), rows)
        return Report(
            dc=self.dc,
            topics=sorted(self.topics),
            chunks=sum(source.chunks for source in sources),
            lines=sum(source.lines for source in sources),
            size_bytes=sum(source.size_bytes for source in sources),
            sources=sources,
            table=self._table_report(rows),
            files=files,
            findings=self.findings,
            seconds=time.monotonic() - started,
        )

    # ---- reading ------------------------------------------------------------------------------------------

    def _ledger(self) -> Loaded | None:
        """What the table must hold; None where there is no table, or nobody can say."""
        tables = self.tables
        if tables is None:
            return None
        ledger = str(tables.paths.ledger)
        if tables.broken:
            self.findings.add(Finding("ledger-broken", ledger, tables.broken))
            return None
        ids = {topic: printed_id(view.id) for topic, view in self.topics.items()}
        if self.is_whole:
            loaded_topics = {r.topic for entry in tables.entries if entry.dc == self.dc for r in entry.ranges}
            for topic in sorted(name for name in loaded_topics - ids.keys() if name.startswith(f"{self.dc}.")):
                detail = "the topic does not exist any more: what was loaded of it cannot be compared"
                self.findings.add(Finding("loaded-topic-gone", topic, detail, refutes=False))
        return check_ledger(ledger, tables.entries, tables.last, tables.last_now, self.dc, ids, self.findings)

    async def _states(self) -> States:
        name, lanes = self.state_topic.name, len(self.state_topic.partitions)
        states = States(name, lanes, None if self.is_whole else frozenset(self.topics), self.findings)
        places = [(name, lane) for lane in range(lanes)]
        starts = await self.kafka.offsets(places, EARLIEST)
        ends = await high_watermarks(self.kafka, places)
        spans = {place: Span(starts[place], starts[place], ends[place]) for place in places}

        def apply(place: Place, records: Iterable[KafkaRecord]) -> None:
            for record in records:
                states.apply(place[1], record.offset, record.key or b"", record.value)

        await self._read("states", spans, apply, lambda _place, _start, _end: None)
        return states

    def _prepare(self, spans: dict[Place, Span], loaded: Loaded | None, states: States, known: ByTopic) -> None:
        """Makes the `PartitionLog` of each partition, with what is expected of it."""
        for topic, view in self.topics.items():
            bases = {
                one.source.source_id: one.state.base for one in known.get(topic, ()) if one.state.topic_id == view.id
            }
            reborn = {source_id: again for (name, source_id), again in states.reborn.items() if name == topic}
            expected = Expected(bases, reborn)
            for place in ((topic, p.partition) for p in view.partitions):
                account = None if loaded is None else Account()
                ranges = Ranges() if loaded is None else loaded.covers(place)
                self.logs[place] = PartitionLog(
                    *place, spans[place], self.findings, account, ranges, self.originals, expected
                )

    def _take(self, place: Place, records: Sequence[KafkaRecord]) -> None:
        self.logs[place].take(records)

    def _overtaken(self, place: Place, start: int, end: int) -> None:
        self.logs[place].overtaken(start, end)

    async def _read(
        self,
        stage: str,
        spans: dict[Place, Span],
        take: Callable[[Place, Sequence[KafkaRecord]], None],
        overtaken: Callable[[Place, int, int], None],
    ) -> None:
        """Partition after partition; one whose stored bytes are damaged is left at the place of the damage."""
        done, total = 0, sum(span.end - span.start for span in spans.values())
        for place, span in spans.items():
            try:
                async for fetched in committed(self.kafka, place, span.start, span.end, partial(overtaken, place)):
                    take(place, fetched.records)
                    self.progress(stage, done + fetched.next_offset - span.start, total)
            except CorruptBatch as error:
                where = f"{place[0]}-{place[1]}"
                self.findings.add(Finding("corrupt-batch", where, f"{error}; what follows was not read"))
            done += span.end - span.start

    async def _still_there(self) -> set[str]:
        """The topics that exist now. Raises Unavailable when an audited one is not what it was at the beginning."""
        now = (await self.kafka.describe()).topics
        for topic, view in self.topics.items():
            if topic not in now or now[topic].id != view.id:
                raise Unavailable(f"{topic} was deleted while it was read; run the audit again")
            if len(now[topic].partitions) != len(view.partitions):
                raise Unavailable(f"{topic} got more partitions while it was read; run the audit again")
        return set(now)

    # ---- judging ------------------------------------------------------------------------------------------

    def _by_topic(self, states: States) -> ByTopic:
        known: ByTopic = {}
        for one in states.known():
            known.setdefault(one.source.topic, []).append(one)
        return known

    def _agree(self, states: States, known: ByTopic, existing: set[str]) -> None:
        """Compares states and log."""
        for topic, view in self.topics.items():
            logs = {p.partition: self.logs[topic, p.partition] for p in view.partitions}
            forgotten = [source_id for name, source_id in states.forgotten if name == topic]
            compare(topic, view.id, logs, known.get(topic, ()), forgotten, self.expired_ms, self.findings)
        for topic in sorted(known.keys() - existing):
            recorded = sum(one.state.recorded is not None for one in known[topic])
            detail = f"the topic does not exist any more; chunks of {recorded} sources were recorded in it"
            self.findings.add(Finding("topic-gone", topic, detail, count=recorded, refutes=False))

    async def _table(self, loaded: Loaded | None, ends: dict[Place, int]) -> RowCounts | None:
        if self.tables is None or loaded is None:
            return None
        beyond_the_log(loaded, ends, self.findings)
        accounts = {place: log.account for place, log in self.logs.items() if log.account is not None}
        removed = {place: log.removed for place, log in self.logs.items()}
        rows = self._counted(self.tables.rows(self.topics.keys()), self.tables.count())
        counts = take_off(rows, accounts, removed, loaded, self.dc, self.findings, self.tables.left_out)
        await name_damaged(self.kafka, self.tables, accounts, self.findings)
        return counts

    def _counted(self, rows: Iterable[ChunkRows], total: int) -> Iterator[ChunkRows]:
        done = 0
        for row in rows:
            yield row
            done += len(row.lines)
            self.progress("table", done, total)

    def _table_report(self, rows: RowCounts | None) -> TableReport | None:
        if self.tables is None or rows is None:
            return None
        return TableReport(
            path=str(self.tables.paths.main),
            batches=self.tables.last + 1,
            rows=sum(rows.by_source.values()) + rows.of_no_source,
            compared=rows.compared,
            not_comparable=rows.removed + rows.elsewhere,
            not_loaded=sum(log.unloaded for log in self.logs.values()),
        )

    def _files(self) -> list[FileReport]:
        reports = self.originals.reports()
        for file in reports:
            source = f"{file.topic} {file.source_id}" if file.source_id else None
            if file.flaw:
                kind = "file-differs" if source else "file-not-stored"
                self.findings.add(Finding(kind, file.path, file.flaw, source))
            elif file.not_sent_bytes:
                detail = f"the last {file.not_sent_bytes} bytes of {file.size_bytes} are not sent yet"
                self.findings.add(Finding("not-sent-yet", file.path, detail, source, refutes=False))
            if source and file.begin:
                detail = f"stored from position {file.begin} on; what is before was removed by retention or never sent"
                self.findings.add(Finding("file-begins-late", file.path, detail, source, refutes=False))
        return reports
