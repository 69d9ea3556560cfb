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
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from logferry.gateway.config import ConfigError
from logferry.gateway.contract.names import TopicPartition, printed_topic_id
from logferry.gateway.kafka.client import EARLIEST, LATEST
from logferry.gateway.kafka.requests import TopicMetadata
from logferry.gateway.tls import kafka_options
from logferry.loaders.location import Location
from logferry.ops.audit.compare.mirror_copy import CopyComparison, MirrorReport
from logferry.ops.audit.compare.pinpoint import Pinpointer
from logferry.ops.audit.compare.proven_file import ProvenState, read_state_file, write_state_file
from logferry.ops.audit.compare.report import BREAKS, ReadReport, Report, SourceCopy, SourceReport, TableAuditReport
from logferry.ops.audit.compare.table import TableComparison, begin_comparison
from logferry.ops.audit.config import AuditConfig, CopySettings
from logferry.ops.audit.digests.findings import Finding, Findings
from logferry.ops.audit.digests.sums import Cell, shown
from logferry.ops.audit.log.agreement import SourceStates, compare_topics
from logferry.ops.audit.log.chain import Chain
from logferry.ops.audit.log.original_files import FileReport, OriginalFiles
from logferry.ops.audit.log.partition import AuditSpan, ExpectedSources, PartitionLog
from logferry.ops.audit.log.partition_work import PartitionJob, PartitionWork
from logferry.ops.audit.log.read import Centre, audited_topics, committed, connected, only_dc, state_topic_of
from logferry.ops.audit.records.batches import CorruptRecords
from logferry.ops.audit.records.formats import MOVED
from logferry.ops.audit.tables.accepted_resets import AcceptedResets, ResetName, named_batches
from logferry.ops.audit.tables.table_reader import TableReader
from logferry.ops.audit.workers.worker_pool import WorkerPool, processors
from logferry.ops.cli.problems import Unavailable, UsageError

# Fewer are read before another process has started.
# Of the states: at most so many, while the number of lanes changes.
_PASSES: Final = 5
_SMALL_RECORDS: Final = 1_000
# Called with a stage (states, log, table, mirror), its work that is done, and its total.
ProgressCallback = Callable[[str, int, int], None]


async def audit(
    config: AuditConfig,
    *,
    files: Sequence[Path] = (),
    full: bool = False,
    accept_resets: Sequence[ResetName] = (),
    progress: ProgressCallback = lambda _stage, _done, _total: None,
) -> Report:
    """Proves or refutes the guarantee over the stored data. It can run at any time, and writes only the state file.

    ``files``: the original files, in place of the patterns of the configuration. ``full``: read everything in spite of
    the state file. ``accept_resets``: resets of the tables that do not refute; the state file remembers them.

    Raises UsageError for a topic, dc, file, reset or state file that cannot be used, Unavailable when Kafka or a table
    cannot be read.
    """
    try:
        options = kafka_options(config.kafka)
        copies = [(copy, kafka_options(copy.kafka)) for copy in config.copies]
    except ConfigError as error:
        raise UsageError(str(error)) from None
    async with AsyncExitStack() as stack:
        pool = stack.enter_context(WorkerPool(config.workers or processors()))
        places = [Location.of(place, *config.accesses) for place in dict.fromkeys(config.tables)]
        batches = named_batches(
            (name._replace(table=str(Location.of(name.table))) for name in accept_resets), map(str, places)
        )
        tables = [TableReader(place) for place in places]
        kafka = await stack.enter_async_context(connected(options))
        views = (await kafka.describe()).topics
        dc = config.dc or only_dc(views, config.prefix)
        scope = {"dc": dc, "prefix": config.prefix, "topics": sorted(set(config.topics))}
        proven = _earlier_proof(config.state_file, scope, full)
        state_topic = state_topic_of(views, dc, config.prefix)
        originals = OriginalFiles(files, proven.files)
        stack.callback(originals.close)
        here = Centre(dc, config.kafka, kafka, views, audited_topics(views, dc, config.topics))
        centres = {dc: here}
        for copy, options in copies:
            if copy.dc in centres:
                what = "the audited data centre" if copy.dc == dc else "listed twice"
                raise UsageError(f"copies: {copy.dc} is {what}; name each data centre that mirrors it once")
            there = await stack.enter_async_context(connected(options))
            centres[copy.dc] = Centre(copy.dc, copy.kafka, there, (await there.describe()).topics)
        run = _Audit(config, here, centres, state_topic, originals, proven, progress, batches, pool)
        report = await run.run(tables)
        if config.state_file is not None:
            write_state_file(config.state_file, run.to_state())
        return report


@dataclass
class _Audit:
    """``here``: the audited data centre. ``centres``: it, and those that have copies. ``is_whole``: all its topics are
    audited, so that a missing one is noticed. ``copies``: their proof, also that of earlier audits. ``expired_ms``: a
    source that is silent since then may have expired."""

    config: AuditConfig
    here: Centre
    centres: dict[str, Centre]
    state_topic: TopicMetadata
    originals: OriginalFiles
    proven: ProvenState
    progress: ProgressCallback
    accepted_batches: Mapping[str, set[int]]
    pool: WorkerPool
    findings: Findings = field(default_factory=Findings)
    comparisons: list[TableComparison] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.is_whole = not self.config.topics
        self.states = self._no_states(len(self.state_topic.partitions))
        self.copies = dict(self.proven.copies)
        self.accepted = dict(self.proven.accepted)
        self.expired_ms = int(time.time() * 1000) - self.config.source_retention_ms

    async def run(self, readers: Iterable[TableReader]) -> Report:
        started = time.monotonic()
        for table in readers:
            path = str(table.paths.main)
            proven = self.proven.tables.get(path)
            known = self.proven.accepted.get(path, [])
            accepted = AcceptedResets(table.id, self.accepted_batches[path], known)
            comparison = await begin_comparison(
                *(table, self.here, self.centres, proven, accepted, self.findings),
                prefix=self.config.prefix,
                is_whole=self.is_whole,
            )
            self.accepted[path] = list(dict.fromkeys([*known, *accepted.met]))
            if comparison is not None:
                self.comparisons.append(comparison)
        for centre in self.centres.values():
            if centre.topics:
                await self._read_centre(centre)
        tables = [await self._compare_table(comparison) for comparison in self.comparisons]
        files = self.originals.reports(self.findings)
        copies = [await self._compare_copy(copy) for copy in self.config.copies]
        return self._report(tables, files, copies, time.monotonic() - started)

    def _report(
        self, tables: list[TableAuditReport], files: list[FileReport], copies: list[MirrorReport], seconds: float
    ) -> Report:
        """The totals are those of the audited topics."""
        logs = [log for centre in self.centres.values() for log in centre.logs.values()]
        read = ReadReport(
            records=sum(log.records for log in logs),
            size_bytes=sum(log.read_bytes for log in logs),
            files=sum(comparison.files_read for comparison in self.comparisons),
            rows=sum(comparison.rows_read for comparison in self.comparisons),
            incremental=bool(self.proven.partitions),
        )
        copied: dict[Cell, list[SourceCopy]] = {}
        for copy in copies:
            for found in copy.partitions:
                for source_id, tally in found.sources.items():
                    one = SourceCopy(copy.copy, tally.lines, tally.size_bytes, shown(tally.digest))
                    copied.setdefault(Cell(found.topic, found.partition, source_id), []).append(one)
        sources = [
            self._source_report(log, source_id, chain, copied)
            for log in self.here.logs.values()
            for source_id, chain in log.chains.items()
        ]
        topics = self.here.own_topics
        counted = [source for source in sources if source.topic in topics]
        return Report(
            dc=self.here.dc,
            topics=sorted(topics),
            chunks=sum(source.chunks for source in counted),
            lines=sum(source.lines for source in counted),
            size_bytes=sum(source.size_bytes for source in counted),
            sources=sources,
            tables=tables,
            files=files,
            findings=self.findings,
            seconds=seconds,
            read=read,
            copies=copies,
        )

    def _source_report(
        self, log: PartitionLog, source_id: str, chain: Chain, copied: Mapping[Cell, list[SourceCopy]]
    ) -> SourceReport:
        cell = Cell(log.topic, log.partition, source_id)
        rows = sum(one.rows[cell].lines for one in self.comparisons if cell in one.rows)
        counts: dict[str, Any] = {name: chain.breaks.get(kind, 0) for kind, name in BREAKS.items()}
        return SourceReport(
            *(log.topic, source_id, log.partition, chain.chunks, chain.lines, chain.size_bytes),
            *(chain.base, chain.first, chain.last),
            is_cut=log.is_cut and not chain.head_seen,
            rows=rows if self.comparisons else None,
            **counts,
            hash=shown(chain.digest),
            copies=tuple(copied.get(cell, ())),
        )

    def to_state(self) -> ProvenState:
        """The proof that the next audit resumes from."""
        sources = self.states.sources()
        logs = {(centre.dc, place): log for centre in self.centres.values() for place, log in centre.logs.items()}
        partitions = {place: log.to_state(sources) for place, log in logs.items()}
        tables = self.proven.tables | {found.path: found.to_state(partitions) for found in self.comparisons}
        for (_, place), copy in self.copies.items():
            own = partitions.get((self.here.dc, place))
            chains = own.chains if own is not None else {}
            copy.sources = {name: tally for name, tally in copy.sources.items() if name in chains}
        return ProvenState(self.proven.scope, partitions, tables, self.copies, self.originals.to_state(), self.accepted)

    # ---- the order of reading ------------------------------------------------------------------------------

    async def _read_centre(self, centre: Centre) -> None:
        """Reads the log of a data centre: the audited one, to compare it with its states; of another one the topics
        that a table is loaded from there."""
        kafka = centre.kafka
        places = [(topic, p.partition) for topic, of in centre.topics.items() for p in of.partitions]
        starts, fences = await kafka.offsets(places, EARLIEST), await kafka.offsets(places, LATEST)
        if centre is self.here:
            await self._read_states()
        ends = await kafka.offsets(places, LATEST, committed=False)
        self._prepare(centre, {place: AuditSpan(starts[place], fences[place], ends[place]) for place in places})
        await self._read_logs(centre)
        existing = await _existing_topics(centre)
        if centre is self.here:
            compare_topics(centre.own_topics, centre.logs, self.states, existing, self.expired_ms, self.findings)

    def _no_states(self, lanes: int) -> SourceStates:
        topics = None if self.is_whole else frozenset(self.here.topics)
        return SourceStates(self.state_topic.name, lanes, topics, Findings())

    async def _read_states(self) -> None:
        """Again where the number of lanes is not that of the partitions, or changed meanwhile."""
        for _ in range(_PASSES):
            await self._read_lanes(self.states)
            lanes = self.states.other_number()
            if lanes is None:
                break
            self.states = self._no_states(lanes)
        else:
            raise Unavailable("the number of lanes changes all the time; repeat the audit")
        self.states.finish()
        self.findings.merge(self.states.findings)

    async def _read_lanes(self, states: SourceStates) -> None:
        kafka = self.here.kafka
        partitions = len((await kafka.describe_topic(states.topic)).partitions)
        places = [(states.topic, lane) for lane in range(partitions)]
        starts, ends = await kafka.offsets(places, EARLIEST), await kafka.offsets(places, LATEST, committed=False)
        spans = {place: (starts[place], ends[place]) for place in places}
        done, total = 0, sum(end - start for start, end in spans.values())
        for place, (start, end) in spans.items():
            try:
                async for fetched in committed(kafka, place, start, end, lambda *_: None):
                    for record in fetched.records:
                        is_moved = record.value is None and any(name == MOVED for name, _ in record.headers)
                        states.apply(place[1], record.offset, record.key or b"", record.value, is_moved)
                    self.progress("states", done + fetched.next_offset - start, total)
            except CorruptRecords as error:
                detail = f"{error}; the rest of the partition was not read"
                self.findings.add(Finding("corrupt-batch", f"{place[0]}-{place[1]}", detail))
            done += end - start

    def _prepare(self, centre: Centre, spans: Mapping[TopicPartition, AuditSpan]) -> None:
        """Creates the `PartitionLog` of each partition, with its expected sources and the proof of earlier audits."""
        before = {place: proven for (dc, place), proven in self.proven.partitions.items() if dc == centre.dc}
        for topic, view in centre.topics.items():
            is_own = centre is self.here and topic in centre.own_topics
            expected = self.states.expected(topic, view.id) if centre is self.here else None
            for place in ((topic, p.partition) for p in view.partitions):
                sources = ExpectedSources({}, {}) if expected is None else expected[place[1]]
                log = PartitionLog(*place, spans[place], self.findings, (), None, sources, is_own=is_own)
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

    async def _read_logs(self, centre: Centre) -> None:
        """Reads each partition from the first offset that is needed, the largest ones first."""
        jobs = []
        for log in centre.logs.values():
            has_originals = centre is self.here and log.topic in centre.own_topics
            jobs.append(PartitionJob(log, log.reading_from(self.originals.concerns), has_originals))
        jobs.sort(key=lambda job: job.start - job.log.span.end)
        work = PartitionWork(centre.settings, self.originals, centre.kafka)
        done, total = 0, sum(job.log.span.end - job.start for job in jobs)
        async with aclosing(
            self.pool.run(
                *(work, jobs, lambda part: self.progress("log", done + part, total)), is_small=total < _SMALL_RECORDS
            )
        ) as reading:
            async for read in reading:
                log, place = read.log, (read.log.topic, read.log.partition)
                done += max(0, log.span.end - log.read_from)
                self.progress("log", done, total)
                self.findings.merge(read.findings)
                self.originals.merge(read.taken)
                log.findings, centre.logs[place] = self.findings, log
                sides = iter(log.sides)
                for comparison in self.comparisons:
                    if comparison.home == centre.dc and place in comparison.sides:
                        comparison.sides[place] = next(sides)

    async def _compare_table(self, comparison: TableComparison) -> TableAuditReport:
        centre = self.centres[comparison.home]
        comparison.read(centre.logs)
        await comparison.compare(self.pool, partial(self.progress, "table"))
        if comparison.bad:
            await Pinpointer(centre.kafka, comparison, self.findings).run()
        return comparison.report()

    async def _compare_copy(self, copy: CopySettings) -> MirrorReport:
        here, there, dc = self.here.kafka, self.centres[copy.dc].kafka, self.here.dc
        named = [] if self.is_whole else [topic for topic in self.here.own_topics if copy.takes(topic)]
        comparison = CopyComparison(here, there, dc, dc, copy.dc, self.config.prefix, copy.takes, self.copies)
        found = await comparison.run(named, self.progress)
        found.add_findings(self.findings)
        return found


def _earlier_proof(state_file: Path | None, scope: dict[str, Any], full: bool) -> ProvenState:
    """Of a full audit only the accepted resets, as far as the file can be used. Raises UsageError."""
    if state_file is None:
        return ProvenState(scope)
    if not full:
        return read_state_file(state_file, scope)
    try:
        return ProvenState(scope, accepted=read_state_file(state_file, scope).accepted)
    except UsageError:
        return ProvenState(scope)


async def _existing_topics(centre: Centre) -> set[str]:
    """The topics that exist now. Raises Unavailable when a topic changed while it was read."""
    now = (await centre.kafka.describe()).topics
    for topic, view in centre.topics.items():
        if topic not in now or now[topic].id != view.id:
            raise Unavailable(f"{topic} was deleted while it was read; run the audit again")
        if len(now[topic].partitions) != len(view.partitions):
            raise Unavailable(f"{topic} got more partitions while it was read; run the audit again")
    return set(now)
