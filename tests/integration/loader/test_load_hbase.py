"""Changes of HBase as rows, and the table with the latest state of each cell."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from logferry.client.hbase.cells import HBaseCell
from logferry.client.hbase.changes import line_of, map_of
from logferry.loaders.batches import execute
from logferry.loaders.batches.execute import Loader
from logferry.loaders.location import Location
from logferry.loaders.parsing.formats import NOT_CHANGE
from logferry.loaders.planning.ledger_entry import TablePaths
from logferry.loaders.runs.table_run import load_table
from logferry.loaders.storage.files import delete_folder, open_table
from logferry.loaders.storage.ledger import last_batch

from tests.support.hbase_loads import REGION, WRITTEN_MS, edit, random_edits, shown, wanted
from tests.support.hbase_state import CellChange
from tests.support.loader import Sent, Topic, quarantine, stored
from tests.support.loader_faults import seeded
from tests.support.table_loads import LoaderDied, die, done, job

pytestmark = pytest.mark.spark

Start = Callable[..., Loader]
PARSER = {"format": "hbase", "latest": True}


ODD = HBaseCell("ä\n".encode(), b"d", b"\xff", 2**62, "put", b"\x00\xfe", ((4, b"ttl"), (9, b"")))
PLAIN = HBaseCell(b"\xfe", b"d", b"", 7, "put", "€".encode())
GONE = HBaseCell(b"r", b"d", b"", 7, "delete_family", b"")


async def test_both_formats_make_the_same_rows(loader: Start, topic: Topic, table: Location):
    await topic.create()
    await topic.write([edit([ODD, PLAIN, GONE], 5), edit([ODD, PLAIN, GONE], 6, map_of)])
    (batch,) = done(load_table(loader(), job(table, topic.name, parser={"format": "hbase"})))
    assert (batch.rows, batch.quarantined) == (6, 0)
    rows = sorted(stored(table), key=lambda row: (row["seqno"], row["line"]))
    names = ["row", "row_bytes", "family", "qualifier", "qualifier_bytes", "type", "timestamp", "value", "value_bytes"]
    for of_edit in (rows[:3], rows[3:]):
        assert [[row[name] for name in names] for row in of_edit] == [
            ["ä\n", None, "d", None, b"\xff", "put", 2**62, None, b"\x00\xfe"],
            [None, b"\xfe", "d", "", None, "put", 7, "€", None],
            ["r", None, "d", "", None, "delete_family", 7, None, None],
        ]
        assert [row["tags"] for row in of_edit] == [
            [{"type": 4, "data": b"ttl"}, {"type": 9, "data": b""}], None, None
        ]  # fmt: skip
    written = datetime.fromtimestamp(WRITTEN_MS / 1000, UTC)
    assert {(row["table"], row["region"], row["write_time"]) for row in rows} == {("orders", REGION, written)}
    assert [row["sequence_id"] for row in rows] == [5] * 3 + [6] * 3
    assert open_table(TablePaths.of(table).latest) is None


FINE = json.loads(line_of(PLAIN._replace(row=b"r"), "orders", REGION, 5, WRITTEN_MS))
BAD: dict[str, dict[str, Any]] = {
    "no row": {"row": None},
    "two rows": {"row_base64": "AA=="},
    "no base64": {"row": None, "row_base64": "?"},
    "no value": {"value": None},
    "a delete with a value": {"type": "delete"},
    "an unknown type": {"type": "merge"},
    "no timestamp": {"timestamp": None},
    "a timestamp that is a text": {"timestamp": "7"},
    "no sequence id": {"sequence_id": None},
    "no table": {"table": None},
}


def test_a_line_that_is_no_change(read: Callable[..., dict[str, Any]]):
    lines = {name: json.dumps(FINE | change).encode() for name, change in BAD.items()}
    given = [json.dumps(FINE).encode(), *lines.values(), b"[]", b"text"]
    found = read(given, format="hbase", msgpack=False)
    assert found.pop(given[0].decode())["value"] == "€"
    assert [name for name, line in lines.items() if found[line.decode()] != NOT_CHANGE] == []
    assert set(found.values()) == {NOT_CHANGE}


async def test_messagepack_that_is_none_goes_to_the_quarantine(loader: Start, topic: Topic, table: Location):
    await topic.create()
    good = edit([PLAIN], 5, map_of)
    await topic.write([good, Sent(REGION, good.chunk._replace(seqno=6, data=good.chunk.data + b"\xc1"))])
    (batch,) = done(load_table(loader(), job(table, topic.name, parser=PARSER)))
    assert batch.rows == 1
    assert b"\n".join(row["bytes"] for row in quarantine(table)) == good.chunk.data + b"\xc1"


# ---- the latest state -----------------------------------------------------------------------------------------------


async def test_the_latest_state_is_that_of_a_scan(loader: Start, topic: Topic, table: Location):
    """After every batch; with loaders that die before and after the commit of the state; made again from the log."""
    await topic.create()
    dice = seeded()
    work = job(table, topic.name, parser={**PARSER, "versions": 1000})
    changes: list[CellChange] = []
    for turn in range(4):
        sent, more = random_edits(dice, len(changes) + 1, 12)
        await topic.write(sent)
        changes += more
        if turn:
            # The state is committed, and the main table is not; or neither is.
            step = "commit_files" if turn == 1 else "merge_latest"
            with pytest.MonkeyPatch.context() as patch:
                if turn == 1:
                    patch.setattr(execute, step, lambda *given, **more: die())
                else:
                    patch.setattr(execute, step, die)
                with pytest.raises(LoaderDied):
                    done(load_table(loader("killed"), work))
        done(load_table(loader(), work))
        assert shown(table) == wanted(changes), turn
    paths = TablePaths.of(table)
    assert last_batch(open_table(paths.latest)) == last_batch(open_table(paths.main)) == 3
    assert sum(row["type"] == "put" for row in stored(paths.main)) == sum(one.kind == "put" for one in changes)
    delete_folder(paths.latest)
    sent, more = random_edits(dice, len(changes) + 100, 1)
    await topic.write(sent)
    done(load_table(loader(), work))
    assert shown(table) == wanted([*changes, *more])


@pytest.mark.long
async def test_the_parts_of_a_large_edit_are_in_order(loader: Start, topic: Topic, table: Location):
    """Of two values of one edit, the second one counts, also if it comes in a further part, and in a batch before."""
    await topic.create()
    first, second = (PLAIN._replace(row=b"r", value=value) for value in (b"first", b"second"))
    for sent in (edit([first, second, second._replace(value=b"third")], 5, part=2), edit([second, first], 5)):
        await topic.write([sent])
        done(load_table(loader(), job(table, topic.name, parser=PARSER)))
    assert [value for *_, value in shown(table).values()] == ["third"]
