"""The lag of a consumer by partition, and how its positions are set."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, Final, Literal, NamedTuple

from aiokafka import errors
from logferry.gateway.contract.names import TopicPartition
from logferry.gateway.errors import Problem
from logferry.gateway.kafka.client import EARLIEST, ELECTION_S, LATEST, PASSING, KafkaClient
from logferry.gateway.kafka.consumer_groups import CommitRefused, ConsumerGroups
from logferry.gateway.kafka.types import NO_MEMBER, grouped
from logferry.gateway.reading.assignment import out_of_range, unknown_topic

_LOOK_BYTES: Final = 64 << 10
# A broker that takes longer for its groups is left out of a list.
_BROKER_S: Final = 5.0
_GROUPS_A_REQUEST: Final = 100
# The client id of a read session's member begins so.
CLIENT_ID_PREFIX: Final = "logferry-"

Start = int | Literal["earliest", "latest"]
MayRead = Callable[[str], bool]


class RequestedPosition(NamedTuple):
    """The new position: an offset, an end, or the first record at or after a time."""

    partition: TopicPartition
    start: Start | None
    time_ms: int | None = None


async def lags(
    kafka: KafkaClient,
    committed: Mapping[TopicPartition, int],
    named: Iterable[str],
    may_read: MayRead,
    *,
    reads: bool = True,
) -> list[dict[str, Any]]:
    """Every partition of the topics that have a committed position or are named.

    ``offset``: what is committed, None if nothing is: the consumer would start at ``first``. ``lag_records`` counts
    offsets from the oldest unread record to the end; Kafka's control records take offsets, one a transaction, so it is
    too high by as many, but it is 0 exactly when nothing is unread. ``lag_seconds``: the age of that record.
    ``lag_bytes``: of the unread chunks, by what the oldest of them have: exact where those are few (`_LOOK_BYTES`),
    else an estimate, since Kafka tells no sizes of a part of a partition. None of them is known without a leader.
    ``reads`` False: by offsets alone, without a read of each partition; bytes and age are None.
    """
    wanted = {topic for topic, _ in committed} | set(named)
    views = (await kafka.describe(sorted(filter(may_read, wanted)))).topics
    partitions = [(name, p.partition) for name, view in sorted(views.items()) for p in view.partitions]
    firsts = await kafka.offsets(partitions, EARLIEST, ELECTION_S) if partitions else {}
    ends = await kafka.offsets(sorted(firsts), LATEST, ELECTION_S) if firsts else {}

    async def described(partition: TopicPartition) -> dict[str, Any]:
        offset, end = committed.get(partition), ends.get(partition)
        first = age_s = records = size_bytes = None
        is_outside = False
        if end is not None:
            first = firsts[partition]
            position = max(first, first if offset is None else offset)
            is_outside = offset is not None and not first <= offset <= end
            records, size_bytes, oldest_ms = max(0, end - position), None, None
            if reads:
                records, size_bytes, oldest_ms = await _unread(kafka, partition, position, end)
            age_s = None if oldest_ms is None else max(0.0, round((kafka.clock.now_ms() - oldest_ms) / 1000, 3))
        return {
            "topic": partition[0],
            "partition": partition[1],
            "offset": offset,
            "first": first,
            "next": end,
            "out_of_range": is_outside,
            "lag_records": records,
            "lag_bytes": size_bytes,
            "lag_seconds": age_s,
        }

    return list(await asyncio.gather(*map(described, partitions)))


async def _unread(
    kafka: KafkaClient, partition: TopicPartition, position: int, end: int
) -> tuple[int, int, int | None]:
    """The unread records after a position: number, bytes by estimate, and the time of the oldest, None without any.

    Control records and aborted data do not count: no reader receives them.
    """
    while position < end:
        try:
            fetched = await kafka.fetch(*partition, position, max_bytes=_LOOK_BYTES, stop_bytes=_LOOK_BYTES)
        except errors.OffsetOutOfRangeError:
            # Retention removed the position meanwhile.
            position = await kafka.offset(*partition, EARLIEST)
            continue
        if fetched.records:
            oldest = fetched.records[0]
            end = max(end, oldest.offset + 1)
            seen_bytes = sum(len(record.value or b"") for record in fetched.records if record.offset < end)
            seen = min(fetched.next_offset, end) - oldest.offset
            return end - oldest.offset, seen_bytes * (end - oldest.offset) // seen, oldest.timestamp_ms
        if fetched.next_offset == position:
            break
        position = fetched.next_offset
    return 0, 0, None


async def summaries(kafka: KafkaClient, may_use: MayRead, may_read: MayRead) -> tuple[list[dict[str, Any]], bool]:
    """The consumers with a position in a topic that may be read; and whether every broker answered for its own."""
    answers = await asyncio.gather(*(_positions_at(kafka, node, may_use) for node, _, _ in kafka.brokers()))
    named = {topic for answer in answers for _, at in (answer or {}).values() for topic, _ in at if may_read(topic)}
    views = (await kafka.describe(sorted(named))).topics if named else {}
    there = [(name, p.partition) for name, view in sorted(views.items()) for p in view.partitions]
    firsts = await kafka.offsets(there, EARLIEST, ELECTION_S) if there else {}
    ends = await kafka.offsets(sorted(firsts), LATEST, ELECTION_S) if firsts else {}
    exist, found = set(there), []
    for consumer, (state, positions) in sorted(pair for answer in answers for pair in (answer or {}).items()):
        at = {partition: offset for partition, offset in positions.items() if partition in exist}
        if not at:
            continue
        known = [(firsts[tp], offset, ends[tp]) for tp, offset in at.items() if tp in ends]
        lag = sum(max(0, end - max(first, offset)) for first, offset, end in known)
        found.append(
            {
                "consumer": consumer,
                "state": state,
                "topics": sorted({topic for topic, _ in at}),
                "partitions": len(at),
                "lag_records": lag if len(known) == len(at) else None,
                "out_of_range": sum(not first <= offset <= end for first, offset, end in known),
            }
        )
    return found, None not in answers


async def _positions_at(
    kafka: KafkaClient, node: int, may_use: MayRead
) -> dict[str, tuple[str, dict[TopicPartition, int]]] | None:
    """Of the groups that the broker coordinates; None: it does not answer."""
    groups = ConsumerGroups(kafka)
    found: dict[str, tuple[str, dict[TopicPartition, int]]] = {}
    with suppress(*PASSING, TimeoutError):
        async with asyncio.timeout(_BROKER_S):
            states = await groups.states_at(node)
            names = sorted(filter(may_use, states))
            for start in range(0, len(names), _GROUPS_A_REQUEST):
                some = names[start : start + _GROUPS_A_REQUEST]
                for group, positions in (await groups.committed_at(node, some)).items():
                    if not isinstance(positions, errors.KafkaError):
                        found[group] = states[group], positions
            return found
    return None


async def strangers(kafka: KafkaClient, consumer: str) -> list[str]:
    """The client ids of the group's members that are not read sessions."""
    found = await ConsumerGroups(kafka).client_ids(consumer)
    return [client_id for client_id in found if not client_id.startswith(CLIENT_ID_PREFIX)]


async def check_members(kafka: KafkaClient, consumer: str) -> None:
    """Raises Problem ``conflict`` for a group that other programs use: it may not be joined, nor its positions set."""
    found = await strangers(kafka, consumer)
    if found:
        detail = f"the group {consumer} is used by programs that are not read sessions; choose another consumer"
        raise Problem("conflict", detail, members=len(found))


async def check_retained(
    kafka: KafkaClient,
    positions: Mapping[TopicPartition, int],
    firsts: Mapping[TopicPartition, int],
    ends: Mapping[TopicPartition, int],
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


async def resolved(kafka: KafkaClient, settings: Iterable[RequestedPosition]) -> dict[TopicPartition, int]:
    """The offsets of the requested positions. Raises Problem ``unknown-topic``, ``not-found``, ``out-of-range``."""
    settings = list(settings)
    views = (await kafka.describe(sorted({setting.partition[0] for setting in settings}))).topics
    for topic, number in (setting.partition for setting in settings):
        if topic not in views:
            raise unknown_topic(topic)
        if number >= len(views[topic].partitions):
            raise Problem("not-found", f"{topic} has the partitions 0 to {len(views[topic].partitions) - 1}")
    partitions = [setting.partition for setting in settings]
    firsts = await kafka.offsets(partitions, EARLIEST)
    ends = await kafka.offsets(partitions, LATEST)
    at: dict[TopicPartition, int] = {}
    for time_ms, asked in grouped((time_ms, p) for p, _, time_ms in settings if time_ms is not None).items():
        at.update(await kafka.offsets(asked, time_ms))
    found = {}
    for partition, start, _ in settings:
        wanted = at.get(partition, start)
        if not isinstance(wanted, int):
            wanted = (ends if wanted == "latest" else firsts)[partition]
        found[partition] = wanted if wanted >= 0 else ends[partition]  # -1: there is no record so late
    await check_retained(kafka, found, firsts, ends)
    return found


async def start_at_latest(kafka: KafkaClient, consumer: str, topics: Iterable[str]) -> None:
    """Sets the consumer's position to the end of topics in which it has none, before a session reads them.

    Committed, so that chunks written before the reader's first commit are not skipped when the partitions move.
    Raises Problem ``conflict`` when other sessions of the consumer are alive.
    """
    groups = ConsumerGroups(kafka)
    missing = await _without_positions(groups, consumer, topics)
    if not missing:
        return
    views = (await kafka.describe(sorted(missing))).topics
    partitions = [(name, p.partition) for name, view in views.items() for p in view.partitions]
    try:
        await groups.commit(consumer, NO_MEMBER, await kafka.offsets(partitions, LATEST))
    except CommitRefused:
        left = await _without_positions(groups, consumer, topics)
        if left:
            detail = (
                f"{consumer} has live sessions and no position in {min(left)} yet; from=latest sets it without them"
            )
            raise Problem("conflict", detail) from None


async def _without_positions(groups: ConsumerGroups, consumer: str, topics: Iterable[str]) -> set[str]:
    return set(topics) - {topic for topic, _ in await groups.committed(consumer)}
