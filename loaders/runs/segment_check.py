"""A segment check: is every record loaded up to a point in event time? It decides which segments close.

A check begins before Kafka's end offsets are fetched, by asking the gateways for the sources of the topics: which are
alive, and how far each has sent. It finishes once everything up to those offsets is loaded. So what a gateway reported
is in the table by then, or is known to be owed. The result is a batch of the ledger without rows, unless nothing
changes. Where a gateway does not answer, the check fails and no segment closes. The time is the gateways'.

Nobody owes what Kafka no longer has. The check knows this where the table has passed all that the partition held after
the report. The ends of an original in another data centre are not known here. But a copy has its order: a loaded chunk
that was recorded well after those of a source shows that the table has passed them.
"""

from __future__ import annotations

import json
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final, NamedTuple

from logferry.gateway.contract.names import check_token, full_topic, split_topic
from logferry.loaders.batches.execute import CheckResult, Loader
from logferry.loaders.config import GatewayAccess, TableJob
from logferry.loaders.errors import GatewayUnavailable, LoaderConfigError
from logferry.loaders.gateway_clock import GatewayClock, difference
from logferry.loaders.planning.ledger_entry import TablePaths
from logferry.loaders.planning.low_watermark import SourceView, low_watermark, without
from logferry.loaders.planning.plan import Range, TopicPartition
from logferry.loaders.planning.segment_states import WatermarkCheck, check_segments, had_rows_all_day
from logferry.loaders.planning.source_facts import KnownSources, SourceKey
from logferry.loaders.storage.side_tables import known_before, moment, read_excluded, save_check, segments_before

_TIMEOUT_S: Final = 30.0
# In a partition, chunks are in the order of their times but for less than this: the timeout of a transaction (15 s) and
# the difference of the gateways' clocks (60 s) are far below.
_ORDERED: Final = timedelta(hours=1)


class ReportedSource(NamedTuple):
    """A source as its gateway reports it. ``beat``: its last heartbeat. ``watermark``: it has sent all before it.
    ``partitions``: where its chunks are; empty: unknown.
    """

    recorded_seqno: int | None
    written: datetime | None
    beat: datetime | None
    watermark: datetime | None
    finished: bool
    partitions: frozenset[int] = frozenset()


_NOT_REPORTED: Final = ReportedSource(None, None, None, None, False)


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
    started = loader.clock.host_time()
    try:
        reported = ask_gateways(loader.gateways, topics, loader.clock)
    except GatewayUnavailable as error:
        return SegmentCheck(started, tuple(topics), {}, {}, str(error))
    # A copy's end says nothing of what the original still has.
    own = [topic for topic in topics if split_topic(topic)[0] == loader.dc]
    ends = loader.kafka.ends(own) if loader.gateways else {}
    return SegmentCheck(loader.clock.of_gateways(started), tuple(topics), reported, ends, "")


def finish_check(
    job: TableJob, paths: TablePaths, last: int, run: str, check: SegmentCheck, positions: Iterable[Range]
) -> CheckResult | None:
    """The result, as of batch ``last``, which holds all that Kafka had; None: it changes nothing. Raises Overtaken."""
    if job.segments is None:
        return None
    rules = job.segments.rules
    known = known_before(paths, last + 1, run)
    at = {r.key: r.end for r in positions}
    passed = {place for place, end in check.ends.items() if at.get(place, -1) >= end}
    views = source_views(known, check.reported, check.topics, passed)
    segments = segments_before(paths, last + 1, run, rules)
    hold_s = rules.max_wait_s if had_rows_all_day(segments, check.began, rules) else 0.0
    low = low_watermark(without(views, read_excluded(paths.excluded)), check.began, rules.source_idle_s, hold_s)
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
        facts, report = known.get(key), reported.get(key, _NOT_REPORTED)
        seqno, event = report.recorded_seqno, facts.event if facts else None
        lacks = seqno is not None and (facts is None or facts.last_seqno < seqno)
        places = [TopicPartition(key.topic, p) for p in report.partitions]
        is_gone = bool(places) and all(p in passed or _is_before(report.written, loaded_to.get(p)) for p in places)
        recorded = _newest(facts.recorded if facts else None, report.written)
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


def _is_before(written: datetime | None, loaded_to: datetime | None) -> bool:
    return written is not None and loaded_to is not None and written + _ORDERED < loaded_to


# ---- gateways --------------------------------------------------------------------------------------------


def ask_gateways(
    gateways: Mapping[str, GatewayAccess], topics: Iterable[str], clock: GatewayClock
) -> dict[SourceKey, ReportedSource]:
    """The sources of each topic, from the gateway of its data centre where one is configured; sets the clock.

    Raises GatewayUnavailable, LoaderConfigError.
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
    clock.learn(times)
    return found


def _both(one: ReportedSource, other: ReportedSource) -> ReportedSource:
    """Two sources of one id under different partition keys: alive if either is, as far as the one that is behind."""
    marks = [report.watermark for report in (one, other) if report.watermark is not None]
    seqnos = [report.recorded_seqno for report in (one, other) if report.recorded_seqno is not None]
    return ReportedSource(
        max(seqnos, default=None),
        _newest(one.written, other.written),
        _newest(one.beat, other.beat),
        min(marks) if len(marks) == 2 else None,
        one.finished and other.finished,
        one.partitions | other.partitions if one.partitions and other.partitions else frozenset(),
    )


def _newest(*times: datetime | None) -> datetime | None:
    return max((at for at in times if at is not None), default=None)


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
    return None if ms is None else moment(ms * 1000)


def _pages(gateway: GatewayAccess, topic: str, times: list[timedelta]) -> Iterator[dict[str, Any]]:
    after = ""
    while True:
        query = f"?after={urllib.parse.quote(after, safe='')}" if after else ""
        page = _get(gateway, f"/v1/topics/{urllib.parse.quote(topic, safe='')}/sources{query}", times)
        if page is None:
            return
        yield from page["sources"]
        after = page.get("next") or ""
        if not after:
            return


class _SameHost(urllib.request.HTTPRedirectHandler):
    """Redirects to another host or port are refused: the request carries a token."""

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        have, want = urllib.parse.urlsplit(newurl), urllib.parse.urlsplit(req.full_url)
        if (have.scheme, have.netloc) != (want.scheme, want.netloc):
            raise urllib.error.URLError(f"it redirects to {have.scheme}://{have.netloc}, which is not followed")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _get(gateway: GatewayAccess, path: str, times: list[timedelta]) -> dict[str, Any] | None:
    """The answer of the first URL that gives one; None: there is no such topic, so no source wrote there.

    ``times`` receives how far the gateway's clock is ahead.
    """
    headers = {} if gateway.token_file is None else {"Authorization": f"Bearer {_token(gateway.token_file)}"}
    why = ""
    for url in gateway.urls:
        request = urllib.request.Request(url.rstrip("/") + path, headers=headers)
        try:
            context = ssl.create_default_context(cafile=gateway.ca_file)
            opener = urllib.request.build_opener(_SameHost, urllib.request.HTTPSHandler(context=context))
            asked = datetime.now(UTC)
            with opener.open(request, timeout=_TIMEOUT_S) as answer:
                page: dict[str, Any] = json.load(answer)
                ahead = difference(answer.headers.get("Date"), asked, datetime.now(UTC))
                if ahead is not None:
                    times.append(ahead)
                return page
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            if error.code in (401, 403):
                raise LoaderConfigError(
                    f"{url} answers {error.code}: the token does not permit listing the sources of this topic"
                ) from None
            why = f"{url} answers {error.code}"
        except (OSError, ValueError) as error:
            why = f"{url}: {error}"
    raise GatewayUnavailable(why)


def _token(file: Path) -> str:
    try:
        return check_token(file.read_text(encoding="utf-8"), str(file))
    except OSError as error:
        raise LoaderConfigError(f"{file}: {error.strerror}") from None
    except ValueError as error:
        raise LoaderConfigError(str(error)) from None
