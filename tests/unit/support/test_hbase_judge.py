"""The judge of HBase's changes finds every kind of damage."""

from __future__ import annotations

import pytest

from tests.support.hbase import Change, Written, judge
from tests.support.hbase_log import Logged, compare

REGION, DAUGHTER = "a" * 32, "b" * 32


def change(row: str, timestamp: int) -> Change:
    return Change(row.encode(), b"d", b"q", b"v", timestamp, "put")


def written(row: str, timestamp: int, sequence_id: int, source_id: str = REGION, partition: int = 0) -> Written:
    return Written("orders", change(row, timestamp), sequence_id, source_id, partition)


WHOLE = [written("1", 1, 5), written("2", 2, 6), written("1", 3, 9), written("1", 4, 12, DAUGHTER)]
SCANS = {"orders": {one.change for one in WHOLE}}


def test_a_whole_topic_is_whole() -> None:
    assert judge(WHOLE, SCANS) == 0


def test_what_the_client_of_hbase_wrote_again_is_counted() -> None:
    assert judge([*WHOLE, written("2", 2, 11, DAUGHTER)], SCANS) == 1


def test_another_part_of_the_same_edit_is_another_chunk() -> None:
    scans = {"orders": SCANS["orders"] | {change("9", 9)}}
    assert judge([*WHOLE[:1], written("9", 9, 5, f"{REGION}/2"), *WHOLE[1:]], scans) == 0


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (WHOLE[:-1], "1 of 4 changes are lost"),
        ([], "4 of 4 changes are lost"),
        ([*WHOLE, written("3", 9, 20)], "1 changes are not HBase's"),
        ([*WHOLE, WHOLE[-1]], "1 changes were written twice"),
        ([WHOLE[1], WHOLE[2], WHOLE[0], WHOLE[3]], "comes after sequence id 9 of its row"),
        ([WHOLE[0], WHOLE[1], WHOLE[3], WHOLE[2]], "comes after sequence id 12 of its row"),
        ([*WHOLE[:3], WHOLE[3]._replace(partition=1)], "orders is in the partitions"),
    ],
)
def test_damage_is_found(found: list[Written], text: str) -> None:
    with pytest.raises(AssertionError, match=text):
        judge(found, SCANS)


LOG = {Logged(one.table, one.source_id, one.sequence_id, one.change) for one in WHOLE}


def test_a_topic_that_has_the_log_is_whole() -> None:
    compare(WHOLE, LOG)
    compare([*WHOLE, written("9", 9, 5, f"{REGION}/2")], LOG | {Logged("orders", REGION, 5, change("9", 9))})


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (WHOLE[:-1], "1 of 4 changes of the log are lost"),
        ([*WHOLE[:-1], WHOLE[-1]._replace(sequence_id=13)], "1 of 4 changes of the log are lost"),
        ([*WHOLE, written("2", 2, 11, DAUGHTER)], "1 changes are in no log"),
        ([*WHOLE, WHOLE[-1]], "1 changes were written twice"),
    ],
)
def test_a_topic_that_differs_from_the_log_is_found(found: list[Written], text: str) -> None:
    with pytest.raises(AssertionError, match=text):
        compare(found, LOG)
