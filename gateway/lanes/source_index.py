"""How a lane keeps its sources in little memory: their states by key, and their order in lists. Pure.

An object for each key and state would cost more than they do. So a few of them stand in one string of bytes.

* No look-up takes one key for another: whole keys are compared, between marks that stand nowhere else.
* What was written last is kept as objects, so that a source that writes costs no more than in a dictionary.
* What goes gives its memory back: the strings shrink, and so does their number.
"""

from __future__ import annotations

import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from heapq import merge
from itertools import islice
from typing import Final
from urllib.parse import quote, unquote_to_bytes

# Around a key, in no UTF-8. The first one also ends its state, where it is escaped; most of a state's numbers begin
# with zeros.
_START, _END, _ESCAPE, _ZEROS = b"\xff", b"\xfe", b"\xfd", b"\xfc"
_FOUR_ZEROS: Final = bytes(4)
# States in a bucket, on average; with fewer than the least there are too many buckets.
_FULL: Final = 4
_LEAST: Final = 2
# So many states are objects; to pack them takes some milliseconds.
_RECENT: Final = 1024
# So many are sorted at once, which takes some milliseconds.
_PIECE: Final = 1000
# Keys in a packed block of the order.
_BLOCK: Final = 128
# Of the sources that are new since the last list; with more of them, and more than a part of all, it is made again.
_ADDED: Final = 1000
_ADDED_PART: Final = 16
# Maps bytes so that their order is that of their escaped forms: what is escaped comes before what is not.
_BY_ESCAPED: Final = bytes(sorted(range(256), key=lambda byte: quote(bytes([byte]), safe="")))
_RANKS: Final = bytes.maketrans(_BY_ESCAPED, bytes(range(256)))


class PackedStates:
    """States by key, both as bytes; the keys are UTF-8.

    Linear hashing (Litwin, 1980): the buckets are divided, and joined, one at a time. A bucket is immutable, so a copy
    of the list of them is the table as of now.

    ``added``: the keys that came since the order of lists took them over; None: there is no order.
    """

    __slots__ = ("_buckets", "_count", "_mask", "_new", "_recent", "added")

    def __init__(self) -> None:
        self.added: list[bytes] | None = None
        self._buckets, self._mask = [_START], 0
        self._recent: dict[bytes, bytes] = {}
        self._new: set[bytes] = set()  # those of the recent ones that are in no bucket
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def get(self, key: bytes) -> bytes | None:
        found = self._recent.get(key)
        if found is not None:
            return found
        buckets, at = self._buckets, hash(key) & self._mask
        bucket = buckets[at if at < len(buckets) else at & (self._mask >> 1)]
        entry = _START + key + _END
        at = bucket.find(entry)
        if at < 0:
            return None
        at += len(entry)
        return _plain(bucket[at : bucket.find(_START, at)])

    def swap(self, key: bytes, state: bytes | None) -> bytes | None:
        """Puts the state in the place of the one that it returns; None: there is none."""
        before = self.get(key)
        if state is not None:
            self._recent[key] = state
            if before is None:
                self._count += 1
                self._new.add(key)
                self._add(key)
            if len(self._recent) > _RECENT:
                self._pack()
        elif before is not None:
            self._recent.pop(key, None)
            if key in self._new:
                self._new.remove(key)
            else:
                self._put(key, b"")
            self._count -= 1
            if self._count < _LEAST * len(self._buckets) and self._mask:
                self._join()
        return before

    def items(self) -> Iterator[tuple[bytes, bytes]]:
        """All as of now."""
        self._pack()
        return (
            (key, _plain(state))
            for bucket in self._buckets.copy()
            for key, _, state in (entry.partition(_END) for entry in _entries(bucket))
        )

    def _add(self, key: bytes) -> None:
        if self.added is not None:
            self.added.append(key)
            if len(self.added) > max(_ADDED, self._count // _ADDED_PART):
                self.added = None

    def _place(self, key: bytes) -> int:
        at = hash(key) & self._mask
        return at if at < len(self._buckets) else at & (self._mask >> 1)

    def _pack(self) -> None:
        buckets, new = self._buckets, self._new
        for key, state in self._recent.items():
            entry = key + _END + _escaped(state) + _START
            if key in new:
                buckets[self._place(key)] += entry
            else:
                self._put(key, entry)
        self._recent.clear()
        new.clear()
        while self._count > _FULL * len(buckets):
            self._divide()

    def _put(self, key: bytes, entry: bytes) -> None:
        """The entry of the key, empty: none, in the place of that which is packed."""
        place = self._place(key)
        bucket = self._buckets[place]
        at = bucket.find(_START + key + _END) + 1
        self._buckets[place] = bucket[:at] + entry + bucket[bucket.index(_START, at) + 1 :]

    def _divide(self) -> None:
        """Some of the keys of one bucket go to a new one, by a further bit of their hash."""
        new = len(self._buckets)
        self._mask = (1 << new.bit_length()) - 1
        bit = (self._mask >> 1) + 1
        parts: tuple[list[bytes], list[bytes]] = ([], [])
        for entry in _entries(self._buckets[new - bit]):
            parts[bool(hash(entry[: entry.index(_END)]) & bit)].append(entry)
        self._buckets[new - bit], added = map(_bucket, parts)
        self._buckets.append(added)

    def _join(self) -> None:
        """The keys of the last bucket go back to that which they came from."""
        last = self._buckets.pop()
        self._buckets[len(self._buckets) - (self._mask >> 1) - 1] += last[1:]
        self._mask = (1 << (len(self._buckets) - 1).bit_length()) - 1


def _entries(bucket: bytes) -> list[bytes]:
    return bucket.split(_START)[1:-1]


def _bucket(entries: list[bytes]) -> bytes:
    return _START.join([b"", *entries, b""])


def _escaped(state: bytes) -> bytes:
    state = state.replace(_ESCAPE, _ESCAPE + b"a").replace(_START, _ESCAPE + b"b").replace(_ZEROS, _ESCAPE + b"c")
    return state.replace(_FOUR_ZEROS, _ZEROS)


def _plain(state: bytes) -> bytes:
    state = state.replace(_ZEROS, _FOUR_ZEROS)
    if _ESCAPE not in state:
        return state
    return state.replace(_ESCAPE + b"c", _ZEROS).replace(_ESCAPE + b"b", _START).replace(_ESCAPE + b"a", _ESCAPE)


def sort_key(source_id: str, partition_key: str | None) -> str:
    """Of a source among those of its topic; escaped, so that the two cannot run together."""
    return quote(source_id, safe="") + ("" if partition_key is None else " " + quote(partition_key, safe=""))


def _place(key: bytes) -> bytes:
    """Of a state key, in the order of topics and sort keys: quoting costs ten times as much."""
    topic, *names = key[1:].split(b"\0")
    return b"\0".join((topic, *(name.translate(_RANKS) for name in reversed(names))))


def _start(topic: str, after: str) -> bytes:
    names = [unquote_to_bytes(name).translate(_RANKS) for name in after.split(" ", 1)]
    return b"\0".join((topic.encode(), *names))


class SourceOrder:
    """The order of a lane's sources in lists: by topic, then by source id and partition key, each escaped as in paths.

    It is made for the first list, and kept: then a page costs what it returns, however many sources there are. Sources
    that are forgotten stay in it until it is made again, so who reads it looks into the states, too.

    Neighbours are much alike: compressed, a key of it takes a few bytes.
    """

    def __init__(self, states: PackedStates) -> None:
        self.states = states
        self._places: list[bytes] = []  # of the first key of each block
        self._blocks: list[bytes] = []
        self._count = 0
        self._changes = 0

    def walk(self, topic: str, start: str) -> Iterator[bytes]:
        """The state keys of the topic's sources from a sort key on, whoever comes and goes meanwhile."""
        place, find, prefix = _start(topic, start), bisect_left, topic.encode() + b"\0"
        while self._blocks:
            number, changes = self._block_of(place), self._changes
            keys = _unpacked(self._blocks[number])
            following = self._places[number + 1 : number + 2]
            for key in keys[find(keys, place, key=_place) :]:
                if not key[1:].startswith(prefix):
                    return
                yield key
                if self._changes != changes:
                    place, find = _place(key), bisect_right
                    break
            else:
                if not following:
                    return
                place, find = following[0], bisect_left

    def settle(self) -> Iterator[None]:
        """Takes over the sources that are new, in small steps; one at a time may be under way."""
        states = self.states
        if states.added is None or self._count > 2 * len(states) + _PIECE:
            states.added = []
            yield from self._sort()
        while states.added:
            self._insert(states.added.pop())
            yield

    def _block_of(self, place: bytes) -> int:
        return max(0, bisect_right(self._places, place) - 1)

    def _insert(self, key: bytes) -> None:
        place, number = _place(key), 0
        keys: list[bytes] = []
        if self._blocks:
            number = self._block_of(place)
            keys = _unpacked(self._blocks[number])
        at = bisect_left(keys, place, key=_place)
        if keys[at : at + 1] == [key]:
            return
        keys.insert(at, key)
        self._count += 1
        self._changes += 1
        blocks = [keys] if len(keys) <= 2 * _BLOCK else [keys[:_BLOCK], keys[_BLOCK:]]
        self._places[number : number + 1] = [_place(block[0]) for block in blocks]
        self._blocks[number : number + 1] = map(_packed, blocks)

    def _sort(self) -> Iterator[None]:
        pieces: list[list[bytes]] = []
        keys = (key for key, _ in self.states.items())
        while piece := sorted(islice(keys, _PIECE), key=_place):
            pieces.append([_packed(block) for block in _cut(piece)])
            yield
        places, blocks, count = list[bytes](), list[bytes](), 0
        for block in _cut(merge(*map(_walked, pieces), key=_place)):
            places.append(_place(block[0]))
            blocks.append(_packed(block))
            count += len(block)
            yield
        self._places, self._blocks, self._count = places, blocks, count
        self._changes += 1


def _cut(keys: Iterable[bytes]) -> Iterator[list[bytes]]:
    left = iter(keys)
    while block := list(islice(left, _BLOCK)):
        yield block


def _walked(blocks: list[bytes]) -> Iterator[bytes]:
    for block in blocks:
        yield from _unpacked(block)


def _packed(keys: list[bytes]) -> bytes:
    return zlib.compress(_START.join(keys), 1)


def _unpacked(block: bytes) -> list[bytes]:
    return zlib.decompress(block).split(_START)
