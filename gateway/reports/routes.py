"""The routes of reports: a loader reports its tables, a connector of HBase its subscription; people and programs read.

The right `report` to each topic of a report lets a program report, replace and remove it. Whoever may read or
administer each of its topics sees it: it names sources.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from aiohttp import web
from logferry.gateway.access.rights import Caller
from logferry.gateway.config import Strict
from logferry.gateway.contract.names import Malformed
from logferry.gateway.errors import Problem
from logferry.gateway.http.admission import Admission
from logferry.gateway.http.auth import Right
from logferry.gateway.http.router import Call, Routes, json_response
from logferry.gateway.kafka.client import KafkaClient
from logferry.gateway.reports import hbase, tables
from logferry.gateway.reports.tables import HELD_BYTES, REPORT_BYTES, StoredReport
from logferry.gateway.subscriptions import NAME
from logferry.gateway.topics.compacted_store import CompactedStore


@dataclass(frozen=True, slots=True)
class ReportKind:
    """``path``: behind /v1; also in the name of the topic. ``parameter``: in the path of one. ``operations``: the names
    of the routes. ``listed``: the key of a list.
    """

    path: str
    parameter: str
    operations: tuple[str, str, str, str]
    listed: str
    noun: str
    report: type[Strict]
    stored: type[StoredReport[Any]]
    description_of: Callable[[str, Any], Strict]
    summary_of: Callable[[str, Any], Strict]

    def topic(self, prefix: str, dc: str) -> str:
        return f"{prefix}.{self.path}.{dc}"


TABLES: Final = ReportKind(
    "tables",
    "table",
    ("tables", "table", "put_table", "delete_table"),
    "tables",
    "table",
    tables.TableReport,
    tables.StoredTableReport,
    tables.description_of,
    tables.summary_of,
)
HBASE: Final = ReportKind(
    "hbase",
    "subscription",
    ("hbase_reports", "hbase_report", "put_hbase_report", "delete_hbase_report"),
    "subscriptions",
    "subscription of HBase",
    hbase.HBaseReport,
    hbase.StoredHBaseReport,
    hbase.description_of,
    hbase.summary_of,
)
KINDS: Final = (TABLES, HBASE)


@dataclass(frozen=True, slots=True)
class ReportsApi:
    kafka: KafkaClient
    admission: Admission
    store: CompactedStore[StoredReport[Any]]
    kind: ReportKind

    def add_to(self, routes: Routes) -> None:
        every = f"/v1/{self.kind.path}"
        one = f"{every}/{{{self.kind.parameter}}}"
        for method, path, operation, do in zip(
            ("GET", "GET", "PUT", "DELETE"),
            (every, one, one, one),
            self.kind.operations,
            (self.list_all, self.get, self.put, self.delete),
            strict=True,
        ):
            routes.add(method, path, operation, do, Right.KNOWN)

    async def list_all(self, call: Call) -> web.StreamResponse:
        call.knows_only()
        found = sorted((await self.store.refresh()).items())
        seen = [self.kind.summary_of(name, stored) for name, stored in found if may_see(call.caller, stored)]
        return json_response({self.kind.listed: [one.model_dump() for one in seen]})

    async def get(self, call: Call) -> web.StreamResponse:
        call.knows_only()
        name, stored = await self._known(call)
        return json_response(self.kind.description_of(name, stored).model_dump())

    async def put(self, call: Call) -> web.StreamResponse:
        """Replaces what was reported before. Safe to repeat."""
        call.knows_only()
        name = self._name(call)
        report: Any = await self.admission.document(call.request, self.kind.report, REPORT_BYTES)
        fresh = self.kind.stored(reported_ms=self.kafka.clock.now_ms(), report=report)
        self._check_right(call.caller, report)
        known = await self.store.refresh()
        if not known:
            await self.store.create()
        before = known.get(name)
        if before is not None:
            # Nobody takes the name of a table of others.
            self._check_right(call.caller, before.report)
        elif self.store.held_bytes + len(fresh.encode()) > HELD_BYTES:
            many = f"{len(known)} reports of a {self.kind.noun}"
            raise Problem("conflict", f"there are {many}, in {HELD_BYTES} bytes already; remove some")
        await self.store.put(name, fresh)
        return json_response(self.kind.summary_of(name, fresh).model_dump(), status=201 if before is None else 200)

    async def delete(self, call: Call) -> web.StreamResponse:
        """Forgets the report, and nothing else. A program that still runs reports it again."""
        call.knows_only()
        name, stored = await self._known(call)
        if not call.caller.admin.is_everything:
            self._check_right(call.caller, stored.report)
        await self.store.put(name, None)
        return json_response(self.kind.summary_of(name, stored).model_dump())

    async def _known(self, call: Call) -> tuple[str, StoredReport[Any]]:
        name = self._name(call)
        stored = (await self.store.refresh()).get(name)
        if stored is None or not may_see(call.caller, stored):
            # Whoever may not see it does not learn whether it exists.
            raise Problem("not-found", f"no {self.kind.noun} {name} is reported")
        return name, stored

    def _name(self, call: Call) -> str:
        name = call.first(self.kind.parameter)
        if not NAME.match(name):
            raise Malformed(f"{self.kind.parameter}: {name[:100]!r} is not 1 to 100 of a-z A-Z 0-9 . _ -")
        return name

    def _check_right(self, caller: Caller, report: Any) -> None:
        for topic in report.topics:
            if not caller.report.match(topic):
                why = f"the token {caller.name} does not have the right to report a {self.kind.noun} of {topic}"
                raise Problem("forbidden", why)


def may_see(caller: Caller, stored: StoredReport[Any]) -> bool:
    rights = (caller.read, caller.admin, caller.report)
    return all(any(right.match(topic) for right in rights) for topic in stored.report.topics)
