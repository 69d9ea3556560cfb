"""The routes that read without a session: chunks of a partition, also as Server-Sent Events, and translated offsets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

from aiohttp import web
from aiokafka.errors import KafkaError
from logferry.gateway.config import Config
from logferry.gateway.contract.mirror_state import OffsetRange
from logferry.gateway.contract.names import Cursor, Malformed, split_topic
from logferry.gateway.errors import Problem
from logferry.gateway.http.admission import computed
from logferry.gateway.http.auth import Gate, Right
from logferry.gateway.http.request import number, optional_number
from logferry.gateway.http.router import Call, Routes, json_response, problem_of
from logferry.gateway.kafka.client import KafkaClient
from logferry.gateway.limits import FairShare, ReadLimit
from logferry.gateway.metrics import READ_BYTES
from logferry.gateway.reading import formats, page
from logferry.gateway.reading.assignment import recreated, unknown_topic
from logferry.gateway.reading.event_stream import EventPage, EventStream
from logferry.gateway.reading.registry import SessionRegistry
from logferry.gateway.reading.stream import FrameStream, ReaderGone
from logferry.gateway.topics.copies import OffsetTranslation

# Counted for each row beside its data: the work to encode it.
_ROW_BYTES: Final = 100
# The kernel takes so many bytes at once; larger answers are written in such pieces.
_BUFFERED_BYTES: Final = 1 << 16
_EVENTS: Final = ("offset", "time_ms", "cursor", "source_prefix")
_READ: Final = (*_EVENTS, "max_bytes", "wait_ms")
_PROBLEMS: Final = (Problem, Malformed, KafkaError, TimeoutError)
# What a worker collects for one write of events.
_EVENT_BYTES: Final = 1 << 18
# The checkpoint of the mirror behind records that were read is written with them, or a little later.
_CHECKPOINT_S: Final = 5.0
_POLL_S: Final = 0.05
# How often a stream over its quota looks whether it may read: other workers may leave it some earlier.
_PACE_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class ReadApi:
    config: Config
    kafka: KafkaClient
    translation: OffsetTranslation
    room: FairShare
    readers: SessionRegistry
    gate: Gate
    quota_of: Callable[[str | None], ReadLimit | None] = lambda _: None

    def add_to(self, routes: Routes) -> None:
        partition = "/v1/topics/{topic}/partitions/{partition}"
        routes.add("GET", partition + "/chunks", "read", self.read, Right.READ)
        routes.add("GET", partition + "/translate", "translate", self.translate, Right.READ)

    async def read(self, call: Call) -> web.StreamResponse:
        accept = call.request.headers.get("Accept", "")
        if formats.media_type(accept, page.FORMATS) == formats.EVENTS:
            return await self._events(call)
        wanted = _read(call, *_READ)
        topic = wanted.topic
        media_type, encode = page.encoder(accept)
        # The bytes of the answer count until the reader has taken it.
        held = page.HeldBytes(self.room, call.caller.name, self.quota_of(call.caller.name))
        try:
            held.settle(1)
            found, cursor = await self._page(wanted, "cursor" in call.query, held)
            size_bytes = sum(len(row[-1]) + _ROW_BYTES for row in found.rows)
            held.settle(size_bytes)
            body = await computed(size_bytes, encode, found.rows)
            data_bytes = sum(len(row[-1]) for row in found.rows)
            held.charge(data_bytes)
            READ_BYTES.labels(topic).inc(data_bytes)
            headers = {"Content-Type": media_type, "X-Next-Offset": str(found.next_offset), "Vary": "Accept-Encoding"}
            coding = page.content_coding(call.request.headers.get("Accept-Encoding", ""))
            if coding is not None and len(body) > page.SMALL_BYTES:
                body = await asyncio.to_thread(page.compressed, body, coding)
                headers["Content-Encoding"] = coding
            if cursor is not None:
                headers["X-Next-Cursor"] = str(Cursor(topic, wanted.partition, cursor))
            if len(body) <= _BUFFERED_BYTES:
                return web.Response(body=body, headers=headers)
            return await written(call.request, body, headers, self.config.limits.session_stall_s)
        finally:
            held.release()

    async def _events(self, call: Call) -> web.StreamResponse:
        """Every problem is an event: a browser that gets an answer of another status gives up and shows nothing."""
        held = page.HeldBytes(self.room, call.caller.name, self.quota_of(call.caller.name))
        headers = {"Content-Type": formats.EVENTS, "Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        try:
            wanted = _read(call, *_EVENTS)
            self.readers.check_room(call.caller.name)
            pages = _EventPages(self, call, held, replace(wanted, max_bytes=_EVENT_BYTES), await self._topic_id(wanted))
            first = await pages.first()
            response = web.StreamResponse(headers=headers)
            out = FrameStream(call.request, response, formats.EVENT_STREAM, self.config.limits.session_stall_s)
            stream = EventStream(out, pages.read)
            with self.readers.event_stream(stream, call.caller.name):
                await response.prepare(call.request)
                try:
                    await stream.run(first)
                except _PROBLEMS as error:
                    with suppress(ReaderGone):
                        await out.send_frames([formats.error(problem_of(error))])
            return response
        except _PROBLEMS as error:
            body = formats.EVENT_STREAM.frame(formats.error(problem_of(error)))
            return web.Response(body=body, headers=headers)
        finally:
            held.release()

    async def _topic_id(self, wanted: page.ReadRequest) -> bytes:
        found = await self.kafka.ids_at_leaders([(wanted.topic, wanted.partition)])
        if wanted.topic not in found:
            raise unknown_topic(wanted.topic)
        return found[wanted.topic]

    async def _page(
        self, wanted: page.ReadRequest, by_cursor: bool, held: page.HeldBytes
    ) -> tuple[page.PartitionPage, int | None]:
        """The page, and the position after it in the original partition; None: for a copy that no mirror wrote."""
        limits, tp = self.config.limits, (wanted.topic, wanted.partition)
        if wanted.dc == self.config.dc:
            found = await page.read_page(self.kafka, limits, wanted, held)
            return found, found.next_offset
        if by_cursor:
            original = int(wanted.offset or 0)
            here = await self.translation.wait_for(tp, original, min(wanted.wait_ms, limits.read_wait_ms) / 1000)
            if here is None:
                # The reader is ahead of this copy, so there is nothing new for it here.
                return page.PartitionPage([], (await self.translation.checkpoint(tp)).local_next), original
            wanted = replace(wanted, offset=here)
        found = await page.read_page(self.kafka, limits, wanted, held)
        try:
            if found.last_offset is None and by_cursor:
                return found, original
            return found, await self.translation.to_original(tp, found.next_offset, found.last_offset)
        except Problem as problem:
            if by_cursor or problem.kind != "not-mirrored":
                raise
            return found, None

    async def translate(self, call: Call) -> web.StreamResponse:
        topic, query = call.first("topic"), call.query
        dc, _ = split_topic(topic)
        call.knows_only("offset", "from", "to")
        partition = number(call.second("partition"), "partition", 2**31 - 1)
        offset = number(query.get("offset", ""), "offset")
        here = self.config.dc
        start = query.get("from", here if query.get("to", here) != here else dc)
        end = query.get("to", here if start == dc else dc)
        if {start, end} != {dc, here}:
            raise Malformed(
                f"query: from and to must be {dc} and {here}; ask the gateways of other data centres for theirs"
            )
        tp = (topic, partition)
        translated: int | None = offset
        if start != end:
            translate = self.translation.to_here if start == dc else self.translation.to_original
            translated = await translate(tp, offset)
        if translated is None:
            reached = (await self.translation.checkpoint(tp)).original.next_offset
            raise Problem("behind", f"{topic}-{partition} is mirrored to offset {reached} so far")
        names = {"topic": topic, "partition": partition, "from": start, "offset": offset, "to": end}
        return json_response({**names, "translated": translated})


async def written(request: web.BaseRequest, body: bytes, headers: dict[str, str], stall_s: float) -> web.StreamResponse:
    """The answer after the reader took it. A reader that takes no piece of it in time is disconnected."""
    response = web.StreamResponse(headers=headers)
    response.content_length = len(body)
    await response.prepare(request)
    now = asyncio.get_running_loop().time
    try:
        async with asyncio.timeout(stall_s) as stall:
            for at in range(0, len(body), _BUFFERED_BYTES):
                await response.write(memoryview(body)[at : at + _BUFFERED_BYTES])
                stall.reschedule(now() + stall_s)
            await response.write_eof()
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionError(f"the reader took nothing for {stall_s:g} s") from None
    return response


@dataclass(slots=True)
class _EventPages:
    """The pages of one event stream. ``topic_id``: as the stream begins."""

    api: ReadApi
    call: Call
    held: page.HeldBytes
    wanted: page.ReadRequest
    topic_id: bytes

    async def first(self) -> EventPage:
        """Without waiting. The id that the browser had last goes before the query."""
        last_id = self.call.request.headers.get("Last-Event-ID", "")
        if last_id:
            return await self._read(replace(self.wanted, offset=_offset_of(last_id, self.wanted), time_ms=None), True)
        return await self._read(self.wanted, "cursor" in self.call.query)

    async def read(self, cursor: Cursor) -> EventPage:
        limits, quota = self.api.config.limits, self.held.quota
        while quota is not None and (wait_s := quota.wait_s()) > 0:  # noqa: ASYNC110
            await asyncio.sleep(min(wait_s, _PACE_S))
        wanted = replace(self.wanted, offset=cursor.offset, time_ms=None, wait_ms=limits.read_wait_ms)
        return await self._read(wanted, True)

    async def _read(self, wanted: page.ReadRequest, by_cursor: bool) -> EventPage:
        """Raises Problem, also where the right or the topic is gone since the stream began."""
        api, topic = self.api, wanted.topic
        if not api.gate.present(self.call.caller).may_read(topic):
            raise Problem("forbidden", "the token no longer has the right to read this")
        self.held.settle(1)
        found, reached = await api._page(wanted, by_cursor, self.held)
        # Asked for after the rows: an id never returns, so they were the older topic's if it is still there.
        if found.rows and await api._topic_id(wanted) != self.topic_id:
            raise recreated(topic)
        if reached is None:
            raise Problem("not-mirrored", f"no mirror writes {topic}-{wanted.partition} here, so chunks have no ids")
        ranges = await self._ranges(found) if wanted.dc != api.config.dc and found.rows else None
        size_bytes = sum(len(row[-1]) + _ROW_BYTES for row in found.rows)
        body = await computed(size_bytes, _events_of, found.rows, ranges)
        self.held.settle(size_bytes)
        data_bytes = sum(len(row[-1]) for row in found.rows)
        self.held.charge(data_bytes)
        READ_BYTES.labels(topic).inc(data_bytes)
        return EventPage(body, Cursor(topic, wanted.partition, reached))

    async def _ranges(self, found: page.PartitionPage) -> list[OffsetRange]:
        """Of the originals of these rows."""
        tp = (self.wanted.topic, self.wanted.partition)
        async with asyncio.timeout(_CHECKPOINT_S):
            while (known := await self.api.translation.originals(tp, found.rows[0][3], found.rows[-1][3])) is None:  # noqa: ASYNC110
                await asyncio.sleep(_POLL_S)
        return known[1]


def _events_of(rows: list[formats.Row], ranges: list[OffsetRange] | None) -> bytes:
    """``ranges``: in which the originals of the rows are; None: these are the originals."""
    if ranges is None:
        return b"".join(map(formats.EVENT_STREAM.chunk, rows))
    parts, at = [], 0
    for row in rows:
        _dc, topic, partition, offset = row[:4]
        while at < len(ranges) and offset >= ranges[at].local + ranges[at].size:
            at += 1
        if at == len(ranges) or offset < ranges[at].local:
            raise Problem("kafka-unavailable", f"{topic}-{partition}: the mirror's history lacks offset {offset}")
        parts.append(formats.event(row, Cursor(topic, partition, ranges[at].source + offset - ranges[at].local + 1)))
    return b"".join(parts)


def _offset_of(text: str, wanted: page.ReadRequest) -> int:
    """Raises Malformed where the cursor is another partition's."""
    cursor = Cursor.parse(text)
    if (cursor.topic, cursor.partition) != (wanted.topic, wanted.partition):
        raise Malformed(f"cursor: {text} is not of {wanted.topic}, partition {wanted.partition}")
    return cursor.offset


def _read(call: Call, *known: str) -> page.ReadRequest:
    query = call.query
    topic = call.first("topic")
    dc, _ = split_topic(topic)
    filters = {name[5:]: query[name] for name in query if name.startswith("attr.")}
    call.knows_only(*known, *(f"attr.{name}" for name in filters))
    partition = number(call.second("partition"), "partition", 2**31 - 1)
    if sum(name in query for name in ("offset", "time_ms", "cursor")) > 1:
        raise Malformed("query: only one of offset, time_ms and cursor may be given")
    offset: int | str = query.get("offset", "earliest")
    if offset not in ("earliest", "latest"):
        offset = number(str(offset), "offset")
    wanted = page.ReadRequest(
        topic=topic,
        dc=dc,
        partition=partition,
        offset=offset,
        time_ms=optional_number(query, "time_ms"),
        max_bytes=number(query["max_bytes"], "max_bytes", 2**31 - 1) if "max_bytes" in query else 1 << 20,
        wait_ms=number(query["wait_ms"], "wait_ms", 2**31 - 1) if "wait_ms" in query else 0,
        source_prefix=query.get("source_prefix", ""),
        attributes=filters,
    )
    return replace(wanted, offset=_offset_of(query["cursor"], wanted)) if "cursor" in query else wanted
