"""Decisions of the Spark source, without Spark and gateway: options, ranges, the end of a batch."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from logferry.client.reading.decode import ReceivedChunk
from logferry.loaders.errors import LoaderConfigError
from logferry.loaders.planning.plan import PartitionOffsets, Range, TopicPartition
from logferry.loaders.query import tail_rows
from logferry.loaders.query.http_ranges import ranges_between
from logferry.loaders.query.spark_source import LogferrySource, Options, as_json, capped, of_json
from pyspark.sql.datasource import DataSourceStreamReader
from pyspark.sql.pandas.types import to_arrow_schema

GIVEN = {"url": "http://a:1, http://b:2", "topic": "dc1.nginx"}
PLACES = st.builds(TopicPartition, st.sampled_from(["dc1.a", "dc2.a"]), st.integers(0, 3))
OFFSETS = st.dictionaries(PLACES, st.integers(0, 50))


def test_options():
    found = Options.of({**GIVEN, "startingCursors": "latest", "MAXCHUNKSPERTRIGGER": "7", "retryS": "2", "token": "x"})
    assert found == Options(
        ("http://a:1", "http://b:2"), ("dc1.nginx",), token="x", starting="latest", max_chunks=7, retry_s=2
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"url": "http://a:1"}, "the option topic is missing"),
        ({"topic": "dc1.a"}, "the option url is missing"),
        ({**GIVEN, "maxChunksPerTrigger": "0"}, "maxchunkspertrigger: '0' is not a whole number from 1 to"),
        ({**GIVEN, "startingOffsets": "earliest"}, "unknown option: startingoffsets; options are url, topic"),
    ],
)
def test_options_that_are_refused(given: dict[str, str], said: str):
    with pytest.raises(LoaderConfigError, match=said):
        Options.of(given)


@pytest.mark.parametrize(
    ("url", "topic", "said"), [("ftp://a", "dc1.a", "is not http"), ("http://a:1", "*.a", "a pattern needs a consumer")]
)
def test_an_address_or_a_topic_that_is_none(url: str, topic: str, said: str):
    with pytest.raises(LoaderConfigError, match=said):
        Options.of({"url": url, "topic": topic}).door()


@given(OFFSETS, OFFSETS, st.integers(1, 60))
def test_a_batch_is_bounded_continues_and_never_goes_back(
    starts: dict[TopicPartition, int], latest: dict[TopicPartition, int], most: int
):
    ends = capped(starts, latest, most)
    assert set(ends) == {*starts, *latest}
    begins = {place: starts.get(place, 0) for place in ends}
    behind = sum(max(0, latest.get(place, 0) - begins[place]) for place in ends)
    assert sum(ends[place] - begins[place] for place in ends) == min(most, behind)
    assert all(begins[place] <= ends[place] <= max(begins[place], latest.get(place, 0)) for place in ends)
    assert of_json(as_json(ends)) == ends


def test_ranges_have_something_to_read_and_new_partitions_begin_at_0():
    a, b, c = (TopicPartition("dc1.a", number) for number in range(3))
    assert ranges_between({a: 3, b: 5}, {a: 7, b: 5, c: 2}) == [
        Range("dc1.a", 0, "", 3, 7),
        Range("dc1.a", 2, "", 0, 2),
    ]
    with pytest.raises(LoaderConfigError, match=r"dc1\.a 0: its end 2 is before its start 3"):
        ranges_between({a: 3}, {a: 2})


class _Door:
    """A topic whose partitions end at ``nexts``."""

    nexts: ClassVar[dict[TopicPartition, int]] = {}

    def offsets(self) -> dict[TopicPartition, PartitionOffsets]:
        return {place: PartitionOffsets(0, end) for place, end in self.nexts.items()}

    def resolve_cursors(
        self, _where: str, offsets: dict[TopicPartition, PartitionOffsets]
    ) -> dict[TopicPartition, int]:
        return {place: at.earliest for place, at in offsets.items()}

    def close(self) -> None:
        pass


def stream(monkeypatch: pytest.MonkeyPatch) -> DataSourceStreamReader:
    monkeypatch.setattr(Options, "door", lambda _: _Door())
    made = LogferrySource({**GIVEN, "maxChunksPerTrigger": "4"})
    return made.streamReader(made.schema())


def test_a_stream_continues_in_bounds_from_where_its_checkpoint_ends(monkeypatch: pytest.MonkeyPatch):
    """As Spark asks: after a restart the partitions of an empty range first."""
    zero, one = (TopicPartition("dc1.nginx", number) for number in range(2))
    monkeypatch.setattr(_Door, "nexts", {zero: 10, one: 2})
    first = stream(monkeypatch)
    assert first.initialOffset() == {"dc1.nginx": {"0": 0, "1": 0}}
    assert [first.latestOffset() for _ in range(4)] == [
        {"dc1.nginx": {"0": 2, "1": 2}},
        {"dc1.nginx": {"0": 6, "1": 2}},
        {"dc1.nginx": {"0": 10, "1": 2}},
        {"dc1.nginx": {"0": 10, "1": 2}},
    ]
    again = stream(monkeypatch)
    at = {"dc1.nginx": {"0": 6, "1": 2}}
    assert again.partitions(at, at) == []
    monkeypatch.setattr(_Door, "nexts", {zero: 11, one: 2, TopicPartition("dc1.nginx", 2): 1})
    end = again.latestOffset()
    assert end == {"dc1.nginx": {"0": 9, "1": 2, "2": 1}}
    assert [task.value for task in again.partitions(at, end)] == [
        ("dc1.nginx", 0, "", 6, 9),
        ("dc1.nginx", 2, "", 0, 1),
    ]
    whole = stream(monkeypatch)
    whole.partitions(at, end)
    assert whole.latestOffset() == {"dc1.nginx": {"0": 11, "1": 2, "2": 1}}


def test_batches_of_arrow_are_what_spark_takes():
    chunk = ReceivedChunk("dc1", "dc1.a", 0, 7, "s", 5, None, None, 1_700_000_000_123, {"host": "web1"}, b"\xff")
    schema = to_arrow_schema(LogferrySource(GIVEN).schema())
    (batch,) = tail_rows.batches([chunk], None, schema)
    assert batch.schema == schema
    (row,) = batch.to_pylist()
    assert row["dc"] == "dc1"
    assert (row["offset"], row["created"], row["attributes"], row["data"]) == (7, None, [("host", "web1")], b"\xff")
    assert row["recorded"] == datetime(2023, 11, 14, 22, 13, 20, 123_000, tzinfo=UTC)
