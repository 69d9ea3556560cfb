"""The story: logs flow, four processes are killed by SIGKILL meanwhile, and everything is brought to its end.

No kill depends on luck. A gateway worker dies when it has requests under way; the mirror when it is behind; the
push-client while files that it follows grow; the loader when its data files are in the table's folder and no commit
names them. The generator writes until all are dead, however long that takes, though less after its time. Files of the
user do not grow: there the gateway worker dies in the first requests, and what the push-client had left to send is
said.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from logferry.loaders.planning.segment_states import READY
from logferry.loaders.planning.segment_states import said as time_of
from logferry.loaders.storage.segment_table import Segments
from logferry.ops.cli.problems import Unavailable
from logferry.ops.demo import gateways
from logferry.ops.demo.asking import Asked, ask
from logferry.ops.demo.killing import kill_busy_worker
from logferry.ops.demo.loader_runs import RUN_S, Loaded, Loads, Torn
from logferry.ops.demo.plan import DC, FULL_TOPIC, LANES, OTHER_DC, PARTITIONS, RATE_MB_S, TOPIC, Plan
from logferry.ops.demo.present import Present
from logferry.ops.demo.push import PushClient, generator
from logferry.ops.demo.readers import Reader
from logferry.ops.demo.traveller import Traveller
from logferry.ops.demo.view import ProcessLine, View, mb
from logferry.ops.demo.wait import LIMIT_S, Waiting, end, failure
from logferry.ops.stack.processes import Child
from logferry.ops.stack.stack import Stack

_CLIENT_AWAY_S: Final = 2.0
_STOP_S: Final = 20.0
_LOAD_S: Final = RUN_S + LIMIT_S
_SHOWN_SOURCES: Final = 3


@dataclass
class Told:
    """What happened, for the end of the demo. ``torn``: None when there was nothing to kill a loader in. ``segments``:
    as they were in the end.
    """

    killed: list[str] = field(default_factory=list)
    loads: list[Loaded] = field(default_factory=list)
    torn: Torn | None = None
    asked: Asked | None = None
    segments: Segments = field(default_factory=dict)


class Story:
    """Told once, within a running stack. Everything that it starts has ended when `__exit__` returns."""

    def __init__(self, plan: Plan, stack: Stack, view: View) -> None:
        self._plan, self._stack, self._view = plan, stack, view
        self.told = Told()
        self.reader = Reader(stack.urls(), FULL_TOPIC, PARTITIONS)
        self.traveller = Traveller([stack.urls(DC), stack.urls(OTHER_DC)], FULL_TOPIC, PARTITIONS)
        self._client = PushClient(plan, stack.urls())
        self._generator = generator(plan)
        self._loads = Loads(plan, stack.cluster().bootstrap, stack.urls())
        self.present = Present(plan, stack, self.reader, self._processes)
        self._waiting = Waiting(self._meanwhile, self._suspects)
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

    @property
    def is_live(self) -> bool:
        """The files grow while they are sent."""
        return self._plan.is_live

    def tell(self) -> None:
        """The whole of it. Raises Problem when something ends that should not, or does not come in time."""
        gateways.create_topic(self._stack.urls()[0], TOPIC, PARTITIONS)
        self._ending.enter_context(self.reader)
        self._ending.enter_context(self.traveller)
        with self._view.live(lambda: self.present.snapshot):
            self._begin()
            if self.is_live:
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
        if self.is_live:
            self._plan.generated.mkdir()
            self._generator.start()
            self._waiting.must_run.append(self._generator)
            self._say(f"generator: access logs of 8 sites, {RATE_MB_S:.0f} MB/s, for {self._plan.seconds} s")
        self._start_client()

    def _await_first_chunk(self) -> None:
        self._waiting.until(lambda: self._loading is not None, "the first chunk at the reader")

    def _kill_gateway(self) -> None:
        self._flow_until(0.2, "data flows; a gateway worker will be killed")
        struck = kill_busy_worker(self._stack, self.present.lanes(), self._waiting, self._is_all_sent)
        self._killed(str(struck), "a gateway worker")
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
        self.present.step = "the mirror is dead; the data centre that it takes from is the buffer"
        self._waiting.until(lambda: bool(gateways.mirror_lanes(url)), "the mirror serves its lanes again")
        self._say(f"the mirror goes on after {time.monotonic() - at:.1f} s, where its last commit says", "green")

    def _kill_client(self) -> None:
        self._flow_until(0.5, "data flows; the push-client will be killed")
        pid, behind = self._client.child.pid, self.present.behind()
        self._waiting.must_run.remove(self._client.child)
        self._client.kill()
        self._killed(f"push-client (pid {pid}), with {behind:,} bytes not readable yet", "the push-client")
        self.present.step = "the push-client is dead; the files are the buffer"
        back_at = time.monotonic() + _CLIENT_AWAY_S
        self._waiting.until(lambda: time.monotonic() >= back_at, "the push-client is away for a moment")
        behind, known = self.present.behind(), len(self.reader.account.sources)
        self._start_client()
        self._waiting.until(lambda: len(self._client.resumed()) >= min(known, 2), "the push-client asks where to go on")
        self._say(f"push-client runs again, {mb(behind)} behind; {_goes_on(self._client.resumed())}", "green")
        self._catch_up()

    def _let_it_flow(self) -> None:
        """Until the time is over and the loader was killed, too."""
        self._flow_until(1.0, "data flows; the loader works")
        self._waiting.until(self._is_torn_or_loaded, "the first run of the loader", _LOAD_S)
        if self.is_live:
            self._waiting.must_run.remove(self._generator)
            end(self._generator, _STOP_S)
            took = time.monotonic() - self._began
            self._say(f"generator stopped after {took:.0f} s: {self.present.written():,} bytes in the files")

    def _send_the_rest(self) -> None:
        self.present.step = "the push-client sends the rest"
        self._waiting.must_run.remove(self._client.child)
        self._client.start_the_rest()
        self._waiting.until(lambda: not self._client.child.running, "the push-client has sent all", 2 * LIMIT_S)
        if self._client.child.exit_status != 0:
            raise failure(self._client.child)
        ends, positions = gateways.ends(self._stack.urls()[0], TOPIC), self.reader.positions
        self._waiting.until(lambda: all(positions[part] >= at for part, at in ends.items()), "the reader has read all")
        account, other = self.reader.account, self.traveller.account
        self._waiting.until(lambda: other.chunks >= account.chunks, "all is mirrored, and the travelling reader has it")
        self._say(f"all is acknowledged, and read: {account.chunks:,} chunks, {account.bytes:,} bytes", "green")

    def _ask(self) -> None:
        """All is sent, and not all is loaded: a query has it all the same."""
        self.present.step = "the loader repeats what the killed one had begun"
        self._waiting.until(self._is_loaded, "the second run of the loader", _LOAD_S)
        self.present.step = "a query reads the table and what is not loaded yet"
        self.told.asked = asked = ask(self._plan, self._stack.urls())
        text = (
            f"logferry query, {asked.seconds:.1f} s, no Spark: {asked.rows:,} rows, {asked.behind:,} of them not loaded"
        )
        self._say(f"{text} yet", "green")

    def _load_the_rest(self) -> None:
        self.present.step = "the loader loads the rest"
        if self.is_live:
            self.present.step += ", and follows until every segment is READY"
        self._loading = self._executor.submit(self._load_to_the_end)
        self._waiting.until(self._is_loaded, "the last run of the loader", _LOAD_S)

    # ---- parts of steps ---------------------------------------------------------------------------------------

    def _flow_until(self, share: float, step: str) -> None:
        """Until so much of the time is over; files of the user give no time."""
        self.present.step = step
        if self.is_live:
            until = self._began + share * self._plan.seconds
            self._waiting.until(lambda: time.monotonic() >= until, step, self._plan.seconds + LIMIT_S)

    def _catch_up(self) -> None:
        """Until all is readable that is written now; files of the user may be sent only much later."""
        if self.is_live:
            target = self.present.written()
            what = "the reader has all that is written now"
            self._waiting.until(lambda: self.reader.account.bytes >= target, what, 2 * LIMIT_S)
            cut, told = self._client.repeated()
            again = f"; {cut} requests were cut off, {told} told to wait: all were repeated" if cut or told else ""
            self._say(f"caught up{again}")

    def _is_all_sent(self) -> bool:
        return self.reader.account.chunks > 0 and not self.present.behind()

    def _start_client(self) -> None:
        self._client.start()
        self._waiting.must_run.append(self._client.child)

    def _load_twice(self) -> None:
        """In a thread of its own: a run that is killed in mid-write, and the one that repeats it."""
        first = self._loads.kill_in_mid_write()
        if isinstance(first, Loaded):
            self._loaded(first)
            return
        self.told.torn = first
        files = "its data file lies" if first.files == 1 else f"its {first.files} data files lie"
        self._killed(
            f"loader (pid {first.pid}) in mid-write: batch {first.batch} is in the ledger, {files} there uncommitted",
            "a loader",
        )
        self._load()

    def _load(self) -> None:
        self._loaded(self._loads.run())

    def _load_to_the_end(self) -> None:
        assert self.told.asked is not None
        if self.is_live:
            self._loaded(self._loads.follow_until_ready(self.told.asked.rows, self._seen))
        else:
            self._load()

    def _seen(self, segments: Segments) -> None:
        """Says what is READY now and was not."""
        before, self.told.segments = self.told.segments, segments
        for start, segment in sorted(segments.items()):
            is_new = start not in before or before[start].state != READY
            if segment.state == READY and segment.rows and is_new:
                self._say(f"segment {time_of(start)} is READY: {segment.rows:,} rows, none is owed any more", "green")

    def _loaded(self, loaded: Loaded) -> None:
        self.told.loads.append(loaded)
        batches = "1 batch" if loaded.batches == 1 else f"{loaded.batches} batches"
        what = f"{batches}, {loaded.rows:,} rows, {loaded.quarantined:,} to the quarantine"
        if not loaded.batches:
            what = "nothing was left to load"
        self._say(f"loader run {loaded.run}: {what}, in {loaded.seconds:.1f} s", "green")

    def _is_torn_or_loaded(self) -> bool:
        return self.told.torn is not None or self._is_loaded()

    def _is_loaded(self) -> bool:
        """Whether what was to be loaded is. Raises what the thread of the loads raised."""
        if self._loading is None or not self._loading.done():
            return False
        self._loading.result()
        return True

    # ---- all the while ----------------------------------------------------------------------------------------

    def _say(self, text: str, style: str = "") -> None:
        self._view.say(text, style)

    def _killed(self, text: str, what: str) -> None:
        self.told.killed.append(what)
        self._say(f"SIGKILL: {text}", "bold red")

    def _meanwhile(self) -> None:
        """Looks at everything; the loader begins when there is something to load."""
        self._view.pulse(self.present.look())
        if self._loading is None and self.reader.account.chunks:
            age_ms = self.reader.account.ages_ms[0]
            self._say(f"the first chunk is readable, {age_ms / 1000:.2f} s after it was made; loader run 1 starts")
            self._loading = self._executor.submit(self._load_twice)
        self._is_loaded()
        for reader in (self.reader, self.traveller):
            if reader.failed is not None:
                raise Unavailable(f"a reader ended: {reader.failed}") from reader.failed

    def _processes(self) -> list[ProcessLine]:
        lines = [] if not self.is_live else [ProcessLine("generator", self._generator.pid, f"{RATE_MB_S:.0f} MB/s")]
        lines.append(ProcessLine("push-client", self._client.child.pid, f"run {self._client.runs}"))
        loader = self._loads.child
        if loader is not None:
            done = sum(loaded.rows for loaded in self.told.loads)
            lines.append(ProcessLine("loader", loader.pid, f"run {self._loads.runs}, {done:,} rows"))
        return lines

    def _suspects(self) -> list[Child]:
        """Whose logs may say why something does not come."""
        workers = range(len(self._stack.urls()))
        return [*(self._stack.child(f"{DC}/gateway-{worker}") for worker in workers), self._client.child]


def _goes_on(positions: dict[str, int]) -> str:
    """Where the sources go on, the furthest first."""
    ordered = sorted(positions.items(), key=lambda one: -one[1])
    shown = [f"{Path(source.partition(':')[2].rpartition('#')[0]).name} at {at:,}" for source, at in ordered]
    more = f" and {len(shown) - _SHOWN_SOURCES} more" if len(shown) > _SHOWN_SOURCES else ""
    return f"the gateway says where it goes on: {', '.join(shown[:_SHOWN_SOURCES])}{more}"
