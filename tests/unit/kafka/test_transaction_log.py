"""How transactions ended, by the log of Kafka's coordinator."""

from __future__ import annotations

import struct

import pytest
from logferry.gateway.kafka.hanging_transactions import java_hash, read_ends
from logferry.gateway.kafka.record_batch import KafkaRecord

_ID = "logferry.gateway.dc1.lane-2"
# Entries of Kafka 4.3.1: version, producer id, epoch, time-out, status, and what is not read.
_REST = bytes.fromhex("0000000193a1")


@pytest.mark.parametrize(
    ("text", "expected"), [("", 0), ("a", 97), ("hello", 99162322), ("polygenelubricants", 0), ("é", 233)]
)
def test_java_hash(text: str, expected: int) -> None:
    assert java_hash(text) == expected


def test_the_partition_of_a_transactional_id_is_kafkas() -> None:
    """As a broker with eight partitions of the log said."""
    assert java_hash(_ID) % 8 == 1


def entry(
    status: int, epoch: int, producer_id: int = 2000, version: int = 1, transactional_id: str = _ID
) -> KafkaRecord:
    key = struct.pack(">hh", 0, len(transactional_id)) + transactional_id.encode()
    return KafkaRecord(0, 0, key, struct.pack(">hqhib", version, producer_id, epoch, 15_000, status) + _REST, [])


def test_a_transaction_ended_as_it_was_prepared_to() -> None:
    ongoing, commit, abort, done = 1, 2, 3, 4
    records = [
        entry(ongoing, 7),
        entry(commit, 8),
        entry(done, 8),
        entry(ongoing, 8),
        entry(abort, 9, version=0),
        entry(commit, 30, producer_id=1),
        entry(commit, 31, transactional_id="logferry.gateway.dc1.lane-3"),
        entry(commit, 32)._replace(value=None),
    ]
    assert read_ends(records, _ID) == {(2000, 7): True, (2000, 8): False, (1, 29): True}
