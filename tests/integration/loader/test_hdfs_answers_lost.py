"""HDFS whose NameNode does a request and whose answer is lost with all connections: at each answer of a step in turn.

The step succeeds, or ends with an error by name and succeeds when it is repeated; its effect is there once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import Final, NamedTuple
from urllib.parse import urlsplit

import pyarrow as pa
import pytest
from logferry.loaders.errors import LoadError
from logferry.loaders.location import Location
from logferry.loaders.planning.ledger_entry import JobOrigin
from logferry.loaders.planning.plan import Range
from logferry.loaders.storage.claims import claim
from logferry.loaders.storage.commit import commit_rows
from logferry.loaders.storage.files import delete_folder, read_text, write_text
from logferry.loaders.storage.ledger import Ledger, arrow_schema, create_table, existing_table, last_batch, new_entry
from logferry.ops.stack.hdfs_cluster import HdfsCluster

from tests.support.relay import Relay

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
SCHEMA: Final = arrow_schema("dc string, topic string, partition int, offset long, text string")
ROWS: Final = 10
MOST: Final = 400


class Way(NamedTuple):
    """The folder of a test through the relay, and without it."""

    relay: Relay
    through: Location
    direct: Location


@pytest.fixture(scope="module")
def hdfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HdfsCluster]:
    with HdfsCluster(tmp_path_factory.mktemp("hdfs")) as cluster:
        yield cluster


@pytest.fixture
def way(hdfs: HdfsCluster, topic_name: str) -> Iterator[Way]:
    with Relay(f"http://{urlsplit(hdfs.uri).netloc}") as relay:
        through = Location.of(f"hdfs://127.0.0.1:{relay.port}/{topic_name}")
        yield Way(relay, through, Location.of(f"{hdfs.uri}/{topic_name}"))


def _rows(batch: int) -> pa.Table:
    row = {"dc": "dc1", "topic": "dc1.a", "partition": 0, "text": "x" * 50}
    return pa.Table.from_pylist([{**row, "offset": ROWS * batch + n} for n in range(ROWS)], schema=SCHEMA)


def _strike(way: Way, before: Callable[[int], None], do: Callable[[int], object], check: Callable[[int], None]) -> None:
    """With a loss at each answer, until a step ends before it comes."""
    errors: list[str] = []
    for number in count():
        before(number)
        way.relay.lose_answer(number)
        try:
            do(number)
        except LoadError as error:
            errors.append(str(error))
        is_struck = not way.relay.loses_answer
        way.relay.lose_answer(None)
        if errors or is_struck:
            do(number)
        check(number)
        if not is_struck:
            break
        assert number < MOST
    assert number > 1
    assert all("hdfs://" in error for error in errors), errors
    print(f"{number} answers were lost, {len(errors)} of the steps ended with an error")


def test_rows_of_a_batch(way: Way) -> None:
    create_table(way.direct / "t", SCHEMA, "t")

    def check(batch: int) -> None:
        found = existing_table(way.direct / "t")
        assert last_batch(found) == batch
        offsets = found.to_pyarrow_table(columns=["offset"])["offset"].to_pylist()
        assert sorted(offsets) == list(range(ROWS * (batch + 1)))

    _strike(way, lambda _: None, lambda batch: commit_rows(_rows(batch), way.through / "t", batch, "run"), check)


def test_an_entry_of_the_ledger(way: Way) -> None:
    Ledger(way.direct / "ledger").create()

    def put(batch: int) -> object:
        ranges = [Range("dc1.a", 0, "id", ROWS * batch, ROWS * batch + ROWS)]
        origin = JobOrigin("host:9092", ("dc1.a",))
        return Ledger(way.through / "ledger").put(new_entry(batch, "dc1", "lines", "run", ranges, origin=origin))

    def check(batch: int) -> None:
        assert [entry.batch for entry in Ledger(way.direct / "ledger").entries()] == list(range(batch + 1))

    _strike(way, lambda _: None, put, check)


def test_a_claim_and_a_note(way: Way) -> None:
    place = way.through / "claim"

    def do(number: int) -> None:
        claim(place, 60)
        write_text(way.through / "note", str(number))

    def check(number: int) -> None:
        assert not claim(way.direct / "claim", 60), "it has one owner"
        assert read_text(way.direct / "note") == str(number)

    _strike(way, lambda _: delete_folder(way.direct / "claim"), do, check)
