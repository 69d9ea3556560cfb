"""``format("logferry")``: topics as a Spark DataFrame over a gateway's HTTP, for Spark that may not reach Kafka.

    spark.dataSource.register(logferry.loaders.source.LogferrySource)
    spark.read.format("logferry").option("url", …).option("topic", "dc1.nginx").load()

One row a chunk, with the columns of a table of the format ``chunk``. A task reads a range of offsets of one partition,
and reads exactly that or fails, however often it is run: so a stream's batch that is run again after a restart has the
same rows, and with a sink that takes each batch once every chunk is there once.

Options:

* ``url`` and ``topic``, several of them with commas; ``token``, ``caFile``
* ``startingCursors``: ``earliest`` (default), ``latest``, or a reader's position, ``dc1.nginx:0:17,dc1.nginx:3:81234``;
  one with ``cursors:`` before it holds in every data centre
* ``endingCursors``, of a batch: the same, default ``latest``
* ``maxChunksPerTrigger``, of a stream: so many offsets are in a batch at most (100,000). With this kind of source
  ``trigger(availableNow=True)`` runs one batch, so at most that many
* ``pageBytes``; ``retryS``: how long a gateway that is away is asked again (120)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple

import pyarrow as pa
from logferry.client.reading.decode import Chunk
from logferry.loaders.errors import ConfigError
from logferry.loaders.planning.plan import TopicPartition, fair_shares
from logferry.loaders.query.http_ranges import EARLIEST, LATEST, Door, Part, parts
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.types import (
    BinaryType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

_SCHEMA: Final = StructType(
    [
        StructField("topic", StringType()),
        StructField("source_id", StringType()),
        StructField("seqno", LongType()),
        StructField("prev", LongType()),
        StructField("dc", StringType()),
        StructField("partition", IntegerType()),
        StructField("offset", LongType()),
        StructField("created", TimestampType()),
        StructField("recorded", TimestampType()),
        StructField("attributes", MapType(StringType(), StringType())),
        StructField("data", BinaryType()),
    ]
)
_TIME: Final = pa.timestamp("us", "UTC")
_ARROW: Final = pa.schema(
    {
        "topic": pa.string(),
        "source_id": pa.string(),
        "seqno": pa.int64(),
        "prev": pa.int64(),
        "dc": pa.string(),
        "partition": pa.int32(),
        "offset": pa.int64(),
        "created": _TIME,
        "recorded": _TIME,
        "attributes": pa.map_(pa.string(), pa.string()),
        "data": pa.binary(),
    }
)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_LAST_MS: Final = 253_402_300_799_999

# Topic → partition → offset, as Spark keeps it in a checkpoint.
Offsets = dict[str, dict[str, int]]


class Options(NamedTuple):
    """Checked. Names of options are in lower case where Spark hands them over."""

    urls: tuple[str, ...]
    topics: tuple[str, ...]
    token: str | None = None
    ca_file: str | None = None
    starting: str = EARLIEST
    ending: str = LATEST
    max_chunks: int = 100_000
    page_bytes: int = 1 << 20
    retry_s: float = 120.0

    @classmethod
    def of(cls, given: Mapping[str, str]) -> Options:
        """Raises ConfigError."""
        left = {name.lower(): value for name, value in given.items()}
        found: dict[str, Any] = {"urls": _list(left, "url"), "topics": _list(left, "topic")}
        for name, field in (("token", "token"), ("cafile", "ca_file")):
            found[field] = left.pop(name, None)
        for name, field in (("startingcursors", "starting"), ("endingcursors", "ending")):
            if name in left:
                found[field] = left.pop(name)
        for name, field in (("maxchunkspertrigger", "max_chunks"), ("pagebytes", "page_bytes"), ("retrys", "retry_s")):
            if name in left:
                found[field] = _number(name, left.pop(name))
        if left:
            known = "url, topic, token, caFile, startingCursors, endingCursors, maxChunksPerTrigger, pageBytes, retryS"
            raise ConfigError(f"no such option: {', '.join(sorted(left))}; there are {known}")
        return cls(**found)

    def door(self) -> Door:
        return Door(self.urls, self.topics, self.token, self.ca_file, self.page_bytes, self.retry_s)


def _list(left: dict[str, str], name: str) -> tuple[str, ...]:
    found = tuple(item.strip() for item in left.pop(name, "").split(",") if item.strip())
    if not found:
        example = "http://127.0.0.1:8080" if name == "url" else "dc1.nginx"
        raise ConfigError(f'the option {name} is needed, as in .option("{name}", "{example}")')
    return found


def _number(name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit()) or not 1 <= int(text) <= 1 << 40:
        raise ConfigError(f"the option {name}: {text!r} is not a whole number from 1 on")
    return int(text)


class Task(InputPartition):
    """What one task reads."""

    def __init__(self, part: Part) -> None:
        super().__init__(tuple(part))


class LogferrySource(DataSource):
    """Register it with ``spark.dataSource.register(LogferrySource)``; logferry is to be installed on the workers."""

    @classmethod
    def name(cls) -> str:
        return "logferry"

    def schema(self) -> StructType:
        return _SCHEMA

    def reader(self, schema: StructType) -> DataSourceReader:
        return _Batch(Options.of(self.options))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return _Stream(Options.of(self.options))


class _Batch(DataSourceReader):
    def __init__(self, options: Options) -> None:
        self._options = options

    def partitions(self) -> Sequence[InputPartition]:
        options = self._options
        with closing(options.door()) as door:
            offsets = door.offsets()
            starts, ends = door.placed(options.starting, offsets), door.placed(options.ending, offsets)
        for place, end in ends.items():
            if end > offsets[place].next:
                raise ConfigError(f"endingCursors: {place.topic} {place.partition} ends at {offsets[place].next}")
        return [Task(part) for part in parts(starts, ends)]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        return _read(self._options, partition)


class _Stream(DataSourceStreamReader):
    """Lives as long as its query. On a restart Spark first asks for the partitions of an empty range at the last offset
    of the checkpoint: that is how it is known, when `latestOffset` is asked, from where the batch begins.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self._at: Offsets | None = None

    def initialOffset(self) -> Offsets:
        with closing(self._options.door()) as door:
            return as_json(door.placed(self._options.starting, door.offsets()))

    def latestOffset(self) -> Offsets:
        """At most so many offsets further than the last answer: Spark sets no limit of its own."""
        if self._at is None:
            self._at = self.initialOffset()
        with closing(self._options.door()) as door:
            latest = {place: at.next for place, at in door.offsets().items()}
        self._at = as_json(capped(of_json(self._at), latest, self._options.max_chunks))
        return self._at

    def partitions(self, start: Offsets, end: Offsets) -> Sequence[InputPartition]:
        if self._at is None:
            self._at = end
        return [Task(part) for part in parts(of_json(start), of_json(end))]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        return _read(self._options, partition)


def capped(
    starts: Mapping[TopicPartition, int], latest: Mapping[TopicPartition, int], most: int
) -> dict[TopicPartition, int]:
    """Where a batch ends. A partition never goes back, and one that vanished stays where it is. Pure."""
    places = sorted({*starts, *latest})
    begins = [starts.get(place, 0) for place in places]
    shares = fair_shares([max(0, latest.get(p, b) - b) for p, b in zip(places, begins, strict=True)], most)
    return {place: b + share for place, b, share in zip(places, begins, shares, strict=True)}


def as_json(offsets: Mapping[TopicPartition, int]) -> Offsets:
    found: Offsets = {}
    for place, offset in sorted(offsets.items()):
        found.setdefault(place.topic, {})[str(place.partition)] = offset
    return found


def of_json(offsets: Offsets) -> dict[TopicPartition, int]:
    return {TopicPartition(topic, int(number)): at for topic, by in offsets.items() for number, at in by.items()}


def _read(options: Options, task: InputPartition) -> Iterator[pa.RecordBatch]:
    with closing(options.door()) as door:
        for chunks in door.chunks(Part(*task.value)):
            yield record_batch(chunks)


def record_batch(chunks: Sequence[Chunk]) -> pa.RecordBatch:
    columns: list[list[Any]] = [
        [c.topic for c in chunks],
        [c.source_id for c in chunks],
        [c.seqno for c in chunks],
        [c.prev for c in chunks],
        [c.dc for c in chunks],
        [c.partition for c in chunks],
        [c.offset for c in chunks],
        [_moment(c.created_ms) for c in chunks],
        [_moment(c.recorded_ms) for c in chunks],
        [list(c.attributes.items()) for c in chunks],
        [c.data for c in chunks],
    ]
    arrays = [pa.array(values, field.type) for values, field in zip(columns, _ARROW, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=_ARROW)


def _moment(unix_ms: int | None) -> datetime | None:
    if unix_ms is None or not 0 <= unix_ms <= _LAST_MS:
        return None
    return _EPOCH + timedelta(milliseconds=unix_ms)
