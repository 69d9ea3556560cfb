"""The routes that read without a session: chunks of a partition, and the translation of offsets."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import Final

from aiohttp import web
from logferry.gateway.config import Config
from logferry.gateway.contract.names import Cursor, Malformed, split_topic
from logferry.gateway.errors import Problem
from logferry.gateway.http.admission import computed
from logferry.gateway.http.auth import Right
from logferry.gateway.http.request import number, optional_number
from logferry.gateway.http.router import Call, Routes, json_response
from logferry.gateway.kafka.client import KafkaClient
from logferry.gateway.limits import FairShare
from logferry.gateway.metrics import READ_BYTES
from logferry.gateway.reading import page
from logferry.gateway.topics.copies import OffsetTranslation

# Counted for each row beside its data: the work to encode it.
_ROW_BYTES: Final = 100
# The kernel takes so many bytes at once; larger answers are written in such pieces.
_BUFFERED_BYTES: Final = 1 << 16
_READ: Final = ("offset", "time_ms", "cursor", "max_bytes", "wait_ms", "source_prefix")


@dataclass(frozen=True, slots=True)
class ReadApi:
    config: Config
    kafka: KafkaClient
    translation: OffsetTranslation
    room: FairShare

    def add_to(self, routes: Routes) -> None:
        partition = "/v1/topics/{topic}/partitions/{partition}"
        routes.add("GET", partition + "/chunks", "read", self.read, Right.READ)
        routes.add("GET", partition + "/translate", "translate", self.translate, Right.READ)

    async def read(self, call: Call) -> web.StreamResponse:
        topic = call.first("topic")
        dc, _ = split_topic(topic)
        wanted = _read(call, topic, dc)
        media_type, encode = page.encoder(call.request.headers.get("Accept", ""))
        # The bytes of the answer count until the reader has taken it.
        held = page.HeldBytes(self.room, call.caller.name)
        try:
            held.settle(1)
            found, cursor = await self._page(wanted, "cursor" in call.query, held)
            size_bytes = sum(len(row[-1]) + _ROW_BYTES for row in found.rows)
            held.settle(size_bytes)
            body = await computed(size_bytes, encode, found.rows)
            READ_BYTES.labels(topic).inc(sum(len(row[-1]) for row in found.rows))
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
            held.settle(0)

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


def _read(call: Call, topic: str, dc: str) -> page.ReadRequest:
    query = call.query
    filters = {name[5:]: query[name] for name in query if name.startswith("attr.")}
    call.knows_only(*_READ, *(f"attr.{name}" for name in filters))
    partition = number(call.second("partition"), "partition", 2**31 - 1)
    if sum(name in query for name in ("offset", "time_ms", "cursor")) > 1:
        raise Malformed("query: only one of offset, time_ms and cursor may be given")
    offset: int | str = query.get("offset", "earliest")
    if offset not in ("earliest", "latest"):
        offset = number(str(offset), "offset")
    if "cursor" in query:
        cursor = Cursor.parse(query["cursor"])
        if (cursor.topic, cursor.partition) != (topic, partition):
            raise Malformed(f"cursor: {query['cursor']} is not of {topic}, partition {partition}")
        offset = cursor.offset
    return page.ReadRequest(
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
