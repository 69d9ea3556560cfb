"""The metrics of a run, for Prometheus: an endpoint while a run follows; at the end of others a file for node_exporter,
a push to a Pushgateway, or both.

A load notes a few numbers per batch and keeps the ranges that it has planned anyhow. Lag by topic and the segments are
computed when they are asked for, so nobody who does not ask pays for partitions. Labels are the table, its topics, and
kinds of errors and stops; never a source or a partition.

A file continues the counters of the file before it, for the tables of this run: they grow over the runs as Prometheus
expects, and the time of the last complete load is not lost with a run that fails. It replaces the old file in one step.
So does a push with what the Pushgateway has of its group.
"""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple
from urllib.parse import unquote, urlsplit
from urllib.request import urlopen

from logferry.loaders.batches.execute import BatchDone
from logferry.loaders.errors import EXIT_DONE, EXIT_SIGNAL, LoaderConfigError, LoadError, StorageUnavailable
from logferry.loaders.location import Location
from logferry.loaders.planning.ledger_entry import TablePaths
from logferry.loaders.planning.plan import Range, StoppedTopic
from logferry.loaders.planning.segment_states import DROPPED, READY
from logferry.loaders.runs.table_run import Backlog, LoadEvent, RunEnded, SegmentNotice
from logferry.loaders.storage.commit import LOST_RACES
from logferry.loaders.storage.files import open_table
from logferry.loaders.storage.ledger import last_batch
from logferry.loaders.storage.side_tables import read_segments
from prometheus_client import CollectorRegistry, push_to_gateway, start_http_server, write_to_textfile
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

# Segments are read at most this often, and no longer than this in one scrape: the others keep their older numbers.
_SEGMENTS_S: Final = 30.0
_SCRAPE_S: Final = 2.0
# Of each request to a Pushgateway.
_PUSH_S: Final = 10.0
_GROUP: Final = ("job", "logferry-load")
# Why a topic is stopped, by the reason's text in `planning.plan`.
_STOPS: Final = (
    ("no longer exists", "removed"),
    ("does not exist", "missing"),
    ("was recreated", "recreated"),
    ("no longer has partition", "partition_removed"),
    ("were removed before they were loaded", "records_removed"),
    ("was truncated", "truncated"),
)
_COUNTERS: Final = ("rows", "quarantined_rows", "bytes", "batches", "batch_seconds", "commit_races")


@dataclass
class _TableNumbers:
    """Of one table. ``complete``: when the last load began that loaded everything; ``stopped``: the kind, and this time
    for the topic alone. ``loaded``: offsets by topic since ``backlog`` was planned. Times are the host's, in seconds.
    """

    counters: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_COUNTERS, 0.0))
    errors: Counter[str] = field(default_factory=Counter)
    batch_seconds: float = 0.0
    backlog: Sequence[Range] = ()
    loaded: Counter[str] = field(default_factory=Counter)
    stopped: dict[str, tuple[str, float | None]] = field(default_factory=dict)
    complete: float | None = None
    # Of the load in progress.
    started: float = 0.0
    stops: list[StoppedTopic] = field(default_factory=list)
    is_cut: bool = False
    # From the file of an earlier run, by topic.
    before: dict[str, float] = field(default_factory=dict)
    # By state, and when they were read; None: the table has no segments.
    segments: dict[str, int] | None = None
    segments_read: float = float("-inf")


class LoadMetrics:
    """Collects for a registry of Prometheus. For several threads: one a table, and those of scrapes."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.exit_status: int | None = None
        self._tables: dict[Location, _TableNumbers] = {}
        self._lock = threading.Lock()
        self._earlier: dict[str, _TableNumbers] = {}
        self.registry.register(self)

    # ---- noted by the loads ----------------------------------------------------------------------------------

    def begin(self, path: Location, *, has_segments: bool = False) -> None:
        """Before each load of a table."""
        with self._lock:
            noted = self._tables.setdefault(path, self._earlier.get(str(path)) or _TableNumbers())
            noted.started, noted.stops, noted.is_cut = time.time(), [], False
            if has_segments and noted.segments is None:
                noted.segments = {}

    def saw(self, path: Location, event: LoadEvent) -> None:
        noted = self._tables[path]
        if isinstance(event, BatchDone):
            with self._lock:
                self._add(noted, event)
        elif isinstance(event, Backlog):
            noted.backlog, noted.loaded = event.ranges, Counter()
        elif isinstance(event, StoppedTopic):
            noted.stops.append(event)
        elif isinstance(event, RunEnded):
            noted.is_cut = True
        elif isinstance(event, SegmentNotice):
            noted.errors["segment_check"] += 1

    @staticmethod
    def _add(noted: _TableNumbers, batch: BatchDone) -> None:
        for r in batch.ranges:
            noted.loaded[r.topic] += r.size
        noted.batch_seconds = batch.seconds
        added = {"batches": 1, "batch_seconds": batch.seconds, "bytes": batch.bytes}
        if batch.ours:
            # A batch of the quarantine moves rows out of it: counters never fall.
            added |= {"rows": batch.rows or 0, "quarantined_rows": max(0, batch.quarantined or 0)}
        for name, number in added.items():
            noted.counters[name] += number

    def end(self, path: Location, error: LoadError | None) -> None:
        """After each load of a table. ``error``: why it ended early."""
        with self._lock:
            noted = self._tables[path]
            noted.counters["commit_races"] += sum(LOST_RACES.pop(str(folder), 0) for folder in TablePaths.of(path))
            if error is not None:
                noted.errors[_kind(error)] += 1
                return
            stops = {one.topic: stop_kind(one.reason) for one in noted.stops}
            if noted.is_cut:
                # Not all topics were looked at.
                stops = {topic: kind for topic, (kind, _) in noted.stopped.items()} | stops
            was = noted.stopped
            noted.stopped = {t: (kind, was[t][1] if t in was else noted.complete) for t, kind in stops.items()}
            if not noted.is_cut:
                noted.complete = noted.started

    # ---- asked for by a scrape -------------------------------------------------------------------------------

    def collect(self) -> Iterator[Metric]:
        self._read_segments()
        with self._lock:
            # A run that could not begin leaves the numbers of the one before.
            tables = {str(path): noted for path, noted in self._tables.items()} or self._earlier
            yield from _counters(tables)
            yield from _gauges(tables)
        if self.exit_status is not None:
            yield GaugeMetricFamily("logferry_load_exit_status", "Exit status of the last run", self.exit_status)
            said = "When the last run ended, in seconds since 1970"
            yield GaugeMetricFamily("logferry_load_end_timestamp_seconds", said, time.time())

    def _read_segments(self) -> None:
        began = time.monotonic()
        with self._lock:
            due = sorted(
                (noted.segments_read, path, noted)
                for path, noted in self._tables.items()
                if noted.segments is not None and noted.segments_read < began - _SEGMENTS_S
            )
        for _, path, noted in due:
            if time.monotonic() > began + _SCRAPE_S:
                return
            paths = TablePaths.of(path)
            # The table is looked at again at the next scrape.
            with suppress(LoadError):
                found = read_segments(paths.segments, last_batch(open_table(paths.main))).values()
                states = {"waiting": 0, "ready": 0, "dropped": 0}
                for segment in found:
                    states[{READY: "ready", DROPPED: "dropped"}.get(segment.state, "waiting")] += 1
                noted.segments, noted.segments_read = states, time.monotonic() if found else noted.segments_read

    # ---- the file, and the Pushgateway -----------------------------------------------------------------------

    def resume(self, text: str, labels: Mapping[str, str] = MappingProxyType({})) -> None:
        """Takes the counters of an earlier run from its text, of the series with these labels; no metrics are none."""
        ours = "\n".join(line for line in text.splitlines() if line.startswith("logferry_load_")) + "\n"
        with suppress(ValueError):
            for metric in text_string_to_metric_families(ours):
                for sample in metric.samples:
                    if "table" in sample.labels and labels.items() <= sample.labels.items():
                        noted = self._earlier.setdefault(sample.labels["table"], _TableNumbers())
                        _take(noted, sample.name, sample.labels, sample.value)

    def write_file(self, file: Path) -> None:
        """In one step. Raises StorageUnavailable."""
        try:
            write_to_textfile(str(file), self.registry)
        except OSError as error:
            raise StorageUnavailable(f"the metrics cannot be written to {file}: {error}") from error


def _take(noted: _TableNumbers, name: str, labels: dict[str, str], value: float) -> None:
    counter = name.removeprefix("logferry_load_").removesuffix("_total")
    if counter in noted.counters and name.endswith("_total"):
        noted.counters[counter] = value
    elif counter == "errors":
        noted.errors[labels.get("kind", "")] = int(value)
    elif counter == "complete_timestamp_seconds":
        noted.before[labels.get("topic", "")] = value


def _counters(tables: dict[str, _TableNumbers]) -> Iterator[Metric]:
    rows = CounterMetricFamily("logferry_load_rows_total", "Rows written by this loader", labels=["table"])
    bad = CounterMetricFamily("logferry_load_quarantined_rows_total", "Rows of the quarantine", labels=["table"])
    read = CounterMetricFamily("logferry_load_bytes_total", "Bytes of the records read", labels=["table"])
    batches = CounterMetricFamily("logferry_load_batches_total", "Batches executed", labels=["table"])
    seconds = CounterMetricFamily("logferry_load_batch_seconds_total", "Seconds spent on them", labels=["table"])
    said = "Commits that were repeated, since another writer was faster"
    races = CounterMetricFamily("logferry_load_commit_races_total", said, labels=["table"])
    families = dict(zip(_COUNTERS, (rows, bad, read, batches, seconds, races), strict=True))
    said = "Loads that ended early, by the kind of error"
    errors = CounterMetricFamily("logferry_load_errors_total", said, labels=["table", "kind"])
    for table, noted in tables.items():
        for name, family in families.items():
            family.add_metric([table], noted.counters[name])
        for kind, number in noted.errors.items():
            errors.add_metric([table, kind], number)
    yield from (*families.values(), errors)


def _gauges(tables: dict[str, _TableNumbers]) -> Iterator[Metric]:
    by_topic = ["table", "topic"]
    lag = GaugeMetricFamily("logferry_load_lag_records", "Offsets that are not loaded yet", labels=by_topic)
    said = "Everything recorded before is loaded: when the last complete load began, in seconds since 1970"
    complete = GaugeMetricFamily("logferry_load_complete_timestamp_seconds", said, labels=by_topic)
    said = "1 for each stopped topic"
    stopped = GaugeMetricFamily("logferry_load_stopped_topics", said, labels=[*by_topic, "reason"])
    last = GaugeMetricFamily("logferry_load_last_batch_seconds", "Duration of the last batch", labels=["table"])
    said = "Segments by state: waiting, ready, dropped"
    segments = GaugeMetricFamily("logferry_load_segments", said, labels=["table", "state"])
    for table, noted in tables.items():
        if noted.counters["batches"]:
            last.add_metric([table], noted.batch_seconds)
        for topic, records in _behind(noted).items():
            lag.add_metric([table, topic], records)
        for topic, moment in _completed(noted).items():
            complete.add_metric([table, topic], moment)
        for topic, (kind, _) in noted.stopped.items():
            stopped.add_metric([table, topic, kind], 1)
        for state, number in (noted.segments or {}).items():
            segments.add_metric([table, state], number)
    yield from (lag, complete, stopped, last, segments)


def _behind(noted: _TableNumbers) -> Counter[str]:
    """Offsets by topic that are not loaded, as of the last look at Kafka; of a stopped topic they are not known."""
    found: Counter[str] = Counter()
    for r in noted.backlog:
        if r.topic not in noted.stopped:
            found[r.topic] += r.size
    for topic in found:
        found[topic] = max(0, found[topic] - noted.loaded[topic])
    return found


def _completed(noted: _TableNumbers) -> dict[str, float]:
    """By topic, until when everything is loaded; a topic that never was is missing."""
    found = dict(noted.before) if noted.complete is None else {}
    for topic in {r.topic for r in noted.backlog} | noted.stopped.keys():
        moment = noted.stopped[topic][1] if topic in noted.stopped else noted.complete
        moment = noted.before.get(topic) if moment is None else moment
        if moment is not None:
            found[topic] = moment
    return found


def stop_kind(reason: str) -> str:
    """The label of a reason: its text would make a new series whenever an offset in it changes."""
    return next((kind for part, kind in _STOPS if part in reason), "other")


def _kind(error: LoadError) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(error).__name__).lower()


class PushGroup(NamedTuple):
    """A group of a Pushgateway: its series are those of the last push. ``labels``: besides the job."""

    gateway: str
    job: str
    labels: dict[str, str]

    @classmethod
    def of(cls, url: str) -> PushGroup:
        """Of ``http://HOST:PORT``, or that with the path of a group. Raises LoaderConfigError."""
        found = urlsplit(url)
        root, *pairs = unquote(found.path).strip("/").split("/") if found.path.strip("/") else ("metrics", *_GROUP)
        names, values = pairs[::2], pairs[1::2]
        is_path = root == "metrics" and names[:1] == ["job"] and len(names) == len(values) and all(values)
        has_more = found.username is not None or found.query or found.fragment
        if found.scheme not in ("http", "https") or not found.hostname or has_more or not is_path:
            what = (
                "must have the form http://HOST:PORT or http://HOST:PORT/metrics/job/NAME/LABEL/VALUE, without a user"
            )
            raise LoaderConfigError(f"metrics_push: {what}")
        return cls(f"{found.scheme}://{found.netloc}", values[0], dict(zip(names[1:], values[1:], strict=True)))

    def stored(self) -> str:
        """What the Pushgateway has; nothing where it does not answer: counters begin again then."""
        with suppress(OSError), urlopen(f"{self.gateway}/metrics", timeout=_PUSH_S) as answer:
            return str(answer.read().decode("utf-8", "replace"))
        return ""

    def push(self, registry: CollectorRegistry) -> None:
        """In place of the last push. Raises StorageUnavailable."""
        try:
            push_to_gateway(self.gateway, self.job, registry, self.labels, timeout=_PUSH_S)
        except OSError as error:
            raise StorageUnavailable(f"the metrics cannot be pushed to {self.gateway}: {error}") from error


@contextmanager
def observed(listen: str | None, file: Path | None, push: str | None = None) -> Iterator[LoadMetrics | None]:
    """The metrics of a run, served at ``listen`` (HOST:PORT) meanwhile, or at its end, also where it fails, written to
    ``file`` and pushed to ``push``; None if none of them is wanted. Raises LoaderConfigError, StorageUnavailable.
    """
    if listen is None and file is None and push is None:
        yield None
        return
    metrics = LoadMetrics()
    if listen is not None:
        with _served(metrics, listen):
            yield metrics
        return
    group = None if push is None else PushGroup.of(push)
    if group is not None:
        metrics.resume(group.stored(), {"job": group.job, **group.labels})
    if file is not None:
        if file.suffix != ".prom" or not file.absolute().parent.is_dir():
            raise LoaderConfigError(f"metrics_file: {file} must end in .prom, and its folder must exist")
        with suppress(OSError, ValueError):
            metrics.resume(file.read_text(encoding="utf-8"))
    try:
        yield metrics
    except LoadError as error:
        metrics.exit_status = error.exit_status
        raise
    except KeyboardInterrupt:
        metrics.exit_status = EXIT_SIGNAL
        raise
    finally:
        metrics.exit_status = EXIT_DONE if metrics.exit_status is None else metrics.exit_status
        if file is not None:
            metrics.write_file(file)
        if group is not None:
            group.push(metrics.registry)


@contextmanager
def _served(metrics: LoadMetrics, listen: str) -> Iterator[None]:
    host, colon, port = listen.rpartition(":")
    if not colon or not host or not port.isdigit():
        raise LoaderConfigError(f"metrics_listen: {listen!r} is not HOST:PORT")
    try:
        server, thread = start_http_server(int(port), host.strip("[]"), metrics.registry)
    except (OSError, OverflowError) as error:
        raise LoaderConfigError(f"metrics_listen: {listen}: {error}") from None
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
