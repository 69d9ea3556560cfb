"""For tests of tables that move: two data centres with mirrors both ways, topics in each, and loaders in either."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

from logferry.loaders.batches.execute import BatchDone, Loader
from logferry.loaders.batches.mirror_offsets import Books
from logferry.loaders.commands.move import move_table
from logferry.loaders.config import TableJob
from logferry.loaders.planning.reset_plan import Move, Target
from logferry.loaders.runs.table_run import load_table
from logferry.loaders.spark.kafka_offsets import kafka_topics
from logferry.ops.stack.stack import Stack
from pyspark.sql import SparkSession

from tests.mirrored import differences_in_the_end
from tests.support.loader import Sent, Topic

PREFIX = "logferry"


class Places:
    """A topic of one name in both data centres (``topics``, where they are written), and a table of both."""

    def __init__(self, stack: Stack, name: str, table: Path) -> None:
        self.stack = stack
        self.topics = {dc: Topic(stack.cluster(dc).bootstrap, f"{dc}.{name}") for dc in ("dc1", "dc2")}
        self.job = TableJob(path=table, topics=[f"*.{name}"], max_records=1000)

    def copy_of(self, dc: str) -> Topic:
        """The copy of that data centre's topic, in the other one."""
        return Topic(self.topics["dc2" if dc == "dc1" else "dc1"].bootstrap, self.topics[dc].name)

    @property
    def table(self) -> Path:
        return self.job.path

    @property
    def sent(self) -> list[Sent]:
        return [one for topic in self.topics.values() for one in topic.committed]

    async def mirrored(self) -> None:
        """Returns when both copies are as their originals. Nobody writes meanwhile."""
        for dc, topic in self.topics.items():
            copy = self.copy_of(dc).bootstrap
            assert await differences_in_the_end((topic.bootstrap, topic.name), (copy, topic.name)) == []

    def load(self, loader: Loader, offsets: int | None = None) -> list[BatchDone]:
        """``offsets``: one batch with so many, and no more."""
        job = self.job if offsets is None else self.job.model_copy(update={"max_records": offsets})
        done = (event for event in load_table(loader, job) if isinstance(event, BatchDone))
        return list(islice(done, None if offsets is None else 1))

    def move(self, loader: Loader, *targets: str, wait_s: float = 0, yes: bool = True) -> list[Move] | None:
        """What was said; None: it was there already."""
        said: list[Move] = []

        def agreed(moves: object) -> bool:
            said.extend(moves)  # type: ignore[call-overload]
            return yes

        wanted = [Target.parse(text) for text in targets]
        done = move_table(loader, self.job, PREFIX, wanted, wait_s, agreed)
        return None if done == [] else said


@contextmanager
def loader_at(spark: SparkSession, stack: Stack, dc: str, run: str = "run", *, notes: bool = True) -> Iterator[Loader]:
    """One in that data centre. ``notes``: it notes where positions are in the originals."""
    bootstrap = stack.cluster(dc).bootstrap
    books = Books(bootstrap, PREFIX, dc)
    try:
        with kafka_topics(spark, bootstrap) as kafka:
            yield Loader(spark, kafka, dc, run, books=books if notes else None)
    finally:
        books.close()


async def both_ways(places: Places, partitions: int) -> None:
    """Makes the topics, and waits for their copies."""
    for topic in places.topics.values():
        await topic.create(partitions)
    async with asyncio.timeout(60):
        for dc in places.topics:
            while not await places.copy_of(dc).exists():  # noqa: ASYNC110 - another process's state
                await asyncio.sleep(0.1)
