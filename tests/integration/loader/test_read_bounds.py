"""The search for copies of the tail's chunks reads the files of the table that may hold one, and no others.

A file that lies outside of a bound is damaged: whoever reads it fails.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import pytest
from logferry.loaders.batches.execute import Loader
from logferry.loaders.config import TableJob
from logferry.loaders.errors import LoadError
from logferry.loaders.location import Location
from logferry.loaders.planning.ledger_entry import DUPLICATE_WINDOW_DAYS
from logferry.loaders.query.realtime_view import realtime
from logferry.loaders.runs.table_run import load_table
from logferry.ops.cli import main
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from tests.support.loader import Sent, Topic, chunks_of
from tests.support.table_loads import job

pytestmark = [
    pytest.mark.spark,
    # PySpark's own, of the check of a parser.
    pytest.mark.filterwarnings("ignore:Exception ignored in. <socket:pytest.PytestUnraisableExceptionWarning"),
]

DAY_MS: Final = 86_400_000
# (first seqno, days since it was recorded) of the file that holds no copy, each beyond one of the bounds alone.
LEAN: Final = "recorded earlier"
BEYOND: Final = {
    "a later seqno": (1000, 0),
    "an earlier seqno": (0, 0),
    "recorded earlier": (500, DUPLICATE_WINDOW_DAYS + 9),
}
NEAR: Final = 500


def chunks(start: int) -> list[Sent]:
    return chunks_of("s", b"1\n", start=start)


class Behind:
    """A table of three files: one with a copy of the tail's first chunk, one with the last rows, one far from both."""

    def __init__(self, topic: Topic, table: Location, loader: Loader) -> None:
        self.topic, self.loader = topic, loader
        self.other = Topic(topic.bootstrap, topic.name.replace("dc1.", "dc2."))
        self.job: TableJob = job(table, topic.name.replace("dc1.", "*."))
        self.far: Path | None = None
        self.since = datetime.now(UTC)

    async def write(self, beyond: str) -> None:
        await self.topic.create()
        await self.other.create()
        start, days = BEYOND[beyond]
        now_ms = int(time.time() * 1000)
        await self.topic.write(chunks(start), recorded_ms=now_ms - days * DAY_MS - 60_000)
        self.load()
        (self.far,) = Path(self.job.path).rglob("batch-*/**/*.parquet")
        await self.topic.write(chunks(NEAR), recorded_ms=now_ms - 60_000)
        self.load()
        self.since = datetime.fromtimestamp(now_ms / 1000 - 30, UTC)
        await self.other.write([*chunks(NEAR), *chunks(NEAR + 100)], recorded_ms=now_ms)

    def load(self) -> None:
        list(load_table(self.loader, self.job))

    def damage(self) -> None:
        assert self.far is not None
        self.far.write_bytes(bytes(self.far.stat().st_size))


@pytest.fixture
def behind(topic: Topic, table: Location, loader: Callable[..., Loader]) -> Behind:
    return Behind(topic, table, loader())


@pytest.mark.parametrize(
    "beyond", [LEAN, *(pytest.param(one, marks=pytest.mark.long) for one in BEYOND if one != LEAN)]
)
@pytest.mark.long
async def test_the_view_passes_over_files_that_hold_no_copy(beyond: str, behind: Behind, spark: SparkSession):
    await behind.write(beyond)
    behind.damage()
    view = realtime(spark, behind.job.path)
    with pytest.raises((LoadError, Py4JJavaError, PySparkException)):
        view.collect()
    # Of the table itself it takes no row then, and opens no file.
    tail = view.where(F.col("recorded") > F.lit(behind.since))
    assert [(row["topic"], row["seqno"]) for row in tail.collect()] == [(behind.other.name, NEAR + 102)]


@pytest.mark.parametrize("beyond", BEYOND)
async def test_the_query_passes_over_files_that_hold_no_copy(
    beyond: str, behind: Behind, capfd: pytest.CaptureFixture[str]
):
    await behind.write(beyond)
    behind.damage()

    def query(sql: str) -> tuple[int, str]:
        options = ["--table", str(behind.job.path), "--bootstrap", behind.topic.bootstrap, "--format", "csv"]
        return main.main(["query", sql, *options]), capfd.readouterr().out

    assert (await asyncio.to_thread(query, "SELECT max(line) FROM logs"))[0] != 0
    since = f"recorded > TIMESTAMPTZ '{behind.since.isoformat()}'"
    found = await asyncio.to_thread(query, f"SELECT topic, seqno FROM logs WHERE {since}")
    assert found == (0, f"topic,seqno\n{behind.other.name},{NEAR + 102}\n")
