"""Chunks that came by two data centres are in the table once, whenever the second comes, and nothing else is lost."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from logferry.loaders.batches import execute
from logferry.loaders.batches.dedup import without_copies
from logferry.loaders.batches.execute import BatchDone, Loader
from logferry.loaders.config import TableJob
from logferry.loaders.location import Location
from logferry.loaders.planning.ledger_entry import TablePaths
from logferry.loaders.runs.table_run import load_table
from logferry.loaders.storage.files import open_table
from logferry.loaders.storage.ledger import last_batch
from logferry.loaders.storage.side_tables import read_left_out
from logferry.ops.stack.kafka_cluster import KafkaCluster

from tests.support.loader import Sent, Topic, check_exact, chunks_of, stored
from tests.support.table_loads import LoaderDied, die

pytestmark = pytest.mark.spark

Start = Callable[..., Loader]


class Centres:
    """The same topic of two (or three) data centres, and the table that all are loaded into."""

    def __init__(self, kafka: KafkaCluster, name: str, table: Location) -> None:
        self.one, self.two, self.three = (Topic(kafka.bootstrap, f"dc{i}.{name}") for i in (1, 2, 3))
        self.table = table
        self.job = TableJob(path=table, topics=[f"*.{name}"], max_records=1000)

    def load(self, loader: Loader) -> int:
        """How many chunks were left out."""
        done = [event for event in load_table(loader, self.job) if isinstance(event, BatchDone)]
        return sum(batch.left_out for batch in done)

    def notes(self) -> list[tuple[str, int, str | None]]:
        last = last_batch(open_table(Location.of(self.table)))
        return [(note.topic, note.seqno, note.kept) for note in read_left_out(TablePaths.of(self.table).left_out, last)]


@pytest.fixture
async def centres(kafka: KafkaCluster, topic_name: str, warehouse: Location) -> Centres:
    found = Centres(kafka, topic_name, warehouse / "logs")
    await found.one.create()
    return found


def numbered(source: str, *seqnos: int, text: str = "line") -> list[Sent]:
    """Chunks with these seqnos, without ``prev``. Each has two lines; the second is not UTF-8."""
    found = []
    for seqno in seqnos:
        (sent,) = chunks_of(source, f"{text} {seqno}\n".encode() + b"\xff%d\n" % seqno)
        found.append(sent._replace(chunk=sent.chunk._replace(seqno=seqno, prev=None)))
    return found


async def test_the_copy_that_comes_later_is_left_out(loader: Start, centres: Centres):
    """The source moved, and its last chunks had no answer: both data centres have them."""
    await centres.two.create()
    await centres.one.write([*numbered("a", 1, 2, 3, 4), *numbered("stays", 1, 2, 3)])
    assert centres.load(loader()) == 0
    await centres.two.write([*numbered("a", 3, 4, 5, 6), *numbered("other", 1, 2, 3)])
    assert centres.load(loader()) == 2
    # It comes back; what it says now was said by nobody, though its seqnos lie between others'.
    await centres.one.write(numbered("a", 7))
    await centres.two.write(numbered("a", 8))
    await centres.one.write(numbered("a", 9))
    assert centres.load(loader()) == 0
    once = numbered("a", *range(1, 10)) + numbered("stays", 1, 2, 3) + numbered("other", 1, 2, 3)
    check_exact(centres.table, once)
    one, two = centres.one.name, centres.two.name
    assert centres.notes() == [(two, 3, one), (two, 4, one)]


async def test_both_copies_in_one_batch(loader: Start, centres: Centres):
    await centres.two.create()
    await centres.three.create()
    await centres.three.write(numbered("a", 2, 3))
    await centres.two.write(numbered("a", 1, 2))
    await centres.one.write(numbered("a", 3, 4))
    assert centres.load(loader()) == 2
    check_exact(centres.table, numbered("a", 1, 2, 3, 4))
    one, two, three = centres.one.name, centres.two.name, centres.three.name
    assert centres.notes() == [(three, 2, two), (three, 3, one)]


@pytest.mark.long
async def test_a_data_centre_that_comes_later(loader: Start, centres: Centres):
    """The table has no facts of its sources yet: the loader computes them, with the lines of the quarantine."""
    bad = chunks_of("bad", b"\xff\n", b"\xfe\n")
    await centres.one.write([*numbered("a", 1, 2), *bad])
    assert centres.load(loader()) == 0
    assert not Path(TablePaths.of(centres.table).sources).exists()
    await centres.two.create()
    await centres.two.write([*numbered("a", 2, 3), *bad])
    assert centres.load(loader()) == 3
    check_exact(centres.table, [*numbered("a", 1, 2, 3), *bad])


@pytest.mark.long
async def test_beyond_the_configured_time_a_copy_is_loaded_as_a_chunk(loader: Start, centres: Centres):
    await centres.two.create()
    await centres.one.write(numbered("a", 1))
    centres.load(loader())
    await centres.two.write(numbered("a", 1))
    forgets = loader()
    object.__setattr__(forgets, "duplicate_window", timedelta(milliseconds=1))
    assert centres.load(forgets) == 0
    assert len(stored(centres.table)) == 2


@pytest.mark.parametrize("window", ["commit_files", pytest.param("commit_rows", marks=pytest.mark.long)])
async def test_a_loader_that_dies_before_the_commit(
    window: str, loader: Start, centres: Centres, monkeypatch: pytest.MonkeyPatch
):
    """Quarantine, sources and notes are written, the rows are not: the next run leaves out the same chunks."""
    await centres.two.create()
    await centres.one.write(numbered("a", 1, 2))
    centres.load(loader())
    await centres.two.write(numbered("a", 2, 3))
    await centres.one.write(numbered("a", 3, 4))
    with monkeypatch.context() as patch:
        patch.setattr(execute, window, die)
        with pytest.raises(LoaderDied):
            centres.load(loader("dies"))
    assert centres.load(loader("continues")) == 2
    check_exact(centres.table, numbered("a", 1, 2, 3, 4))
    assert len(centres.notes()) == 2, "noted once"


@pytest.mark.long
async def test_a_loader_that_comes_late(loader: Start, centres: Centres, monkeypatch: pytest.MonkeyPatch):
    """Others have written its batch and one more before it searches for copies: the batch's own rows are no copies."""
    await centres.two.create()
    await centres.one.write(numbered("a", 1, 2))
    centres.load(loader())
    await centres.two.write(numbered("a", 2, 3))

    def others_first(*given: Any) -> Any:
        monkeypatch.setattr(execute, "without_copies", without_copies)
        assert centres.load(loader("fast")) == 1
        return without_copies(*given)

    monkeypatch.setattr(execute, "without_copies", others_first)
    done = [event for event in load_table(loader("slow"), centres.job) if isinstance(event, BatchDone)]
    assert [batch.ours for batch in done] == [False]
    check_exact(centres.table, numbered("a", 1, 2, 3))
