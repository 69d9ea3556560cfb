"""Writing over HTTP as the interface promises it, against two workers and a real Kafka; what is in the log is read
back by a plain consumer."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import cramjam
import msgpack
import pytest
from logferry.gateway.contract.chunk import MSGPACK, Chunk, pack_chunk
from logferry.gateway.contract.names import MAX_SEQNO, partition_of

from tests.support.checker import digest, read_back
from tests.support.gateway import Answer, Gateway, log_of, open_session, source_path, write

KEYS = (
    *("dc", "topic", "partition", "offset", "source_id"),
    *("seqno", "prev", "created_ms", "recorded_ms", "attributes", "data"),
)


@pytest.fixture
async def topic(workers: Gateway, topic_name: str) -> str:
    """A new topic of four partitions, by the name that writers use."""
    await workers.make_topic(topic_name, 4)
    return topic_name


# ---- one chunk ---------------------------------------------------------------------------------------------


async def test_one_chunk_is_one_record(workers: Gateway, topic: str) -> None:
    answer = await write(workers, topic, "web1/access.log", "seqno=4096&prev=100&created_ms=5", b"a line\n\xff\n")
    partition = partition_of("web1/access.log", 4)
    assert answer.document == {
        "source_id": "web1/access.log",
        "topic": f"dc1.{topic}",
        "partition": partition,
        "recorded_seqno": 4096,
        "written": 1,
        "duplicates": 0,
        "offsets": [0, 0],
    }
    [record] = await read_back(workers.kafka.bootstrap, f"dc1.{topic}")
    assert record == ("web1/access.log", partition, 0, 4096, 100, digest(b"a line\n\xff\n"))


@pytest.mark.parametrize("worker", [0, 1])
@pytest.mark.parametrize(
    "source", ["a", "é/ёж б.log", "a b+c", "100%", "%2F", "a?b#c&d=e", "..a", "'\"<>\\", "x" * 512, "\u2028"]
)
async def test_any_source_id_through_any_worker(workers: Gateway, topic: str, source: str, worker: int) -> None:
    answer = await write(workers, topic, source, "seqno=1", worker=worker)
    assert answer.document["source_id"] == source
    assert await log_of(workers, topic) == [(source, 1, None)]
    assert (await workers.ask("GET", source_path(topic, source), worker)).document["recorded_seqno"] == 1


@pytest.mark.parametrize("size", [0, 1, 65_536, 1 << 20, 4 << 20])
@pytest.mark.parametrize("worker", [0, 1])
async def test_chunks_of_any_size_up_to_the_limit(workers: Gateway, topic: str, size: int, worker: int) -> None:
    data = b"x" * size
    await write(workers, topic, "a", "seqno=1", data, worker=worker)
    [record] = await read_back(workers.kafka.bootstrap, f"dc1.{topic}")
    assert record.digest == digest(data)


async def test_the_ends_of_the_seqnos(workers: Gateway, topic: str) -> None:
    await write(workers, topic, "a", "seqno=0")
    await write(workers, topic, "a", f"seqno={MAX_SEQNO}&prev=0&created_ms={MAX_SEQNO}")
    assert await log_of(workers, topic) == [("a", 0, None), ("a", MAX_SEQNO, 0)]


async def test_attributes_are_headers_in_and_out(workers: Gateway, topic: str) -> None:
    headers = {"X-Attr-Level": "warn", "x-attr-host": "w%C3%A9b 1", "X-Attr-empty": ""}
    await write(workers, topic, "a", "seqno=1", headers=headers)
    rows = await read(workers, topic, "a")
    assert rows[0]["attributes"] == {"level": "warn", "host": "wéb 1", "empty": ""}


@pytest.mark.parametrize("worker", [0, 1])
async def test_the_largest_attributes_fit_into_headers_whatever_they_hold(
    workers: Gateway, topic: str, worker: int
) -> None:
    """Three bytes of a header for each of a value that is all but ASCII."""
    values = {f"{number:02}".ljust(64, "n"): "é" * 2048 for number in range(20)}
    headers = {f"X-Attr-{name}": quote(value) for name, value in values.items()}
    await write(workers, topic, "a", "seqno=1", headers=headers, worker=worker)
    assert (await read(workers, topic, "a"))[0]["attributes"] == values
    over = {"X-Attr-a": quote("é" * 2049)}
    refused = await write(workers, topic, "a", "seqno=2", headers=over, worker=worker, expect=400)
    assert "4096" in refused.document["detail"]


async def read(workers: Gateway, topic: str, source: str) -> list[dict[str, Any]]:
    """The chunks in the partition of a source, once all that was acknowledged can be read."""
    await read_back(workers.kafka.bootstrap, f"dc1.{topic}")
    partition = partition_of(source, 4)
    path = f"/v1/topics/dc1.{topic}/partitions/{partition}/chunks?offset=earliest"
    answer = await workers.ask("GET", path, headers={"Accept": MSGPACK})
    unpacker = msgpack.Unpacker(raw=False)
    unpacker.feed(answer.body)
    return [dict(zip(KEYS, row, strict=True)) for row in unpacker]


async def test_created_defaults_to_recorded(workers: Gateway, topic: str) -> None:
    await write(workers, topic, "a", "seqno=1")
    [row] = await read(workers, topic, "a")
    assert row["created_ms"] == row["recorded_ms"]


ENCODED: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "x-gzip": gzip.compress,
    "zstd": lambda raw: bytes(cramjam.zstd.compress(raw)),
    "identity": lambda raw: raw,
}


@pytest.mark.parametrize("encoding", ENCODED)
@pytest.mark.parametrize("worker", [0, 1])
async def test_the_encoding_belongs_to_the_way(workers: Gateway, topic: str, encoding: str, worker: int) -> None:
    data = b"some line\n" * 1000
    encoded = ENCODED[encoding](data)
    await write(workers, topic, "a", "seqno=1", encoded, worker=worker, headers={"Content-Encoding": encoding})
    [record] = await read_back(workers.kafka.bootstrap, f"dc1.{topic}")
    assert record.digest == digest(data)


@pytest.mark.parametrize("worker", [0, 1])
async def test_a_chunked_body_and_any_content_type(workers: Gateway, topic: str, worker: int) -> None:
    async def pieces() -> Any:
        for piece in (b"one ", b"", b"two\n"):
            yield piece

    headers = {"Content-Type": "application/x-www-form-urlencoded"}
    path = source_path(topic, "a", "/chunks?seqno=1")
    await workers.ask("POST", path, worker, data=pieces(), headers=headers)
    [record] = await read_back(workers.kafka.bootstrap, f"dc1.{topic}")
    assert record.digest == digest(b"one two\n")


# ---- many chunks -------------------------------------------------------------------------------------------


async def write_many(
    workers: Gateway, topic: str, chunks: list[Chunk], query: str = "", expect: int | None = 200, **options: Any
) -> Answer:
    headers = {"Content-Type": f"{MSGPACK}; charset=binary", **options.pop("headers", {})}
    body = b"".join(map(pack_chunk, chunks))
    body = ENCODED[headers.get("Content-Encoding", "identity")](body)
    path = source_path(topic, "many", f"/chunks{query}")
    return await workers.ask("POST", path, data=body, headers=headers, expect=expect, **options)


def chained(*seqnos: int) -> list[Chunk]:
    places = zip(seqnos[1:], seqnos, strict=False)
    return [Chunk(seqno, prev, 7, {"n": str(seqno)}, b"%d\n" % seqno) for seqno, prev in places]


@pytest.mark.parametrize("worker", [0, 1])
@pytest.mark.parametrize("encoding", ENCODED)
async def test_many_chunks_commit_together(workers: Gateway, topic: str, worker: int, encoding: str) -> None:
    headers = {"Content-Encoding": encoding}
    answer = await write_many(workers, topic, chained(0, 10, 20, 30), worker=worker, headers=headers)
    assert (answer.document["written"], answer.document["duplicates"]) == (3, 0)
    assert (answer.document["recorded_seqno"], answer.document["offsets"]) == (30, [0, 2])
    assert await log_of(workers, topic) == [("many", 10, 0), ("many", 20, 10), ("many", 30, 20)]
    answer = await write_many(workers, topic, chained(10, 20, 30, 40, 50), worker=worker, headers=headers)
    assert (answer.document["written"], answer.document["duplicates"]) == (2, 2)
    first, last = answer.document["offsets"]
    assert (first > 2, last) == (True, first + 1)
    rows = await read(workers, topic, "many")
    assert [row["offset"] for row in rows[-2:]] == [first, last]
    assert [row["attributes"] for row in rows[:2]] == [{"n": "10"}, {"n": "20"}]


async def test_a_gap_anywhere_writes_nothing(workers: Gateway, topic: str) -> None:
    await write_many(workers, topic, chained(0, 10))
    refused = await write_many(workers, topic, [*chained(10, 20), *chained(25, 30)], expect=409)
    assert (refused.problem, refused.document["recorded_seqno"]) == ("gap", 10)
    refused = await write_many(workers, topic, [*chained(10, 20), *chained(15, 30)], expect=409)
    assert (refused.problem, refused.document["recorded_seqno"]) == ("overlap", 10)
    refused = await write_many(workers, topic, [*chained(10, 20), *chained(11, 20)], expect=409)
    assert refused.problem == "out-of-order"
    assert await log_of(workers, topic) == [("many", 10, 0)]


async def test_more_bytes_than_a_batch_of_kafka_holds(workers: Gateway, topic: str) -> None:
    data = bytes(range(256)) * 2048
    chunks = [Chunk(seqno, seqno - 1, None, {}, data) for seqno in range(1, 21)]
    answer = await write_many(workers, topic, chunks)
    first, last = answer.document["offsets"]
    assert (answer.document["written"], last - first) == (20, 19)
    assert [seqno for _, seqno, _ in await log_of(workers, topic)] == list(range(1, 21))


# ---- duplicates, gaps, overlaps ----------------------------------------------------------------------------


async def test_a_repeated_chunk_is_acknowledged_and_not_written(workers: Gateway, topic: str) -> None:
    for worker in (0, 1, 0):
        answer = await write(workers, topic, "a", "seqno=5&prev=3", worker=worker)
        assert answer.document["recorded_seqno"] == 5
    assert (answer.document["written"], answer.document["duplicates"], answer.document["offsets"]) == (0, 1, None)
    await write(workers, topic, "a", "seqno=9&prev=5")
    assert (await write(workers, topic, "a", "seqno=5&prev=3")).document["recorded_seqno"] == 9
    assert await log_of(workers, topic) == [("a", 5, 3), ("a", 9, 5)]


async def test_the_same_chunk_many_times_at_once_is_written_once(workers: Gateway, topic: str) -> None:
    answers = await asyncio.gather(*(write(workers, topic, "a", "seqno=5", worker=n % 2) for n in range(40)))
    assert sum(answer.document["written"] for answer in answers) == 1
    assert {answer.document["recorded_seqno"] for answer in answers} == {5}
    assert await log_of(workers, topic) == [("a", 5, None)]


@pytest.mark.parametrize("worker", [0, 1])
async def test_gap_overlap_and_base(workers: Gateway, topic: str, worker: int) -> None:
    await write(workers, topic, "a", "seqno=20&prev=10")
    for query, problem in [
        ("seqno=40&prev=30", "gap"),
        ("seqno=40&prev=15", "overlap"),
        ("seqno=10&prev=5", "gap"),  # before the first recorded chunk: never seen, so not a duplicate
        ("seqno=10", "gap"),
        ("seqno=3", "gap"),
    ]:
        refused = await write(workers, topic, "a", query, expect=409, worker=worker)
        assert (refused.problem, refused.document["recorded_seqno"]) == (problem, 20), query
    assert (await write(workers, topic, "a", "seqno=15&prev=12")).document["duplicates"] == 1
    assert await log_of(workers, topic) == [("a", 20, 10)]


async def test_pipelined_chunks_in_any_order_are_never_lost(workers: Gateway, topic: str) -> None:
    """The reordered ones are refused, and recorded when they are sent again."""
    await write(workers, topic, "a", "seqno=1&prev=0")
    missing = list(range(2, 12))
    while missing:
        asked = list(reversed(missing))
        answers = await asyncio.gather(
            *(write(workers, topic, "a", f"seqno={n}&prev={n - 1}", worker=n % 2, expect=None) for n in asked)
        )
        for n, answer in zip(asked, answers, strict=True):
            assert answer.status == 200 or answer.problem == "gap"
            if answer.status == 200:
                missing.remove(n)
    assert await log_of(workers, topic) == [("a", n, n - 1) for n in range(1, 12)]


# ---- sessions ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("worker", [0, 1])
async def test_a_session_returns_the_position_to_continue_from(workers: Gateway, topic: str, worker: int) -> None:
    first = await open_session(workers, topic, "a", worker=worker)
    assert first == {
        "source_id": "a",
        "topic": f"dc1.{topic}",
        "session": first["session"],
        "partition": partition_of("a", 4),
        "recorded_seqno": None,
        "url": workers.urls[await workers.owner("a")],
        "source_retention_ms": 14 * 86_400_000,
    }
    await write(workers, topic, "a", f"seqno=10&session={first['session']}", worker=worker)
    second = await open_session(workers, topic, "a", worker=1 - worker)
    assert second["session"] > first["session"]
    assert second["recorded_seqno"] == 10


async def test_only_the_newest_session_writes(workers: Gateway, topic: str) -> None:
    older, newer = [(await open_session(workers, topic, "a"))["session"] for _ in range(2)]
    for session in (older, newer + 1, 0):
        refused = await write(workers, topic, "a", f"seqno=10&session={session}", expect=409)
        assert refused.problem == "superseded"
    await write(workers, topic, "a", f"seqno=10&session={newer}")
    refused = await write(workers, topic, "a", f"seqno=10&session={older}", expect=409)
    assert refused.problem == "superseded", "not even a duplicate is acknowledged to an older session"
    await write_many(workers, topic, chained(0, 5), expect=200)
    refused = await write_many(workers, topic, chained(5, 6), f"?session={older}", expect=409)
    assert refused.problem == "superseded"
    refused = await write(workers, topic, "a", "seqno=20", expect=409)  # the session was used, and lives
    assert refused.problem == "superseded"
    assert f"session={newer}" in refused.document["detail"]
    await workers.ask("POST", source_path(topic, "a", "/heartbeat"), json={"position": 10})
    await open_session(workers, topic, "a")
    await write(workers, topic, "a", "seqno=20")  # one that was opened for its facts alone excludes nobody
    assert [row[:2] for row in await log_of(workers, topic) if row[0] == "a"] == [("a", 10), ("a", 20)]
