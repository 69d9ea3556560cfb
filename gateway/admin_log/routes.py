"""The route that reads the log of acts and refusals."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final

from aiohttp import web
from aiokafka import errors
from logferry.gateway.admin_log.records import AdminLogPage
from logferry.gateway.admin_log.writer import PARTITIONS
from logferry.gateway.contract.names import Malformed
from logferry.gateway.http.auth import Right
from logferry.gateway.http.request import number, optional_number
from logferry.gateway.http.router import Call, Routes, json_response
from logferry.gateway.kafka.client import EARLIEST, LATEST, KafkaClient

_FETCH_BYTES: Final = 1 << 20
_MOST: Final = 1000
_DEFAULT: Final = "100"


@dataclass(frozen=True, slots=True)
class AdminLogApi:
    kafka: KafkaClient
    topic: str

    def add_to(self, routes: Routes) -> None:
        routes.add("GET", "/v1/admin-log", "admin_log", self.get, Right.EVERYTHING)

    async def get(self, call: Call) -> web.StreamResponse:
        """A page, from an offset or a time on; the last one may be empty."""
        call.knows_only("kind", "offset", "time_ms", "max")
        kind = call.query.get("kind", "acts")
        if kind not in PARTITIONS:
            raise Malformed(f"kind: {kind[:40]!r} is neither {' nor '.join(PARTITIONS)}")
        offset, time_ms = optional_number(call.query, "offset"), optional_number(call.query, "time_ms")
        if offset is not None and time_ms is not None:
            raise Malformed("query: only one of offset and time_ms may be given")
        most = number(call.query.get("max", _DEFAULT), "max", _MOST)
        if most == 0:
            raise Malformed("max: is not from 1 to 1000")
        try:
            records, after = await self._page(PARTITIONS[kind], offset, time_ms, most)
        except errors.UnknownTopicOrPartitionError:
            records, after = [], 0  # nothing was ever written
        page = AdminLogPage.model_validate({"kind": kind, "records": records, "next": after})
        return json_response(page.model_dump())

    async def _page(self, partition: int, offset: int | None, time_ms: int | None, most: int) -> tuple[list[Any], int]:
        first = await self.kafka.offset(self.topic, partition, EARLIEST)
        end = await self.kafka.offset(self.topic, partition, LATEST)
        if time_ms is not None:
            found = await self.kafka.offset(self.topic, partition, time_ms)
            offset = end if found < 0 else found
        start = min(max(first, offset or 0), end)
        fetched = await self.kafka.fetch(self.topic, partition, start, max_bytes=_FETCH_BYTES)
        taken = fetched.records[:most]
        records = [{**json.loads(record.value), "offset": record.offset} for record in taken if record.value]
        return records, taken[-1].offset + 1 if taken else start
