"""``format("logferry")``: topics as a Spark DataFrame over a gateway's HTTP, for Spark that may not reach Kafka.

    spark.dataSource.register(logferry.loaders.query.LogferrySource)
    spark.read.format("logferry").option("url", …).option("topic", "dc1.nginx").load()

One row per chunk, with the columns of a table of the format ``chunk``. A task reads exactly one range of offsets of a
partition or fails, however often it runs. So a stream's batch that is repeated after a restart has the same rows, and a
sink that takes each batch once has every chunk once.

Options:

* ``url`` and ``topic``, several of them with commas; ``token``, ``caFile``
* ``startingCursors``: ``earliest`` (default), ``latest``, or a reader's position, ``dc1.nginx:0:17,dc1.nginx:3:81234``;
  one with ``cursors:`` before it holds in every data centre
* ``endingCursors``, of a batch: the same, default ``latest``
* ``maxChunksPerTrigger``, of a stream: the largest number of offsets in a batch (100,000). With this kind of source
  ``trigger(availableNow=True)`` runs one batch, so at most that many
* ``pageBytes``; ``retryS``: how long a gateway that does not answer is retried (120)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from itertools import chain
from typing import Any, Final, NamedTuple

import pyarrow as pa
from logferry.loaders.errors import LoaderConfigError
from logferry.loaders.parsing.rows import CHUNK
from logferry.loaders.planning.plan import Range, TopicPartition, fair_shares
from logferry.loaders.query import tail_rows
from logferry.loaders.query.http_ranges import EARLIEST, LATEST, HttpTopics, ranges_between
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

_ARROW: Final = to_arrow_schema(CHUNK)

# Topic → partition → offset, as in a checkpoint of Spark.
Offsets = dict[str, dict[str, int]]


class Options(NamedTuple):
    """The checked options. Spark passes their names in lower case."""

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
        """Raises LoaderConfigError."""
        left = {name.lower(): value for name, value in given.items()}
        found: dict[str, Any] = {"urls": _list(left, "url"), "topics": _list(left, "topic")}
        texts = {"token": "token", "cafile": "ca_file", "startingcursors": "starting", "endingcursors": "ending"}
        numbers = {"maxchunkspertrigger": "max_chunks", "pagebytes": "page_bytes", "retrys": "retry_s"}
        found |= {field: left.pop(name) for name, field in texts.items() if name in left}
        found |= {field: _number(name, left.pop(name)) for name, field in numbers.items() if name in left}
        if left:
            known = "url, topic, token, caFile, startingCursors, endingCursors, maxChunksPerTrigger, pageBytes, retryS"
            raise LoaderConfigError(f"unknown option: {', '.join(sorted(left))}; options are {known}")
        return cls(**found)

    def door(self) -> HttpTopics:
        return HttpTopics(self.urls, self.topics, self.token, self.ca_file, self.page_bytes, self.retry_s)


def _list(left: dict[str, str], name: str) -> tuple[str, ...]:
    found = tuple(item.strip() for item in left.pop(name, "").split(",") if item.strip())
    if not found:
        example = "http://127.0.0.1:8080" if name == "url" else "dc1.nginx"
        raise LoaderConfigError(f'the option {name} is missing, as in .option("{name}", "{example}")')
    return found


def _number(name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit()) or not 1 <= int(text) <= 1 << 40:
        raise LoaderConfigError(f"the option {name}: {text!r} is not a whole number from 1 to 2^40")
    return int(text)


class LogferrySource(DataSource):
    """Register it with ``spark.dataSource.register(LogferrySource)``; logferry must be installed on the workers."""

    @classmethod
    def name(cls) -> str:
        return "logferry"

    def schema(self) -> StructType:
        return CHUNK

    def reader(self, schema: StructType) -> DataSourceReader:
        return _Batch(Options.of(self.options))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return _Stream(Options.of(self.options))


class _Ranges:
    """Reads exactly the range of a task."""

    def __init__(self, options: Options) -> None:
        self._options = options

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        with closing(self._options.door()) as door:
            chunks = chain.from_iterable(door.chunks(Range(*partition.value)))
            yield from tail_rows.batches(chunks, None, _ARROW)


class _Batch(_Ranges, DataSourceReader):
    def partitions(self) -> Sequence[InputPartition]:
        options = self._options
        with closing(options.door()) as door:
            offsets = door.offsets()
            starts, ends = (door.resolve_cursors(where, offsets) for where in (options.starting, options.ending))
        for place, end in ends.items():
            if end > offsets[place].stable:
                raise LoaderConfigError(
                    f"endingCursors: {place.topic} {place.partition} ends at {offsets[place].stable}"
                )
        return [InputPartition(tuple(part)) for part in ranges_between(starts, ends)]


class _Stream(_Ranges, DataSourceStreamReader):
    """Lives as long as its query. On a restart Spark first calls `partitions` with an empty range at the last offset of
    the checkpoint, from which `latestOffset` then knows where the batch begins.
    """

    _at: Offsets | None = None

    def initialOffset(self) -> Offsets:
        with closing(self._options.door()) as door:
            return as_json(door.resolve_cursors(self._options.starting, door.offsets()))

    def latestOffset(self) -> Offsets:
        """At most ``maxChunksPerTrigger`` offsets after the last answer: Spark sets no limit of its own."""
        if self._at is None:
            self._at = self.initialOffset()
        with closing(self._options.door()) as door:
            latest = {place: at.stable for place, at in door.offsets().items()}
        self._at = as_json(capped(of_json(self._at), latest, self._options.max_chunks))
        return self._at

    def partitions(self, start: Offsets, end: Offsets) -> Sequence[InputPartition]:
        if self._at is None:
            self._at = end
        return [InputPartition(tuple(part)) for part in ranges_between(of_json(start), of_json(end))]


def capped(
    starts: Mapping[TopicPartition, int], latest: Mapping[TopicPartition, int], most: int
) -> dict[TopicPartition, int]:
    """The end of a batch. A partition never moves back, and one that vanished stays."""
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
