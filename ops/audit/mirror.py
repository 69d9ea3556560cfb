"""``logferry audit --mirror dc1:dc2``: both sides' records, compared partition by partition, in order.

Read are the records themselves (key, value, headers, time), not what the mirror says of them; its history is only
asked where to begin when retention has removed the beginnings. What the original has beyond the copy is not mirrored
yet and is told, it refutes nothing. How far a partition is proven is kept in a file, so the next run goes on there.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from aiokafka import errors
from logferry.gateway.errors import Problem
from logferry.gateway.fetch import KafkaRecord
from logferry.gateway.kafka import EARLIEST, LATEST, Kafka
from logferry.gateway.tls import kafka_options
from logferry.gateway.translation import Translation
from logferry.mirror.config import MirrorConfig
from logferry.ops.audit.reading import connected
from logferry.ops.problems import WrongUse

_FETCH_BYTES: Final = 1 << 20
_AT_ONCE: Final = 4
_KEPT_EVERY: Final = 20_000

_Books = tuple[Translation, Translation | None]


class Proven(NamedTuple):
    """Up to these offsets, in the original and in the copy, both are the same."""

    original: int
    copy: int


@dataclass(slots=True)
class PartitionFinding:
    """``wrong``: what refutes, None: nothing. ``behind``: records of the original that are not in the copy yet."""

    topic: str
    partition: int
    compared: int = 0
    behind: int = 0
    wrong: str | None = None


@dataclass(slots=True)
class MirrorReport:
    original: str
    copy: str
    partitions: list[PartitionFinding] = field(default_factory=list)

    @property
    def exact(self) -> bool:
        return all(found.wrong is None for found in self.partitions)

    @property
    def verdict(self) -> str:
        compared, behind = sum(p.compared for p in self.partitions), sum(p.behind for p in self.partitions)
        where = f"{self.original} to {self.copy}: {len(self.partitions)} partitions, {compared:,} records compared"
        rest = f", {behind:,} not mirrored yet" if behind else ""
        if self.exact:
            return f"exact: {where}{rest}: the same records in the same order, nothing twice"
        wrong = [p for p in self.partitions if p.wrong is not None]
        return f"REFUTED: {where}{rest}: {len(wrong)} partitions differ"

    def as_dict(self) -> dict[str, object]:
        return {
            "exact": self.exact,
            "verdict": self.verdict,
            "original": self.original,
            "copy": self.copy,
            "partitions": [asdict(found) for found in self.partitions],
        }


async def audit_mirror(
    config: MirrorConfig,
    original: str,
    topics: list[str],
    kept_in: Path | None,
    progress: Callable[[str, int, int], None],
) -> MirrorReport:
    """Raises WrongUse, and Unavailable when either Kafka cannot be read."""
    remote = next((remote for remote in config.remotes if original in remote.taken), None)
    if remote is None:
        names = ", ".join(dc for remote in config.remotes for dc in remote.taken)
        raise WrongUse(f"this mirror brings nothing of {original}; it brings {names}")
    kept = _Kept(kept_in)
    report = MirrorReport(original, config.dc)
    async with connected(kafka_options(remote.kafka)) as there, connected(kafka_options(config.kafka)) as here:
        translation = Translation(here, config.prefix, config.dc)
        # In a chain it is compared with the copy that it was taken from; the history speaks of the original.
        books = None if original == remote.dc else Translation(there, config.prefix, remote.dc)
        named = {topic if topic.startswith(f"{original}.") else f"{original}.{topic}" for topic in topics}
        views = (await there.describe()).topics
        wanted = sorted(name for name in views if name.startswith(f"{original}.") and remote.takes(name))
        if named - set(wanted):
            raise WrongUse(f"{original} has no topic {', '.join(sorted(named - set(wanted)))} that is mirrored here")
        places = [(name, p.partition) for name in named or wanted for p in views[name].partitions]
        done = 0
        gate = asyncio.Semaphore(_AT_ONCE)

        async def one(place: tuple[str, int]) -> None:
            nonlocal done
            async with gate:
                report.partitions.append(await _compare(there, here, (translation, books), place, kept))
            done += 1
            progress("mirror", done, len(places))

        try:
            await asyncio.gather(*map(one, places))
        finally:
            kept.save()
    report.partitions.sort(key=lambda found: (found.topic, found.partition))
    return report


async def _compare(there: Kafka, here: Kafka, books: _Books, place: tuple[str, int], kept: _Kept) -> PartitionFinding:
    found = PartitionFinding(*place)
    try:
        # The copy's end first: what it holds by now, the original must hold.
        copy_end = await here.offset(*place, LATEST)
        original_end = await there.offset(*place, LATEST)
        start = await _start(there, here, books, place, kept.get(place))
    except errors.UnknownTopicOrPartitionError:
        found.wrong = "the copy is missing"
        return found
    except Problem as problem:
        found.wrong = problem.detail
        return found
    copies = _records(here, place, start.copy, copy_end)
    async for record in _records(there, place, start.original, original_end):
        copy = await anext(copies, None)
        if copy is None:
            found.behind += 1
            continue
        if _content(record) != _content(copy):
            found.wrong = f"record {record.offset} there and {copy.offset} here differ, after {found.compared} alike"
            return found
        found.compared += 1
        kept.put(place, Proven(record.offset + 1, copy.offset + 1))
    left = await anext(copies, None)
    if left is not None:
        found.wrong = f"record {left.offset} here is not in the original, after {found.compared} alike"
    return found


async def _start(there: Kafka, here: Kafka, books: _Books, place: tuple[str, int], proven: Proven | None) -> Proven:
    """Where both begin: at what is proven, else at the first record that both still have."""
    first, first_here = await there.offset(*place, EARLIEST), await here.offset(*place, EARLIEST)
    if proven is not None and proven.original >= first and proven.copy >= first_here:
        return proven
    if first == first_here == 0:
        return Proven(0, 0)
    ours, theirs = books
    wanted = await ours.to_original(place, first_here)
    if theirs is not None:
        found = await theirs.to_here(place, wanted)
        wanted = (await theirs.progress(place)).local_next if found is None else found
    original = max(first, wanted)
    copy = await ours.to_here(place, original if theirs is None else await theirs.to_original(place, original))
    return Proven(original, first_here if copy is None else max(copy, first_here))


def _content(record: KafkaRecord) -> tuple[object, ...]:
    return record.key, record.value, record.headers, record.timestamp_ms


async def _records(kafka: Kafka, place: tuple[str, int], start: int, end: int) -> AsyncIterator[KafkaRecord]:
    """Committed ones, up to an end that was taken before."""
    position, found = start, deque[KafkaRecord]()
    while position < end:
        fetched = await kafka.fetch(*place, position, max_bytes=_FETCH_BYTES)
        position = fetched.next_offset
        found.extend(fetched.records)
        while found:
            record = found.popleft()
            if record.offset < end:
                yield record


class _Kept:
    """What is proven so far, in a file if there is one; written now and then."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._proven: dict[str, list[int]] = {}
        self._news = 0
        if file is not None and file.exists():
            try:
                self._proven = dict(json.loads(file.read_text(encoding="utf-8"))["proven"])
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise WrongUse(f"--keep {file}: cannot be read ({error}); remove it to begin anew") from None

    def get(self, place: tuple[str, int]) -> Proven | None:
        found = self._proven.get(f"{place[0]}:{place[1]}")
        return None if found is None else Proven(*found)

    def put(self, place: tuple[str, int], proven: Proven) -> None:
        self._proven[f"{place[0]}:{place[1]}"] = list(proven)
        self._news += 1
        if self._news % _KEPT_EVERY == 0:
            self.save()

    def save(self) -> None:
        if self._file is not None:
            new = self._file.with_name(self._file.name + ".new")
            new.write_text(json.dumps({"format": 1, "proven": self._proven}), encoding="utf-8")
            new.replace(self._file)
