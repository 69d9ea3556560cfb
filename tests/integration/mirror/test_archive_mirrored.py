"""Files of the archive, mirrored and loaded there: whole, in order and once, and none that was not committed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Final

import pytest
from logferry.gateway.config import KafkaSettings
from logferry.gateway.contract.chunk import Chunk
from logferry.loaders.batches.execute import Loader
from logferry.loaders.config import TableJob
from logferry.loaders.location import Location
from logferry.loaders.runs.table_run import load_table
from logferry.loaders.spark.kafka_access import kafka_topics
from pyspark.sql import SparkSession

from tests.support.checker import committed_records
from tests.support.gateway import Gateway, gateway
from tests.support.loader import Sent, check_kept
from tests.support.mirrored_topic import World, mirroring

pytestmark = pytest.mark.spark

_FILES: Final = 16


def pieces_of(name: str, count: int) -> list[bytes]:
    return [b"".join(b"%s %d %d\n" % (name.encode(), piece, line) for line in range(3)) for piece in range(count)]


async def send_file(at: Gateway, name: str, pieces: list[bytes], ends: tuple[str, ...]) -> list[Sent]:
    """Each call twice, at both workers. Returns the chunks of a file that is committed."""

    async def call(rest: str, data: bytes = b"") -> dict[str, int | str]:
        answers = [await at.ask("POST", f"/v1/archive/{name}/{rest}", worker, data=data) for worker in (0, 1)]
        assert answers[0].document == answers[1].document
        return dict(answers[0].document)

    query = "host=web1&file=app.log&log_type=app"
    for number, piece in enumerate(pieces, 1):
        query = f"digest={(await call(f'store?piece={number}&{query}', piece))['digest']}"
    answer: dict[str, int | str] = {}
    for end in ends:
        answer = await call(f"{end}?{query}")
    if "commit" not in ends:
        return []
    first = int(answer["first_seqno"])
    chunks = (Chunk(seqno, None, None, {}, data) for seqno, data in enumerate(pieces, first))
    return [Sent(str(answer["source_id"]), chunk) for chunk in chunks]


async def test_files_are_mirrored_and_loaded_whole_in_order_and_once(
    world: World, spark: SparkSession, tmp_path: Path
) -> None:
    rules: dict[str, Any] = {"archive": {"topics": [{"name": "*", "topic": world.name}], "commit_within_s": 600.0}}
    job = TableJob(path=Location.of(tmp_path / "table"), topics=[f"*.{world.name}"], max_records=20)
    sent: list[Sent] = []
    with (
        gateway(world.stack.cluster("dc1"), tmp_path, "archived", receivers=rules) as at,
        mirroring(world.mirror),
        kafka_topics(spark, KafkaSettings(bootstrap_servers=world.here)) as topics,
    ):
        await at.make_topic(world.name, 2)
        for load in range(2):
            ends = [("commit_request", "commit")] * _FILES + [("commit_request",), ()]
            files = [(f"f{load}-{number}", pieces_of(f"f{load}-{number}", 1 + number % 5), end)
                     for number, end in enumerate(ends)]  # fmt: skip
            for found in await asyncio.gather(*(send_file(at, *file) for file in files)):
                sent += found
            assert await world.differences() == []
            assert list(load_table(Loader(spark, topics, "dc2", f"run-{load}"), job))
            check_kept(job.path, sent)
    # A file's chunks stand side by side in the copy, too.
    records = sorted(await committed_records(world.here, world.topic), key=lambda one: (one.partition, one.offset))
    keys = [(one.partition, one.key) for one in records]
    assert len(keys) == len(sent)
    assert sum(key != before for key, before in zip(keys, [None, *keys], strict=False)) == len(set(keys)) == 2 * _FILES
