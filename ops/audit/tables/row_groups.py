"""A batch of a table's rows → the groups of adjacent rows of one chunk, by Arrow's kernels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from logferry.ops.audit.digests.sums import WHOLE_CHUNK, WHOLE_RECORD, ChunkHead, ChunkLine, LineRun, RecordHead
from logferry.ops.audit.tables.rows import ChunkRows

CHUNK: Final = ("dc", "topic", "partition", "offset", "source_id", "seqno")
HEAD: Final = ("prev", "created", "recorded", "attributes")
STATE: Final = ("resolved", "since")
RECORD: Final = ("key", "headers")
_MICROS: Final = pa.timestamp("us", "UTC")


def grouped(batch: pa.RecordBatch, segment_s: int | None) -> Iterator[ChunkRows]:
    """The rows in their order, grouped where they are adjacent, of one chunk and equal in all columns of the chunk, and
    have consecutive lines. ``segment_s``: the length of the segments, None where there are none."""
    if not batch.num_rows:
        return
    have = set(batch.schema.names)
    keys = {name: _plain(batch.column(name)) for name in (*CHUNK, *HEAD, *STATE, "newline") if name in have}
    if segment_s and "event_time" in have:
        keys["segment"] = _segments(batch.column("event_time"), segment_s)
    content = next(name for name in ("text", "bytes", "data") if name in have)
    stored = batch.column(content).cast(pa.binary())
    texts = (stored.fill_null(b"") if stored.null_count else stored).to_pylist()
    stored_lines = batch.column("line") if content != "data" else None
    changes = [_changes(column) for column in keys.values()]
    changes.append(pa.array([True] * (len(texts) - 1), pa.bool_()) if stored_lines is None else _jumps(stored_lines))
    starts = [0, *(at + 1 for at in pc.indices_nonzero(_any(changes)).to_pylist())]
    firsts = pa.array(starts)
    values = {name: _python(column.take(firsts)) for name, column in keys.items()}
    numbers = [WHOLE_CHUNK] * len(starts) if stored_lines is None else stored_lines.take(firsts).to_pylist()
    more = {name: batch.column(name) for name in RECORD if name in have}
    nothing = [None] * len(starts)
    chunks = zip(*(values[name] for name in CHUNK), strict=True)
    columns = [values.get(name, nothing) for name in ("segment", *STATE)]
    heads = zip(*(values.get(name, nothing) for name in HEAD), strict=True)
    newlines = values.get("newline", nothing)
    ends = [*starts[1:], len(texts)]
    state = zip(*columns, strict=True)
    parts = zip(starts, ends, numbers, newlines, chunks, heads, state, strict=True)
    for start, end, number, newline, chunk, (prev, created, recorded, attributes), batches in parts:
        lines: LineRun | list[ChunkLine] = LineRun(number or 0, texts[start:end], bool(newline))
        head: ChunkHead | RecordHead = ChunkHead(prev, created, recorded, tuple(sorted(attributes or (), key=_by_name)))
        if number is None:
            key, headers = (more[name][start].as_py() if name in more else None for name in RECORD)
            head = RecordHead(recorded, key, tuple((one["key"], one["value"]) for one in headers or ()))
            lines = [ChunkLine(WHOLE_RECORD, text, False) for text in texts[start:end]]
        yield ChunkRows._make((*chunk, lines, *batches, number is None, head))


def _by_name(pair: tuple[str, str | None]) -> tuple[str, str]:
    return pair[0], pair[1] or ""


def _plain(column: Any) -> Any:
    """Times as microseconds since 1970, dictionaries and maps as what they hold."""
    kind = column.type
    if pa.types.is_timestamp(kind):
        return column.cast(pa.timestamp("us", kind.tz)).cast(pa.int64())
    if pa.types.is_map(kind):
        return column.cast(pa.list_(pa.struct([("key", kind.key_type), ("value", kind.item_type)])))
    return column.dictionary_decode() if pa.types.is_dictionary(kind) else column


def _python(column: Any) -> list[Any]:
    found: list[Any] = column.to_pylist()
    if pa.types.is_list(column.type):
        return [None if pairs is None else [(one["key"], one["value"]) for one in pairs] for pairs in found]
    return found


def _segments(times: Any, length_s: int) -> Any:
    """The start of each row's segment in Unix seconds."""
    seconds = times.cast(_MICROS).cast(pa.int64())
    starts = [None if at is None else at // (length_s * 1_000_000) * length_s for at in seconds.to_pylist()]
    return pa.array(starts, pa.int64())


def _any(changes: Iterable[Any]) -> Any:
    found = None
    for one in changes:
        found = one if found is None else pc.or_(found, one)
    return found


def _changes(column: Any) -> Any:
    """Whether each value but the first differs from the one before it."""
    if pa.types.is_list(column.type):
        return _pair_changes(column)
    ours, before = column.slice(1), column.slice(0, len(column) - 1)
    found = pc.not_equal(ours, before)
    if not column.null_count:
        return found
    has, had = ours.is_valid(), before.is_valid()
    return pc.if_else(pc.and_(has, had), found, pc.xor(has, had))


def _pair_changes(column: Any) -> Any:
    """Of lists of pairs."""
    size = pc.list_value_length(column)
    if column.null_count or size.null_count or pc.count_distinct(size).as_py() > 1:
        pairs = column.to_pylist()
        return pa.array([one != other for one, other in zip(pairs[1:], pairs, strict=False)], pa.bool_())
    elements = [pc.list_element(column, index) for index in range(size[0].as_py())]
    fields = (_changes(pc.struct_field(each, [part])) for each in elements for part in (0, 1))
    return _any([pa.repeat(pa.scalar(False), len(column) - 1), *fields])


def _jumps(lines: Any) -> Any:
    """Whether each line but the first is not the next one after the line before it."""
    steps = pc.subtract(lines.slice(1), lines.slice(0, len(lines) - 1))
    return pc.fill_null(pc.not_equal(steps, 1), True)
