"""A segment check: is every record loaded up to a point in event time? It decides which segments close.

A check begins before Kafka's end offsets are fetched, by asking the gateways for the sources of the topics: which are
alive, and how far each has sent. It finishes once everything up to those offsets is loaded. So what a gateway reported
is in the table by then, or is known to be owed. The result is a batch of the ledger without rows, unless nothing
changes. Where a gateway does not answer, the check fails and no segment closes. The time is the gateways'.

Nobody owes what Kafka no longer has. The check knows this where the table has passed all that the partition held after
the report. The ends of an original in another data centre are not known here. But a copy has its order: a loaded chunk
that was recorded well after those of a source shows that the table has passed them.

Others are notified that segments are READY by a file ``_SUCCESS`` and a POST to a webhook, once per version. Only what
the table holds is reported. A loader first claims a notification beside the table, and marks it as
sent afterwards; so of several loaders one sends it. A claim without a mark that is a minute old belongs to a loader
that died: the next one sends the notification, maybe a second time. Receivers recognise a repetition by the header
``Idempotency-Key``.
"""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import quote

from logferry.client.transport.cluster import bearer
from logferry.client.transport.connections import Connections, Dialer, NoResponse, proxies_of
from logferry.gateway.contract.names import check_token, full_topic, split_topic
from logferry.loaders.batches.execute import CheckResult, GatewayClock, Loader
from logferry.loaders.batches.row_counts import table_segments, table_sources
from logferry.loaders.config import GatewayAccess, SegmentSettings, TableJob
from logferry.loaders.errors import GatewayUnavailable, LoaderConfigError
from logferry.loaders.planning import source_facts
from logferry.loaders.planning.ledger_entry import TablePaths
from logferry.loaders.planning.plan import Range, TopicPartition
from logferry.loaders.planning.segment_states import READY, Segment, WatermarkCheck, check_segments, usually_has_rows
from logferry.loaders.planning.source_facts import KnownSources, SourceKey, SourceView, newest, utc_text
from logferry.loaders.storage.claims import claim
from logferry.loaders.storage.files import delete_folder, list_files, storage_errors, write_text
from logferry.loaders.storage.side_tables import known_before, read_excluded, read_segments, save_check, segments_before

_TIMEOUT_S: Final = 30.0
_LARGEST_PAGE_BYTES: Final = 64 << 20
_POST_TIMEOUT_S: Final = 10.0
_SENT: Final = "_told"
_CLAIM_S: Final = 60.0
SUCCESS: Final = "_SUCCESS"
# In a partition, chunks are in the order of their times but for less than this: the timeout of a transaction (15 s) and
# the difference of the gateways' clocks (60 s) are far below.
_ORDERED: Final = timedelta(hours=1)


class ReportedSource(NamedTuple):
    """A source as its gateway reports it. ``beat``: its last heartbeat. ``watermark``: it has sent all before it.
    ``partitions``: where its chunks are; empty: unknown.
    """

    recorded_seqno: int | None = None
    written: datetime | None = None
    beat: datetime | None = None
    watermark: datetime | None = None
    finished: bool = False
    partitions: frozenset[int] = frozenset()


@dataclass(frozen=True)
class SegmentCheck:
    """A check in progress. ``ends``: of the partitions, open transactions included, after the gateways' reports.
    ``missing``: why it cannot finish, else empty.
    """

    began: datetime
    topics: tuple[str, ...]
    reported: Mapping[SourceKey, ReportedSource]
    ends: Mapping[TopicPartition, int]
    missing: str


def begin_check(loader: Loader, topics: Sequence[str]) -> SegmentCheck:
    """To be called before Kafka's offsets are fetched. Raises LoaderConfigError, KafkaUnavailable."""
    started = datetime.now(UTC)
    try:
        reported = ask_gateways(loader.gateways, topics, loader.clock)
    except GatewayUnavailable as error:
        return SegmentCheck(started, tuple(topics), {}, {}, str(error))
    # A copy's end says nothing of what the original still has.
    own = [topic for topic in topics if split_topic(topic)[0] == loader.dc]
    ends = loader.kafka.ends(own) if loader.gateways else {}
    return SegmentCheck(started + loader.clock.ahead, tuple(topics), reported, ends, "")


def finish_check(
    loader: Loader, job: TableJob, paths: TablePaths, last: int, check: SegmentCheck, positions: Iterable[Range]
) -> CheckResult | None:
    """The result, as of batch ``last``, which holds all that Kafka had; None: it changes nothing. Raises Overtaken."""
    if job.segments is None:
        return None
    rules = job.segments.rules
    known = known_before(paths, last + 1, loader.run, partial(table_sources, loader.spark))
    at = {r.key: r.end for r in positions}
    passed = {place for place, end in check.ends.items() if at.get(place, -1) >= end}
    views = source_views(known, check.reported, check.topics, passed)
    segments = segments_before(paths, last + 1, loader.run, rules, partial(table_segments, loader.spark))
    is_steady = usually_has_rows(segments, check.began, rules)
    counted = source_facts.without(views, read_excluded(paths.excluded))
    silence = (rules.source_idle_s, rules.max_wait_s, rules.silent_share)
    low = source_facts.low_watermark(counted, check.began, *silence, is_steady=is_steady)
    found = WatermarkCheck(check.began, low)
    save_check(paths.segments, found)
    changes = check_segments(segments, found, last + 1, rules)
    return CheckResult(found, rules) if changes else None


def source_views(
    known: KnownSources,
    reported: Mapping[SourceKey, ReportedSource],
    topics: Iterable[str],
    passed: Collection[TopicPartition] = (),
) -> list[SourceView]:
    """The sources of these topics in a check.

    A source that wrote in several data centres is one view per topic: chunks from one say nothing of what the other
    still holds. ``passed``: partitions of which everything is loaded that they held after the report, open transactions
    included. What is missing of them was removed from Kafka, or skipped by a reset. The same holds of chunks that were
    recorded well before another one that is loaded from their partition.
    """
    chosen, found = set(topics), []
    loaded_to = _loaded_to(known, reported)
    for key in sorted({*known, *reported}):
        if key.topic not in chosen:
            continue
        facts, report = known.get(key), reported.get(key, ReportedSource())
        seqno, event = report.recorded_seqno, facts.event if facts else None
        lacks = seqno is not None and (facts is None or facts.last_seqno < seqno)
        places = [TopicPartition(key.topic, p) for p in report.partitions]
        past = report.written and report.written + _ORDERED
        is_gone = bool(places) and all(p in passed or (past and past < loaded_to.get(p, past)) for p in places)
        recorded = newest(facts.recorded if facts else None, report.written)
        times = (event, recorded, report.beat, report.watermark)
        is_lost = lacks and is_gone and facts is None
        found.append(SourceView(*key, *times, report.finished, lacks and not is_gone, is_lost))
    return found


def _loaded_to(known: KnownSources, reported: Mapping[SourceKey, ReportedSource]) -> dict[TopicPartition, datetime]:
    """When the newest loaded chunk of each partition was recorded, by the sources of which everything is loaded."""
    found: dict[TopicPartition, datetime] = {}
    for key, report in reported.items():
        facts, seqno = known.get(key), report.recorded_seqno
        if facts is None or seqno is None or facts.last_seqno < seqno or len(report.partitions) != 1:
            continue
        place = TopicPartition(key.topic, *report.partitions)
        found[place] = max(found.get(place, facts.recorded), facts.recorded)
    return found


# ---- gateways --------------------------------------------------------------------------------------------


def ask_gateways(
    gateways: Mapping[str, GatewayAccess], topics: Iterable[str], clock: GatewayClock
) -> dict[SourceKey, ReportedSource]:
    """The sources of each topic, from the gateway of its data centre where one is configured. Sets the clock: of
    several gateways the one that is furthest behind counts. Raises GatewayUnavailable, LoaderConfigError.
    """
    found: dict[SourceKey, ReportedSource] = {}
    times: list[timedelta] = []
    for topic in sorted(set(topics)):
        dc, name = split_topic(topic)
        if dc in gateways:
            for row in _pages(gateways[dc], name, times):
                key, report = SourceKey(full_topic(dc, name), row["source_id"]), _reported(row)
                before = found.get(key)
                found[key] = report if before is None else _both(before, report)
    clock.ahead = min(times, default=timedelta(0))
    return found


def _both(one: ReportedSource, other: ReportedSource) -> ReportedSource:
    """Two sources of one id under different partition keys: alive if either is, as far as the one that is behind."""
    marks = [report.watermark for report in (one, other) if report.watermark is not None]
    seqnos = [report.recorded_seqno for report in (one, other) if report.recorded_seqno is not None]
    return ReportedSource(
        max(seqnos, default=None),
        newest(one.written, other.written),
        newest(one.beat, other.beat),
        min(marks) if len(marks) == 2 else None,
        one.finished and other.finished,
        one.partitions | other.partitions if one.partitions and other.partitions else frozenset(),
    )


def _reported(row: Mapping[str, Any]) -> ReportedSource:
    beat, watermark = _moment(row.get("heartbeat_ms")), _moment(row.get("watermark_ms"))
    position, size = row.get("position"), row.get("size")
    if watermark is None and beat is not None and position is not None and size is not None and position >= size:
        # At the heartbeat, all of its file was sent.
        watermark = beat
    written, finished = _moment(row.get("written_ms")), bool(row.get("finished"))
    partition = row.get("partition")
    partitions = frozenset[int]() if partition is None else frozenset({int(partition)})
    return ReportedSource(row.get("recorded_seqno"), written, beat, watermark, finished, partitions)


def _moment(ms: int | None) -> datetime | None:
    return None if ms is None else datetime.fromtimestamp(0, UTC) + timedelta(milliseconds=ms)


def _pages(gateway: GatewayAccess, topic: str, times: list[timedelta]) -> Iterator[dict[str, Any]]:
    """``times`` receives how far the gateway's clock is ahead. Without a topic of that name there are no sources."""
    token = None if gateway.token_file is None else _token(gateway.token_file)
    ca_file = None if gateway.ca_file is None else str(gateway.ca_file)
    try:
        dialer = Dialer(ca_file, proxies=proxies_of(os.environ))
    except OSError as error:
        raise GatewayUnavailable(f"{ca_file}: {error}") from None
    path, after = f"/v1/topics/{quote(topic, safe='')}/sources", ""
    with closing(Connections(_TIMEOUT_S, dialer, _LARGEST_PAGE_BYTES)) as connections:
        while page := _get(connections, gateway.urls, path + after, token, times):
            yield from page["sources"]
            if not page.get("next"):
                return
            after = f"?after={quote(page['next'], safe='')}"


def _get(
    connections: Connections, urls: Sequence[str], path: str, token: str | None, times: list[timedelta]
) -> dict[str, Any] | None:
    """The answer of the first URL that gives one; None: there is no such topic. Redirects are not followed: the request
    carries a token.
    """
    why = ""
    for url in urls:
        asked = datetime.now(UTC)
        try:
            headers = {} if token is None else bearer(token, url)
            reply = connections.exchange(url.rstrip("/") + path, headers, None, "GET")
            ahead = difference(reply.headers.get("date"), asked, datetime.now(UTC))
            if reply.status == 200:
                page: dict[str, Any] = json.loads(reply.body)
                times += [] if ahead is None else [ahead]
                return page
        except (NoResponse, ValueError) as error:
            why = f"{url}: {error}"
            continue
        if reply.status == 404:
            return None
        if reply.status in (401, 403):
            raise LoaderConfigError(
                f"{url} answers {reply.status}: the token does not permit listing the sources of this topic"
            )
        why = f"{url} answers {reply.status}"
    raise GatewayUnavailable(why)


def difference(date: str | None, asked: datetime, answered: datetime) -> timedelta | None:
    """How far a gateway is ahead of the host, at the least; negative: behind. ``date``: its header; None: unknown.

    The header has whole seconds: a difference that these and the duration of the request can explain is none.
    """
    try:
        theirs = parsedate_to_datetime(date or "").astimezone(UTC)
    except (ValueError, TypeError):
        return None
    return max(theirs - answered, min(timedelta(0), theirs + timedelta(seconds=1) - asked))


def _token(file: Path) -> str:
    try:
        return check_token(file.read_text(encoding="utf-8"), str(file))
    except (OSError, ValueError) as error:
        raise LoaderConfigError(f"{file}: {error}") from None


# ---- notifications -----------------------------------------------------------------------------------------


def notify_ready(job: TableJob, paths: TablePaths, last: int) -> list[str]:
    """Notifies of segments that are READY as of a batch. Returns the failures, which are retried later.

    Raises StorageUnavailable.
    """
    settings = job.segments
    if settings is None or (settings.success is None and settings.webhook is None):
        return []
    sent = paths.segments / _SENT
    failed: list[str] = []
    with storage_errors(f"{sent} cannot be read"):
        already = {file.name for file in list_files(sent)}
    for segment in read_segments(paths.segments, last).values():
        mark = sent / f"{segment.name}-{segment.version}"
        claimed = mark.with_name(f"{mark.name}.claim")
        if segment.state != READY or mark.name in already or not claim(claimed, _CLAIM_S):
            continue
        text = json.dumps(_facts(paths, segment, settings))
        try:
            with storage_errors(f"the notification of segment {segment.name} cannot be recorded"):
                if settings.success is not None:
                    write_text(settings.success / segment.name / SUCCESS, text)
            if settings.webhook is not None:
                headers = {"Content-Type": "application/json", "Idempotency-Key": f"{paths.main}/{mark.name}"}
                request = urllib.request.Request(settings.webhook, text.encode(), headers, method="POST")
                urllib.request.urlopen(request, timeout=_POST_TIMEOUT_S).close()
        except (urllib.error.URLError, TimeoutError) as error:
            failed.append(f"{settings.webhook}: {error}")
            delete_folder(claimed)
            continue
        with storage_errors(f"{mark} cannot be written"):
            write_text(mark, text)
    return failed


def _facts(paths: TablePaths, segment: Segment, settings: SegmentSettings) -> dict[str, object]:
    plain = ("version", "rows", "bytes", "late_rows", "batch", "sources", "silent_sources")
    return {
        "table": str(paths.main),
        "segment": segment.name,
        "start": utc_text(segment.start),
        "end": utc_text(settings.rules.end_of(segment.start)),
        **{name: getattr(segment, name) for name in plain},
        "watermark": utc_text(segment.watermark) if segment.watermark else None,
    }
