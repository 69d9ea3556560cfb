"""How far a consumer is behind, partition by partition, and what its positions are set to. No handlers here."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Literal, NamedTuple

from aiokafka import errors
from logferry.gateway.errors import Problem
from logferry.gateway.kafka.client import EARLIEST, LATEST, Kafka
from logferry.gateway.kafka.consumer_groups import Groups, Refused
from logferry.gateway.reading.assignment import NOBODY, out_of_range
from logferry.gateway.reading.formats import Partition

_LOOK_BYTES: Final = 64 << 10

Start = int | Literal["earliest", "latest"]
MayRead = Callable[[str], bool]


class Unread(NamedTuple):
    """What a position has before it; ``oldest_ms`` is None when that is nothing. ``size_bytes``: an estimate."""

    records: int
    size_bytes: int
    oldest_ms: int | None


class Setting(NamedTuple):
    """Where a position is to go: to an offset, an end, or the first record at or after a time."""

    partition: Partition
    start: Start | None
    time_ms: int | None = None


async def lags(
    kafka: Kafka, committed: Mapping[Partition, int], named: Iterable[str], may_read: MayRead
) -> list[dict[str, Any]]:
    """Every partition of the topics that have a committed position, or are named.

    ``offset``: what is committed, None if nothing is: the consumer would start at ``first``. ``lag_records`` counts
    offsets from the oldest unread record to the end; Kafka's control records take offsets, one a transaction, so it is
    too high by as many, but it is 0 exactly when nothing is unread. ``lag_seconds``: the age of that record.
    ``lag_bytes``: of the unread chunks, by what the oldest of them have: exact where those are few (`_LOOK_BYTES`),
    else an estimate, since Kafka tells no sizes of a part of a partition.
    """
    wanted = {topic for topic, _ in committed} | set(named)
    views = (await kafka.describe(sorted(filter(may_read, wanted)))).topics
    partitions = [(name, p.partition) for name, view in sorted(views.items()) for p in view.partitions]
    firsts = await kafka.offsets(partitions, EARLIEST) if partitions else {}
    ends = await kafka.offsets(partitions, LATEST) if partitions else {}

    async def described(partition: Partition) -> dict[str, Any]:
        first, end = firsts[partition], ends[partition]
        offset = committed.get(partition)
        unread = await _unread(kafka, partition, max(first, first if offset is None else offset), end)
        return {
            "topic": partition[0],
            "partition": partition[1],
            "offset": offset,
            "first": first,
            "next": end,
            "out_of_range": offset is not None and not first <= offset <= end,
            "lag_records": unread.records,
            "lag_bytes": unread.size_bytes,
            "lag_seconds": None
            if unread.oldest_ms is None
            else max(0.0, round(time.time() - unread.oldest_ms / 1000, 3)),
        }

    return list(await asyncio.gather(*map(described, partitions)))


async def _unread(kafka: Kafka, partition: Partition, position: int, end: int) -> Unread:
    """Control records and aborted data are passed: nobody has to read them."""
    while position < end:
        try:
            fetched = await kafka.fetch(*partition, position, max_bytes=_LOOK_BYTES, stop_bytes=_LOOK_BYTES)
        except errors.OffsetOutOfRangeError:
            # Retention took it meanwhile.
            position = await kafka.offset(*partition, EARLIEST)
            continue
        if fetched.records:
            oldest = fetched.records[0]
            end = max(end, oldest.offset + 1)
            seen_bytes = sum(len(record.value or b"") for record in fetched.records if record.offset < end)
            seen = min(fetched.next_offset, end) - oldest.offset
            return Unread(end - oldest.offset, seen_bytes * (end - oldest.offset) // seen, oldest.timestamp_ms)
        if fetched.next_offset == position:
            break
        position = fetched.next_offset
    return Unread(0, 0, None)


async def check_retained(
    kafka: Kafka,
    positions: Mapping[Partition, int],
    firsts: Mapping[Partition, int],
    ends: Mapping[Partition, int],
) -> None:
    """Raises Problem ``out-of-range`` for a position at which nothing can be read.

    ``ends`` may be behind what was acknowledged, as long as Kafka still writes the markers of a transaction, so what
    seems to be outside is asked for: Kafka knows.
    """
    for partition, offset in positions.items():
        if not firsts[partition] <= offset <= ends[partition]:
            try:
                await kafka.fetch(*partition, offset, max_bytes=1)
            except errors.OffsetOutOfRangeError:
                raise out_of_range(partition, offset, firsts[partition], ends[partition]) from None


async def resolved(kafka: Kafka, settings: Iterable[Setting]) -> dict[Partition, int]:
    """The offsets that are meant. Raises Problem ``unknown-topic``, ``not-found``, ``out-of-range``."""
    settings = list(settings)
    views = (await kafka.describe(sorted({setting.partition[0] for setting in settings}))).topics
    for topic, number in (setting.partition for setting in settings):
        if topic not in views:
            raise Problem("unknown-topic", f"there is no topic {topic}", topic=topic)
        if number >= len(views[topic].partitions):
            raise Problem("not-found", f"{topic} has the partitions 0 to {len(views[topic].partitions) - 1}")
    partitions = [setting.partition for setting in settings]
    firsts = await kafka.offsets(partitions, EARLIEST)
    ends = await kafka.offsets(partitions, LATEST)
    times: dict[int, list[Partition]] = {}
    for setting in settings:
        if setting.time_ms is not None:
            times.setdefault(setting.time_ms, []).append(setting.partition)
    at: dict[tuple[int, Partition], int] = {}
    for time_ms, asked in times.items():
        at.update({(time_ms, p): offset for p, offset in (await kafka.offsets(asked, time_ms)).items()})
    found = {}
    for partition, start, late_as in settings:
        first, end = firsts[partition], ends[partition]
        if late_as is not None:
            found_at = at[late_as, partition]
            offset = found_at if found_at >= 0 else end
        elif isinstance(start, int):
            offset = start
        else:
            offset = end if start == "latest" else first
        found[partition] = offset
    await check_retained(kafka, found, firsts, ends)
    return found


async def start_at_latest(kafka: Kafka, consumer: str, topics: Iterable[str]) -> None:
    """Topics in which the consumer has no position yet get theirs, at the end, before anybody reads them.

    Stored and not merely begun at, so that what is written before the first commit is not passed over when the
    partitions move. Raises Problem ``conflict`` when other sessions of the consumer are alive.
    """
    groups = Groups(kafka)
    missing = await _without_positions(groups, consumer, topics)
    if not missing:
        return
    views = (await kafka.describe(sorted(missing))).topics
    partitions = [(name, p.partition) for name, view in views.items() for p in view.partitions]
    try:
        await groups.commit(consumer, NOBODY, await kafka.offsets(partitions, LATEST))
    except Refused:
        left = await _without_positions(groups, consumer, topics)
        if left:
            detail = (
                f"{consumer} has live sessions and no position in {min(left)} yet; from=latest sets it without them"
            )
            raise Problem("conflict", detail) from None


async def _without_positions(groups: Groups, consumer: str, topics: Iterable[str]) -> set[str]:
    return set(topics) - {topic for topic, _ in await groups.committed(consumer)}
