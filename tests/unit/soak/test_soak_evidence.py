"""`make soak` reads the segments of a table as the loader writes them, and also what a later batch has replaced."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from logferry.loaders.planning.segment_states import AddedRows, Segment, WatermarkCheck, add_rows, check_segments
from logferry.loaders.planning.source_facts import LowWatermark
from logferry.loaders.storage.side_tables import SNAPSHOT_EVERY, put_segments, read_segments

from tests.soak import evidence
from tests.support.loaded_table import HOUR, MAIN, NOON, RULES, LoadedTable, commit


def put(table: LoadedTable, batch: int, changed: dict[datetime, Segment], *, is_confirmed: bool = True) -> None:
    put_segments(table.paths.segments, batch, "run", changed.values())
    if is_confirmed:
        commit(Path(table.paths.main), batch, [], MAIN)


def test_every_state_is_read_though_later_batches_replace_it(tmp_path: Path) -> None:
    table = LoadedTable(tmp_path)
    table.load(NOON, NOON)
    segments = table.paths.segments
    for batch in (1, 2, 3):
        now = NOON + 3 * batch * HOUR
        check = WatermarkCheck(now, LowWatermark(now, None, sources=2, silent=1))
        put(table, batch, check_segments({NOON: read_segments(segments, batch - 1)[NOON]}, check, batch, RULES))
    late = {NOON: AddedRows(1, 6, NOON, NOON)}
    reopened = add_rows(read_segments(segments, 3), late, SNAPSHOT_EVERY, NOON)
    put(table, SNAPSHOT_EVERY, reopened, is_confirmed=False)
    found = [one for one in evidence.read_segments(Path(table.paths.main)) if one.start == NOON]
    states = [("ACTIVE", 0, 0), ("ACTIVE", 1, 0), ("IMMUTABLE", 2, 0), ("READY", 3, 1)]
    assert [(one.state, one.batch, one.silent) for one in found] == states
    assert [one.written_ms for one in found] == sorted(one.written_ms for one in found)

    commit(Path(table.paths.main), SNAPSHOT_EVERY, [], MAIN)
    put(table, 2 * SNAPSHOT_EVERY, {})
    *before, again = [one for one in evidence.read_segments(Path(table.paths.main)) if one.start == NOON]
    assert before == found
    assert (again.state, again.version, again.rows, again.batch) == ("ACTIVE", 2, 3, SNAPSHOT_EVERY)
