"""The audit itself: what is stored is read in an order that makes it comparable, and judged.

The order of looking, which lets everything go on meanwhile without a false word:

1. each table's version, then its ledger: every range of that version lies below the ends that are taken next;
2. the committed ends of the partitions (the fences);
3. the states, up to an end at which every transaction is decided;
4. the partitions, likewise, up to ends taken after the states;
5. the rows of the tables' versions.

With a file of what was proven (`kept`), 4 and 5 read only what came since. The states are read as a whole: their topic
is compacted, as large as there are sources.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from logferry.gateway.fetch import CorruptBatch, KafkaRecord
from logferry.gateway.kafka.client import EARLIEST, LATEST, Kafka
from logferry.gateway.kafka.metadata_request import TopicView
from logferry.ops.audit.by_source import source_reports
from logferry.ops.audit.compare.centres import Centre, begins_of
from logferry.ops.audit.compare.mirror_copy import MISSING, Copies, Link, compare_copies
from logferry.ops.audit.compare.pinpoint import name_differences
from logferry.ops.audit.compare.proven_file import Kept, KeptTable, read_kept, write_kept
from logferry.ops.audit.compare.report import ReadReport, Report, SourceCopy, TableReport
from logferry.ops.audit.compare.resume import kept_partitions, resume
from logferry.ops.audit.compare.table import TableProof, notes_digest
from logferry.ops.audit.digests.findings import Finding, Findings
from logferry.ops.audit.digests.sums import Cell, shown
from logferry.ops.audit.log.agreement import compare
from logferry.ops.audit.log.original_files import FileReport, OriginalFiles
from logferry.ops.audit.log.partition import Expected, PartitionLog, Span
from logferry.ops.audit.log.read import committed, connected, high_watermarks
from logferry.ops.audit.log.scope import audited_topics, only_dc, state_topic_of
from logferry.ops.audit.states import Known, States
from logferry.ops.audit.tables.file_rows import beyond_the_log
from logferry.ops.audit.tables.ledger_check import Place, check_ledger, home_of, is_moved, loaded_there, printed_id
from logferry.ops.audit.tables.table_reader import Tables
from logferry.ops.cli.problems import Unavailable, WrongUse

# Called with a stage (`STAGES`) and how much of it is done, of how much.
Progress = Callable[[str, int, int], None]
ByTopic = dict[str, list[Known]]
SOURCE_RETENTION_MS: Final = 14 * 86_400_000
STAGES: Final = ("states", "log", "table")


class Copy(NamedTuple):
    """A data centre that mirrors the topics. ``options``: of Kafka's clients; ``topics``: patterns of their names
    without the data centre."""

    dc: str
    options: Mapping[str, Any]
    topics: Sequence[str] = ("*",)


async def audit(
    bootstrap: str,
    dc: str | None = None,
    *,
    topics: Sequence[str] = (),
    table: Path | None = None,
    tables: Sequence[Path] = (),
    files: Sequence[Path] = (),
    prefix: str = "logferry",
    source_retention_ms: int = SOURCE_RETENTION_MS,
    security: Mapping[str, Any] | None = None,
    copies: Sequence[Copy] = (),
    keep: Path | None = None,
    full: bool = False,
    progress: Progress = lambda _stage, _done, _total: None,
) -> Report:
    """Proves or refutes the promise over what is stored now. Safe at any time and again; writes nothing but ``keep``.

    ``dc``: None for the only one that the cluster has. ``topics``: as writers name them, none for all of the dc.
    ``table``, ``tables``: that are loaded from this Kafka. ``prefix`` and ``source_retention_ms``: the gateway's
    settings. ``security``: options of Kafka's clients. ``copies``: data centres that mirror the topics. ``keep``: a
    file with what was proven; only what is new is read, and the file is written anew. ``full``: everything is read,
    whatever the file says.

    Raises WrongUse for a topic, dc, file or kept file that cannot be used, Unavailable when Kafka or a table cannot be
    read.
    """
    every = list(dict.fromkeys([*([] if table is None else [table.absolute()]), *(one.absolute() for one in tables)]))
    async with AsyncExitStack() as stack:
        opened = [Tables.open(path) for path in every]
        options = {**(security or {}), "bootstrap_servers": bootstrap}
        kafka = await stack.enter_async_context(connected(options))
        views = (await kafka.describe()).topics
        dc = dc or only_dc(views, prefix)
        scope = {"dc": dc, "prefix": prefix, "topics": sorted(set(topics))}
        kept = Kept(scope) if keep is None or full else read_kept(keep, scope)
        state_topic = state_topic_of(views, dc, prefix)
        originals = OriginalFiles(files, kept.files)
        stack.callback(originals.close)
        here = Centre(dc, kafka, views, audited_topics(views, dc, topics))
        centres = {dc: here}
        for copy in copies:
            if copy.dc in centres:
                raise WrongUse(f"copies: {copy.dc} is the data centre of the originals itself")
            there = await stack.enter_async_context(connected(dict(copy.options)))
            centres[copy.dc] = Centre(copy.dc, there, (await there.describe()).topics)
        expired_ms = int(time.time() * 1000) - source_retention_ms
        proof = _Proof(here, centres, state_topic, prefix, not topics, expired_ms, opened, originals, kept, progress)
        report = await proof.run()
        kept_copies = dict(kept.copies)
        for copy in copies:
            await _copy(here, centres[copy.dc], copy.topics, report, prefix, topics, kept_copies, progress)
        _beside(report)
        if keep is not None:
            write_kept(keep, proof.to_keep(kept_copies))
        return report


async def _copy(
    here: Centre,
    there: Centre,
    patterns: Sequence[str],
    report: Report,
    prefix: str,
    topics: Sequence[str],
    kept: Copies,
    progress: Progress,
) -> None:
    """Compares another data centre's copies with the originals, and adds what it finds to the report."""

    def takes(topic: str) -> bool:
        return any(fnmatchcase(topic.partition(".")[2], pattern) for pattern in patterns)

    link = Link(here.dc, here.dc, there.dc, prefix, takes)
    named = [topic for topic in report.topics if takes(topic)] if topics else []
    found = await compare_copies(here.kafka, there.kafka, link, named, kept, progress)
    report.copies.append(found)
    for partition in found.partitions:
        where = f"{there.dc}: {partition.topic}-{partition.partition}"
        if partition.wrong is not None:
            kind = "copy-missing" if partition.wrong == MISSING else "copy-differs"
            report.findings.add(Finding(kind, where, partition.wrong))
        elif partition.behind:
            detail = f"{partition.behind} records are not mirrored yet"
            report.findings.add(Finding("not-mirrored-yet", where, detail, count=partition.behind, refutes=False))


def _beside(report: Report) -> None:
    """Puts what the copies hold of each source beside the originals."""
    found: dict[tuple[str, int, str], list[SourceCopy]] = {}
    for copy in report.copies:
        for partition in copy.partitions:
            for source_id, tally in partition.sources.items():
                one = SourceCopy(copy.copy, tally.lines, tally.size_bytes, shown(tally.digest))
                found.setdefault((partition.topic, partition.partition, source_id), []).append(one)
    for index, source in enumerate(report.sources):
        copies = tuple(found.get((source.topic, source.partition, source.source_id), ()))
        report.sources[index] = source._replace(copies=copies)


@dataclass
class _Proof:
    """``here``: the data centre that is audited, ``topics`` its own. ``centres``: it, and those that have copies.

    ``is_whole``: all of its topics are audited, so that what is missing among them is noticed. ``expired_ms``: a source
    that was silent since then may have been forgotten. ``sources``: (topic, source) of which there is a state.
    """

    here: Centre
    centres: dict[str, Centre]
    state_topic: TopicView
    prefix: str
    is_whole: bool
    expired_ms: int
    tables: list[Tables]
    originals: OriginalFiles
    kept: Kept
    progress: Progress
    findings: Findings = field(default_factory=Findings)
    proofs: list[TableProof] = field(default_factory=list)
    sources: set[tuple[str, str]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.dc, self.kafka, self.topics = self.here.dc, self.here.kafka, dict(self.here.topics)

    async def run(self) -> Report:
        started = time.monotonic()
        for tables in self.tables:
            proof = await self._ledger(tables)
            if proof is not None:
                self.proofs.append(proof)
        ends = await self._logs()
        for centre in self.centres.values():
            if centre is not self.here and centre.topics:
                ends[centre.dc] = await self._log_elsewhere(centre)
        reports = [await self._table(proof, ends[proof.home]) for proof in self.proofs]
        files = self._files()
        sources = source_reports(self.here.logs.values(), self.proofs)
        own = [source for source in sources if source.topic in self.topics]
        logs = [log for centre in self.centres.values() for log in centre.logs.values()]
        return Report(
            dc=self.dc,
            topics=sorted(self.topics),
            chunks=sum(source.chunks for source in own),
            lines=sum(source.lines for source in own),
            size_bytes=sum(source.size_bytes for source in own),
            sources=sources,
            tables=reports,
            files=files,
            findings=self.findings,
            seconds=time.monotonic() - started,
            read=ReadReport(
                records=sum(log.records for log in logs),
                size_bytes=sum(log.read_bytes for log in logs),
                files=sum(proof.files_read for proof in self.proofs),
                rows=sum(proof.rows_read for proof in self.proofs),
                goes_on=bool(self.kept.partitions),
            ),
        )

    def to_keep(self, copies: Copies) -> Kept:
        """What the next audit goes on from."""
        partitions = {
            (centre.dc, place): kept
            for centre in self.centres.values()
            for place, kept in kept_partitions(centre.logs, centre.resumed, self.sources).items()
        }
        tables = dict(self.kept.tables)
        for proof in self.proofs:

            def is_retired(cell: Cell, home: str = proof.home) -> bool:
                partition = partitions.get((home, cell.place))
                return partition is not None and cell.source_id not in partition.chains

            tables[proof.path] = proof.to_keep(is_retired)
        for (_, place), copy in copies.items():
            own = partitions.get((self.dc, place))
            chains = own.chains if own is not None else {}
            copy.sources = {name: tally for name, tally in copy.sources.items() if name in chains}
        return Kept(self.kept.scope, partitions, tables, dict(copies), self.originals.to_keep())

    # ---- reading ------------------------------------------------------------------------------------------

    async def _logs(self) -> dict[str, dict[Place, int]]:
        """Reads the states and the log of this data centre, and compares them. Returns its ends."""
        places = self.here.places
        starts = await self.kafka.offsets(places, EARLIEST)
        fences = await self.kafka.offsets(places, LATEST)
        states = await self._states()
        known = self._by_topic(states)
        ends = await high_watermarks(self.kafka, places)
        spans = {place: Span(starts[place], fences[place], ends[place]) for place in places}
        self._prepare(self.here, spans, states, known)
        await self._read_logs(self.here, spans)
        existing = await _still_there(self.here)
        self._agree(states, known, existing)
        return {self.dc: ends}

    async def _log_elsewhere(self, centre: Centre) -> dict[Place, int]:
        """Reads what another data centre has of the topics that a table is loaded from there. Returns its ends."""
        starts = await centre.kafka.offsets(centre.places, EARLIEST)
        ends = await high_watermarks(centre.kafka, centre.places)
        spans = {place: Span(starts[place], ends[place], ends[place]) for place in centre.places}
        self._prepare(centre, spans, None, {})
        await self._read_logs(centre, spans)
        await _still_there(centre)
        return ends

    async def _read_logs(self, centre: Centre, spans: Mapping[Place, Span]) -> None:
        """From where each partition has to be read."""
        found = {}
        for place, span in spans.items():
            begin = centre.logs[place].reading_from(self.originals.concerns)
            found[place] = Span(min(max(begin, span.start), span.end), span.fence, span.end)

        def take(place: Place, records: Sequence[KafkaRecord], next_offset: int) -> None:
            centre.logs[place].take(records)
            centre.logs[place].reached = next_offset

        def overtaken(place: Place, start: int, end: int) -> None:
            centre.logs[place].overtaken(start, end)

        await self._read(centre.kafka, "log", found, take, overtaken, lambda place: centre.logs[place].ended())

    async def _ledger(self, tables: Tables) -> TableProof | None:
        """What the table must hold; None where nobody can say."""
        ledger = str(tables.paths.ledger)
        if tables.broken:
            self.findings.add(Finding("ledger-broken", ledger, tables.broken))
            return None
        last, entries = tables.last, tables.entries
        home = home_of(entries, last) or self.dc
        if home not in self.centres:
            home = self.dc
        centre = self.centres[home]
        named = {r.topic for entry in entries if entry.dc == home for r in entry.ranges}
        if self.is_whole or home != self.dc:
            # Topics of other data centres, too, whose copies there were loaded.
            for name in sorted(named & centre.views.keys()):
                if not (home == self.dc and name.startswith(f"{home}.")):
                    centre.topics[name] = centre.views[name]
        ids = {topic: printed_id(view.id) for topic, view in centre.topics.items()}
        if self.is_whole:
            for topic in sorted(name for name in named - ids.keys() if name.startswith(f"{home}.")):
                detail = "the topic does not exist any more: what was loaded of it cannot be compared"
                self.findings.add(Finding("loaded-topic-gone", topic, detail, refutes=False))
        dcs = list(dict.fromkeys(entry.dc for entry in entries))
        loaded = {dc: loaded_there(entries, last, dc) for dc in dcs}
        loaded[home] = check_ledger(ledger, entries, last, tables.last_now, home, ids, self.findings)
        moved = is_moved(entries, last) and home == home_of(entries, last)
        proof = TableProof(tables, loaded, home, moved, self._kept_table(tables, home, moved), self.findings)
        if moved:
            proof.begins, unknown = await begins_of(loaded, self.centres, home, self.prefix)
            for topic, partition in unknown:
                detail = f"the table moved to {home}, and nobody tells where its first rows are in the log there"
                self.findings.add(Finding("moved-not-comparable", f"{topic}-{partition}", detail, refutes=False))
                loaded[home].strange.add(topic)
        return proof

    def _kept_table(self, tables: Tables, home: str, moved: bool) -> KeptTable:
        path, nothing = str(tables.paths.main), KeptTable(tables.id, -1, home, {} if moved else None)
        kept = self.kept.tables.get(path)
        if kept is None:
            return nothing
        if kept.table_id != tables.id:
            detail = f"an earlier audit proved another table here, up to batch {kept.batch}; this one was made anew"
            self.findings.add(Finding("table-made-anew", path, detail))
            return nothing
        if kept.batch > tables.last:
            detail = f"an earlier audit proved it up to batch {kept.batch}, now it ends with {tables.last}"
            self.findings.add(Finding("table-put-back", path, detail))
        # In another data centre it is compared with another log, and where a repair has left out other chunks with
        # others: from the beginning.
        is_other = (kept.home, kept.firsts is not None) != (home, moved)
        return nothing if is_other or kept.notes != notes_digest(tables.left_out, kept.seen) else kept

    async def _states(self) -> States:
        name, lanes = self.state_topic.name, len(self.state_topic.partitions)
        states = States(name, lanes, None if self.is_whole else frozenset(self.topics), self.findings)
        places = [(name, lane) for lane in range(lanes)]
        starts = await self.kafka.offsets(places, EARLIEST)
        ends = await high_watermarks(self.kafka, places)
        spans = {place: Span(starts[place], starts[place], ends[place]) for place in places}

        def apply(place: Place, records: Iterable[KafkaRecord], _next: int) -> None:
            for record in records:
                states.apply(place[1], record.offset, record.key or b"", record.value)

        await self._read(self.kafka, "states", spans, apply, lambda *_: None, lambda *_: None)
        return states

    def _prepare(self, centre: Centre, spans: dict[Place, Span], states: States | None, known: ByTopic) -> None:
        """Makes the `PartitionLog` of each partition, with what is expected of it and what is known of it.

        ``states``: None where nobody knows them.
        """
        self.sources |= {(topic, one.source.source_id) for topic, found in known.items() for one in found}
        before = {place: kept for (dc, place), kept in self.kept.partitions.items() if dc == centre.dc}
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
                log.expected = Expected(bases, reborn)
                centre.resumed[place] = resume(log, printed_id(view.id), before.get(place))
                sides = (proof.side(centre.dc, place, log.chains_from) for proof in self.proofs)
                log.sides = [side for side in sides if side is not None]
                centre.logs[place] = log
        gone = {topic for topic, _ in before.keys() - centre.logs.keys() if topic not in centre.views}
        anew = {topic for (topic, _), one in centre.resumed.items() if one.is_anew}
        for topic in sorted(gone | anew):
            what = "it was deleted and created anew" if topic in anew else "it does not exist any more"
            where = topic if centre is self.here else f"{centre.dc}: {topic}"
            detail = f"{what} since the last audit: what was proven of it is gone"
            self.findings.add(Finding("topic-created-anew" if topic in anew else "topic-deleted", where, detail))

    async def _read(
        self,
        kafka: Kafka,
        stage: str,
        spans: dict[Place, Span],
        take: Callable[[Place, Sequence[KafkaRecord], int], None],
        overtaken: Callable[[Place, int, int], None],
        ended: Callable[[Place], None],
    ) -> None:
        """Partition after partition; one whose stored bytes are damaged is left at the place of the damage."""
        done, total = 0, sum(span.end - span.start for span in spans.values())
        for place, span in spans.items():
            try:
                async for fetched in committed(kafka, place, span.start, span.end, partial(overtaken, place)):
                    take(place, fetched.records, fetched.next_offset)
                    self.progress(stage, done + fetched.next_offset - span.start, total)
                ended(place)
            except CorruptBatch as error:
                where = f"{place[0]}-{place[1]}"
                self.findings.add(Finding("corrupt-batch", where, f"{error}; what follows was not read"))
            done += span.end - span.start

    # ---- judging ------------------------------------------------------------------------------------------

    def _by_topic(self, states: States) -> ByTopic:
        known: ByTopic = {}
        for one in states.known():
            known.setdefault(one.source.topic, []).append(one)
        return known

    def _agree(self, states: States, known: ByTopic, existing: set[str]) -> None:
        """Compares states and log."""
        for topic, view in self.topics.items():
            logs = {p.partition: self.here.logs[topic, p.partition] for p in view.partitions}
            forgotten = [source_id for name, source_id in states.forgotten if name == topic]
            compare(topic, view.id, logs, known.get(topic, ()), forgotten, self.expired_ms, self.findings)
        for topic in sorted(known.keys() - existing):
            recorded = sum(one.state.recorded is not None for one in known[topic])
            detail = f"the topic does not exist any more; chunks of {recorded} sources were recorded in it"
            self.findings.add(Finding("topic-gone", topic, detail, count=recorded, refutes=False))

    async def _table(self, proof: TableProof, ends: dict[Place, int]) -> TableReport:
        centre = self.centres[proof.home]
        beyond_the_log(proof.loaded[proof.home], ends, self.findings)
        proof.read(centre.logs)
        proof.compare(partial(self.progress, "table"))
        if proof.bad:
            await name_differences(centre.kafka, proof, self.findings)
        return proof.report()

    def _files(self) -> list[FileReport]:
        for path in self.originals.replaced:
            detail = "another file lies there than at the last audit, or it was cut: it is compared from its beginning"
            self.findings.add(Finding("file-replaced", path, detail, refutes=False))
        reports = self.originals.reports()
        for file in reports:
            source = f"{file.topic} {file.source_id}" if file.source_id else None
            if file.flaw and source is None and file.path in self.originals.replaced:
                self.findings.add(Finding("not-sent-yet", file.path, f"new here: {file.flaw}", refutes=False))
            elif file.flaw:
                kind = "file-differs" if source else "file-not-stored"
                self.findings.add(Finding(kind, file.path, file.flaw, source))
            elif file.not_sent_bytes:
                detail = f"the last {file.not_sent_bytes} bytes of {file.size_bytes} are not sent yet"
                self.findings.add(Finding("not-sent-yet", file.path, detail, source, refutes=False))
            if source and file.begin:
                detail = f"stored from position {file.begin} on; what is before was removed by retention or never sent"
                self.findings.add(Finding("file-begins-late", file.path, detail, source, refutes=False))
        return reports


async def _still_there(centre: Centre) -> set[str]:
    """The topics that exist now. Raises Unavailable when one that was read is not what it was at the beginning."""
    now = (await centre.kafka.describe()).topics
    for topic, view in centre.topics.items():
        if topic not in now or now[topic].id != view.id:
            raise Unavailable(f"{topic} was deleted while it was read; run the audit again")
        if len(now[topic].partitions) != len(view.partitions):
            raise Unavailable(f"{topic} got more partitions while it was read; run the audit again")
    return set(now)
