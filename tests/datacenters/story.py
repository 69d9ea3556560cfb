"""The order of a run: all well, a gateway stops, a broker stops, the link is cut and mended, everything is proven.

These are the faults of the last step of the page *Production*, while the logs come at their full rate.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final, NamedTuple

import pyarrow.dataset as ds
from logferry.loaders.location import Location
from logferry.loaders.planning.ledger_entry import TablePaths
from logferry.loaders.planning.segment_states import READY
from logferry.loaders.storage.files import dataset, open_table
from logferry.loaders.storage.ledger import last_batch
from logferry.loaders.storage.side_tables import last_check, read_segments
from logferry.ops.cli.gateway_client import GatewayClient
from logferry.ops.cli.problems import CommandError, Unavailable
from rich.progress import Progress

from tests.datacenters.figures import Look, Note, Phase, TableLook, link_of, loaded_text
from tests.datacenters.plan import DCS, TOPIC, other
from tests.datacenters.site import Site

_LOOK_S: Final = 1.0
_TABLE_S: Final = 3.0
_SAY_S: Final = 20.0
_ASK_S: Final = 3.0
_ANSWER_S: Final = 5.0
_END_S: Final = 240.0
_STABLE_S: Final = 8.0
FAR: Final = "dc2"  # the data centre that is cut off
LINK_DOWN: Final = "the link is cut"


class Times(NamedTuple):
    """Seconds of each phase."""

    well: float
    fault: float
    cut: float
    after: float
    settle: float


class ConsoleWatch(threading.Thread):
    """Asks ``dc``'s gateways every three seconds what the console's pages ask, from the loader host of ``here``."""

    def __init__(self, site: Site, here: str, dc: str) -> None:
        super().__init__(name=f"console {here} {dc}", daemon=True)
        self.looks: list[Look] = []
        self._site, self._here = site, here
        secrets = site.secrets.folder
        token = (secrets / "operator.token").read_text(encoding="ascii").strip()
        self._gateways = [GatewayClient(url, token, str(secrets / "ca.pem"), _ANSWER_S) for url in site.urls(dc)]
        self._stopping = threading.Event()

    def run(self) -> None:
        self._site.network.enter(f"load1.{self._here}.example")
        while not self._stopping.wait(_ASK_S):
            began = time.time()
            self.looks.append(self._look(began))

    def _look(self, began: float) -> Look:
        for gateway in self._gateways:
            with suppress(CommandError):
                workers = gateway.request("GET", "/v1/workers")
                mirror: dict[str, Any] = gateway.request("GET", "/v1/mirror")
                wrong = tuple(str(one["what"]) for one in workers["findings"] if one["wrong"])
                return Look(began * 1000, (time.time() - began) * 1000, wrong, *link_of(mirror))
        return Look(began * 1000, (time.time() - began) * 1000, None)

    def stop(self) -> None:
        self._stopping.set()
        self.join(3 * _ANSWER_S)


class Outcome(NamedTuple):
    """``notes``: of each writer and reader by its name. ``looks``: from a data centre at another one."""

    phases: list[Phase]
    notes: dict[str, list[Note]]
    looks: dict[tuple[str, str], list[Look]]
    table: list[TableLook]


class Story:
    """Runs once, within a started site."""

    def __init__(self, site: Site, times: Times, progress: Progress, say: Callable[[str], None]) -> None:
        self._site, self._times, self._progress, self._say = site, times, progress, say
        self.is_loaded = False
        self._table: list[TableLook] = []
        self._table_at_s = 0.0
        self._phases: list[Phase] = []
        self._paths = TablePaths.of(Location.of(site.warehouse / TOPIC))
        self._watches = {(here, dc): ConsoleWatch(site, here, dc) for here in DCS for dc in DCS}

    def run(self, seed: int) -> Outcome:
        """Raises CommandError when a process ends that should not, or a step takes too long."""
        site, times, near = self._site, self._times, other(FAR)
        site.start_clients(seed)
        for watch in self._watches.values():
            watch.start()
        try:
            self._say("clients and loader are started")
            with self._phase("all is well"):
                self._flow(times.well)
            with self._phase(f"a gateway of {near} is dead"):
                self._kill(f"{near}/gateway-1")
                self._flow(times.fault)
                site.start_gateway(near, 1)
                self._flow_until(lambda: site.is_ready(near, 1), "the gateway is back")
            with self._phase(f"a broker of {FAR} is dead"):
                self._kill(f"{FAR}/kafka-2")
                self._flow(times.fault)
                site.start_broker(FAR, 2)
                site.resting.discard(f"{FAR}/kafka-2")
                self._flow(times.fault)
            with self._phase(LINK_DOWN):
                site.network.cut()
                self._say(f"CUT: nothing passes between {near} and {FAR}")
                self._flow(times.cut)
                site.network.mend()
                self._say(f"MENDED after {times.cut:.0f} s")
            with self._phase("the link is back"):
                self._flow(times.after)
            with self._phase("all is sent and loaded"):
                self._finish()
        finally:
            for watch in self._watches.values():
                watch.stop()
        notes = {
            name: _notes(child.log) for name, child in site.children.items() if "/writer" in name or "reader" in name
        }
        return Outcome(self._phases, notes, {key: watch.looks for key, watch in self._watches.items()}, self._table)

    # ---- parts -------------------------------------------------------------------------------------------------------

    def _kill(self, name: str) -> None:
        self._site.resting.add(name)
        self._site.children[name].kill_group()
        self._say(f"SIGKILL: {name}")

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        began = time.time()
        self._say(name)
        try:
            yield
        finally:
            self._phases.append(Phase(name, began * 1000, time.time() * 1000))

    def _flow(self, seconds: float) -> None:
        task = self._progress.add_task("logs flow", total=seconds)
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self._site.check()
            self._look_at_table()
            self._progress.update(task, completed=seconds - left)
            time.sleep(min(_LOOK_S, left))
        self._progress.remove_task(task)

    def _flow_until(
        self,
        done: Callable[[], bool],
        what: str,
        limit_s: float = 240.0,
        *,
        must: bool = True,
        state: Callable[[], str] = lambda: "not yet",
    ) -> bool:
        """Whether it was reached in time; ``state`` is said meanwhile. Raises Unavailable if it ``must`` be."""
        task = self._progress.add_task(what, total=None)
        began = said = time.monotonic()
        while not done():
            now = time.monotonic()
            if now > began + limit_s:
                if not must:
                    break
                why = f"not reached within {limit_s:.0f} s: {what}: {state()}"
                raise Unavailable(f"{why}; see {self._site.logs}")
            if now > said + _SAY_S:
                said = now
                self._say(f"  {what}: {state()}; {began + limit_s - now:.0f} s are left")
            self._site.check()
            self._look_at_table()
            time.sleep(_LOOK_S)
        self._progress.remove_task(task)
        return done()

    def _finish(self) -> None:
        site = self._site
        site.send_the_rest()
        self._say("all files are recorded")
        mirrored = "both mirrors have copied everything"
        self._flow_until(self._is_mirrored, mirrored, _END_S, state=self._mirror_text)
        self._say(mirrored)
        loaded = "everything is loaded, and every segment READY"
        self.is_loaded = self._flow_until(self._is_loaded, loaded, self._times.settle, must=False, state=self.load_text)
        self._say(f"{'' if self.is_loaded else 'NOT '}{loaded}")
        if not self.is_loaded:
            self._say(f"  {self.load_text()}; the loader's last words:\n{site.children['loader'].log_tail()}")
            self._kill("loader")  # in mid-batch, maybe: that is safe
        pushes = [f"{dc}/push" for dc in DCS]
        for name in ("loader", *pushes, *(f"{dc}/reader-of-{of}" for dc in DCS for of in DCS)):
            site.end(name)

    def load_text(self) -> str:
        return loaded_text(self._table)

    def _mirror_text(self) -> str:
        """By what each console said last."""
        found = []
        for dc in DCS:
            looks = self._watches[dc, dc].looks
            last = looks[-1] if looks else None
            silent = last is None or last.lag_records is None
            text = "no answer" if last is None or silent else f"{last.lag_records} records behind"
            found.append(f"{dc}: {text}" + (f", {last.wait}" if last is not None and last.wait else ""))
        return "; ".join(found)

    def _is_mirrored(self) -> bool:
        """By the mirrors' own words, each asked at home."""
        looks = [self._watches[dc, dc].looks for dc in DCS]
        return all(found and found[-1].lag_records == 0 and found[-1].wait is None for found in looks)

    def _is_loaded(self) -> bool:
        """All segments are READY, and nothing has changed for a while."""
        if not self._table:
            return False
        last = self._table[-1]
        old = [look for look in self._table if look.at_ms <= last.at_ms - _STABLE_S * 1000]
        return bool(old) and old[-1].rows == last.rows and last.ready == last.segments > 0

    def _look_at_table(self) -> None:
        """Every few seconds: the processes that are looked at have the same cores."""
        if time.monotonic() < self._table_at_s + _TABLE_S:
            return
        self._table_at_s = time.monotonic()
        table = open_table(self._paths.main)
        if table is None:
            return
        stored = dataset(self._paths.main, table)
        rows = {dc: int(stored.count_rows(filter=ds.field("topic") == f"{dc}.{TOPIC}")) for dc in DCS}
        segments = [one for one in read_segments(self._paths.segments, last_batch(table)).values() if one.rows]
        late = sorted(segment for segment in segments if segment.state != READY)
        why = str(last_check(self._paths.segments).get("waits") or "") if late else ""
        waits = f"{late[0].name} is {late[0].state}: {why or late[0].reason or 'not checked yet'}" if late else ""
        self._table.append(TableLook(time.time() * 1000, rows, len(segments), len(segments) - len(late), waits))


def _notes(log: Any) -> list[Note]:
    """An incomplete last line is left out, and what is no note."""
    found: list[Note] = []
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
        with suppress(ValueError):
            note = json.loads(line)
            if isinstance(note, dict):
                found.append(note)
    return found
