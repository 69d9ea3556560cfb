"""An object store that is busy, fails, loses answers of commits and cuts uploads: each batch once, all rows there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from logferry.loaders.errors import StorageUnavailable
from logferry.loaders.location import Location, S3Access
from logferry.loaders.planning.ledger_entry import JobOrigin
from logferry.loaders.planning.plan import Range
from logferry.loaders.storage.claims import claim
from logferry.loaders.storage.commit import commit_rows, committed_batch
from logferry.loaders.storage.files import list_files, open_table, read_text, write_text
from logferry.loaders.storage.ledger import Ledger, arrow_schema, create_table, existing_table, last_batch, new_entry
from logferry.loaders.storage.merge import Merge
from logferry.ops.stack.s3_server import BUCKET, S3Server

from tests.support.store_faults import BUSY, CUT, FAILS, KINDS, LOST_ANSWER, FaultyStore

COMMITS = r"_delta_log/[0-9]+\.json"
SCHEMA = arrow_schema("dc string, topic string, partition int, offset long, text string")
BATCH = pa.Table.from_pylist(
    [{"dc": "dc1", "topic": "dc1.a", "partition": 0, "offset": n, "text": "x" * 100} for n in range(1000)],
    schema=SCHEMA,
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with S3Server(tmp_path_factory.mktemp("s3")) as running:
        yield running


@pytest.fixture
def faulty(server: S3Server) -> Iterator[FaultyStore]:
    with FaultyStore(server.endpoint) as store:
        yield store


@pytest.fixture
def place(faulty: FaultyStore, tmp_path: Path, topic_name: str) -> Location:
    for name in ("access", "secret"):
        (tmp_path / name).write_text(f"{name}-of-the-test\n")
    access = S3Access(faulty.url, "us-east-1", tmp_path / "access", tmp_path / "secret")
    return Location.of(f"s3://{BUCKET}/{topic_name}/t", access)


def rows_in(place: Location) -> int:
    return int(existing_table(place).to_pyarrow_table().num_rows)


@pytest.mark.parametrize("kind", KINDS)
def test_a_commit_counts_once_whatever_becomes_of_its_answer(kind: str, faulty: FaultyStore, place: Location):
    create_table(place, SCHEMA, "t")
    for batch in range(3):
        faulty.fail(kind, "PUT", COMMITS)
        done = commit_rows(BATCH, place, batch, "run")
        assert (done.ours, done.rows) == (True, 1000)
    assert faulty.struck() == [kind] * 3
    assert (rows_in(place), last_batch(open_table(place))) == (3000, 2)
    assert [commit_rows(BATCH, place, batch, "other").ours for batch in range(3)] == [False] * 3
    assert rows_in(place) == 3000


@pytest.mark.parametrize("kind", KINDS)
def test_files_are_merged_once(kind: str, faulty: FaultyStore, place: Location):
    create_table(place, SCHEMA, "t")
    for batch in range(3):
        commit_rows(BATCH, place, batch, "run")
    faulty.fail(kind, "PUT", COMMITS)
    faulty.fail(kind, "PUT", r"\.parquet\?")
    assert Merge().run(place) == (3, 1)
    assert faulty.struck() == [kind] * 2
    assert (rows_in(place), last_batch(open_table(place))) == (3000, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_an_entry_of_the_ledger_is_written_once(kind: str, faulty: FaultyStore, place: Location):
    ledger = Ledger(place)
    faulty.fail(kind, "PUT", COMMITS)
    ledger.create()
    ranges = [Range("dc1.a", 0, "id", 0, 9)]
    entry = new_entry(0, "dc1", "lines", "mine", ranges, origin=JobOrigin("host:9092", ("dc1.a",)))
    faulty.fail(kind, "PUT", COMMITS)
    assert ledger.put(entry) == entry
    assert faulty.struck() == [kind] * 2
    other = new_entry(0, "dc1", "lines", "other", [Range("dc1.a", 0, "id", 0, 5)])
    assert ledger.put(other) == entry, "the first one stays"
    assert ledger.entries() == [entry]


@pytest.mark.parametrize("kind", KINDS)
def test_a_claim_has_one_owner(kind: str, faulty: FaultyStore, place: Location):
    faulty.fail(kind, "PUT", COMMITS)
    assert claim(place, 60)
    assert faulty.struck() == [kind]
    assert not claim(place, 60)


def test_what_is_stored_decides_where_the_store_fails_after_a_lost_answer(faulty: FaultyStore, place: Location):
    """The commit is there, and every repetition of it fails."""
    create_table(place, SCHEMA, "t")
    ledger = Ledger(place.with_name("ledger"))
    ledger.create()
    for path in (f"/t/{COMMITS}", f"/ledger/{COMMITS}", f"/claim/{COMMITS}"):
        faulty.fail(LOST_ANSWER, "PUT", path)
        faulty.fail(FAILS, "PUT", path, times=100)
    assert commit_rows(BATCH, place, 0, "run").ours
    assert rows_in(place) == 1000
    entry = new_entry(0, "dc1", "lines", "mine", [Range("dc1.a", 0, "id", 0, 9)])
    assert ledger.put(entry) == entry
    assert claim(place.with_name("claim"), 60)
    assert [faulty.struck().count(kind) for kind in (LOST_ANSWER, FAILS)] == [3, 30]


def test_a_store_that_stays_away_is_an_error_by_name_without_secrets(faulty: FaultyStore, place: Location):
    create_table(place, SCHEMA, "t")
    faulty.fail(FAILS, "PUT", COMMITS, times=100)
    with pytest.raises(StorageUnavailable, match="batch 0 cannot be written") as failed:
        commit_rows(BATCH, place, 0, "run")
    assert str(place) in str(failed.value)
    assert "of-the-test" not in str(failed.value)
    assert "of-the-test" not in repr(place)
    assert committed_batch(place, 0, "run") is None


def test_files_survive_a_busy_store(faulty: FaultyStore, place: Location):
    for kind in (BUSY, FAILS, LOST_ANSWER, CUT):
        faulty.fail(kind, "PUT", "note")
        faulty.fail(BUSY, "GET", "list-type=2")
        faulty.fail(BUSY, "GET", "note$")
        write_text(place / "note", kind)
        assert read_text(place / "note") == kind
        assert [file.name for file in list_files(place)] == ["note"]
