"""The batch ledger: the offset ranges of each batch of a table. Without Spark, so that an audit can read it.

It is a small Delta table beside the main one. Batch ``n`` is written here before anything else of it, put-if-absent: of
several loaders one wins, and all read the winner's entry back and execute that. An entry names the data centre of its
offsets, each topic's Kafka id, and the parser; it never changes.

Crash windows: before the put, nothing happened; after it, the next run finds the entry and loads exactly its ranges,
whatever Kafka has received since. The put is one atomic creation of a commit file by delta-rs. Spark's own commit to a
local folder checks and then renames, which is too weak: two loaders could each believe in their own entry.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable, Schema, Transaction
from deltalake.exceptions import DeltaError
from logferry.loaders.errors import LedgerBroken, Overtaken, StorageUnavailable, UnsupportedFeature
from logferry.loaders.location import Location
from logferry.loaders.planning.ledger_entry import LOAD, JobOrigin, LedgerEntry, OriginOffset, TablePaths
from logferry.loaders.planning.plan import Range
from logferry.loaders.storage.files import (
    STORAGE_ERRORS,
    dataset,
    open_table,
    storage_errors,
    written_rows,
)
from logferry.loaders.storage.snapshots import newest_table, read_commit

# The application of Delta's transaction versions, the same in a table, its quarantine and its ledger.
APP: Final = "logferry.loader"
_TRIES: Final = 10
_NEW_COMMITS: Final = 4

_TYPES: Final = {
    "int": pa.int32(),
    "long": pa.int64(),
    "boolean": pa.bool_(),
    "string": pa.string(),
    "binary": pa.binary(),
    "time": pa.timestamp("us", "UTC"),
}


def arrow_schema(columns: str, *, nullable: bool = True) -> pa.Schema:
    """From columns as in ``batch long, topic string``."""
    pairs = (column.split() for column in columns.split(","))
    return pa.schema([pa.field(name, _TYPES[kind], nullable=nullable) for name, kind in pairs])


LEDGER_SCHEMA: Final = pa.schema(
    [
        *arrow_schema(
            "batch long, dc string, topic string, topic_id string, partition int, start long, end long, parser string, "
            "run string, planned time",
            nullable=False,
        ),
        # Null in ledgers of older loaders, and in entries without settings.
        *arrow_schema("kind string, settings string, origin string"),
        # Null where the topic is the data centre's own, or the original was unknown.
        *arrow_schema("original_id string, original long, reload string, cutoff time"),
        # Null in an entry of one batch. Of a ledger that was merged: loaders that do not know it cannot write there.
        *arrow_schema("first long"),
    ]
)
_METADATA_CHANGED: Final = "Metadata changed"
_UNMERGED: Final = pa.schema([field for field in LEDGER_SCHEMA if field.name != "first"])
# What all rows of a batch have in common.
HEAD: Final = ("dc", "parser", "run", "planned", "kind", "settings", "origin", "reload", "cutoff")


def create_table(
    path: Location,
    schema: Schema | pa.Schema,
    name: str,
    configuration: Mapping[str, str | None] | None = None,
    partition_by: Sequence[str] = (),
) -> None:
    """Creates an empty table unless there is one. Several loaders may call it at once; one creation wins."""
    if newest_table(path) is not None:
        return
    more: dict[str, Any] = {"configuration": dict(configuration or {}), "partition_by": list(partition_by) or None}
    with storage_errors(f"{path} cannot be created"):
        try:
            DeltaTable.create(path.uri, schema, mode="ignore", name=name, storage_options=path.options, **more)
        except (DeltaError, OSError):
            if newest_table(path) is None:
                raise


def add_columns(path: Location, schema: Schema) -> None:
    """Adds the missing columns of ``schema`` to a table. Several loaders may do so. Raises StorageUnavailable."""
    for _ in range(_TRIES):
        table = existing_table(path)
        have = {field.name for field in table.schema().fields}
        lacking = [field for field in schema.fields if field.name not in have]
        if not lacking:
            return
        # This fails where another loader adds one meanwhile; then fewer are missing. So it may where the store does.
        with suppress(*STORAGE_ERRORS):
            table.alter.add_columns(lacking)
    raise StorageUnavailable(f"{path}: columns could not be added after several tries")


def existing_table(path: Location) -> DeltaTable:
    """`newest_table`, for a table that was there before. Raises StorageUnavailable also where it is gone."""
    return _existing(path, newest_table(path))


def pinned_table(path: Location) -> DeltaTable:
    """As `existing_table`, but an object of the caller's own, which stays at its version."""
    return _existing(path, open_table(path))


def _existing(path: Location, table: DeltaTable | None) -> DeltaTable:
    if table is None:
        raise StorageUnavailable(f"{path} no longer exists")
    return table


# A loader adds and replaces files by delta-rs. It does not read deletion vectors, evaluate constraints or expressions,
# nor write row ids, clustering, commit timestamps or mapped names. A table with such a feature is refused by its name,
# before the first row; so is one with a feature that is not known here. These are harmless where no property or column
# below uses them.
_KNOWN: Final = {
    *("appendOnly", "invariants", "checkConstraints", "changeDataFeed", "generatedColumns", "identityColumns"),
    *("columnMapping", "timestampNtz", "allowColumnDefaults", "domainMetadata", "vacuumProtocolCheck"),
    "inCommitTimestamp",
}
# Property → feature, unless the property has one of the values.
_PROPERTIES: Final[Mapping[str, tuple[str, Collection[str]]]] = {
    "delta.enableDeletionVectors": ("deletionVectors", ("false",)),
    "delta.enableRowTracking": ("rowTracking", ("false",)),
    "delta.enableInCommitTimestamps": ("inCommitTimestamp", ("false",)),
    "delta.columnMapping.mode": ("columnMapping", ("none",)),
}
_CONSTRAINT: Final = "delta.constraints."
_COLUMNS: Final[Mapping[str, str]] = {
    "delta.generationExpression": "generatedColumns",
    "delta.identity.start": "identityColumns",
    "delta.invariants": "invariants",
}


def unsupported_features(
    features: Collection[str], properties: Mapping[str, str | None], columns: Sequence[tuple[str, Mapping[str, Any]]]
) -> list[str]:
    """What the loader cannot keep, each with where it is used. ``columns``: names and their metadata."""
    found = {name: name for name in features if name not in _KNOWN}
    for name, value in properties.items():
        feature, harmless = _PROPERTIES.get(name, ("", ()))
        if feature and (value or "").lower() not in harmless:
            found[feature] = f"{feature} ({name}={value})"
        if name.startswith(_CONSTRAINT):
            found["checkConstraints"] = f"checkConstraints ({name.removeprefix(_CONSTRAINT)}: {value})"
    for column, metadata in columns:
        for key, feature in _COLUMNS.items():
            if key in metadata:
                found[feature] = f"{feature} (column {column})"
    return [found[name] for name in sorted(found)]


def check_features(path: Location, table: DeltaTable | None) -> None:
    """To be called before a commit: delta-rs itself ignores some features. Raises UnsupportedFeature."""
    if table is None:
        return
    protocol = table.protocol()
    features = {*(protocol.reader_features or ()), *(protocol.writer_features or ())}
    columns = [(field.name, field.metadata or {}) for field in table.schema().fields]
    if found := unsupported_features(features, table.metadata().configuration, columns):
        raise UnsupportedFeature(
            f"{path} uses {', '.join(found)}, which the loader does not support: rows would be wrong. "
            "Remove it (ALTER TABLE … DROP FEATURE, DROP CONSTRAINT, UNSET TBLPROPERTIES), or load into a new table"
        )


def read_rows(path: Location, filters: Any = None) -> list[dict[str, Any]]:
    """The rows of a small table; empty where there is none. Raises StorageUnavailable."""
    found: list[dict[str, Any]] = read_arrow(path, filters).to_pylist()
    return found


def read_arrow(path: Location, filters: Any = None, columns: list[str] | None = None) -> pa.Table:
    """The rows of a table; empty where there is none. Raises StorageUnavailable."""
    table = newest_table(path)
    if table is None:
        return pa.table({})
    with storage_errors(f"{path} cannot be read"):
        wanted = None if filters is None else pq.filters_to_expression(filters)
        return dataset(path, table).to_table(columns=columns, filter=wanted)


class _Known(threading.local):
    """By address: an object of the table, its version, and the last batch of that. Of this object alone: a version may
    become another commit, since Spark overwrites some, and `newest_table` opens another object then."""

    def __init__(self) -> None:
        self.batches: dict[str, tuple[DeltaTable, int, int]] = {}


_KNOWN_BATCHES: Final = _Known()


def last_batch(table: DeltaTable | None) -> int:
    """The last batch that a table (main, ledger or quarantine) holds, by its own transaction state; -1: none.

    delta-rs reads every commit since the last checkpoint for it. Where the same object was asked before, only the
    commits in between are read. Raises StorageUnavailable.
    """
    if table is None:
        return -1
    uri, version = table.table_uri, int(table.version())
    known = _KNOWN_BATCHES.batches.get(uri)
    with storage_errors(f"{uri} cannot be read"):
        batch = None
        if known is not None and known[0] is table and known[1] <= version <= known[1] + _NEW_COMMITS:
            batch = _batch_after(uri, known, version)
        batch = table.transaction_version(APP) if batch is None else batch
    found = -1 if batch is None else int(batch)
    _KNOWN_BATCHES.batches[uri] = table, version, found
    return found


def _batch_after(uri: str, known: tuple[DeltaTable, int, int], version: int) -> int | None:
    """The last batch of a version soon after the known one; None: not to be found out so."""
    batch = known[2]
    for number in range(known[1] + 1, version + 1):
        try:
            actions = map(json.loads, read_commit(uri, number).splitlines())
            batch = next((a["txn"]["version"] for a in actions if a.get("txn", {}).get("appId") == APP), batch)
        except FileNotFoundError:
            return None
    return batch


def table_at(path: Location, batch: int) -> DeltaTable:
    """The table, which holds exactly this batch, pinned. Raises Overtaken."""
    table = open_table(path)
    if table is None or last_batch(table) != batch:
        raise Overtaken(f"{path} holds batch {last_batch(table)} and not {batch}: another loader has continued")
    return table


def read_ledger(path: Location) -> list[LedgerEntry]:
    """Every entry of the ledger of the table at ``path`` (the main table's), oldest first.

    The last one may be planned only: it is loaded when it is not above `last_batch` of the main table.
    """
    return Ledger(TablePaths.of(path).ledger).entries()


# An entry never changes. By address: the ledger's own id with the batch, and the entry that was read last.
_LAST: Final[dict[str, tuple[tuple[str, int], LedgerEntry]]] = {}


class Ledger:
    """The ledger at its own path. Every call reads the stored table."""

    def __init__(self, path: Location) -> None:
        self.path = path

    def create(self) -> None:
        """Creates an empty ledger unless there is one, and adds missing columns to an older one."""
        create_table(self.path, _UNMERGED, "logferry batch ledger", {"delta.appendOnly": "true"})
        add_columns(self.path, Schema.from_arrow(_UNMERGED))

    def last(self) -> int:
        return last_batch(newest_table(self.path))

    def entries(self) -> list[LedgerEntry]:
        return _entries(read_arrow(self.path), self.path)

    def get(self, batch: int) -> LedgerEntry:
        """The entry of a batch. Raises LedgerBroken when it is missing: then the offsets of the table are unknown."""
        found: list[LedgerEntry] = []
        if (table := newest_table(self.path)) is not None:
            name = (str(table.metadata().id), batch)
            known, entry = _LAST.get(self.path.uri, (None, None))
            if known == name and entry is not None:
                return entry
            with storage_errors(f"{self.path} cannot be read"):
                # Each batch has its own file until they are merged; the others are not looked at.
                stored = dataset(self.path, table, f"batch = {batch}")
                found = _entries(stored.to_table(filter=ds.field("batch") == batch), self.path)
                if not found and any(batch in entry.batches for entry in self.entries()):
                    raise Overtaken(
                        f"{self.path}: batch {batch} is summed up with later ones: another loader continued"
                    )
            if found:
                _LAST[self.path.uri] = name, found[0]
        if not found:
            raise LedgerBroken(
                f"{self.path} has no entry for batch {batch}, though the table holds that batch: its offsets are "
                "unknown, so nothing is loaded. Restore the ledger, or load into a new table"
            )
        return found[0]

    def put(self, entry: LedgerEntry) -> LedgerEntry:
        """Writes the entry unless its batch has one; returns the stored one. Safe to call again."""
        if newest_table(self.path) is None:
            raise LedgerBroken(f"{self.path} no longer exists")
        if self.last() < entry.batch:
            properties = CommitProperties(
                app_transactions=[Transaction(APP, entry.batch)], custom_metadata={"run": entry.run}
            )
            with storage_errors(f"{self.path}: the entry of batch {entry.batch} cannot be written"):
                adds = written_rows(self.path, entry_rows(entry))
                for tries_left in reversed(range(_TRIES)):
                    if last_batch(table := existing_table(self.path)) >= entry.batch:
                        break
                    try:
                        table.create_write_transaction(adds, "append", table.schema(), [], commit_properties=properties)
                    except (DeltaError, OSError) as error:
                        if self.last() < entry.batch:
                            if tries_left and _METADATA_CHANGED in str(error):
                                continue
                            raise
                    break
        return self.get(entry.batch)


def new_entry(
    batch: int,
    dc: str,
    parser: str,
    run: str,
    ranges: Iterable[Range],
    *,
    kind: str = LOAD,
    settings: str = "",
    origin: JobOrigin | None = None,
    originals: Iterable[OriginOffset] = (),
    reload: Iterable[Range] = (),
    cutoff: datetime | None = None,
) -> LedgerEntry:
    head = (batch, dc, parser, run, datetime.now(UTC), tuple(sorted(ranges)), kind, settings, origin)
    return LedgerEntry(*head, tuple(sorted(originals)), tuple(sorted(reload)), cutoff)


def entry_rows(entry: LedgerEntry) -> pa.Table:
    """The entry as rows of the ledger, one a range."""
    head = {
        **entry._asdict(),
        "settings": entry.settings or None,
        "origin": entry.origin.as_json if entry.origin else None,
        "reload": json.dumps([r._asdict() for r in entry.reload]) if entry.reload else None,
    }
    known = {at.key: (at.topic_id, at.offset) for at in entry.originals}
    originals = [known.get(r.key, (None, None)) for r in entry.ranges]
    columns: dict[str, list[Any]] = {name: [head[name]] * len(originals) for name in ("batch", "first", *HEAD)}
    # By column: ten thousand ranges as rows take half a second.
    columns |= {name: [r[number] for r in entry.ranges] for number, name in enumerate(Range._fields)}
    columns |= {name: [at[number] for at in originals] for number, name in enumerate(("original_id", "original"))}
    schema = _UNMERGED if entry.first is None else LEDGER_SCHEMA
    return pa.table([pa.array(columns[field.name], field.type) for field in schema], schema=schema)


def with_all_columns(rows: pa.Table) -> pa.Table:
    """Rows of an older ledger as of a present one."""
    for name in LEDGER_SCHEMA.names:
        if name not in rows.column_names:
            rows = rows.append_column(name, pa.nulls(rows.num_rows, LEDGER_SCHEMA.field(name).type))
    return rows


def _entries(rows: pa.Table, path: Location) -> list[LedgerEntry]:
    rows = with_all_columns(rows)
    heads: dict[int, list[dict[str, Any]]] = {}
    for head in rows.group_by(["batch", "first", *HEAD]).aggregate([]).to_pylist():
        heads.setdefault(head["batch"], []).append(head)
    ranges: dict[int, list[Range]] = {batch: [] for batch in heads}
    numbers = rows["batch"].to_pylist()
    for batch, r in zip(numbers, map(Range, *(rows[name].to_pylist() for name in Range._fields)), strict=True):
        ranges[batch].append(r)
    originals: dict[int, list[OriginOffset]] = {batch: [] for batch in heads}
    for row in rows.filter(pc.is_valid(rows["original"])).to_pylist():
        at = OriginOffset(row["topic"], row["partition"], row["original_id"], row["original"])
        originals[row["batch"]].append(at)
    found = []
    for batch, of_batch in sorted(heads.items()):
        if len(of_batch) != 1 or len({(r.topic, r.partition) for r in ranges[batch]}) != len(ranges[batch]):
            raise LedgerBroken(f"{path}: batch {batch} was written twice; the ledger is damaged")
        head = of_batch[0]
        origin = JobOrigin.parse(head["origin"]) if head["origin"] else None
        reload = tuple(Range(**r) for r in json.loads(head["reload"] or "[]"))
        common = (batch, head["dc"], head["parser"], head["run"], head["planned"], tuple(sorted(ranges[batch])))
        first = None if head["first"] == batch else head["first"]
        kind, settings, places = head["kind"] or LOAD, head["settings"] or "", tuple(sorted(originals[batch]))
        found.append(LedgerEntry(*common, kind, settings, origin, places, reload, head["cutoff"], first))
    return found
