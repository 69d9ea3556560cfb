"""The audit: reads the stored data in an order that makes it comparable, and compares it.

The order of reading makes each comparison exact while all services continue to write:

1. the version of each table, then its ledger: every range of that version ends below the offsets taken next;
2. the committed ends of the partitions (the fences);
3. the states of the sources, up to an end at which every transaction is decided;
4. the partitions, likewise, up to ends that are taken after the states were read;
5. the rows of the table versions of step 1.

With a state file, steps 4 and 5 read only the data that is new since the last audit. The states are always read in
full: their topic is compacted, so its size follows the number of sources.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from logferry.gateway.config import ConfigError
from logferry.gateway.contract.names import TopicPartition, printed_topic_id
from logferry.gateway.kafka.client import EARLIEST, LATEST, KafkaClient
from logferry.gateway.kafka.record_batch import CorruptBatch, KafkaRecord
from logferry.gateway.kafka.requests import TopicMetadata
from logferry.gateway.tls import kafka_options
from logferry.ops.audit.compare.centres import Centre
from logferry.ops.audit.compare.mirror_copy import Copies, CopyScope, compare_copies
from logferry.ops.audit.compare.pinpoint import Pinpointer
from logferry.ops.audit.compare.proven_file import ProvenState, read_state_file, write_state_file
from logferry.ops.audit.compare.report import ReadReport, Report, SourceReport, TableAuditReport
from logferry.ops.audit.compare.table import TableComparison, begin_comparison
from logferry.ops.audit.config import AuditConfig
from logferry.ops.audit.digests.findings import Finding, Findings
from logferry.ops.audit.digests.sums import Cell, shown, totals
from logferry.ops.audit.log.agreement import SourceStates, StatesByTopic, compare_topics
from logferry.ops.audit.log.chain import Chain
from logferry.ops.audit.log.original_files import FileReport, OriginalFiles
from logferry.ops.audit.log.partition import AuditSpan, ExpectedSources, PartitionLog
from logferry.ops.audit.log.read import committed, connected, high_watermarks
from logferry.ops.audit.log.scope import audited_topics, only_dc, state_topic_of
from logferry.ops.audit.tables.file_rows import beyond_the_log
from logferry.ops.audit.tables.table_reader import TableReader
from logferry.ops.cli.problems import Unavailable, UsageError

# Called with a stage (states, log, table, mirror), its work that is done, and its total.
ProgressCallback = Callable[[str, int, int], None]


async def audit(
    config: AuditConfig,
    *,
    files: Sequence[Path] = (),
    full: bool = False,
    progress: ProgressCallback = lambda _stage, _done, _total: None,
) -> Report:
    """Proves or refutes the guarantee over the stored data. It can run at any time, and writes only the state file.

    ``files``: the original files, in place of the patterns of the configuration. ``full``: read everything in spite of
    the state file.

    Raises UsageError for a topic, dc, file or state file that cannot be used, Unavailable when Kafka or a table cannot
    be read.
    """
    try:
        options = kafka_options(config.kafka)
        copies = [(copy, kafka_options(copy.kafka)) for copy in config.copies]
    except ConfigError as error:
        raise UsageError(str(error)) from None
    prefix, state_file = config.prefix, config.state_file
    async with AsyncExitStack() as stack:
        opened = [TableReader.open(path) for path in dict.fromkeys(path.absolute() for path in config.tables)]
        kafka = await stack.enter_async_context(connected(options))
        views = (await kafka.describe()).topics
        dc = config.dc or only_dc(views, prefix)
        scope = {"dc": dc, "prefix": prefix, "topics": sorted(set(config.topics))}
        proven = ProvenState(scope) if state_file is None or full else read_state_file(state_file, scope)
        state_topic = state_topic_of(views, dc, prefix)
        originals = OriginalFiles(files, proven.files)
        stack.callback(originals.close)
        here = Centre(dc, kafka, views, audited_topics(views, dc, config.topics))
        centres = {dc: here}
        for copy, options in copies:
            if copy.dc in centres:
                raise UsageError(f"copies: {copy.dc} is the audited data centre; name data centres that mirror it")
            there = await stack.enter_async_context(connected(options))
            centres[copy.dc] = Centre(copy.dc, there, (await there.describe()).topics)
        expired_ms = int(time.time() * 1000) - config.source_retention_ms
        is_whole = not config.topics
        run = _Audit(here, centres, state_topic, prefix, is_whole, expired_ms, opened, originals, proven, progress)
        report = await run.run()
        proven_copies = dict(proven.copies)
        for copy, _ in copies:
            compared = CopyScope(dc, dc, copy.dc, prefix, copy.takes)
            named = [] if is_whole else [topic for topic in report.topics if copy.takes(topic)]
            found = await compare_copies(kafka, centres[copy.dc].kafka, compared, named, proven_copies, progress)
            report.copies.append(found)
            found.add_findings(report.findings)
        report.add_copies_to_sources()
        if state_file is not None:
            write_state_file(state_file, run.to_state(proven_copies))
        return report


@dataclass
class _Audit:
    """``here``: the audited data centre, ``topics`` its own. ``centres``: it, and those that have copies.

    ``is_whole``: all its topics are audited, so that a missing one is noticed. ``expired_ms``: a source that is silent
    since then may have expired. ``sources``: (topic, source) of all states.
    """

    here: Centre
    centres: dict[str, Centre]
    state_topic: TopicMetadata
    prefix: str
    is_whole: bool
    expired_ms: int
    tables: list[TableReader]
    originals: OriginalFiles
    proven: ProvenState
    progress: ProgressCallback
    findings: Findings = field(default_factory=Findings)
    comparisons: list[TableComparison] = field(default_factory=list)
    sources: set[tuple[str, str]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.kafka, self.topics = self.here.kafka, dict(self.here.topics)

    async def run(self) -> Report:
        started = time.monotonic()
        for tables in self.tables:
            proven = self.proven.tables.get(str(tables.paths.main))
            comparison = await begin_comparison(
                tables, self.here, self.centres, proven, self.findings, prefix=self.prefix, is_whole=self.is_whole
            )
            if comparison is not None:
                self.comparisons.append(comparison)
        ends = {centre.dc: await self._read_centre(centre) for centre in self.centres.values() if centre.topics}
        reports = [await self._compare_table(one, ends[one.home]) for one in self.comparisons]
        files = self.originals.reports(self.findings)
        return self._report(reports, files, time.monotonic() - started)

    def _report(self, tables: list[TableAuditReport], files: list[FileReport], seconds: float) -> Report:
        """The totals are those of the audited topics."""
        logs = [log for centre in self.centres.values() for log in centre.logs.values()]
        read = ReadReport(
            records=sum(log.records for log in logs),
            size_bytes=sum(log.read_bytes for log in logs),
            files=sum(comparison.files_read for comparison in self.comparisons),
            rows=sum(comparison.rows_read for comparison in self.comparisons),
            incremental=bool(self.proven.partitions),
        )
        own = self.here.logs.values()
        sources = [self._source_report(log, source_id, chain) for log in own for source_id, chain in log.chains.items()]
        counted = [source for source in sources if source.topic in self.topics]
        return Report(
            dc=self.here.dc,
            topics=sorted(self.topics),
            chunks=sum(source.chunks for source in counted),
            lines=sum(source.lines for source in counted),
            size_bytes=sum(source.size_bytes for source in counted),
            sources=sources,
            tables=tables,
            files=files,
            findings=self.findings,
            seconds=seconds,
            read=read,
        )

    def _source_report(self, log: PartitionLog, source_id: str, chain: Chain) -> SourceReport:
        cell, breaks = Cell(log.topic, log.partition, source_id), chain.breaks
        loaded = totals(one.rows[cell] for one in self.comparisons if cell in one.rows)
        return SourceReport(
            topic=log.topic,
            source_id=source_id,
            partition=log.partition,
            chunks=chain.chunks,
            lines=chain.lines,
            size_bytes=chain.size_bytes,
            base=chain.base,
            first=chain.first,
            last=chain.last,
            is_cut=log.is_cut and not chain.head_seen,
            rows=loaded.lines if self.comparisons else None,
            gaps=breaks.get("gap", 0),
            overlaps=breaks.get("overlap", 0),
            doubles=breaks.get("double", 0),
            out_of_order=breaks.get("out-of-order", 0),
            hash=shown(chain.digest),
            rows_hash=shown(loaded.digest) if self.comparisons else None,
        )

    def to_state(self, copies: Copies) -> ProvenState:
        """The proof that the next audit resumes from."""
        partitions = {
            (centre.dc, place): log.to_state(self.sources)
            for centre in self.centres.values()
            for place, log in centre.logs.items()
        }
        tables = dict(self.proven.tables)
        for comparison in self.comparisons:

            def is_retired(cell: Cell, home: str = comparison.home) -> bool:
                partition = partitions.get((home, cell.place))
                return partition is not None and cell.source_id not in partition.chains

            tables[comparison.path] = comparison.to_state(is_retired)
        for (_, place), copy in copies.items():
            own = partitions.get((self.here.dc, place))
            chains = own.chains if own is not None else {}
            copy.sources = {name: tally for name, tally in copy.sources.items() if name in chains}
        return ProvenState(self.proven.scope, partitions, tables, dict(copies), self.originals.to_state())

    # ---- the order of reading ------------------------------------------------------------------------------

    async def _read_centre(self, centre: Centre) -> dict[TopicPartition, int]:
        """Reads the log of a data centre, and returns its ends: that of the audited one, to compare it with its states;
        of another one the topics that a table is loaded from there."""
        kafka, places = centre.kafka, centre.places
        starts = await kafka.offsets(places, EARLIEST)
        fences = await kafka.offsets(places, LATEST)
        states = await self._read_states() if centre is self.here else None
        known = {} if states is None else states.by_topic()
        ends = await high_watermarks(kafka, places)
        spans = {place: AuditSpan(starts[place], fences[place], ends[place]) for place in places}
        self._prepare(centre, spans, states, known)
        await self._read_logs(centre, spans)
        existing = await _existing_topics(centre)
        if states is not None:
            compare_topics(self.topics, centre.logs, states, known, existing, self.expired_ms, self.findings)
        return ends

    async def _read_states(self) -> SourceStates:
        name, lanes = self.state_topic.name, len(self.state_topic.partitions)
        states = SourceStates(name, lanes, None if self.is_whole else frozenset(self.topics), self.findings)
        places = [(name, lane) for lane in range(lanes)]
        starts = await self.kafka.offsets(places, EARLIEST)
        ends = await high_watermarks(self.kafka, places)
        spans = {place: AuditSpan(starts[place], starts[place], ends[place]) for place in places}

        def apply(place: TopicPartition, records: Iterable[KafkaRecord], _next: int) -> None:
            for record in records:
                states.apply(place[1], record.offset, record.key or b"", record.value)

        await self._read(self.kafka, "states", spans, apply, lambda *_: None, lambda *_: None)
        return states

    def _prepare(
        self, centre: Centre, spans: dict[TopicPartition, AuditSpan], states: SourceStates | None, known: StatesByTopic
    ) -> None:
        """Creates the `PartitionLog` of each partition, with its expected sources and the proof of earlier audits.

        ``states``: None where they are unknown.
        """
        self.sources |= {(topic, one.source.source_id) for topic, found in known.items() for one in found}
        before = {place: proven for (dc, place), proven in self.proven.partitions.items() if dc == centre.dc}
        for topic, view in centre.topics.items():
            bases = {
                one.source.source_id: one.state.base for one in known.get(topic, ()) if one.state.topic_id == view.id
            }
            born = states.reborn.items() if states is not None else ()
            reborn = {source_id: again for (name, source_id), again in born if name == topic}
            is_own = states is not None and topic in self.topics
            for place in ((topic, p.partition) for p in view.partitions):
                log = PartitionLog(*place, spans[place], self.findings, is_own=is_own)
                log.originals = self.originals if is_own else None
                log.expected = ExpectedSources(bases, reborn)
                log.resume(printed_topic_id(view.id), before.get(place))
                sides = (comparison.side(centre.dc, place, log.chains_from) for comparison in self.comparisons)
                log.sides = [side for side in sides if side is not None]
                centre.logs[place] = log
        prefix = "" if centre is self.here else f"{centre.dc}: "
        recreated = {log.topic for log in centre.logs.values() if log.is_recreated}
        deleted = {topic for topic, _ in before if topic not in centre.views}
        for topic in sorted(deleted | recreated):
            kind = "topic-recreated" if topic in recreated else "topic-deleted"
            change = "it was deleted and recreated" if topic in recreated else "it was deleted"
            detail = f"{change} since the last audit: the proof of its records is lost"
            self.findings.add(Finding(kind, prefix + topic, detail))

    async def _read_logs(self, centre: Centre, spans: Mapping[TopicPartition, AuditSpan]) -> None:
        """Reads each partition from the first offset that is needed."""
        found = {}
        for place, span in spans.items():
            begin = centre.logs[place].reading_from(self.originals.concerns)
            found[place] = span._replace(start=min(max(begin, span.start), span.end))

        def take(place: TopicPartition, records: Sequence[KafkaRecord], next_offset: int) -> None:
            centre.logs[place].take(records)
            centre.logs[place].reached = next_offset

        def overtaken(place: TopicPartition, start: int, end: int) -> None:
            centre.logs[place].overtaken(start, end)

        await self._read(centre.kafka, "log", found, take, overtaken, lambda place: centre.logs[place].ended())

    async def _read(
        self,
        kafka: KafkaClient,
        stage: str,
        spans: dict[TopicPartition, AuditSpan],
        take: Callable[[TopicPartition, Sequence[KafkaRecord], int], None],
        overtaken: Callable[[TopicPartition, int, int], None],
        ended: Callable[[TopicPartition], None],
    ) -> None:
        """Reads one partition after the other; where stored bytes are damaged, the rest of the partition is skipped."""
        done, total = 0, sum(span.end - span.start for span in spans.values())
        for place, span in spans.items():
            try:
                async for fetched in committed(kafka, place, span.start, span.end, partial(overtaken, place)):
                    take(place, fetched.records, fetched.next_offset)
                    self.progress(stage, done + fetched.next_offset - span.start, total)
                ended(place)
            except CorruptBatch as error:
                detail = f"{error}; the rest of the partition was not read"
                self.findings.add(Finding("corrupt-batch", f"{place[0]}-{place[1]}", detail))
            done += span.end - span.start

    async def _compare_table(self, comparison: TableComparison, ends: dict[TopicPartition, int]) -> TableAuditReport:
        centre = self.centres[comparison.home]
        beyond_the_log(comparison.loaded[comparison.home], ends, self.findings)
        comparison.read(centre.logs)
        comparison.compare(partial(self.progress, "table"))
        if comparison.bad:
            await Pinpointer(centre.kafka, comparison, self.findings).run()
        return comparison.report()


async def _existing_topics(centre: Centre) -> set[str]:
    """The topics that exist now. Raises Unavailable when a topic changed while it was read."""
    now = (await centre.kafka.describe()).topics
    for topic, view in centre.topics.items():
        if topic not in now or now[topic].id != view.id:
            raise Unavailable(f"{topic} was deleted while it was read; run the audit again")
        if len(now[topic].partitions) != len(view.partitions):
            raise Unavailable(f"{topic} got more partitions while it was read; run the audit again")
    return set(now)
