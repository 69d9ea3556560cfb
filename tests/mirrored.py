"""Both sides of a mirrored topic, read by plain Kafka consumers, not through the code that is under test."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from logferry.gateway.contract.offset_history import Chapter, place_of

from tests.support.checker import committed_records


class Copied(NamedTuple):
    """One record as it stands in either cluster; its offset apart, all of it must be the same."""

    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes], ...]
    timestamp_ms: int


Log = dict[int, list[tuple[int, Copied]]]
"""Partition → (offset, record), in order; a partition without records is missing."""


async def read_log(bootstrap: str, topic: str) -> Log:
    """All committed records up to the end of every partition; open transactions are waited for."""
    found: Log = {}
    for record in await committed_records(bootstrap, topic):
        copied = Copied(record.key, record.value, tuple(record.headers), record.timestamp)
        found.setdefault(record.partition, []).append((record.offset, copied))
    return found


def differences(original: Log, copy: Log) -> list[str]:
    """Where the copy is not the original, record by record, in order; empty when it is."""
    found = []
    for number in sorted(original.keys() | copy.keys()):
        records, ours = original.get(number, []), copy.get(number, [])
        if len(records) != len(ours):
            found.append(f"partition {number}: {len(records)} records there, {len(ours)} here")
        for index, ((_, wanted), (offset, got)) in enumerate(zip(records, ours, strict=False)):
            if wanted != got:
                found.append(f"partition {number}: record {index} (offset {offset} here) differs")
                break
    return found


async def differences_in_the_end(original: tuple[str, str], copy: tuple[str, str], within_s: float = 60) -> list[str]:
    """(bootstrap, topic) of both. The original is at rest; the copy is read until it is the same, or time is up."""
    wanted = await read_log(*original)
    deadline = asyncio.get_running_loop().time() + within_s
    while True:
        found = differences(wanted, await read_log(*copy))
        if not found or asyncio.get_running_loop().time() > deadline:
            return found
        await asyncio.sleep(0.2)


async def pairs_by_history(bootstrap: str, pairs_topic: str) -> dict[tuple[str, int], dict[int, int]]:
    """By partition, original offset → local offset, as the mirror's history tells it."""
    found: dict[tuple[str, int], dict[int, int]] = {}
    for records in (await read_log(bootstrap, pairs_topic)).values():
        for _, record in records:
            known = found.setdefault(place_of(record.key or b""), {})
            for run in Chapter.decode(record.value or b"").runs:
                for step in range(run.size):
                    assert run.source + step not in known, "an original offset is paired twice"
                    known[run.source + step] = run.local + step
    return found


def true_pairs(original: Log, copy: Log) -> dict[int, dict[int, int]]:
    """By partition, original offset → local offset: the records are the same in the same order."""
    return {
        number: {there: here for (there, _), (here, _) in zip(records, copy[number], strict=True)}
        for number, records in original.items()
    }
