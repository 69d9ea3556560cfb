"""The order of the demo: logs flow, four processes are killed by SIGKILL, and all data is delivered to the end.

No kill depends on luck. A gateway worker is killed while it has requests in progress, the mirror while it lags, the
push-client while its files grow, the loader while its data files are in the table's folder without a commit. The
generator writes until all four are dead, at a lower rate after its time. Files of the user do not grow: the gateway
worker is killed during the first requests, and the event of the push-client's kill reports the bytes left to send.
"""

from __future__ import annotations

import json
import re
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from http import HTTPStatus
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from logferry.loaders.location import Location
from logferry.loaders.storage.files import dataset, open_table
from logferry.ops.cli.gateway_client import GatewayClient
from logferry.ops.cli.problems import Unavailable
from logferry.ops.demo.loader_runs import RUN_S, LoaderRuns
from logferry.ops.demo.plan import DC, FULL_TOPIC, LANES, OTHER_DC, PARTITIONS, RATE_MB_S, TOPIC, DemoPlan, PushClient
from logferry.ops.demo.readers import IndependentReader
from logferry.ops.demo.view import DemoState, Row, View, mb, process_row
from logferry.ops.stack.processes import Child, get, json_of
from logferry.ops.stack.stack import Stack

_LIMIT_S: Final = 60.0
_LOOK_S: Final = 0.05
_CLIENT_AWAY_S: Final = 2.0
_STOP_S: Final = 20.0
_LOAD_S: Final = RUN_S + _LIMIT_S
_QUERY_S: Final = 120.0
_SQL: Final = "SELECT count(*) AS rows FROM logs"
_SHOWN_SOURCES: Final = 3
# Requests take hundredths of a second.
_BUSY_LOOK_S: Final = 0.003
_BUSY_S: Final = 10.0
_STOPPED_S: Final = 1.0
_IN_FLIGHT: Final = re.compile(rb"^logferry_in_flight_bytes ([0-9.e+]+)", re.MULTILINE)
_ESTABLISHED: Final = "01"
_SMALLEST_WRITE: Final = 512


class Story:
    """Runs once, within a running stack. All processes that it starts have ended when `__exit__` returns.

    ``asked``: rows that the query returned.
    """

    def __init__(self, plan: DemoPlan, stack: Stack, view: View) -> None:
        self.plan, self._stack, self.view, self._say = plan, stack, view, view.say
        self.reader = IndependentReader([stack.urls()], FULL_TOPIC)
        self.roaming = IndependentReader([stack.urls(DC), stack.urls(OTHER_DC)], FULL_TOPIC)
        self._gateway = GatewayClient(stack.urls()[0])
        self._client = PushClient(plan, stack.urls())
        self._generator = plan.generator()
        self.loads = LoaderRuns(plan, stack, view)
        self.asked = 0
        self.present = DemoState(plan, stack, self.reader, self._processes)
        self._must_run: list[Child] = []
        self._loading: Future[None] | None = None
        self._began = time.monotonic()
        self._ending = ExitStack()

    def __enter__(self) -> Story:
        self._executor = self._ending.enter_context(ThreadPoolExecutor(1, "loads"))
        self._ending.callback(self.loads.end)
        self._ending.callback(lambda: self._client.child.stop(_STOP_S))
        self._ending.callback(lambda: self._generator.stop(_STOP_S))
        return self

    def __exit__(self, *exc: object) -> None:
        self._ending.close()

    def run(self) -> None:
        """All steps. Raises CommandError when a process ends unexpectedly or a step takes too long."""
        self._gateway.request("PUT", f"/v1/topics/{TOPIC}", {"partitions": PARTITIONS})
        self._ending.enter_context(self.reader)
        self._ending.enter_context(self.roaming)
        with self.view.live(self.present):
            self._begin()
            if self.plan.is_live:
                self._await_first_chunk()
            self._kill_gateway()
            self._kill_mirror()
            self._kill_client()
            self._await_first_chunk()
            self._let_it_flow()
            self._send_the_rest()
            self._ask()
            self._load_the_rest()

    # ---- the steps --------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._began = time.monotonic()
        if self.plan.is_live:
            self.plan.generated.mkdir()
            self._generator.start()
            self._must_run.append(self._generator)
            self._say(f"generator: access logs of 8 sites, {RATE_MB_S:.0f} MB/s, for {self.plan.seconds} s")
        self._start_client()

    def _await_first_chunk(self) -> None:
        self._until(lambda: self._loading is not None, "the first chunk at the reader")

    def _kill_gateway(self) -> None:
        """With requests in progress and others on the way: a worker that reports bytes in flight is stopped (SIGSTOP),
        so that it answers none of them, until the kernel holds unread bytes for it, and then killed."""
        self._flow_until(0.2, "data flows; a gateway worker will be killed")
        urls, pids, deadline = self._stack.urls(), self._stack.pids, time.monotonic() + _BUSY_S
        sizes = [0] * len(urls)

        def is_caught() -> bool:
            sizes[:] = map(in_flight_bytes, urls)
            return any(sizes) or time.monotonic() > deadline or self._is_all_sent()

        served = self.present.lanes()
        self._until(is_caught, "a gateway worker has requests in progress", look_s=_BUSY_LOOK_S)
        worker = sizes.index(max(sizes))
        name = f"gateway-{worker}"
        self._stack.kill(f"{DC}/{name}", signal.SIGSTOP)
        deadline = time.monotonic() + _STOPPED_S
        while not (unread := unread_bytes(urls[worker])) and time.monotonic() < deadline:
            time.sleep(_BUSY_LOOK_S)
        self._stack.kill(f"{DC}/{name}")
        at, requests = time.monotonic(), f"{sizes[worker]:,} bytes of requests in progress and {unread:,} unread"
        who = f"{name} (pid {pids[f'{DC}/{name}']}), which served {served.count(worker)} lanes"
        self.view.say_killed("a gateway worker", f"{who} and had {requests}")
        self.present.step = f"{name} is dead; its lanes go to the others"
        self._until(lambda: None not in self.present.lanes(), "all lanes are served again")
        self._say(f"all {LANES} lanes are served again after {time.monotonic() - at:.1f} s", "green")
        self._catch_up()

    def _kill_mirror(self) -> None:
        self._flow_until(0.35, "data flows; the mirror will be killed")
        name, (url,) = f"{OTHER_DC}/mirror-0", self._stack.urls(OTHER_DC, "mirror")

        def has_work() -> bool:
            return any(partition["lag_records"] for partition in json_of(url, "/v1/status").get("partitions", []))

        self._until(lambda: has_work() or self._is_all_sent(), "the mirror has work to do")
        pid, at = self._stack.pids.get(name), time.monotonic()
        self._stack.kill(name)
        self.view.say_killed("the mirror", f"mirror (pid {pid}), on the way from {DC} to {OTHER_DC}")
        self.present.step = f"the mirror is dead; {DC} is the buffer"
        self._until(lambda: get(url, "/readyz")[0] == HTTPStatus.OK, "the mirror serves its lanes again")
        self._say(f"the mirror resumes after {time.monotonic() - at:.1f} s, at its last commit", "green")

    def _kill_client(self) -> None:
        self._flow_until(0.5, "data flows; the push-client will be killed")
        child, behind = self._client.child, self.present.behind()
        self._must_run.remove(child)
        said = f"push-client (pid {child.pid}), with {behind:,} bytes not readable yet"
        child.send(signal.SIGKILL)
        self.view.say_killed("the push-client", said)
        self.present.step = "the push-client is dead; the files are the buffer"
        back_at = time.monotonic() + _CLIENT_AWAY_S
        self._until(lambda: time.monotonic() >= back_at, "the push-client stays down for a moment")
        behind, known = self.present.behind(), len(self.reader.account.sources)
        self._start_client()
        self._until(lambda: len(self._client.resumed()) >= min(known, 2), "the push-client asks where to resume")
        self._say(f"push-client restarted, {mb(behind)} behind; {_resume_text(self._client.resumed())}", "green")
        self._catch_up()

    def _let_it_flow(self) -> None:
        """Until the time is over and the loader was killed."""
        self._flow_until(1.0, "data flows; the loader works")
        self._until(lambda: self.loads.has_killed or self._is_loaded(), "the first run of the loader", _LOAD_S)
        if self.plan.is_live:
            self._end(self._generator)
            took = time.monotonic() - self._began
            self._say(f"generator stopped after {took:.0f} s: the files have {self.present.written():,} bytes")

    def _send_the_rest(self) -> None:
        """By a client that exits when all files are recorded, in place of the one that follows them."""
        self.present.step = "the push-client sends the rest"
        self._end(self._client.child)
        self._client.start("--once")
        self._end_of(self._client.child, "the push-client has sent all", 2 * _LIMIT_S)
        offsets = self._gateway.request("GET", f"/v1/topics/{TOPIC}")["offsets"]
        ends = {(FULL_TOPIC, at["partition"]): at["next"] for at in offsets}
        what = "the reader has read all"
        self._until(lambda: all(self.reader.positions[at].offset >= end for at, end in ends.items()), what)
        account, other = self.reader.account, self.roaming.account
        self._until(lambda: other.chunks >= account.chunks, "the roaming reader has all chunks")
        self._say(f"all is acknowledged and read: {account.chunks:,} chunks, {account.bytes:,} bytes", "green")

    def _ask(self) -> None:
        """All is sent, but not all is loaded: a query returns all rows nevertheless."""
        self.present.step = "the loader repeats the batch of the killed one"
        self._until(self._is_loaded, "the second run of the loader", _LOAD_S)
        self.present.step = "a query reads the table and the records not loaded yet"
        stored, began = stored_rows(self.plan.table), time.monotonic()
        command = [sys.executable, "-m", "logferry.ops", "query", _SQL, "--table", str(self.plan.table)]
        command += ["--url", self._stack.urls()[0], "--format", "json"]
        query = Child("query", command, self.plan.runs / "query.log")
        self._ending.callback(lambda: query.stop(_STOP_S))
        query.start()
        self._end_of(query, "the end of the query", _QUERY_S)
        took = time.monotonic() - began
        try:
            self.asked = int(json.loads(query.log_tail())[0]["rows"])
        except ValueError:
            raise query.failed("printed more than its rows") from None
        text = f"logferry query, {took:.1f} s, no Spark: {self.asked:,} rows"
        self._say(f"{text}, {self.asked - stored:,} of them not loaded yet", "green")

    def _load_the_rest(self) -> None:
        self.present.step = "the loader loads the rest"
        if self.plan.is_live:
            self.present.step += ", and follows until every segment is READY"
            self._loading = self._executor.submit(self.loads.follow_until_ready, self.asked)
        else:
            self._loading = self._executor.submit(self.loads.run)
        self._until(self._is_loaded, "the last run of the loader", _LOAD_S)

    # ---- parts of steps ---------------------------------------------------------------------------------------

    def _until(self, done: Callable[[], bool], what: str, limit_s: float = _LIMIT_S, look_s: float = _LOOK_S) -> None:
        """Returns when ``done``. Raises Unavailable after the limit, or when a process or a reader has failed.

        Meanwhile it refreshes the state, and starts the loader after the first chunk.
        """
        deadline = time.monotonic() + limit_s
        while not done():
            for child in self._must_run:
                if not child.running:
                    raise child.ended()
            for reader in (self.reader, self.roaming):
                if reader.failed is not None:
                    raise Unavailable(f"a reader ended: {reader.failed}") from reader.failed
            if time.monotonic() > deadline:
                raise Unavailable(f"not reached within {limit_s:.0f} s: {what}")
            self.present.look()
            self.view.pulse(self.present.text)
            if self._loading is None and self.reader.account.chunks:
                age_s = self.reader.account.ages_ms[0] / 1000
                self._say(f"the first chunk is readable, {age_s:.2f} s after its creation; loader run 1 starts")
                self._loading = self._executor.submit(self.loads.kill_and_repeat)
            self._is_loaded()
            time.sleep(look_s)

    def _flow_until(self, share: float, step: str) -> None:
        """Until this share of the time is over; without a wait for files of the user."""
        self.present.step = step
        if self.plan.is_live:
            until = self._began + share * self.plan.seconds
            self._until(lambda: time.monotonic() >= until, step, self.plan.seconds + _LIMIT_S)

    def _catch_up(self) -> None:
        """Until all bytes written now are readable; without a wait for files of the user, which may be large."""
        if self.plan.is_live:
            target = self.present.written()
            what = "the reader has all bytes written so far"
            self._until(lambda: self.reader.account.bytes >= target, what, 2 * _LIMIT_S)
            cut, refused = self._client.repeated()
            again = f"; {cut} requests were cut off, {refused} refused for a while: all repeated"
            self._say(f"caught up{again if cut + refused else ''}")

    def _is_all_sent(self) -> bool:
        return self.reader.account.chunks > 0 and not self.present.behind()

    def _start_client(self) -> None:
        self._client.start()
        self._must_run.append(self._client.child)

    def _end(self, child: Child) -> None:
        """Stops a process that had to run."""
        self._must_run.remove(child)
        child.stop(_STOP_S)
        child.check_end()

    def _end_of(self, child: Child, what: str, limit_s: float) -> None:
        self._until(lambda: not child.running, what, limit_s)
        child.check_end()

    def _is_loaded(self) -> bool:
        """Whether the present loader task is done. Raises the task's error."""
        if self._loading is None or not self._loading.done():
            return False
        self._loading.result()
        return True

    def _processes(self) -> list[Row]:
        lines = [process_row("generator", self._generator.pid, f"{RATE_MB_S:.0f} MB/s")] if self.plan.is_live else []
        lines.append(process_row("push-client", self._client.child.pid, f"run {self._client.runs}"))
        if self.loads.child is not None:
            done = sum(report.rows for report in self.loads.reports)
            lines.append(process_row("loader", self.loads.child.pid, f"run {self.loads.runs}, {done:,} rows"))
        return lines


def in_flight_bytes(url: str) -> int:
    """Bytes of the requests in progress at this worker; 0 if it does not answer."""
    found = _IN_FLIGHT.search(get(url, "/metrics")[1])
    return int(float(found[1])) if found else 0


def unread_bytes(url: str) -> int:
    """Bytes in the worker's sockets that it has not read; 0 on a system without /proc/net/tcp.

    Sockets with less than a chunk's size are left out: they are readers' polls."""
    port = f":{urlsplit(url).port:04X}"
    found = 0
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        for _, local, _, state, queues, *_ in map(str.split, lines):
            if local.endswith(port) and state == _ESTABLISHED:
                waiting = int(queues.partition(":")[2], 16)
                found += waiting if waiting >= _SMALLEST_WRITE else 0
    return found


def stored_rows(place: Location) -> int:
    """Rows of the table, without its quarantine."""
    table = open_table(place)
    return 0 if table is None else int(dataset(place, table).count_rows())


def _resume_text(positions: dict[str, int]) -> str:
    """The resume positions of the sources, the furthest first."""
    ordered = sorted(positions.items(), key=lambda one: -one[1])
    shown = [f"{Path(source.partition(':')[2].rpartition('#')[0]).name} at {at:,}" for source, at in ordered]
    more = f" and {len(shown) - _SHOWN_SOURCES} more" if len(shown) > _SHOWN_SOURCES else ""
    return f"the gateway's resume positions: {', '.join(shown[:_SHOWN_SOURCES])}{more}"
