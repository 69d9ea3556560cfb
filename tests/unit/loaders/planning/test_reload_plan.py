"""The targets of a reload: their syntax, their offsets, and the refused ones."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pytest
from logferry.loaders.commands.repair import ReloadPreview
from logferry.loaders.commands.table import main
from logferry.loaders.errors import LoaderConfigError, TopicChanged
from logferry.loaders.location import Location
from logferry.loaders.planning.ledger_entry import LOAD, RELOAD, RESET, LedgerEntry
from logferry.loaders.planning.plan import PartitionOffsets, Range, TopicOffsets, TopicPartition, one_a_partition
from logferry.loaders.planning.reload_plan import HeldOffsets, ReloadTarget, TimeSpan, held_offsets, ranges_to_reload
from logferry.loaders.storage.ledger import Ledger, new_entry
from logferry.loaders.storage.side_tables import LeftOutChunk, left_out_changes
from logferry.loaders.storage.tables import active_filter

T, P0, P1 = "dc1.nginx", TopicPartition("dc1.nginx", 0), TopicPartition("dc1.nginx", 1)
TEN, NOON = datetime(2026, 11, 20, 10, tzinfo=UTC), datetime(2026, 11, 20, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("dc1.nginx", ReloadTarget("", "dc1.nginx")),
        ("dc1.nginx:3", ReloadTarget("", "dc1.nginx", 3)),
        ("dc1.nginx:3=1000..2000", ReloadTarget("", "dc1.nginx", 3, (1000, 2000))),
        ("2026-11-20T10..2026-11-20T12", ReloadTarget("", None, span=TimeSpan(TEN, NOON))),
        ("2026-11-20T10:00..2026-11-20T12:00:00Z", ReloadTarget("", None, span=TimeSpan(TEN, NOON))),
        ("dc1.nginx=2026-11-20T10Z..2026-11-20T12", ReloadTarget("", "dc1.nginx", span=TimeSpan(TEN, NOON))),
        ("dc1.20.nginx", ReloadTarget("", "dc1.20.nginx")),
        ("dc1.a..b:3=0..2", ReloadTarget("", "dc1.a..b", 3, (0, 2))),
    ],
)
def test_what_is_written(text: str, target: ReloadTarget):
    assert ReloadTarget.parse(text) == target._replace(text=text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "dc1.nginx:3=2000..2000",
        "dc1.nginx:3=2000..1000",
        "dc1.nginx:3=2000",
        "dc1.nginx=10..20",
        "dc1.nginx:x",
        "*.nginx",
        "2026-11-20T12..2026-11-20T10",
        "2026-11-20T10..",
        "2026-11-31..2026-12-02",
        "dc1.nginx..dc1.other",
    ],
)
def test_what_is_no_target(text: str):
    with pytest.raises(LoaderConfigError, match="--from"):
        ReloadTarget.parse(text)


def test_a_day_that_does_not_exist_is_refused_with_an_example():
    with pytest.raises(LoaderConfigError, match="'2026-11-31' is not a time like 2026-11-20T10"):
        ReloadTarget.parse("2026-11-31..2026-12-02")


def entry(batch: int, *ranges: tuple[int, int, int], dc: str = "dc1", id_: str = "A", kind: str = LOAD) -> LedgerEntry:
    return new_entry(batch, dc, "lines/1", "run", [Range(T, p, id_, start, end) for p, start, end in ranges], kind=kind)


def test_what_a_table_has_by_its_ledger():
    entries = [entry(0, (0, 5, 10)), entry(1, (0, 10, 30), (1, 0, 4)), entry(2, (0, 30, 99))]
    assert held_offsets(entries, entries[1]) == {P0: HeldOffsets(5, 30), P1: HeldOffsets(0, 4)}, (
        "what is planned does not count"
    )
    skipped = [*entries[:2], entry(2, (0, 50, 50), (1, 4, 4), kind=RESET), entry(3, (0, 50, 60), (1, 4, 4))]
    assert held_offsets(skipped, skipped[-1])[P0] == HeldOffsets(5, 60)
    forgotten = [entries[1], entry(2, (0, 30, 30), kind=RESET)]
    assert set(held_offsets(forgotten, forgotten[-1])) == {P0}


def test_offsets_of_another_data_centre_are_not_ours():
    moved = [
        entry(0, (0, 0, 100), dc="dc1"),
        entry(1, (0, 70, 70), dc="dc2"),
        entry(2, (0, 70, 90), (1, 3, 5), dc="dc2"),
    ]
    assert held_offsets(moved, moved[-1]) == {P0: HeldOffsets(70, 90, ((0, 70),)), P1: HeldOffsets(3, 5)}
    # It comes back, where 100 to 119 are what was loaded there; and once more, with nothing loaded there.
    moved += [entry(3, (0, 120, 120), dc="dc1"), entry(4, (0, 120, 150), dc="dc1"), entry(5, (0, 111, 111), dc="dc2")]
    moved += [entry(6, (0, 150, 150), dc="dc1"), entry(7, (0, 150, 160), (2, 0, 1), dc="dc1")]
    back = held_offsets(moved, moved[-1])
    assert (back[P0].first, back[P0].position) == (0, 160)
    assert back[P0].loaded_here() == [(0, 100), (120, 160)]
    assert held_offsets(moved[:4], moved[3])[P0].loaded_here() == [(0, 100)]


def test_a_topic_with_another_id_is_refused():
    with pytest.raises(TopicChanged, match="rows of the older topic have the same offsets"):
        held_offsets([entry(0, (0, 0, 9)), entry(1, (0, 0, 5), id_="B")], entry(1, (0, 0, 5), id_="B"))


def meant(
    *texts: str, earliest: int = 0, elsewhere: tuple[tuple[int, int], ...] = (), id_: str = "A", spans: Any = None
) -> list[tuple[int, ...]]:
    have = {P0: HeldOffsets(0, 100, elsewhere), P1: HeldOffsets(0, 50)}
    view = TopicOffsets(T, id_, {0: PartitionOffsets(earliest, 120), 1: PartitionOffsets(0, 50)})
    committed = entry(7, (0, 90, 100), (1, 50, 50))
    found = ranges_to_reload([ReloadTarget.parse(text) for text in texts], have, committed, {T: view}, spans or {})
    assert all(r.topic_id == "A" for r in found)
    return [(r.partition, r.start, r.end) for r in found]


def test_which_offsets_are_read():
    assert meant(f"{T}:0=10..20") == [(0, 10, 20)]
    assert meant(T) == [(0, 0, 100), (1, 0, 50)]
    assert meant(f"{T}:1") == [(1, 0, 50)]
    assert meant(f"{T}:0", elsewhere=((30, 60),)) == [(0, 0, 30), (0, 60, 100)], "what was loaded here"
    assert meant(f"{T}:0=60..70", f"{T}:0=10..30", elsewhere=((30, 60),)) == [(0, 10, 30), (0, 60, 70)]
    assert meant(f"{T}:0=10..20", f"{T}:0=40..50", f"{T}:0=15..30", f"{T}:0=30..31") == [(0, 10, 31), (0, 40, 50)]
    spans = {TimeSpan(TEN, NOON): {P0: (30, 110)}}
    assert meant("2026-11-20T10..2026-11-20T12", spans=spans) == [(0, 30, 100)], "up to the position"
    assert meant(f"{T}=2026-11-20T10..2026-11-20T12", f"{T}:1=0..1", spans=spans) == [(0, 30, 100), (1, 0, 1)]


@pytest.mark.parametrize(
    ("texts", "more", "error", "why"),
    [
        ([f"{T}:0=90..101"], {}, LoaderConfigError, "is loaded up to 100"),
        (["dc1.other"], {}, LoaderConfigError, "no committed position in this table; it has dc1.nginx"),
        ([f"{T}:2=0..1"], {}, LoaderConfigError, "no committed position"),
        ([f"{T}:0=10..20", "dc1.other"], {}, LoaderConfigError, "no committed position"),
        (["2026-11-20T10..2026-11-20T12"], {}, LoaderConfigError, "has no rows of it to replace"),
        ([f"{T}:0=10..20"], {"earliest": 15}, TopicChanged, "so 10 to 14 cannot be read again; nothing was replaced"),
        ([f"{T}:0=10..20"], {"earliest": 110}, TopicChanged, "so 10 to 19"),
        ([T], {"earliest": 1}, TopicChanged, "so 0 to 0"),
        ([T], {"id_": "B"}, TopicChanged, "recreated"),
        (
            [f"{T}:0=10..20"],
            {"elsewhere": ((0, 11),)},
            LoaderConfigError,
            "from 0 to 10 was loaded in another data centre",
        ),
        ([f"{T}:0=10..20"], {"elsewhere": ((15, 16),)}, LoaderConfigError, "loaded in another data centre"),
    ],
)
def test_what_is_refused(texts: list[str], more: Any, error: type[Exception], why: str):
    with pytest.raises(error, match=why):
        meant(*texts, **more)


def test_a_time_of_which_kafka_may_have_dropped_something_is_refused():
    spans = {TimeSpan(TEN, NOON): {P0: (15, 30)}}
    with pytest.raises(TopicChanged, match="start later, or name offsets"):
        meant("2026-11-20T10..2026-11-20T12", earliest=15, spans=spans)
    assert meant("2026-11-20T10..2026-11-20T12", earliest=14, spans=spans) == [(0, 15, 30)]


def test_the_ledger_keeps_a_reload_apart_from_the_positions(tmp_path: Any):
    ledger = Ledger(Location.of(tmp_path / "ledger"))
    ledger.create()
    again = [Range(T, 0, "A", 40, 50), Range(T, 0, "A", 10, 20)]
    put = new_entry(0, "dc1", "lines/1", "run", [Range(T, 0, "A", 90, 90)], kind=RELOAD, reload=again)
    assert ledger.put(put) == put
    assert ledger.get(0).reads == tuple(sorted(again))
    assert ledger.get(0).ranges == (Range(T, 0, "A", 90, 90),)


def test_two_ranges_of_a_partition_are_read_apart():
    a, b, c = (Range(T, 0, "A", n, n + 5) for n in (0, 10, 20))
    other = Range(T, 1, "A", 0, 5)
    assert one_a_partition([a, b, other, c]) == [[a, other], [b], [c]]


def test_notes_of_a_reload():
    was = [LeftOutChunk(1, T, 0, n, "s", n, "dc2.nginx") for n in (11, 12, 30)]
    now = [was[0]._replace(batch=5), LeftOutChunk(5, T, 0, 13, "s", 13, "dc2.nginx")]
    planned = new_entry(5, "dc1", "p", "r", [], kind=RELOAD, reload=[Range(T, 0, "A", 10, 20)])
    assert left_out_changes(was, now, planned) == (was[1]._replace(batch=5, kept=None), now[1])
    assert left_out_changes(was, now, planned._replace(reload=())) == tuple(now)


def test_wrong_use_is_reported_before_anything_starts(capsys: pytest.CaptureFixture[str]):
    job = ["/nowhere", "--topics", "dc1.nginx", "--bootstrap", "127.0.0.1:1", "--json"]
    assert main(["reload", *job, "--from", "dc1.nginx:0=5..1"]) == 2
    assert "no offsets" in capsys.readouterr().out


def test_the_preview_of_a_reload():
    ranges, there = (Range(T, 0, "A", 1000, 2000), Range(T, 1, "A", 5, 6)), (Range(T, 1, "A", 0, 5),)
    means = ReloadPreview(ranges, rows=12_345, quarantined=7, elsewhere=there)
    assert means.lines() == [
        "dc1.nginx 0: offsets 1,000 to 1,999 will be read again",
        "dc1.nginx 1: offsets 5 to 5 will be read again",
        "dc1.nginx 1: offsets 0 to 4 were loaded in another data centre and stay unchanged",
        "12,345 rows of the table and 7 of its quarantine will be replaced by the records of these 1,001 offsets in "
        "one transaction; positions stay unchanged",
    ]


def test_which_rows_of_a_quarantine_stand():
    rows = [
        {"line": 0, "resolved": None, "since": None},
        {"line": 1, "resolved": 4, "since": None},
        {"line": 2, "resolved": 5, "since": None},
        {"line": 3, "resolved": None, "since": 5},
        {"line": 4, "resolved": None, "since": 4},
        {"line": 5, "resolved": 5, "since": 4},
        {"line": 6, "resolved": 4, "since": 2},
    ]
    schema = pa.schema([(name, pa.int64()) for name in ("line", "resolved", "since")])
    table = ds.dataset(pa.Table.from_pylist(rows, schema=schema))

    def stand(last: int) -> list[int]:
        found: list[int] = table.to_table(filter=active_filter(last))["line"].to_pylist()
        return found

    assert stand(4) == [0, 2, 4, 5]
    assert stand(5) == [0, 3, 4]
