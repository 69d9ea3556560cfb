"""`Reader`: the chunks of topics, for programs. The decisions are `Rotation`'s and `Membership`'s.

Threads fetch ahead, a little: pages of the partitions (`fetching`), or the frames of a session (`attending`). All that
is shared is under one lock (`shelf`), and no request is made under it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from types import TracebackType
from typing import Callable, TypeVar

from logferry.client.errors import Closed, LogferryError, Superseded, Unknown
from logferry.client.reading.attending import Attending
from logferry.client.reading.decode import Chunk, Line
from logferry.client.reading.duplicates import Copies, of_several_centres
from logferry.client.reading.fetching import Fetching
from logferry.client.reading.group_membership import Membership, Revoked
from logferry.client.reading.link import Link
from logferry.client.reading.partition_scheduler import Rotation
from logferry.client.reading.position import At, Cursors, Partition, Position
from logferry.client.reading.requests import Again, content_of
from logferry.client.reading.shelf import Shelf
from logferry.client.reading.start_positions import cursors_of, names, placed, starts, translated
from logferry.client.reading.subscription import wanted
from logferry.client.transport.connections import Reply
from logferry.client.transport.dialer import Dialer, proxies_of

_T = TypeVar("_T")


class Reader:
    """Iterates over the chunks of topics, each partition in order. For one thread.

    * Without a ``consumer`` it reads all partitions from ``start`` on, and `position` is all there is to store.
    * With one, it shares the partitions with the other readers of that consumer, goes on where the consumer has
      committed (where nothing is committed, at ``start``), and `commit` says that what was handed out is done.
    * A lost connection, a gateway that is away: it waits and goes on behind what was handed out, nothing left out and
      nothing twice. What it cannot mend is raised: `OutOfRange`, `Rejected`.

    ``topic``: one or several, in full (``dc1.nginx``) or without the data centre; with a consumer also patterns
    (``*.nginx``). ``start``: ``earliest``, ``latest``, a time with its zone, a `Position` or `Cursors`, or the text of
    one; partitions that it does not name are read from their beginning. ``partitions``: these alone.
    ``source_prefix``, ``attributes``: only chunks of such sources, with such attributes. ``follow``: wait for more;
    else it ends where the topic ended when reading began. ``gzip``: on the way; for slow links. It holds
    ``connections`` pages of about ``page_bytes`` at most. ``drop_copies``: a chunk that this reader had from another
    data centre's topic of the same name, since its source moved, is not handed out again; it is known by source id and
    seqno, so switch it off where one id stands for several partition keys. ``on_revoked``: called while partitions
    move to another reader; what it commits within a second does not come again.
    """

    def __init__(
        self,
        urls: str | Iterable[str],
        topic: str | Iterable[str],
        *,
        consumer: str | None = None,
        start: str | datetime | Position = "earliest",
        partitions: Iterable[int] | None = None,
        source_prefix: str = "",
        attributes: Mapping[str, str] | None = None,
        follow: bool = True,
        max_chunks: int | None = None,
        token: str | None = None,
        ca_file: str | None = None,
        gzip: bool = False,
        page_bytes: int = 1 << 20,
        connections: int = 8,
        drop_copies: bool = True,
        on_revoked: Callable[[], None] | None = None,
    ) -> None:
        """Raises ValueError, and OSError for a ``ca_file`` that cannot be used."""
        self._wanted = wanted(
            urls, topic, token, consumer=consumer, start=start, partitions=partitions, source_prefix=source_prefix,
            attributes=attributes, follow=follow, max_chunks=max_chunks, gzip=gzip, page_bytes=page_bytes,
            connections=connections, on_revoked=on_revoked,
        )  # fmt: skip
        self._left = max_chunks
        several = drop_copies and of_several_centres(self._wanted.topics)
        self._copies = Copies() if several else None
        self._dialer = Dialer(ca_file, proxies=proxies_of(os.environ))
        self._link = Link(self._wanted, self._dialer)
        self._shelf = Shelf()
        self._rotation: Rotation | None = None
        self._membership: Membership | None = None

    def __enter__(self) -> Reader:
        try:
            self.open()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def open(self, timeout_s: float | None = None) -> None:
        """Finds the topics and where to begin; does nothing where that is done. The first `read` calls it.

        Raises `Rejected`, and `Unknown` after ``timeout_s``.
        """
        if self._shelf.is_closed:
            raise Closed("the reader is closed")
        if self._rotation is not None or self._membership is not None:
            return
        deadline = _deadline(timeout_s)
        with self._shelf.cutting(self._link.cut):
            self._wanted = self._follow(placed(self._wanted), deadline)
            if self._wanted.consumer is not None:
                topics = self._follow(names(self._wanted), deadline)
                self._membership = Membership(self._wanted.stored(), self._wanted.follow)
                Attending(self._wanted, self._membership, topics, self._shelf, self._dialer)
                return
            rotation = Rotation(self._wanted.connections)
            for place in self._follow(starts(self._wanted), deadline):
                rotation.add(*place)
            self._rotation = rotation
            Fetching(self._wanted, rotation, self._shelf, self._dialer)

    # ---- reading ---------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        chunk = self.read()
        if chunk is None:
            raise StopIteration
        return chunk

    def read(self, timeout_s: float | None = None) -> Chunk | None:
        """The next chunk; None at the end (``follow=False``, ``max_chunks``), or where none came in time."""
        chunk = self._next(_deadline(timeout_s))
        if chunk is not None:
            with self._shelf.lock:
                self._core.reach(chunk, At(chunk.offset + 1))
        return chunk

    def lines(self) -> Iterator[Line]:
        """The lines of the chunks, one by one; `position` counts them, so that a restart goes on with the next line."""
        while True:
            chunk = self._next(None)
            if chunk is None:
                return
            found = chunk.lines()
            at = self._core.at(chunk)
            skipped = at.lines if at.offset == chunk.offset else 0
            for number in range(skipped, len(found)):
                with self._shelf.lock:
                    self._core.reach(chunk, after_line(chunk, number, len(found)))
                yield Line(chunk.source_id, chunk.seqno, number, found[number], chunk)
            with self._shelf.lock:
                self._core.reach(chunk, At(chunk.offset + 1))

    @property
    def position(self) -> Position:
        """Where to go on after what was handed out; its `str` is to be stored. Empty before `open`."""
        with self._shelf.lock:
            return self._core.position if self._rotation or self._membership else Position({})

    def cursors(self, timeout_s: float | None = None) -> Cursors:
        """`position` for all data centres: a reader elsewhere that has it as ``start`` goes on at the very next chunk.

        Asks the gateway. Raises `Rejected` for a topic that no mirror brought here, and `Unknown` after ``timeout_s``.
        """
        return self._follow(cursors_of(self._wanted, self.position), _deadline(timeout_s))

    def translate(
        self, topic: str, partition: int, offset: int, from_dc: str, to_dc: str, timeout_s: float | None = None
    ) -> int:
        """The offset of the same record in another data centre: ``topic`` in full; one of the two is where the topic is
        written, the other where this reader reads. What is not mirrored yet is waited for.

        Raises `Rejected` for a topic that no mirror brought here, and `Unknown` after ``timeout_s``.
        """
        steps = translated(self._wanted, (topic, partition), offset, from_dc, to_dc)
        return self._follow(steps, _deadline(timeout_s))

    @property
    def is_over(self) -> bool:
        """Nothing more will come: the end, or `max_chunks`, is reached."""
        if self._left == 0:
            return True
        with self._shelf.lock:
            return bool(self._rotation or self._membership) and self._core.is_over

    def commit(self, timeout_s: float | None = None) -> None:
        """Commits `position` for the consumer: everything that was handed out counts as done.

        Raises `Superseded` where partitions are another reader's meanwhile (that of the others is committed), and
        `Unknown` after ``timeout_s``. It is safe to call again.
        """
        membership = self._membership
        if self._wanted.consumer is None:
            raise ValueError("commit: a reader without a consumer has nowhere to commit; store its position")
        if membership is None:
            return
        with self._shelf.lock:
            body, path = membership.to_commit(), self._wanted.commit_path(membership.session)
        if body is not None:
            self._insist(path, _deadline(timeout_s), json.dumps(body).encode())
        with self._shelf.lock:
            if body is not None:
                membership.committed(body)
            lost = membership.lost()
        if lost:
            raise Superseded(lost_partitions(lost))

    def close(self) -> None:
        """Ends the requests under way. Nothing is committed by it. Calling it again is safe."""
        self._shelf.close()
        self._link.close()

    # ---- in the caller's thread ------------------------------------------------------------------------------

    @property
    def _core(self) -> Rotation | Membership:
        core = self._rotation or self._membership
        if core is None:
            raise Closed("the reader is not open")
        return core

    def _next(self, deadline: float | None) -> Chunk | None:
        if self._left == 0:
            return None
        self.open(None if deadline is None else max(deadline - time.monotonic(), 0.0))
        while True:
            try:
                chunk = self._await_chunk(deadline)
            except Revoked:
                self._wanted.on_revoked()
                continue
            except LogferryError as error:
                self._shelf.fail(error)
                raise
            if chunk is not None and self._copies is not None and self._copies.is_copy(chunk):
                with self._shelf.lock:
                    self._core.reach(chunk, At(chunk.offset + 1))
                continue
            if chunk is not None and self._left is not None:
                self._left -= 1
            return chunk

    def _await_chunk(self, deadline: float | None) -> Chunk | None:
        shelf = self._shelf
        with shelf.lock:
            while True:
                if shelf.is_closed:
                    raise Closed("the reader is closed")
                with suppress(Again):  # the session is opened anew
                    freed = self._core.freed
                    try:
                        chunk = self._core.next_chunk()
                    finally:
                        if self._core.freed != freed:
                            shelf.room.notify_all()
                    if chunk is not None:
                        return chunk
                    if shelf.failure is not None:
                        raise shelf.failure
                    if self._core.is_over:
                        return None
                    left = None if deadline is None else deadline - time.monotonic()
                    if left is not None and left <= 0:
                        return None
                    shelf.came.wait(left)

    def _follow(self, steps: Generator[str, Reply, _T], deadline: float | None) -> _T:
        try:
            path = next(steps)
            while True:
                path = steps.send(self._insist(path, deadline))
        except StopIteration as result:
            found: _T = result.value
            return found

    def _insist(self, path: str, deadline: float | None, body: bytes | None = None) -> Reply:
        """Asks until there is a good answer. Raises what the caller must hear of."""
        failures = 0
        while True:
            try:
                reply = self._link.ask(path, body)
                content_of(reply)
                return reply
            except Again as again:
                failures += 1
                pause_s = again.pause_s(failures)
                if deadline is not None and time.monotonic() + pause_s >= deadline:
                    raise Unknown(f"no answer in time: {again}") from None
            self._shelf.pause(pause_s)
            if self._shelf.is_closed:
                raise Closed("the reader is closed")


def lost_partitions(lost: Iterable[Partition]) -> str:
    """What `Superseded` says of them."""
    named = ", ".join(f"{topic}:{number}" for topic, number in lost)
    return f"superseded: {named} moved to another reader before this; what was not committed comes again"


def after_line(chunk: Chunk, number: int, count: int) -> At:
    """Where its partition stands when so many of a chunk's lines, and one more, were handed out."""
    return At(chunk.offset, number + 1) if number + 1 < count else At(chunk.offset + 1)


def _deadline(timeout_s: float | None) -> float | None:
    return None if timeout_s is None else time.monotonic() + timeout_s
