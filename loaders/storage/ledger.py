"""The batch ledger: which offsets each batch of a table holds. Without Spark, so that an audit can read it.

A small Delta table beside the main one. Batch ``n`` is written here before anything of it is written anywhere else,
put-if-absent: of several loaders one wins, and all of them read the winner's entry back and load that. An entry names
the data centre whose offsets it holds, each topic's Kafka id, and the parser; it is never changed.

Crash windows: before the put, nothing happened; after it, the next run finds the entry and loads exactly its ranges,
whatever Kafka has got since. The put is one atomic creation of a commit file by delta-rs (Spark's own commit to a local
folder looks and then renames, which is too weak here: two loaders could each believe in another entry).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.dataset as ds
from deltalake import CommitProperties, DeltaTable, Schema, Transaction, write_deltalake
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from logferry.loaders.errors import LedgerBroken, StorageAway
from logferry.loaders.planning.plan import Range, TopicPartition

# The application of Delta's transaction versions, the same in a table, its quarantine and its ledger.
APP: Final = "logferry.loader"
_TRIES: Final = 10
_BOUNDS: Final = ("min.batch", "max.batch")

_SCHEMA: Final = pa.schema(
    [
        pa.field("batch", pa.int64(), nullable=False),
        pa.field("dc", pa.string(), nullable=False),
        pa.field("topic", pa.string(), nullable=False),
        pa.field("topic_id", pa.string(), nullable=False),
        pa.field("partition", pa.int32(), nullable=False),
        pa.field("start", pa.int64(), nullable=False),
        pa.field("end", pa.int64(), nullable=False),
        pa.field("parser", pa.string(), nullable=False),
        pa.field("run", pa.string(), nullable=False),
        pa.field("planned", pa.timestamp("us", "UTC"), nullable=False),
        # Null in a ledger from before there was more than one kind, and in entries without settings.
        pa.field("kind", pa.string()),
        pa.field("settings", pa.string()),
        pa.field("origin", pa.string()),
        # Null where the topic is the data centre's own, or nobody knew.
        pa.field("original_id", pa.string()),
        pa.field("original", pa.int64()),
        pa.field("reload", pa.string()),
        pa.field("cutoff", pa.timestamp("us", "UTC")),
    ]
)

LOAD: Final = "load"
REQUARANTINE: Final = "requarantine"
RESET: Final = "reset"
MOVE: Final = "move"
RELOAD: Final = "reload"
DROP: Final = "drop"
KINDS: Final = (LOAD, REQUARANTINE, RESET, MOVE, RELOAD, DROP)


# By itself, the copy of a chunk that came by another data centre is known as one for so long.
MOVED_DAYS: Final = 14


class Origin(NamedTuple):
    """Where a job reads, and its setting ``moved_days``: for those who look at what is not loaded yet."""

    bootstrap_servers: str
    topics: tuple[str, ...]
    moved_days: int = MOVED_DAYS

    @property
    def as_json(self) -> str:
        return json.dumps(self._asdict())

    @classmethod
    def parse(cls, text: str) -> Origin:
        said = json.loads(text)
        return cls(said["bootstrap_servers"], tuple(said["topics"]), said.get("moved_days", MOVED_DAYS))


class Original(NamedTuple):
    """A position in a topic's original: the same place in every data centre. ``topic_id``: of the original."""

    topic: str
    partition: int
    topic_id: str
    offset: int

    @property
    def key(self) -> TopicPartition:
        return TopicPartition(self.topic, self.partition)


class LedgerEntry(NamedTuple):
    """One batch. ``ranges`` hold every partition known by then, also those of which the batch reads nothing.

    ``kind``: ``load`` reads the ranges out of Kafka; ``requarantine`` brings lines of the quarantine into the table;
    ``reset`` moves positions, by a command; ``move`` brings them to another data centre, whose they are; ``reload``
    reads the ranges of ``reload`` again, in place of the rows that the table holds of them; ``drop`` removes the rows
    from before ``cutoff``. ``settings``: the parser's, so that a planned batch can be finished as it was planned.
    ``origin``: the job's addresses and topics; None in entries of older loaders. ``originals``: where the ranges of
    other data centres' topics end there, as far as it was known.
    """

    batch: int
    dc: str
    parser: str
    run: str
    planned: datetime
    ranges: tuple[Range, ...]
    kind: str = LOAD
    settings: str = ""
    origin: Origin | None = None
    originals: tuple[Original, ...] = ()
    reload: tuple[Range, ...] = ()
    cutoff: datetime | None = None

    @property
    def reads(self) -> tuple[Range, ...]:
        """The ranges with something to read out of Kafka. Those of a move say what the batch before it has read, in
        the new place: it was planned in the old one, and could not be finished there.
        """
        return tuple(r for r in self.reload or self.ranges if r.size) if self.kind != MOVE else ()


class TablePaths(NamedTuple):
    """A table and what stands beside it."""

    main: Path
    ledger: Path
    quarantine: Path

    @classmethod
    def of(cls, path: Path) -> TablePaths:
        main = path.absolute()
        return cls(main, main.with_name(f"{main.name}_ledger"), main.with_name(f"{main.name}_quarantine"))

    @property
    def sources(self) -> Path:
        return self.main.with_name(f"{self.main.name}_sources")

    @property
    def moved(self) -> Path:
        return self.main.with_name(f"{self.main.name}_moved")

    @property
    def segments(self) -> Path:
        return self.main.with_name(f"{self.main.name}_segments")

    @property
    def every(self) -> tuple[Path, ...]:
        """All folders that belong to the table, whether they are there or not."""
        return (*self, self.sources, self.moved, self.segments)


def create_table(
    path: Path,
    schema: Schema,
    name: str,
    configuration: dict[str, str | None],
    partition_by: Sequence[str] = (),
) -> None:
    """Makes an empty table unless there is one. Several loaders may call it at once; one creation wins."""
    if open_table(path) is not None:
        return
    try:
        DeltaTable.create(
            str(path),
            schema,
            mode="ignore",
            partition_by=list(partition_by) or None,
            name=name,
            configuration=configuration,
        )
    except CommitFailedError:
        if open_table(path) is None:
            raise
    except (DeltaError, OSError) as error:
        raise StorageAway(f"{path} cannot be created: {error}") from error


def add_columns(path: Path, schema: Schema) -> None:
    """Gives a table the columns of ``schema`` that it lacks. Several loaders may do so at once. Raises StorageAway."""
    for _ in range(_TRIES):
        table = open_table(path)
        if table is None:
            raise StorageAway(f"{path} is not there any more")
        have = {field.name for field in table.schema().fields}
        lacking = [field for field in schema.fields if field.name not in have]
        if not lacking:
            return
        # One that another loader adds meanwhile makes this fail; then there is less to add.
        with suppress(CommitFailedError, DeltaError):
            table.alter.add_columns(lacking)
    raise StorageAway(f"{path}: columns could not be added")


def open_table(path: Path) -> DeltaTable | None:
    """The Delta table as it stands now; None when there is none. Raises StorageAway."""
    try:
        return DeltaTable(str(path))
    except TableNotFoundError:
        return None
    except (DeltaError, OSError) as error:
        raise StorageAway(f"{path} cannot be read: {error}") from error


def last_batch(table: DeltaTable | None) -> int:
    """The last batch that a table (main, ledger or quarantine) holds, by its own transaction state; -1: none."""
    version = table.transaction_version(APP) if table is not None else None
    return -1 if version is None else version


def read_ledger(path: Path) -> list[LedgerEntry]:
    """Every entry of the ledger of the table at ``path`` (the main table's), oldest first.

    The last one may be planned only: it is loaded when it is not above `last_batch` of the main table.
    """
    return Ledger(TablePaths.of(path).ledger).entries()


class Ledger:
    """The ledger at its own path. Every call reads what is stored then."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def create(self) -> None:
        """Makes an empty ledger unless there is one, and gives an older one the columns that it lacks."""
        create_table(self.path, Schema.from_arrow(_SCHEMA), "logferry batch ledger", {"delta.appendOnly": "true"})
        add_columns(self.path, Schema.from_arrow(_SCHEMA))

    def last(self) -> int:
        return last_batch(open_table(self.path))

    def entries(self) -> list[LedgerEntry]:
        return _entries(self._rows(None), self.path)

    def get(self, batch: int) -> LedgerEntry:
        """The entry of a batch. Raises LedgerBroken when it is missing: then nobody knows what the table holds."""
        found = _entries(self._rows(batch), self.path)
        if not found:
            raise LedgerBroken(
                f"{self.path} has no entry for batch {batch}, though the table holds that batch: "
                "which offsets were loaded is not known, so nothing is"
            )
        return found[0]

    def put(self, entry: LedgerEntry) -> LedgerEntry:
        """Writes the entry unless its batch has one; returns the one that stands. Safe to call again."""
        table = open_table(self.path)
        if table is None:
            raise LedgerBroken(f"{self.path} is not there any more")
        if last_batch(table) < entry.batch:
            properties = CommitProperties(
                app_transactions=[Transaction(APP, entry.batch)], custom_metadata={"run": entry.run}
            )
            try:
                write_deltalake(table, _rows(entry), mode="append", commit_properties=properties)
            except CommitFailedError:
                # Another loader was faster; with its entry there, this is no failure.
                if self.last() < entry.batch:
                    raise StorageAway(f"{self.path}: the entry of batch {entry.batch} could not be written") from None
            except (DeltaError, OSError) as error:
                raise StorageAway(f"{self.path} cannot be written: {error}") from error
        return self.get(entry.batch)

    def _rows(self, batch: int | None) -> list[dict[str, Any]]:
        table = open_table(self.path)
        if table is None:
            return []
        try:
            stored = table.to_pyarrow_table() if batch is None else _of_batch(table, self.path, batch)
            rows: list[dict[str, Any]] = stored.to_pylist()
        except (DeltaError, OSError) as error:
            raise StorageAway(f"{self.path} cannot be read: {error}") from error
        return rows


def _of_batch(table: DeltaTable, path: Path, batch: int) -> pa.Table:
    """Its rows, out of the files that may hold them: each batch has one of its own, until they are merged."""
    adds = pa.table(table.get_add_actions(flatten=True))
    bounds = [adds[name].to_pylist() if name in adds.column_names else [None] * len(adds) for name in _BOUNDS]
    files = [
        str(path / unquote(name))
        for name, low, high in zip(adds["path"].to_pylist(), *bounds, strict=True)
        if low is None or high is None or low <= batch <= high
    ]
    schema = pa.schema(table.schema().to_arrow())
    if not files:
        return schema.empty_table()
    return ds.dataset(files, schema=schema, format="parquet").to_table(filter=ds.field("batch") == batch)


def new_entry(
    batch: int,
    dc: str,
    parser: str,
    run: str,
    ranges: Iterable[Range],
    *,
    kind: str = LOAD,
    settings: str = "",
    origin: Origin | None = None,
    originals: Iterable[Original] = (),
    reload: Iterable[Range] = (),
    cutoff: datetime | None = None,
) -> LedgerEntry:
    head = (batch, dc, parser, run, datetime.now(UTC))
    more = (tuple(sorted(originals)), tuple(sorted(reload)), cutoff)
    return LedgerEntry(*head, tuple(sorted(ranges)), kind, settings, origin, *more)


def _rows(entry: LedgerEntry) -> pa.Table:
    head = {
        "batch": entry.batch,
        "dc": entry.dc,
        "parser": entry.parser,
        "run": entry.run,
        "planned": entry.planned,
        "kind": entry.kind,
        "settings": entry.settings or None,
        "origin": entry.origin.as_json if entry.origin else None,
        "reload": json.dumps([r._asdict() for r in entry.reload]) if entry.reload else None,
        "cutoff": entry.cutoff,
    }
    known = {at.key: {"original_id": at.topic_id, "original": at.offset} for at in entry.originals}
    rows = [{**head, **r._asdict(), **known.get(r.key, {})} for r in entry.ranges]
    return pa.Table.from_pylist(rows, schema=_SCHEMA)


def _entries(rows: Iterable[Mapping[str, Any]], path: Path) -> list[LedgerEntry]:
    by_batch: dict[int, list[Mapping[str, Any]]] = {}
    for row in rows:
        by_batch.setdefault(row["batch"], []).append(row)
    found = []
    for batch, of_batch in sorted(by_batch.items()):
        heads = {
            (
                *(row["dc"], row["parser"], row["run"], row["planned"]),
                *(row.get("kind") or LOAD, row.get("settings") or "", row.get("origin") or ""),
                *(row.get("reload") or "", row.get("cutoff")),
            )
            for row in of_batch
        }
        ranges = sorted(
            Range(row["topic"], row["partition"], row["topic_id"], row["start"], row["end"]) for row in of_batch
        )
        originals = sorted(
            Original(row["topic"], row["partition"], row["original_id"], row["original"])
            for row in of_batch
            if row.get("original") is not None
        )
        if len(heads) != 1 or len({r.key for r in ranges}) != len(ranges):
            raise LedgerBroken(f"{path}: batch {batch} was written twice")
        dc, parser, run, planned, kind, settings, said, again, cutoff = heads.pop()
        origin = Origin.parse(said) if said else None
        reload = tuple(Range(**r) for r in json.loads(again)) if again else ()
        head = (batch, dc, parser, run, planned)
        more = (tuple(originals), reload, cutoff)
        found.append(LedgerEntry(*head, tuple(ranges), kind, settings, origin, *more))
    return found
