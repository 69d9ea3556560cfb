"""A store that fails at any one request of what a loader does with its tables: the step succeeds, or it ends with an
error by name and succeeds when it is repeated; then its effect is there once.
"""

from __future__ import annotations

import os
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from itertools import count, cycle
from pathlib import Path
from typing import Any, Final, NamedTuple

import boto3
import pyarrow as pa
import pytest
from logferry.loaders.batches.drop_rows import drop_rows
from logferry.loaders.batches.merge_files import spark_merge
from logferry.loaders.batches.rewrite_rows import Rewriter
from logferry.loaders.config import TableJob
from logferry.loaders.errors import LoadError, StorageUnavailable
from logferry.loaders.location import Location
from logferry.loaders.parsing.settings import ParserSettings
from logferry.loaders.planning.ledger_entry import DROP, JobOrigin, LedgerEntry, TablePaths
from logferry.loaders.planning.plan import Range
from logferry.loaders.planning.segment_states import READY, Segment, SegmentRules
from logferry.loaders.planning.source_facts import SourceFacts, SourceKey
from logferry.loaders.runs.segment_check import notify_ready
from logferry.loaders.runs.table_run import prepare
from logferry.loaders.storage.claims import claim
from logferry.loaders.storage.commit import DataFiles, commit_files, commit_rows
from logferry.loaders.storage.files import delete_folder, list_files, read_text, storage_errors, write_text
from logferry.loaders.storage.ledger import Ledger, existing_table, last_batch, new_entry, read_ledger
from logferry.loaders.storage.merge import Merge
from logferry.loaders.storage.retention import compact
from logferry.loaders.storage.rewrite import Rule
from logferry.loaders.storage.side_tables import (
    add_sources,
    create_segments,
    create_side_tables,
    exclude,
    put_segments,
    read_excluded,
    read_segments,
    read_sources,
)
from logferry.loaders.storage.tables import read_state, snapshot_of
from logferry.ops.stack.azure_server import ROOT, AzureServer
from logferry.ops.stack.gcs_server import GcsServer
from logferry.ops.stack.s3_server import BUCKET, S3Server
from pyspark.sql import SparkSession

from tests.support.delta_log import rows_by_log
from tests.support.loader_faults import seeded
from tests.support.store_faults import BUSY, CUT, DENIED, FAILS, LOST_ANSWER, FaultyStore, relay_process
from tests.support.stores import needs_azure, needs_gcs

pytestmark = pytest.mark.timeout(900)
NOW: Final = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
ORIGIN: Final = JobOrigin("host:9092", ("dc1.a",))
RULES: Final = SegmentRules(3600)
PARSER: Final = {"format": "regex", "pattern": r"(?<at>\S+).*", "event_time": {"column": "at", "formats": ["iso"]}}


class Tables:
    """A table and its side tables. Each step is a batch of its own; ``rows``: what the table must hold."""

    def __init__(self, at: Location) -> None:
        self.at, self.paths, self.batch, self.rows = at, TablePaths.of(at), -1, 0

    def create(self) -> None:
        prepare(self.paths, ParserSettings.model_validate(PARSER))
        create_side_tables(self.paths)
        create_segments(self.paths.segments, RULES)

    def some_rows(self, batch: int, old: bool = False) -> pa.Table:
        schema = pa.schema(existing_table(self.at).schema().to_arrow())
        at = NOW - timedelta(days=30 * old)
        row = {"dc": "dc1", "topic": "dc1.a", "partition": 0, "source_id": "web1", "recorded": at, "created": at}
        rows = [{**row, "offset": 100 * batch + n, "line": 0, "seqno": n, "text": "x" * 50} for n in range(10)]
        return pa.Table.from_pylist([{name: one.get(name) for name in schema.names} for one in rows], schema=schema)

    def load(self, old: bool = False) -> None:
        """One more batch of ten rows, before the fault."""
        self.batch += 1
        Ledger(self.paths.ledger).put(self.entry())
        commit_rows(self.some_rows(self.batch, old), self.at, self.batch, "run")
        self.rows += 10

    def entry(self, **more: Any) -> LedgerEntry:
        ranges = [Range("dc1.a", 0, "id", 0, 100 * self.batch + 10)]
        return new_entry(self.batch, "dc1", "lines", "run", ranges, origin=ORIGIN, **more)

    def check(self) -> None:
        assert len(rows_by_log(self.at)) == self.rows
        assert last_batch(existing_table(self.at)) == self.batch


class Step(NamedTuple):
    """``before``: is done without faults. ``do``: may be repeated. ``check``: its effect, once."""

    before: Callable[[Tables], None]
    do: Callable[[Tables], object]
    check: Callable[[Tables], None]


def nothing(_: Tables) -> None:
    pass


def next_batch(tables: Tables) -> None:
    tables.batch += 1


def removed(tables: Tables) -> None:
    """The tables are recreated."""
    for path in tables.paths:
        delete_folder(path)
    tables.batch, tables.rows = -1, 0


def created(tables: Tables) -> None:
    assert read_state(tables.paths).last == -1
    assert list(tables.paths.excluded.parent.name)


def plan(tables: Tables) -> None:
    entry = tables.entry()
    assert Ledger(tables.paths.ledger).put(entry).ranges == entry.ranges


def is_planned(tables: Tables) -> None:
    assert [entry.batch for entry in read_ledger(tables.at)][-2:] == [*range(tables.batch + 1)][-2:]
    commit_rows(tables.some_rows(tables.batch), tables.at, tables.batch, "run")
    tables.rows += 10
    tables.check()


def write_rows(tables: Tables) -> None:
    commit_rows(tables.some_rows(tables.batch), tables.at, tables.batch, "run")


def planned(tables: Tables) -> None:
    next_batch(tables)
    Ledger(tables.paths.ledger).put(tables.entry())


def ten_more(tables: Tables) -> None:
    tables.rows += 10
    tables.check()


def rows_to_replace(tables: Tables) -> None:
    tables.load()
    planned(tables)


def no_spark() -> SparkSession:
    raise AssertionError("the bounds of the files suffice")


def replace(tables: Tables) -> None:
    first = 100 * (tables.batch - 1)
    rule = Rule(f"offset >= {first}", f"offset >= {first}", others=f"offset < {first}")
    changes = Rewriter(no_spark, tables.at, tables.batch, rule).actions
    assert commit_files(DataFiles(tables.at), tables.at, tables.batch, "run", changes=changes)


def old_rows(tables: Tables) -> None:
    tables.load(old=True)
    add_sources(tables.paths.sources, tables.batch, "run", {})
    put_segments(tables.paths.segments, tables.batch, "run", [])
    next_batch(tables)
    Ledger(tables.paths.ledger).put(tables.entry(kind=DROP, cutoff=NOW - timedelta(days=7)))


def drop(tables: Tables) -> None:
    drop_rows(no_spark, tables.paths, read_ledger(tables.at)[-1], "run")


def ten_less(tables: Tables) -> None:
    tables.rows -= 10
    tables.check()


def put_sides(tables: Tables) -> None:
    facts = {SourceKey("dc1.a", "web1"): SourceFacts(0, 1000 + tables.batch, NOW, None)}
    add_sources(tables.paths.sources, tables.batch, "run", facts)
    put_segments(tables.paths.segments, tables.batch, "run", [segment(tables)])


def segment(tables: Tables) -> Segment:
    return Segment(
        start=NOW, version=1, state=READY, rows=tables.batch, bytes=1, first=NOW, last=NOW, late_rows=0,
        passed=NOW, touched=NOW, closed=NOW, batch=tables.batch,
    )  # fmt: skip


def sides_are_there(tables: Tables) -> None:
    assert read_sources(tables.paths.sources)[SourceKey("dc1.a", "web1")].last_seqno == 1000 + tables.batch
    assert read_segments(tables.paths.segments, tables.batch)[NOW].rows == tables.batch
    for path in (tables.paths.sources, tables.paths.segments):
        assert [row["batch"] for row in rows_by_log(path)].count(tables.batch) == 1
    ten_more_after(tables)


def ten_more_after(tables: Tables) -> None:
    commit_rows(tables.some_rows(tables.batch), tables.at, tables.batch, "run")
    ten_more(tables)


def tell(tables: Tables) -> None:
    job = TableJob.model_validate(
        {
            "path": tables.at,
            "topics": ["dc1.a"],
            "parser": PARSER,
            "segments": {"success": tables.at.with_name("done")},
        }
    )
    notify_ready(job, tables.paths, tables.batch)


def segments_to_tell(tables: Tables) -> None:
    for place in (tables.paths.segments / "_told", tables.at.with_name("done")):
        delete_folder(place)
    tables.load()
    put_segments(tables.paths.segments, tables.batch, "run", [segment(tables)])


def is_told(tables: Tables) -> None:
    told = [file.name for file in list_files(tables.at.with_name("done"))]
    claims = [file.name for file in list_files(tables.paths.segments / "_told")]
    # A claim without a mark is another loader's for a minute.
    assert told in ([], [f"{NOW:%Y-%m-%dT%H}/_SUCCESS"])
    assert told or any(".claim/" in name for name in claims)


def note(tables: Tables) -> None:
    place = tables.at.with_name("note")
    with storage_errors(f"{place} cannot be written"):  # as its callers do
        write_text(place, str(tables.batch))


def is_noted(tables: Tables) -> None:
    assert read_text(tables.at.with_name("note")) == str(tables.batch)


def merge(tables: Tables) -> None:
    list(compact(tables.at, timedelta(hours=1)))


def two_batches(tables: Tables) -> None:
    tables.load()
    tables.load()


def own(tables: Tables) -> bool:
    return claim(tables.at.with_name("claim"), 60)


def unclaimed(tables: Tables) -> None:
    delete_folder(tables.at.with_name("claim"))


def has_one_owner(tables: Tables) -> None:
    assert not claim(tables.at.with_name("claim"), 60)
    assert claim(tables.at.with_name("claim"), 0)


def put_aside(tables: Tables) -> None:
    exclude(tables.paths.excluded, ["web9"], NOW, "me", is_excluded=True)


def is_aside(tables: Tables) -> None:
    assert read_excluded(tables.paths.excluded) == ["web9"]


def look(tables: Tables) -> None:
    assert read_state(tables.paths).last == tables.batch
    assert snapshot_of(tables.at).entry.batch == tables.batch
    assert len(read_ledger(tables.at)) == tables.batch + 1


STEPS: Final = {
    "create": Step(removed, Tables.create, created),
    "plan": Step(next_batch, plan, is_planned),
    "rows": Step(planned, write_rows, ten_more),
    "replace": Step(rows_to_replace, replace, ten_less),
    "drop": Step(old_rows, drop, ten_less),
    "sides": Step(planned, put_sides, sides_are_there),
    "tell": Step(segments_to_tell, tell, is_told),
    "note": Step(nothing, note, is_noted),
    "compact": Step(two_batches, merge, Tables.check),
    "claim": Step(unclaimed, own, has_one_owner),
    "exclude": Step(nothing, put_aside, is_aside),
    "look": Step(nothing, look, nothing),
}
_TURNS: Final = 8
_SHORT: Final = ("note", "claim")
# Times of the fault: keys are refused from then on, until the operator mends it; the others are passing.
FAULTS: Final = {DENIED: 10_000, BUSY: 1, FAILS: 1, LOST_ANSWER: 1, CUT: 1}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with S3Server(tmp_path_factory.mktemp("s3")) as running, pytest.MonkeyPatch.context() as patch:
        for variable, value in running.environment.items():
            patch.setenv(variable, value)
        yield running


def cases() -> list[object]:
    """A test of minutes strikes at each fourth request of a step, from any of the first four on, with each fault in
    turn, and at each request of a short one; the others strike at fewer.
    """
    lean = [pytest.param("rows", [kind], 7, id=f"rows-{kind}-lean") for kind in (DENIED, LOST_ANSWER)]
    whole = [
        pytest.param(name, list(FAULTS), 1 if name in _SHORT else 4, marks=pytest.mark.long, id=name) for name in STEPS
    ]
    return [*lean, *whole]


@pytest.mark.parametrize(("name", "kinds", "stride"), cases())
def test_a_fault_at_each_request_of_a_step(
    name: str, kinds: list[str], stride: int, server: S3Server, topic_name: str, monkeypatch: pytest.MonkeyPatch
):
    with FaultyStore(server.endpoint) as store:
        monkeypatch.setenv("AWS_ENDPOINT_URL", store.url)
        dice, tables = seeded(), Tables(Location.of(f"s3://{BUCKET}/{topic_name}/t"))
        first = dice.randrange(stride)
        # Keys that are refused come first: the error of a step is seen also where it takes few requests.
        in_order = sorted(dice.sample(kinds, len(kinds)), key=lambda kind: kind != DENIED)
        strike(STEPS[name], tables, store, in_order, stride, first)


def strike(step: Step, tables: Tables, store: FaultyStore, kinds: Sequence[str], stride: int, first: int = 0) -> None:
    """With each kind of fault in turn, at each request of such a number."""
    errors: list[str] = []
    for number, kind in zip(count(first, stride), cycle(kinds), strict=False):
        if (number - first) // stride % _TURNS == 0:  # with each batch a step takes more requests
            removed(tables)
            tables.create()
            tables.load()
        step.before(tables)
        before, known = len(store.requests), len(errors)
        store.strike(kind, number, FAULTS[kind])
        try:
            step.do(tables)
        except LoadError as error:
            errors.append(str(error))
        is_struck = any(fault for *_, fault in store.requests[before:])
        store.heal()
        if step.do is not own or len(errors) > known:
            step.do(tables)
        step.check(tables)
        if not is_struck:
            break
    assert number > stride
    assert all(str(tables.at.parent) in error for error in errors), errors
    assert errors or DENIED not in kinds


@pytest.mark.long
@pytest.mark.spark
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("name", ["replace", "drop", "compact"])
def test_a_fault_at_each_request_of_a_step_by_executors(
    name: str, warehouse: Location, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
):
    """Files are rewritten whose bounds do not suffice; one request in 29 is struck."""
    if request.config.getoption("--store") != "s3":
        pytest.skip("a session with the jars for S3: --store s3")
    spark: SparkSession = request.getfixturevalue("spark")
    bucket = f"struck-{uuid.uuid4().hex[:12]}"
    client = boto3.client("s3", endpoint_url=os.environ["AWS_ENDPOINT_URL"], region_name="us-east-1")
    client.create_bucket(Bucket=bucket)
    with FaultyStore(os.environ["AWS_ENDPOINT_URL"]) as faulty:
        monkeypatch.setenv("AWS_ENDPOINT_URL", faulty.url)
        conf: Any = spark.sparkContext._jsc.hadoopConfiguration()
        conf.set(f"fs.s3a.bucket.{bucket}.endpoint", faulty.url)
        conf.set(f"fs.s3a.bucket.{bucket}.attempts.maximum", "2")
        strike(
            by_executors(spark)[name], Tables(Location.of(f"s3://{bucket}/{warehouse.name}/t")), faulty, list(FAULTS), 7
        )
        assert any("/_temporary/" in path or "batch-" in path for _, path, _ in faulty.requests)


def by_executors(spark: SparkSession) -> dict[str, Step]:
    """Steps of which the half of a file's rows are selected."""

    def replace_half(tables: Tables) -> None:
        first = 100 * (tables.batch - 1)
        meant = f"offset >= {first + 5} AND offset < {first + 10}"
        rule = Rule(meant, meant, others=f"offset < {first + 5}")
        changes = Rewriter(lambda: spark, tables.at, tables.batch, rule).actions
        assert commit_files(DataFiles(tables.at), tables.at, tables.batch, "run", changes=changes)

    def half_is_old(tables: Tables) -> None:
        tables.batch += 1
        Ledger(tables.paths.ledger).put(tables.entry())
        both = pa.concat_tables([tables.some_rows(tables.batch, old=True)[:5], tables.some_rows(tables.batch)[5:]])
        commit_rows(both, tables.at, tables.batch, "run")
        tables.rows += 10
        add_sources(tables.paths.sources, tables.batch, "run", {})
        put_segments(tables.paths.segments, tables.batch, "run", [])
        next_batch(tables)
        Ledger(tables.paths.ledger).put(tables.entry(kind=DROP, cutoff=NOW - timedelta(days=7)))

    def drop_half(tables: Tables) -> None:
        drop_rows(lambda: spark, tables.paths, read_ledger(tables.at)[-1], "run")

    def five_less(tables: Tables) -> None:
        tables.rows -= 5
        tables.check()

    def merge_files(tables: Tables) -> None:
        list(compact(tables.at, timedelta(hours=1), merge=spark_merge(lambda: spark, Merge().target_mb)))

    return {
        "replace": Step(rows_to_replace, replace_half, five_less),
        "drop": Step(half_is_old, drop_half, five_less),
        "compact": Step(two_batches, merge_files, Tables.check),
    }


POLICY: Final = Path(__file__).parents[3] / "ops" / "deploy"


def test_the_rights_that_the_documentation_names_are_enough_and_fewer_are_not(
    server: S3Server, topic_name: str, monkeypatch: pytest.MonkeyPatch
):
    """The policies of ``ops/deploy``, enforced: a loader's for every step, a reader's for reading only."""
    iam = boto3.client("iam", endpoint_url=server.endpoint, region_name="us-east-1")

    def user(name: str, policy: str) -> dict[str, str]:
        iam.create_user(UserName=name)
        iam.put_user_policy(UserName=name, PolicyName="of-the-test", PolicyDocument=policy)
        key = iam.create_access_key(UserName=name)["AccessKey"]
        return {"AWS_ACCESS_KEY_ID": key["AccessKeyId"], "AWS_SECRET_ACCESS_KEY": key["SecretAccessKey"]}

    def become(keys: dict[str, str]) -> None:
        for variable, value in keys.items():
            monkeypatch.setenv(variable, value)

    def enforce(actions: bytes) -> None:
        url, plain = f"{server.endpoint}/moto-api/reset-auth", {"Content-Type": "text/plain"}
        urllib.request.urlopen(urllib.request.Request(url, actions, plain, method="POST")).close()

    writing, reading = ((POLICY / f"s3-{who}.json").read_text() for who in ("loader", "reader"))
    loader, reader = user("loader", writing), user("reader", reading)
    no_deletion = user("keeper", writing.replace('"s3:DeleteObject", ', ""))
    tables = Tables(Location.of(f"s3://{BUCKET}/{topic_name}/t"))
    enforce(b"0")
    try:
        become(reader)
        with pytest.raises(StorageUnavailable, match="privileges"):
            tables.create()
        become(loader)
        tables.create()
        for name, step in STEPS.items():
            if name != "create":
                step.before(tables)
                step.do(tables)
                step.check(tables)
        become(reader)
        look(tables)
        assert len(rows_by_log(tables.at)) == tables.rows
        with pytest.raises(StorageUnavailable, match="cannot be written"):
            tables.load()
        become(no_deletion)
        with pytest.raises(StorageUnavailable, match="cannot be compacted"):
            list(compact(tables.at, timedelta(0)))
        assert len(rows_by_log(tables.at)) == tables.rows
    finally:
        enforce(b"inf")


@pytest.mark.long
@needs_azure
def test_every_step_on_azure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with AzureServer(tmp_path) as running:
        for variable, value in running.environment.items():
            monkeypatch.setenv(variable, value)
        every_step(Location.of(f"{ROOT}/a/t"))


@needs_gcs
def test_every_step_on_google_cloud_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """And of two writers of one object that must not be there, one is refused."""
    with GcsServer(tmp_path) as running:
        for variable, value in running.environment.items():
            monkeypatch.setenv(variable, value)
        every_step(Location.of(f"gs://{BUCKET}/a/t"))
        with ThreadPoolExecutor(8) as pool:
            for number in range(20):
                at = f"/{BUCKET}/new-{number}"
                assert sorted(pool.map(created_at, [f"{running.endpoint}{at}"] * 8)) == [200, *[412] * 7]


@needs_gcs
@pytest.mark.parametrize("kind", [BUSY, FAILS, LOST_ANSWER, CUT])
def test_a_commit_on_google_cloud_storage_is_judged_by_what_is_stored(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with GcsServer(tmp_path) as running:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", running.endpoint)
        tables = Tables(Location.of(f"gs://{BUCKET}/a/t"))
        tables.create()
        tables.load()
        planned(tables)
        with relay_process(running.endpoint, kind, "PUT", r"/t/_delta_log/[0-9]+\.json") as url:
            monkeypatch.setenv("STORAGE_EMULATOR_HOST", url)
            with suppress(LoadError):
                write_rows(tables)
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", running.endpoint)
        write_rows(tables)
        ten_more(tables)


def created_at(url: str) -> int:
    """The status of a PUT of an object that must be new."""
    request = urllib.request.Request(url, b"x", {"x-goog-if-generation-match": "0"}, method="PUT")
    try:
        with urllib.request.urlopen(request) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def every_step(at: Location) -> None:
    """What Python does with a table, without faults."""
    tables = Tables(at)
    tables.create()
    for name, step in STEPS.items():
        if name != "create":
            step.before(tables)
            step.do(tables)
            step.check(tables)
