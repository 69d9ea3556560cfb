"""The order of the demo: logs flow, four processes are killed by SIGKILL, and all data is delivered to the end.

No kill depends on luck. A gateway worker is killed while it has requests in progress, the mirror while it lags, the
push-client while its files grow, the loader while its data files are in the table's folder without a commit. The
generator writes until all four are dead, at a lower rate after its time. Files of the user do not grow: the gateway
worker is killed during the first requests, and the event of the push-client's kill reports the bytes left to send.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Final

from logferry.loaders.planning.segment_states import READY
from logferry.loaders.planning.source_facts import utc_text as time_of
from logferry.loaders.storage.side_tables import Segments
from logferry.ops.cli.gateway_client import GatewayClient
from logferry.ops.cli.problems import Unavailable
from logferry.ops.demo import gateways
from logferry.ops.demo.gateways import kill_busy_worker
from logferry.ops.demo.loader_runs import RUN_S, KilledRun, LoaderRun, LoaderRuns, QueryAnswer, run_query
from logferry.ops.demo.plan import DC, FULL_TOPIC, LANES, OTHER_DC, PARTITIONS, RATE_MB_S, TOPIC, DemoPlan
from logferry.ops.demo.push import PushClient, generator
from logferry.ops.demo.readers import IndependentReader, RoamingReader
from logferry.ops.demo.view import DemoState, ProcessLine, View, mb
from logferry.ops.demo.wait import LIMIT_S, BoundedWait, failure, stop_child
from logferry.ops.stack.processes import Child
from logferry.ops.stack.service_workers import get
from logferry.ops.stack.stack import Stack

_CLIENT_AWAY_S: Final = 2.0
_STOP_S: Final = 20.0
_LOAD_S: Final = RUN_S + LIMIT_S
_SHOWN_SOURCES: Final = 3


@dataclass
class StoryRecord:
    """The events that the summary needs. ``torn``: None if the loader had nothing to write. ``segments``: the last."""

    killed: list[str] = field(default_factory=list)
    loads: list[LoaderRun] = field(default_factory=list)
    torn: KilledRun | None = None
    asked: QueryAnswer | None = None
    segments: Segments = field(default_factory=dict)


class Story:
    """Runs once, within a running stack. All processes that it starts have ended when `__exit__` returns."""

    def __init__(self, plan: DemoPlan, stack: Stack, view: View) -> None:
        self.plan, self._stack, self._view, self._say = plan, stack, view, view.say
        self.record = StoryRecord()
        self.reader = IndependentReader(stack.urls(), FULL_TOPIC)
        self.roaming = RoamingReader([stack.urls(DC), stack.urls(OTHER_DC)], FULL_TOPIC)
        self._gateway = GatewayClient(stack.urls()[0])
        self._client = PushClient(plan, stack.urls())
        self._generator = generator(plan)
        self._loads = LoaderRuns(plan, stack.cluster().bootstrap, stack.urls())
        self.present = DemoState(plan, stack, self.reader, self._processes)
        self._waiting = BoundedWait(self._meanwhile, self._suspects)
        self._loading: Future[None] | None = None
        self._began = time.monotonic()
        self._ending = ExitStack()

    def __enter__(self) -> Story:
        self._executor = self._ending.enter_context(ThreadPoolExecutor(1, "loads"))
        self._ending.callback(self._loads.end)
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
        with self._view.live(lambda: self.present.snapshot):
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
            self._waiting.must_run.append(self._generator)
            self._say(f"generator: access logs of 8 sites, {RATE_MB_S:.0f} MB/s, for {self.plan.seconds} s")
        self._start_client()

    def _await_first_chunk(self) -> None:
        self._waiting.until(lambda: self._loading is not None, "the first chunk at the reader")

    def _kill_gateway(self) -> None:
        self._flow_until(0.2, "data flows; a gateway worker will be killed")
        struck = kill_busy_worker(self._stack, self.present.lanes(), self._waiting, self._is_all_sent)
        self._killed(struck.said, "a gateway worker")
        self.present.step = f"{struck.name} is dead; its lanes go to the others"
        self._waiting.until(lambda: None not in self.present.lanes(), "all lanes are served again")
        self._say(f"all {LANES} lanes are served again after {time.monotonic() - struck.at:.1f} s", "green")
        self._catch_up()

    def _kill_mirror(self) -> None:
        self._flow_until(0.35, "data flows; the mirror will be killed")
        name, (url,) = f"{OTHER_DC}/mirror-0", self._stack.mirror_urls(OTHER_DC)
        self._waiting.until(lambda: gateways.mirror_lag(url) != 0 or self._is_all_sent(), "the mirror has work to do")
        pid, at = self._stack.pids.get(name), time.monotonic()
        self._stack.kill(name)
        self._killed(f"mirror (pid {pid}), on the way from {DC} to {OTHER_DC}", "the mirror")
        self.present.step = f"the mirror is dead; {DC} is the buffer"
        self._waiting.until(lambda: get(url, "/readyz")[0] == HTTPStatus.OK, "the mirror serves its lanes again")
        self._say(f"the mirror resumes after {time.monotonic() - at:.1f} s, at its last commit", "green")

    def _kill_client(self) -> None:
        self._flow_until(0.5, "data flows; the push-client will be killed")
        pid, behind = self._client.child.pid, self.present.behind()
        self._waiting.must_run.remove(self._client.child)
        self._client.kill()
        self._killed(f"push-client (pid {pid}), with {behind:,} bytes not readable yet", "the push-client")
        self.present.step = "the push-client is dead; the files are the buffer"
        back_at = time.monotonic() + _CLIENT_AWAY_S
        self._waiting.until(lambda: time.monotonic() >= back_at, "the push-client stays down for a moment")
        behind, known = self.present.behind(), len(self.reader.account.sources)
        self._start_client()
        what = "the push-client asks where to resume"
        self._waiting.until(lambda: len(self._client.resumed()) >= min(known, 2), what)
        self._say(f"push-client restarted, {mb(behind)} behind; {_resume_text(self._client.resumed())}", "green")
        self._catch_up()

    def _let_it_flow(self) -> None:
        """Until the time is over and the loader was killed."""
        self._flow_until(1.0, "data flows; the loader works")
        what = "the first run of the loader"
        self._waiting.until(lambda: self.record.torn is not None or self._is_loaded(), what, _LOAD_S)
        if self.plan.is_live:
            self._waiting.must_run.remove(self._generator)
            stop_child(self._generator, _STOP_S)
            took = time.monotonic() - self._began
            self._say(f"generator stopped after {took:.0f} s: the files have {self.present.written():,} bytes")

    def _send_the_rest(self) -> None:
        self.present.step = "the push-client sends the rest"
        self._waiting.must_run.remove(self._client.child)
        self._client.start_the_rest()
        self._waiting.until(lambda: not self._client.child.running, "the push-client has sent all", 2 * LIMIT_S)
        if self._client.child.exit_status != 0:
            raise failure(self._client.child)
        offsets = self._gateway.request("GET", f"/v1/topics/{TOPIC}")["offsets"]
        ends = {(FULL_TOPIC, at["partition"]): at["next"] for at in offsets}
        what = "the reader has read all"
        self._waiting.until(lambda: all(self.reader.positions[at].offset >= end for at, end in ends.items()), what)
        account, other = self.reader.account, self.roaming.account
        self._waiting.until(lambda: other.chunks >= account.chunks, "the roaming reader has all chunks")
        self._say(f"all is acknowledged and read: {account.chunks:,} chunks, {account.bytes:,} bytes", "green")

    def _ask(self) -> None:
        """All is sent, but not all is loaded: a query returns all rows nevertheless."""
        self.present.step = "the loader repeats the batch of the killed one"
        self._waiting.until(self._is_loaded, "the second run of the loader", _LOAD_S)
        self.present.step = "a query reads the table and the records not loaded yet"
        self.record.asked = asked = run_query(self.plan, self._stack.urls())
        text = f"logferry query, {asked.seconds:.1f} s, no Spark: {asked.rows:,} rows"
        self._say(f"{text}, {asked.behind:,} of them not loaded yet", "green")

    def _load_the_rest(self) -> None:
        self.present.step = "the loader loads the rest"
        if self.plan.is_live:
            self.present.step += ", and follows until every segment is READY"
        self._loading = self._executor.submit(self._load_to_the_end)
        self._waiting.until(self._is_loaded, "the last run of the loader", _LOAD_S)

    # ---- parts of steps ---------------------------------------------------------------------------------------

    def _flow_until(self, share: float, step: str) -> None:
        """Until this share of the time is over; without a wait for files of the user."""
        self.present.step = step
        if self.plan.is_live:
            until = self._began + share * self.plan.seconds
            self._waiting.until(lambda: time.monotonic() >= until, step, self.plan.seconds + LIMIT_S)

    def _catch_up(self) -> None:
        """Until all bytes written now are readable; without a wait for files of the user, which may be large."""
        if self.plan.is_live:
            target = self.present.written()
            what = "the reader has all bytes written so far"
            self._waiting.until(lambda: self.reader.account.bytes >= target, what, 2 * LIMIT_S)
            cut, refused = self._client.repeated()
            again = f"; {cut} requests were cut off, {refused} refused for a while: all repeated"
            self._say(f"caught up{again if cut + refused else ''}")

    def _is_all_sent(self) -> bool:
        return self.reader.account.chunks > 0 and not self.present.behind()

    def _start_client(self) -> None:
        self._client.start()
        self._waiting.must_run.append(self._client.child)

    def _load_twice(self) -> None:
        """In its own thread: a run that is killed in mid-write, and the next one, which repeats its batch."""
        first = self._loads.kill_in_mid_write()
        if isinstance(first, LoaderRun):
            self._loaded(first)
            return
        self.record.torn = first
        files = "its data file is" if first.files == 1 else f"its {first.files} data files are"
        self._killed(
            f"loader (pid {first.pid}) in mid-write: batch {first.batch} is in the ledger, {files} uncommitted",
            "a loader",
        )
        self._loaded(self._loads.run())

    def _load_to_the_end(self) -> None:
        assert self.record.asked is not None
        if self.plan.is_live:
            self._loaded(self._loads.follow_until_ready(self.record.asked.rows, self._seen))
        else:
            self._loaded(self._loads.run())

    def _seen(self, segments: Segments) -> None:
        """Reports the segments that became READY."""
        before, self.record.segments = self.record.segments, segments
        for start, segment in sorted(segments.items()):
            is_new = start not in before or before[start].state != READY
            if segment.state == READY and segment.rows and is_new:
                self._say(f"segment {time_of(start)} is READY: {segment.rows:,} rows, no source can add one", "green")

    def _loaded(self, loaded: LoaderRun) -> None:
        self.record.loads.append(loaded)
        batches = "1 batch" if loaded.batches == 1 else f"{loaded.batches} batches"
        what = f"{batches}, {loaded.rows:,} rows, {loaded.quarantined:,} quarantined, in {loaded.seconds:.1f} s"
        if not loaded.batches:
            what = "no record was left to load"
        self._say(f"loader run {loaded.run}: {what}", "green")

    def _is_loaded(self) -> bool:
        """Whether the present loader task is done. Raises the task's error."""
        if self._loading is None or not self._loading.done():
            return False
        self._loading.result()
        return True

    # ---- during all steps ----------------------------------------------------------------------------------------

    def _killed(self, text: str, what: str) -> None:
        self.record.killed.append(what)
        self._say(f"SIGKILL: {text}", "bold red")

    def _meanwhile(self) -> None:
        """Refreshes the state; starts the loader after the first chunk; reports failed readers."""
        self._view.pulse(self.present.look())
        if self._loading is None and self.reader.account.chunks:
            age_ms = self.reader.account.ages_ms[0]
            self._say(f"the first chunk is readable, {age_ms / 1000:.2f} s after its creation; loader run 1 starts")
            self._loading = self._executor.submit(self._load_twice)
        self._is_loaded()
        for reader in (self.reader, self.roaming):
            if reader.failed is not None:
                raise Unavailable(f"a reader ended: {reader.failed}") from reader.failed

    def _processes(self) -> list[ProcessLine]:
        lines = [ProcessLine("generator", self._generator.pid, f"{RATE_MB_S:.0f} MB/s")] if self.plan.is_live else []
        lines.append(ProcessLine("push-client", self._client.child.pid, f"run {self._client.runs}"))
        loader = self._loads.child
        if loader is not None:
            done = sum(loaded.rows for loaded in self.record.loads)
            lines.append(ProcessLine("loader", loader.pid, f"run {self._loads.runs}, {done:,} rows"))
        return lines

    def _suspects(self) -> list[Child]:
        """The processes whose logs may explain a time-out."""
        workers = range(len(self._stack.urls()))
        return [*(self._stack.child(f"{DC}/gateway-{worker}") for worker in workers), self._client.child]


def _resume_text(positions: dict[str, int]) -> str:
    """The resume positions of the sources, the furthest first."""
    ordered = sorted(positions.items(), key=lambda one: -one[1])
    shown = [f"{Path(source.partition(':')[2].rpartition('#')[0]).name} at {at:,}" for source, at in ordered]
    more = f" and {len(shown) - _SHOWN_SOURCES} more" if len(shown) > _SHOWN_SOURCES else ""
    return f"the gateway's resume positions: {', '.join(shown[:_SHOWN_SOURCES])}{more}"
