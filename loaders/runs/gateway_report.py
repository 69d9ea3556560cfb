"""Reports the state of each table to a gateway, which shows it in its console and reads no table itself.

A thread of its own computes and sends: a load only notes that something is new, and never waits. A gateway that is away
costs a report, not a batch; it is logged once until a report is accepted again. While a run follows, each table is also
reported every `EVERY_S`: a report that is much older is one of a loader that is gone. The last one of a run says so.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Final

from logferry.client.transport.cluster import bearer
from logferry.client.transport.connections import Connections, Dialer, NoResponse, proxies_of
from logferry.gateway.contract.names import check_token
from logferry.loaders.batches.execute import BatchDone
from logferry.loaders.batches.topic_lag import lag_of
from logferry.loaders.config import Config, ReportSettings
from logferry.loaders.errors import KafkaUnavailable, LoaderConfigError, LoadError
from logferry.loaders.location import Location
from logferry.loaders.planning.ledger_entry import TablePaths
from logferry.loaders.runs.table_facts import segment_facts, table_facts
from logferry.loaders.storage.files import STORAGE_ERRORS
from logferry.loaders.storage.tables import snapshot_of

EVERY_S: Final = 60.0
# Between two reports of a table: the newest one says it all.
_LEAST_S: Final = 5.0
_TIMEOUT_S: Final = 3.0
# For the last reports of a run; then it ends without them.
_CLOSE_S: Final = 15.0
_LARGEST_BYTES: Final = 250_000
_TEXT: Final = 2000


@dataclass
class _Noted:
    """What a load said of its table. ``batch``: its last one; the number may be older than the ledger's."""

    due: float
    batch: BatchDone | None = None
    error: str | None = None
    failure: str | None = None
    sent: float = float("-inf")


class TableReports:
    """``failed``: why the gateway did not accept the last report; None: it did. For several threads: one a table."""

    def __init__(self, settings: Config, to: ReportSettings, *, follows: bool, say: Callable[[str], None]) -> None:
        self._settings, self._to, self._say, self._follows = settings, to, say, follows
        self._tables: dict[Location, _Noted] = {}
        self._changed = threading.Condition()
        self._is_closing = False
        self.failed: str | None = None
        self._thread = threading.Thread(target=self._run, name="reports", daemon=True)
        self._thread.start()

    # ---- noted by the loads ----------------------------------------------------------------------------------

    def batch_done(self, path: Location, batch: BatchDone) -> None:
        with self._changed:
            noted = self._due(path)
            noted.batch = batch

    def load_ended(self, path: Location, error: LoadError | None, check_failure: str | None) -> None:
        said = None if error is None else str(error)
        with self._changed:
            noted = self._tables.get(path)
            if noted is None or (noted.error, noted.failure) != (said, check_failure):
                noted = self._due(path)
                noted.error, noted.failure = said, check_failure

    def _due(self, path: Location) -> _Noted:
        noted = self._tables.setdefault(path, _Noted(0.0))
        noted.due = min(noted.due, max(time.monotonic(), noted.sent + _LEAST_S))
        self._changed.notify()
        return noted

    def close(self) -> None:
        """Sends the last report of each table, for a few seconds at most."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join(_CLOSE_S)

    # ---- the thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (path := self._next()) is not None:
            self._report(path)
        until = time.monotonic() + _CLOSE_S
        for path in list(self._tables):
            # The others would wait for the same gateway.
            if time.monotonic() > until or not self._report(path):
                return

    def _next(self) -> Location | None:
        """The table whose report is due; None: the run ends."""
        with self._changed:
            while not self._is_closing:
                now = time.monotonic()
                path = min(self._tables, key=lambda one: self._tables[one].due, default=None)
                if path is not None and (noted := self._tables[path]).due <= now:
                    noted.sent, noted.due = now, now + EVERY_S
                    return path
                self._changed.wait(None if path is None else self._tables[path].due - now)
        return None

    def _report(self, path: Location) -> bool:
        try:
            document = self._document(path)
            why = None if document is None else send(self._to, table_name(path), document)
        except (LoadError, *STORAGE_ERRORS) as error:
            why = f"the state of {path} cannot be read: {error}"
        except Exception as error:  # noqa: BLE001 - a report never ends a load
            why = f"{path}: {error!r}"
        was, self.failed = self.failed, why
        if why is not None and was is None:
            self._say(f"no report to the gateway: {why}")
        elif why is None and was is not None:
            self._say("the gateway accepts reports again")
        return why is None

    def _document(self, path: Location) -> bytes | None:
        """None: nothing was loaded yet."""
        paths, noted = TablePaths.of(path), self._tables[path]
        try:
            facts = table_facts(path)
        except LoaderConfigError:
            return None
        if facts["last"] is not None:
            try:
                facts["lag"] = [one._asdict() for one in lag_of([snapshot_of(path)], self._settings.kafka)[0]]
            except KafkaUnavailable as error:
                facts["lag_unknown"] = str(error)
        every_s = EVERY_S if self._follows and not self._is_closing else None
        found = report_of(facts, segment_facts(paths), self._settings.dc, every_s)
        if not found["topics"]:
            return None
        found["error"] = noted.error
        done = noted.batch
        if done is not None and done.ours and found["batch"] and found["batch"]["batch"] == done.batch:
            found["batch"]["rows"] = done.rows
        if found["segments"] is not None:
            found["segments"]["failure"] = noted.failure
        return fitted(found)


def table_name(path: Location) -> str:
    """The name at the gateway: the folder's, and a hash of the whole location, since folders share names."""
    name = re.sub(r"[^a-zA-Z0-9._-]", "-", path.name)[:80]
    return f"{name}-{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"


def report_of(facts: dict[str, Any], segments: dict[str, Any] | None, dc: str, every_s: float | None) -> dict[str, Any]:
    """The body of ``PUT /v1/tables/{name}``, of what `logferry table state --json` shows and the segments."""
    lag = [dict(one) for one in facts.get("lag", ())]
    for one in lag:
        way = f"logferry table reset {facts['table']} --to {one['topic']}=…"
        one["way"] = way if one["stopped"] is not None else None
    last = facts["last"]
    return {
        "location": facts["table"],
        "dc": dc,
        "topics": sorted({one["topic"] for one in (*facts["positions"], *lag)}),
        "every_s": every_s,
        "error": None,
        "batch": last and {"batch": last["batch"], "kind": last["kind"], "planned": last["planned"], "rows": None},
        "lag": lag,
        "lag_unknown": facts.get("lag_unknown"),
        "quarantine": facts["quarantine"],
        "segments": segments and {**segments, "failure": None},
    }


def fitted(report: dict[str, Any]) -> bytes:
    """As JSON that the gateway accepts: long texts are cut, and so are, where that is too little, lists of sources."""
    short = _shortened(report)
    for most in (100, 5, 1, 0):
        for segment in short["segments"]["newest"] if short["segments"] else ():
            segment["waits_for"] = segment["waits_for"][:most]
        body = json.dumps(short).encode()
        if len(body) <= _LARGEST_BYTES:
            break
    return body


def _shortened(value: Any) -> Any:
    if isinstance(value, str):
        return value[:_TEXT]
    if isinstance(value, dict):
        return {_shortened(key): _shortened(one) for key, one in value.items()}
    return [_shortened(one) for one in value] if isinstance(value, list) else value


def send(to: ReportSettings, name: str, body: bytes) -> str | None:
    """To the first URL that answers. Returns why it was not accepted. Redirects are not followed: it bears a token."""
    why = ""
    try:
        token = None if to.token_file is None else check_token(to.token_file.read_text("utf-8"), str(to.token_file))
        dialer = Dialer(None if to.ca_file is None else str(to.ca_file), proxies=proxies_of(os.environ))
    except (OSError, ValueError) as error:
        return str(error)
    with closing(Connections(_TIMEOUT_S, dialer)) as connections:
        for url in to.urls:
            try:
                headers = {"Content-Type": "application/json", **({} if token is None else bearer(token, url))}
                reply = connections.exchange(f"{url.rstrip('/')}/v1/tables/{name}", headers, body, "PUT")
            except (NoResponse, ValueError) as error:
                why = str(error)
                continue
            if reply.status in (200, 201):
                return None
            why = f"{url} answers {reply.status}: {reply.body[:300].decode('utf-8', 'replace')}"
            if reply.status < 500:
                return why
    return why
