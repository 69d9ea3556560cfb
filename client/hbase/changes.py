"""From an edit of HBase to chunks: one chunk an edit; a line of JSON, or a map of MessagePack, a cell. Pure.

The source of a chunk is the region, its seqno the sequence id of the edit, which rises within a region and is never
used twice. So an edit that HBase ships again is a duplicate for the gateway. The partition key is the table: the edits
of a row stay in one partition, in order, also when its region is split, merged or moved.

An edit of more than `PART_BYTES` is cut into parts, between cells: the first is a chunk of the source REGION, the
second of the source REGION/2, and so on, all with the seqno of the edit. Each part is a duplicate when it comes again.
The next edit is written after all of them.

Chunks are made one by one, so that the memory for a request is bounded by its size.
"""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple
from uuid import UUID

import msgpack
from logferry.client.hbase import messages
from logferry.client.hbase.cells import BULK_LOAD, MARK_FAMILY, WHOLE_FAMILY, CellBlock, HBaseCell
from logferry.client.hbase.definition import PeerDefinition
from logferry.client.hbase.messages import ForeignBytes
from logferry.gateway.contract.chunk import Chunk
from logferry.gateway.contract.names import MAX_SEQNO

# It may never change: an edit of which a part is recorded must be cut again as it was. Below the chunks of a gateway.
PART_BYTES = 1 << 20
CLOCKS_MS = 120_000
_MOST_REGIONS = 100_000
_REGION = re.compile(r"[0-9a-f]{32}\Z")


class WrongCluster(Exception):
    """The edits are another cluster's."""


class SequenceRestarted(Exception):
    """What is shipped would look like duplicates of what was recorded."""


class RegionChunk(NamedTuple):
    """``table``: the partition key. ``source_id``: the region, and the number of a further part."""

    table: str
    source_id: str
    chunk: Chunk


class EditKey(NamedTuple):
    """``write_time``: in milliseconds."""

    table: str
    region: str
    sequence_id: int
    write_time: int


class CellFilter:
    """Which cells a subscription wants: all conditions that are given must hold.

    A delete of a whole family passes the condition on qualifiers, since it deletes those that are wanted.
    """

    def __init__(self, definition: PeerDefinition) -> None:
        self._tables = frozenset(definition.tables)
        self._families = frozenset(name.encode() for name in definition.families)
        self._qualifiers = frozenset(name.encode() for name in definition.qualifiers)
        self._prefixes = tuple(prefix.encode() for prefix in definition.row_prefixes)
        self._pattern = re.compile(definition.row_pattern.encode()) if definition.row_pattern else None

    def wants_table(self, table: str) -> bool:
        return table in self._tables

    def wants(self, cell: HBaseCell) -> bool:
        if self._families and cell.family not in self._families:
            return False
        if self._qualifiers and cell.qualifier not in self._qualifiers and cell.type not in WHOLE_FAMILY:
            return False
        if self._prefixes and not cell.row.startswith(self._prefixes):
            return False
        return self._pattern is None or self._pattern.search(cell.row) is not None


class RegionHistory:
    """The newest edit of each region that this process has met, to notice that sequence ids begin again.

    HBase's ``truncate_region`` does that: the gateway would take all that follows for duplicates, silently. What comes
    again has an earlier time than the edit with the highest sequence id, but for the clocks of two region servers,
    which HBase lets differ by half a minute each from the master's; twice that is allowed.
    """

    def __init__(self) -> None:
        self._newest: dict[str, tuple[int, int]] = {}  # region → sequence id and time of its edit

    def check(self, region: str, seqno: int, write_ms: int) -> None:
        """Raises SequenceRestarted."""
        newest = self._newest.get(region)
        if newest is None or seqno > newest[0]:
            if len(self._newest) >= _MOST_REGIONS:
                self._newest.clear()
            self._newest[region] = seqno, write_ms
        elif write_ms > newest[1] + CLOCKS_MS:
            raise SequenceRestarted(
                f"edit {seqno} of {region} was written {(write_ms - newest[1]) // 1000} s after edit {newest[0]}: "
                "its sequence ids began again, as after truncate_region. Delete the region's sources in the gateway, "
                "and restart all connectors"
            )


class ShippedEdits:
    """The chunks of one ``ReplicateWALEntry``. ``bulk_loads``: how many were met and left out, by table. ``newest_ms``:
    when the newest of its edits was written, 0 without one.
    """

    def __init__(
        self,
        param: memoryview,
        cells: memoryview,
        cluster_id: str,
        wanted: CellFilter,
        history: RegionHistory | None = None,
        encoding: str = "json",
    ) -> None:
        """``cluster_id``: of the HBase that is served. ``encoding``: of the definition. Raises ForeignBytes."""
        self._request = messages.parse("ReplicateWALEntryRequest", param)
        self._cluster_id = cluster_id
        self._cells, self._wanted = CellBlock(cells), wanted
        self._history = history or RegionHistory()
        self._encoding = encoding
        self._last: dict[str, int] = {}
        self._first: dict[tuple[bytes, int], tuple[int, memoryview]] | None = None
        self.bulk_loads: dict[str, int] = {}
        self.newest_ms = 0

    def __iter__(self) -> Iterator[RegionChunk]:
        """In the order of the request. Raises ForeignBytes, WrongCluster and SequenceRestarted; the chunks before that
        may be recorded: HBase ships the request again.
        """
        for entry in self._request.entry:
            yield from self._edit(entry)
        self._cells.check_end()

    def _edit(self, entry: Any) -> Iterator[RegionChunk]:
        key, count = entry.key, entry.associated_cell_count
        region = key.encoded_region_name.decode("ascii", "replace")
        seqno = key.log_sequence_number
        if entry.key_value_bytes or count < 0:
            raise ForeignBytes(f"edit {seqno} of {region} does not have its cells in the cell block")
        self._check_cluster(key)
        table = key.table_name.decode("utf-8", "replace")
        if not self._wanted.wants_table(table):  # such as HBase's own marks, of which all servers use one region
            self._cells.next_block(count)
            return
        if not _REGION.match(region) or not key.HasField("log_sequence_number") or seqno > MAX_SEQNO:
            raise ForeignBytes(f"an edit has the region {region!r} and the sequence id {seqno}")
        if seqno <= self._last.get(region, -1):
            # A region server whose log breaks writes what was not acknowledged into the next one, too.
            start = self._cells.at
            if self._cells.next_block(count) == self._block_before(start, key):
                return
            raise ForeignBytes(f"edit {seqno} of {region} comes after {self._last[region]}: the peer is not serial")
        self._history.check(region, seqno, key.write_time)
        self._last[region] = seqno
        self.newest_ms = max(self.newest_ms, key.write_time)
        edit = EditKey(table, region, seqno, key.write_time)
        yield from chunks_of_edit(edit, self._cells.take(count), self._wanted, self.bulk_loads, self._encoding)

    def _block_before(self, start: int, key: Any) -> memoryview | None:
        """The cells of the first edit of this region and sequence id; None if it is not before ``start``."""
        if self._first is None:  # seldom: no call pays for it that has no such edit
            self._first, cells = {}, CellBlock(self._cells.block)
            for entry in self._request.entry:
                found = cells.at, cells.next_block(entry.associated_cell_count)
                self._first.setdefault((entry.key.encoded_region_name, entry.key.log_sequence_number), found)
        at, block = self._first[key.encoded_region_name, key.log_sequence_number]
        return block if at < start else None

    def _check_cluster(self, key: Any) -> None:
        """HBase marks an edit with each cluster that it went through: that of the sender is among them."""
        names = [str(UUID(int=one.most_sig_bits << 64 | one.least_sig_bits)) for one in key.cluster_ids]
        if self._cluster_id not in names:
            shown = ", ".join(names) or "(not named)"
            raise WrongCluster(f"an edit is of the cluster {shown}, and this connector serves {self._cluster_id}")


def chunks_of_edit(
    edit: EditKey,
    cells: Iterable[HBaseCell],
    wanted: CellFilter,
    bulk_loads: dict[str, int],
    encoding: str = "json",
) -> Iterator[RegionChunk]:
    """All ``cells`` are taken. ``bulk_loads``: those that are met and left out are counted in it, by table.
    ``encoding``: of the definition.
    """
    is_wanted = wanted.wants_table(edit.table)
    lines: list[bytes] = []
    written = map_of if encoding == "msgpack" else line_of
    part, size = 1, 0
    for cell in cells:
        if cell.family == MARK_FAMILY:
            if cell.qualifier == BULK_LOAD and is_wanted:
                bulk_loads[edit.table] = bulk_loads.get(edit.table, 0) + 1
        elif is_wanted and wanted.wants(cell):
            line = written(cell, *edit)
            if lines and size + len(line) > PART_BYTES:
                yield _part(edit, part, encoding, lines)
                part, size, lines = part + 1, 0, []
            lines.append(line)
            size += len(line)
    if lines:
        yield _part(edit, part, encoding, lines)


def _part(edit: EditKey, part: int, encoding: str, lines: list[bytes]) -> RegionChunk:
    attributes = {"table": edit.table} | ({"format": "msgpack"} if encoding == "msgpack" else {})
    chunk = Chunk(edit.sequence_id, None, edit.write_time, attributes, b"".join(lines))
    return RegionChunk(edit.table, edit.region if part == 1 else f"{edit.region}/{part}", chunk)


def line_of(cell: HBaseCell, table: str, region: str, sequence_id: int, write_time: int) -> bytes:
    """A change as a line of JSON; the guide describes its keys. Bytes that are not UTF-8 have a key of their own."""
    found: dict[str, object] = {"table": table}
    _put(found, "row", cell.row)
    _put(found, "family", cell.family)
    _put(found, "qualifier", cell.qualifier)
    found["type"], found["timestamp"] = cell.type, cell.timestamp
    if cell.type == "put":
        _put(found, "value", cell.value)
    if cell.tags:
        found["tags"] = [{"type": kind, "data_base64": b64encode(data).decode()} for kind, data in cell.tags]
    found["sequence_id"], found["write_time"], found["region"] = sequence_id, write_time, region
    return json.dumps(found, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def map_of(cell: HBaseCell, table: str, region: str, sequence_id: int, write_time: int) -> bytes:
    """A change as a map of MessagePack: the keys of `line_of`, with bytes as bytes."""
    names = {"row": cell.row, "family": cell.family, "qualifier": cell.qualifier}
    found: dict[str, object] = {"table": table, **names, "type": cell.type, "timestamp": cell.timestamp}
    if cell.type == "put":
        found["value"] = cell.value
    if cell.tags:
        found["tags"] = [{"type": kind, "data": data} for kind, data in cell.tags]
    return bytes(msgpack.packb({**found, "sequence_id": sequence_id, "write_time": write_time, "region": region}))


def _put(found: dict[str, object], name: str, data: bytes) -> None:
    try:
        found[name] = data.decode()
    except UnicodeDecodeError:
        found[f"{name}_base64"] = b64encode(data).decode()
