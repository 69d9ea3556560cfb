"""Which offset of a mirrored partition is which of its original: the latest pair as a state, and the history. Pure.

Offsets differ between clusters, since each has its own control records; the order never does. So the history is kept
as *runs*: so many records with consecutive offsets on both sides, split at each hole on either. Each transaction of
the mirror writes one *chapter* of it a partition. Chapters are found again without reading the whole: each knows the
places of some before it, the last one, the last whose number is a multiple of 4, of 16 and so on.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple
from zlib import crc32

VERSION: Final = 1
_KEY_END: Final = struct.Struct(">i")
# Version, original topic id, local topic id, next original and local offset, last batch: base, epoch, crc, timestamp.
_STATE: Final = struct.Struct(">B16s16sqqqiIq")
# Version, original topic id, chapter number.
_CHAPTER: Final = struct.Struct(">B16sq")
_STRIDE: Final = 4

Place = tuple[str, int]


class Damaged(Exception):
    """A stored state or chapter that cannot be read; the text says which."""


class Run(NamedTuple):
    """``size`` records: ``source`` + i in the original partition is ``local`` + i in the mirrored one."""

    source: int
    local: int
    size: int


class Signpost(NamedTuple):
    """Where an earlier chapter is: its offset in the history, and the first offsets that it speaks of."""

    offset: int
    source: int
    local: int


class Original(NamedTuple):
    """The topic where a record was written first, and the offset there after the last one that was mirrored."""

    id: bytes
    next_offset: int


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a partition is mirrored.

    ``source_next``: the next original offset to look at, ``local_next``: the one after the last record mirrored. The
    last batch is the proof that the original's log is still the one that was read: ``last_base`` -1: there is none;
    ``last_epoch``: of the last that was passed, control batches too.
    ``chapters``: how many there are, and ``signposts`` those that the next one begins with. ``chained``: what it was
    copied from is a copy itself; the history speaks of this original then, and of what it was copied from otherwise.
    """

    source_id: bytes
    local_id: bytes
    source_next: int
    local_next: int
    last_base: int
    last_epoch: int
    last_crc: int
    last_ms: int
    chapters: int
    signposts: tuple[Signpost, ...]
    chained: Original | None = None

    @property
    def original(self) -> Original:
        """The original that the history speaks of."""
        return self.chained or Original(self.source_id, self.source_next)

    def encode(self) -> bytes:
        fixed = _STATE.pack(
            VERSION,
            self.source_id,
            self.local_id,
            self.source_next,
            self.local_next,
            self.last_base,
            self.last_epoch,
            self.last_crc,
            self.last_ms,
        )
        chained = () if self.chained is None else (self.chained.next_offset, int.from_bytes(self.chained.id))
        return fixed + _numbers([self.chapters, *_flat(self.signposts), *chained])

    @classmethod
    def decode(cls, raw: bytes) -> Progress:
        """Raises Damaged."""
        try:
            version, source_id, local_id, source, local, base, epoch, crc, last_ms = _STATE.unpack_from(raw)
            if version != VERSION:
                raise Damaged(f"a state of version {version}; this program knows {VERSION}")
            chapters, *rest = _read_numbers(raw[_STATE.size :])
            chained = None
            if len(rest) % 3 == 2:
                *rest, next_offset, original_id = rest
                chained = Original(original_id.to_bytes(16), next_offset)
            posts = _signposts(rest)
        except (struct.error, IndexError, ValueError, OverflowError) as error:
            raise Damaged(f"a state of {len(raw)} bytes cannot be read: {error}") from None
        return cls(source_id, local_id, source, local, base, epoch, crc, last_ms, chapters, posts, chained)


@dataclass(frozen=True, slots=True)
class Chapter:
    """The runs of one transaction, in order, and the way to those before. ``source_id``: of the original's topic."""

    source_id: bytes
    number: int
    signposts: tuple[Signpost, ...]
    runs: tuple[Run, ...]

    def encode(self) -> bytes:
        flat = [len(self.signposts), *_flat(self.signposts)]
        source = local = 0
        for run in self.runs:
            flat += (run.source - source, run.local - local, run.size)
            source, local = run.source + run.size, run.local + run.size
        return _CHAPTER.pack(VERSION, self.source_id, self.number) + _numbers(flat)

    @classmethod
    def decode(cls, raw: bytes) -> Chapter:
        """Raises Damaged."""
        try:
            version, source_id, number = _CHAPTER.unpack_from(raw)
            if version != VERSION:
                raise Damaged(f"a chapter of version {version}; this program knows {VERSION}")
            count, *rest = _read_numbers(raw[_CHAPTER.size :])
            posts, rest = _signposts(rest[: 3 * count]), rest[3 * count :]
            runs: list[Run] = []
            source = local = 0
            for index in range(0, len(rest), 3):
                source, local, size = source + rest[index], local + rest[index + 1], rest[index + 2]
                runs.append(Run(source, local, size))
                source, local = source + size, local + size
        except (struct.error, IndexError, ValueError) as error:
            raise Damaged(f"a chapter of {len(raw)} bytes cannot be read: {error}") from None
        return cls(source_id, number, posts, tuple(runs))


def lane_of(topic: str, partition: int, lanes: int) -> int:
    """The mirror's lane that writes a partition."""
    return (crc32(topic.encode()) + partition) % lanes


def numbers_of(topic: str, partitions: int, lane: int, lanes: int) -> range:
    """Those of a topic's partitions that the lane writes."""
    return range((lane - lane_of(topic, 0, lanes)) % lanes, partitions, lanes)


def key_of(topic: str, partition: int) -> bytes:
    """The key of a state or a chapter."""
    return topic.encode() + b"\0" + _KEY_END.pack(partition)


def place_of(key: bytes) -> Place:
    """Raises Damaged."""
    if len(key) < 6 or key[-5] != 0:
        raise Damaged(f"a key of {len(key)} bytes names no partition")
    return key[:-5].decode(), _KEY_END.unpack(key[-4:])[0]


def merged(runs: Iterable[Run]) -> tuple[Run, ...]:
    """Neighbours that follow each other on both sides are one."""
    found: list[Run] = []
    for run in runs:
        if found:
            last = found[-1]
            if (last.source + last.size, last.local + last.size) == run[:2]:
                found[-1] = Run(last.source, last.local, last.size + run.size)
                continue
        found.append(run)
    return tuple(found)


def within(runs: Iterable[Run], first: int, last: int) -> list[Run]:
    """What they say of the local offsets from the first to the last."""
    found = []
    for run in runs:
        start, end = max(run.local, first), min(run.local + run.size, last + 1)
        if start < end:
            found.append(Run(run.source + start - run.local, start, end - start))
    return found


def composed(first: Iterable[Run], second: Iterable[Run]) -> tuple[Run, ...]:
    """Over two steps: from the source of the ``first`` to the local side of the ``second``, whose source is where the
    first ones lead. Both are in order; what only one of them speaks of is left out.
    """
    found: list[Run] = []
    steps, wanted = iter(first), iter(second)
    one, two = next(steps, None), next(wanted, None)
    while one is not None and two is not None:
        start, end = max(one.local, two.source), min(one.local + one.size, two.source + two.size)
        if start < end:
            found.append(Run(one.source + start - one.local, two.local + start - two.source, end - start))
        if one.local + one.size <= two.source + two.size:
            one = next(steps, None)
        else:
            two = next(wanted, None)
    return merged(found)


def signposts_after(number: int, before: Sequence[Signpost], last: Signpost) -> tuple[Signpost, ...]:
    """Those of the chapter after ``last``, which has this number and began with those ``before``.

    They lead to the last chapter, then to the last one whose number is a multiple of 4, of 16, …, at the end to
    chapter 0.
    """
    found: list[Signpost] = []
    step = 1
    while True:
        found.append(last if number % step == 0 else before[min(len(found), len(before) - 1)])
        if step > number:
            return tuple(found)
        step *= _STRIDE


class Step(NamedTuple):
    """The chapter to go to. ``is_it``: it holds the offset, or the one after it begins behind the offset."""

    post: Signpost
    is_it: bool


def step_towards(signposts: Sequence[Signpost], offset: int, *, of_source: bool) -> Step | None:
    """From a chapter that begins after the offset, or from the end of the history; None: all begin after it."""
    later: Signpost | None = None
    for post in signposts:
        if (post.source if of_source else post.local) <= offset:
            return Step(post, True) if later is None else Step(later, False)
        later = post
    return None if later is None else Step(later, False)


def _flat(posts: Iterable[Signpost]) -> Iterable[int]:
    for post in posts:
        yield from post


def _signposts(flat: Sequence[int]) -> tuple[Signpost, ...]:
    if len(flat) % 3:
        raise ValueError("signposts are cut off")
    return tuple(Signpost(*flat[index : index + 3]) for index in range(0, len(flat), 3))


def _numbers(values: Iterable[int]) -> bytes:
    out = bytearray()
    for value in values:
        if value < 0:
            raise ValueError(f"{value} is negative")
        while value > 0x7F:
            out.append(value & 0x7F | 0x80)
            value >>= 7
        out.append(value)
    return bytes(out)


def _read_numbers(raw: bytes) -> list[int]:
    found, value, shift = [], 0, 0
    for byte in raw:
        value |= (byte & 0x7F) << shift
        if byte & 0x80:
            shift += 7
        else:
            found.append(value)
            value = shift = 0
    if shift:
        raise ValueError("a number is cut off")
    return found
