"""The routes about tables: a loader reports the state of its tables, people and programs read it.

The right `report` to each topic of a table lets a loader report, replace and remove its state. Whoever may read or
administer each of its topics sees it: it names sources.
"""

from __future__ import annotations

from dataclasses import dataclass

from aiohttp import web
from logferry.gateway.access.rights import Caller
from logferry.gateway.contract.names import Malformed
from logferry.gateway.errors import Problem
from logferry.gateway.http.admission import Admission
from logferry.gateway.http.auth import Right
from logferry.gateway.http.router import Call, Routes, json_response
from logferry.gateway.kafka.client import KafkaClient
from logferry.gateway.subscriptions import NAME
from logferry.gateway.tables.reports import (
    HELD_BYTES,
    REPORT_BYTES,
    StoredReport,
    TableReport,
    description_of,
    summary_of,
)
from logferry.gateway.topics.compacted_store import CompactedStore


@dataclass(frozen=True, slots=True)
class TablesApi:
    kafka: KafkaClient
    admission: Admission
    store: CompactedStore[StoredReport]

    def add_to(self, routes: Routes) -> None:
        one = "/v1/tables/{table}"
        routes.add("GET", "/v1/tables", "tables", self.list_all, Right.KNOWN)
        routes.add("GET", one, "table", self.get, Right.KNOWN)
        routes.add("PUT", one, "put_table", self.put, Right.KNOWN)
        routes.add("DELETE", one, "delete_table", self.delete, Right.KNOWN)

    async def list_all(self, call: Call) -> web.StreamResponse:
        call.knows_only()
        found = sorted((await self.store.refresh()).items())
        seen = [summary_of(name, stored) for name, stored in found if may_see(call.caller, stored)]
        return json_response({"tables": [one.model_dump() for one in seen]})

    async def get(self, call: Call) -> web.StreamResponse:
        call.knows_only()
        name, stored = await self._known(call)
        return json_response(description_of(name, stored).model_dump())

    async def put(self, call: Call) -> web.StreamResponse:
        """Replaces what was reported before. Safe to repeat."""
        call.knows_only()
        name = _name(call)
        report = await self.admission.document(call.request, TableReport, REPORT_BYTES)
        fresh = StoredReport(reported_ms=self.kafka.clock.now_ms(), report=report)
        _check_right(call.caller, report)
        known = await self.store.refresh()
        if not known:
            await self.store.create()
        before = known.get(name)
        if before is not None:
            # Nobody takes the name of a table of others.
            _check_right(call.caller, before.report)
        elif self.store.held_bytes + len(fresh.encode()) > HELD_BYTES:
            raise Problem("conflict", f"{len(known)} tables are reported, in {HELD_BYTES} bytes already; remove some")
        await self.store.put(name, fresh)
        return json_response(summary_of(name, fresh).model_dump(), status=201 if before is None else 200)

    async def delete(self, call: Call) -> web.StreamResponse:
        """Forgets the report; the table stays. A loader that still runs reports it again."""
        call.knows_only()
        name, stored = await self._known(call)
        if not call.caller.admin.is_everything:
            _check_right(call.caller, stored.report)
        await self.store.put(name, None)
        return json_response(summary_of(name, stored).model_dump())

    async def _known(self, call: Call) -> tuple[str, StoredReport]:
        name = _name(call)
        stored = (await self.store.refresh()).get(name)
        if stored is None or not may_see(call.caller, stored):
            # Whoever may not see it does not learn whether it exists.
            raise Problem("not-found", f"no table {name} is reported")
        return name, stored


def may_see(caller: Caller, stored: StoredReport) -> bool:
    rights = (caller.read, caller.admin, caller.report)
    return all(any(right.match(topic) for right in rights) for topic in stored.report.topics)


def _check_right(caller: Caller, report: TableReport) -> None:
    for topic in report.topics:
        if not caller.report.match(topic):
            raise Problem("forbidden", f"the token {caller.name} does not have the right to report tables of {topic}")


def _name(call: Call) -> str:
    name = call.first("table")
    if not NAME.match(name):
        raise Malformed(f"table: {name[:100]!r} is not 1 to 100 of a-z A-Z 0-9 . _ -")
    return name
