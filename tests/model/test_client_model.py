"""Sequences of what happens to files, gateway and client, against a model of what must arrive.

The model knows every *incarnation*: the bytes that one file held from its creation, or its truncation, to its
end. What must hold when everything has come to rest:

* Each source holds, from position 0 and without hole, the bytes of one incarnation, or a beginning of them; its
  chunks meet end to end.
* No incarnation is in two sources: nothing is doubled.
* An incarnation is there whole, unless it was out of the client's reach: truncated (what had not been sent is
  lost), removed while the client was down, or renamed to where no pattern sees it before the client had ever
  seen it. Then what was recorded at that moment is there at least.
* Where an incarnation of which something was recorded did not arrive whole, the client told which source it is.
* Where there are two data centres, which go away and come back: all of this holds for what both have together, after
  equal copies were dropped. Chunks of the same source and seqno hold the same bytes.
* A chunk without ``split`` holds whole lines; where lines are gathered into records, it begins with a record.

A client is killed between any two steps, before a request leaves and after its answer was lost: it is then
thrown away and a new one begins from the state folder.
"""

from __future__ import annotations

import contextlib
import gzip
import logging
import os
import re
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from logferry.client.agent.agent import Agent
from logferry.client.agent.config import Config, DataCentre
from logferry.client.agent.config import Files as Patterns
from logferry.client.agent.requests import Pusher
from logferry.client.files.checkpoint import Checkpoint
from logferry.client.files.chunking import starts_record
from logferry.client.transport.cluster import Cluster
from model.fake_gateway import FAULTS, Killed
from model.two_centres import FIRST, SECOND, TwoCentres

NAMES = ("a.log", "b.log", "sub/c.log")
LONGEST_PAUSE_S = 400.0  # longer than any pause of the client's


@dataclass
class Incarnation:
    """``must``: so many bytes have to arrive; None: all of them."""

    content: bytearray = field(default_factory=bytearray)
    must: int | None = None
    seen: bool = False


class Told(logging.Handler):
    """Sources of which the client said that they ended before all of them was sent."""

    def __init__(self) -> None:
        super().__init__()
        self.over: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        event, _, fields = record.getMessage().partition(" source=")
        if event in ("source-over", "file-gone"):
            self.over.add(fields.partition(" ")[0])


class Files(RuleBasedStateMachine):
    @initialize(record_start=st.sampled_from((None, starts_record(r"\d*[05]\D"))), centres=st.integers(1, 2))
    def begin(self, record_start: re.Pattern[bytes] | None, centres: int) -> None:
        self.record_start = record_start
        self.fallbacks = (DataCentre("second", (SECOND,)),) * (centres - 1)
        self.root = Path(tempfile.mkdtemp(prefix="logferry-model-"))
        (self.root / "logs" / "sub").mkdir(parents=True)
        (self.root / "elsewhere").mkdir()
        self.centres = TwoCentres()
        for url, gateway in self.centres.of.items():
            gateway.other_url = f"{url}/owner"
            gateway.is_one_of_many = centres > 1
        self.at: dict[str, Incarnation] = {}  # files under a name that patterns see
        self.gone: list[tuple[Incarnation, bool]] = []  # no longer; is it still in its folder?
        self.all: list[Incarnation] = []
        self.serial = 0
        self.now = 1000.0
        self.client: tuple[Agent, Checkpoint, Pusher] | None = None
        self.told = Told()
        logging.getLogger("logferry.client").addHandler(self.told)

    # ---- the client ------------------------------------------------------------------------------------------

    def start(self) -> None:
        config = Config(
            urls=(FIRST,),
            fallbacks=self.fallbacks,
            failover_s=20.0,
            failback_s=30.0,
            state_dir=str(self.root / "state"),
            host="h",
            files=(Patterns((str(self.root / "logs" / "**" / "*.log*"),), "t", record_start=self.record_start),),
            chunk_bytes=1024,
            line_bytes=2048,
            request_bytes=4096,
            linger_s=0.0,
            threads=2,
        )
        checkpoint = Checkpoint.open(Path(config.state_dir))
        agent = Agent(config, checkpoint, self.now)
        self.client = agent, checkpoint, Pusher(self.clusters(config), self.centres)

    def clusters(self, config: Config) -> list[Cluster]:
        return [Cluster(centre.urls, None) for centre in config.data_centres]

    def kill(self) -> None:
        """The system closes the descriptors and frees the lock; nothing is written."""
        assert self.client
        agent, checkpoint, _ = self.client
        agent.close()
        checkpoint.close()
        self.client = None
        for incarnation in self.all:
            incarnation.seen = False
        for incarnation, in_folder in self.gone:
            if incarnation.must is None and not (in_folder and self.recorded(incarnation)):
                incarnation.must = self.recorded(incarnation)

    def look(self) -> None:
        """So much later that the client looks for new files again."""
        assert self.client
        self.now += 5.0
        agent, _, pusher = self.client
        dc = agent.centres.probe(self.now)
        if dc is not None:
            agent.probed(dc, pusher.probe(dc), self.now)
        agent.tick(self.now)
        for incarnation in self.at.values():
            incarnation.seen = True

    def step(self, room: int) -> bool:
        """One round of the main loop; False when there was nothing to send, or only heartbeats."""
        assert self.client
        agent, _, pusher = self.client
        self.look()
        jobs = agent.jobs(self.now, room)
        try:
            for source, job in jobs:
                agent.finish(source, job, pusher.perform(job), self.now)
        except Killed:
            self.kill()
        return any(job.beat is None or job.beat.finished for _, job in jobs)

    @precondition(lambda self: self.client is None)
    @rule()
    def client_starts(self) -> None:
        self.start()

    @precondition(lambda self: self.client)
    @rule()
    def client_is_killed(self) -> None:
        self.kill()

    @precondition(lambda self: self.client)
    @rule()
    def client_ends(self) -> None:
        assert self.client
        assert self.client[0].remember(self.now)
        self.kill()

    @precondition(lambda self: self.client)
    @rule(rounds=st.integers(1, 6), room=st.integers(1, 2), pause_s=st.sampled_from((0.0, 0.2, 2.0, 40.0)))
    def client_works(self, rounds: int, room: int, pause_s: float) -> None:
        for _ in range(rounds):
            if self.client:
                self.step(room)
            self.now += pause_s

    @precondition(lambda self: self.client)
    @rule()
    def client_dispatches_then_files_change(self) -> None:
        """A request is on its way while files are changed: its answer comes in a later step."""
        assert self.client
        agent, _, pusher = self.client
        self.look()
        jobs = agent.jobs(self.now, 2)
        for name in sorted(self.at):
            self.truncate(name)
            self.append(name, 1)
        agent.tick(self.now)
        try:
            for source, job in jobs:
                agent.finish(source, job, pusher.perform(job), self.now)
        except Killed:
            self.kill()

    @rule(fault=st.sampled_from((*FAULTS, "kill before", "kill after", "")), url=st.sampled_from((FIRST, SECOND)))
    def something_fails(self, fault: str, url: str) -> None:
        self.centres.of[url].faults.append(fault)

    @precondition(lambda self: self.fallbacks)
    @rule(url=st.sampled_from((FIRST, SECOND)))
    def a_data_centre_goes(self, url: str) -> None:
        self.centres.of[url].is_away = True

    @precondition(lambda self: self.fallbacks and self.client)
    @rule(last=st.sampled_from(("", "cut after", "cut before")), killed=st.booleans(), size=st.sampled_from((30, 300)))
    def the_client_goes_on_elsewhere(self, last: str, killed: bool, size: int) -> None:
        """``last``: what becomes of the last request before; ``killed``: then the client is, too."""
        assert self.client
        here = self.client[0].centres.here
        at, other = (self.centres.of[url] for url in ((FIRST, SECOND), (SECOND, FIRST))[here])
        other.is_away = False
        at.faults.clear()
        other.faults.clear()
        for fault in ("", "", last):
            self.append(NAMES[here], 2, size)
            at.faults.extend([fault] if fault else [])
            if self.client:
                self.step(2)
        at.is_away = True
        if killed and self.client:
            self.kill()
        if not self.client:
            self.start()
        self.append(NAMES[here], 2, size)
        for _ in range(30):
            if self.client and self.client[0].centres.here == here:
                self.step(2)
                self.now += 2.0

    @precondition(lambda self: any(gateway.is_away for gateway in self.centres.of.values()))
    @rule(data=st.data())
    def a_data_centre_comes_back(self, data: st.DataObject) -> None:
        gateways = [gateway for gateway in self.centres.of.values() if gateway.is_away]
        data.draw(st.sampled_from(gateways)).is_away = False

    # ---- the files -------------------------------------------------------------------------------------------

    def path(self, name: str) -> Path:
        return self.root / "logs" / name

    def recorded(self, incarnation: Incarnation) -> int:
        stored = [s for s in self.centres.together().values() if s.chunks]
        content = bytes(incarnation.content)
        return max((len(s.content()) for s in stored if content.startswith(s.content())), default=0)

    def line(self, size: int = 0, end: bytes = b"\n") -> bytes:
        """Unlike all others, not UTF-8, with a NUL."""
        self.serial += 1
        return b"%d\xff\x00%b" % (self.serial, b"." * size) + end

    def write(self, path: Path, incarnation: Incarnation, text: bytes) -> None:
        with path.open("ab") as file:
            file.write(text)
        incarnation.content += text
        # a clock of our own: two changes within one tick of the file system's are not what is tested here
        self.serial += 1
        os.utime(path, (self.serial, self.serial))

    def append(self, name: str, lines: int, size: int = 0, end: bytes = b"\n") -> None:
        if name not in self.at:
            self.at[name] = Incarnation()
            self.all.append(self.at[name])
        self.write(self.path(name), self.at[name], b"".join(self.line(size, end) for _ in range(lines)))

    def truncate(self, name: str) -> None:
        incarnation = self.at[name]
        if not incarnation.content:
            return
        incarnation.must = self.recorded(incarnation)
        os.truncate(self.path(name), 0)
        self.at[name] = Incarnation(seen=incarnation.seen)
        self.all.append(self.at[name])

    @rule(name=st.sampled_from(NAMES), lines=st.integers(0, 5), size=st.sampled_from((0, 30, 300, 900)))
    def lines_are_written(self, name: str, lines: int, size: int) -> None:
        self.append(name, lines, size)

    @rule(name=st.sampled_from(NAMES), size=st.sampled_from((0, 500, 1500, 5000)))
    def half_a_line_is_written(self, name: str, size: int) -> None:
        self.append(name, 1, size, end=b"")

    @precondition(lambda self: self.at)
    @rule(data=st.data(), where=st.sampled_from(("seen", "moved", "elsewhere")), late=st.integers(0, 2))
    def a_file_is_renamed(self, data: st.DataObject, where: str, late: int) -> None:
        """``late``: so often its writer, who has it open, still writes; the client may look in between."""
        name = data.draw(st.sampled_from(sorted(self.at)))
        incarnation = self.at.pop(name)
        self.serial += 1
        new = {
            "seen": self.path(f"{name}.{self.serial}"),
            "moved": self.path(name).with_name(f"old-{self.serial}"),
            "elsewhere": self.root / "elsewhere" / str(self.serial),
        }[where]
        self.path(name).rename(new)
        if where == "seen":
            self.at[f"{name}.{self.serial}"] = incarnation
        else:
            self.goes(incarnation, in_folder=where == "moved")
        for _ in range(late):
            self.write(new, incarnation, self.line())
            if self.client:
                self.step(1)

    def goes(self, incarnation: Incarnation, in_folder: bool) -> None:
        """No pattern sees it any more: what can still arrive of it?"""
        if not incarnation.seen and not (in_folder and self.recorded(incarnation)):
            incarnation.must = self.recorded(incarnation)
        self.gone.append((incarnation, in_folder))

    @precondition(lambda self: self.at)
    @rule(data=st.data(), size=st.sampled_from((0, 30, 2000)), copy=st.booleans())
    def a_file_is_truncated(self, data: st.DataObject, size: int, copy: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.at)))
        self.truncate(name)
        if copy:
            self.append(name, 3, size)

    @precondition(lambda self: self.at)
    @rule(data=st.data())
    def a_file_is_removed(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.at)))
        incarnation = self.at.pop(name)
        self.path(name).unlink()
        self.goes(incarnation, in_folder=False)

    @precondition(lambda self: self.at)
    @rule(data=st.data())
    def a_file_is_compressed(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.at)))
        path = self.path(name)
        path.with_name(path.name + ".gz").write_bytes(gzip.compress(path.read_bytes(), 1))
        self.goes(self.at.pop(name), in_folder=False)
        path.unlink()

    @precondition(lambda self: self.at)
    @rule(data=st.data(), lines=st.integers(1, 5), size=st.sampled_from((0, 30, 900)))
    def a_file_is_made_anew(self, data: st.DataObject, lines: int, size: int) -> None:
        """With the same inode, where the file system uses it again and no client has it open."""
        name = data.draw(st.sampled_from(sorted(self.at)))
        self.goes(self.at.pop(name), in_folder=False)
        self.path(name).unlink()
        self.append(name, lines, size)

    @precondition(lambda self: self.at)
    @rule(data=st.data())
    def a_file_is_replaced(self, data: st.DataObject) -> None:
        """A new file is renamed over it."""
        name = data.draw(st.sampled_from(sorted(self.at)))
        self.goes(self.at.pop(name), in_folder=False)
        self.append(".new", 2)
        self.at[name] = self.at.pop(".new")
        self.path(".new").rename(self.path(name))

    # ---- the end ---------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        if not hasattr(self, "root"):
            return
        try:
            self.come_to_rest()
            self.check()
        finally:
            with contextlib.suppress(AssertionError):
                self.kill()
            logging.getLogger("logferry.client").removeHandler(self.told)
            shutil.rmtree(self.root)

    def come_to_rest(self) -> None:
        for gateway in self.centres.of.values():
            gateway.faults.clear()
            gateway.is_away = False
        if not self.client:
            self.start()
        quiet = 0
        for _ in range(300):
            quiet = 0 if self.step(2) else quiet + 1
            self.now += LONGEST_PAUSE_S
            if quiet == 4:
                return
        raise AssertionError("the client does not come to rest")

    def check(self) -> None:
        found: dict[int, str] = {}
        together = self.centres.together()
        for name, stored in together.items():
            position = 0
            for chunk in stored.chunks:
                prev = position if chunk.prev is None else chunk.prev  # the gateway looks at whether it may be so
                assert (prev, chunk.seqno - len(chunk.data)) == (position, position), (name, chunk)
                if "split" not in chunk.attributes:
                    assert chunk.data.endswith(b"\n"), (name, chunk)
                    assert stored.content()[:position][-1:] in (b"", b"\n"), (name, chunk)
                    if self.record_start and position:
                        assert self.record_start.match(chunk.data), (name, chunk)
                position = chunk.seqno
            fits = [n for n, inc in enumerate(self.all) if inc.content.startswith(stored.content())]
            assert len(fits) == 1, f"{name} holds what no file held: {stored.content()!r}"
            assert fits[0] not in found, f"{name} and {found[fits[0]]} hold the same"
            found[fits[0]] = name
        for number, incarnation in enumerate(self.all):
            got = len(together[found[number]].content()) if number in found else 0
            must = len(incarnation.content) if incarnation.must is None else incarnation.must
            assert got >= must, f"{incarnation}: {got} of {must} bytes arrived"
            if number in found and got < len(incarnation.content):
                assert found[number] in self.told.over, f"{found[number]}: {got} bytes, and nobody said so"


def _settings(max_examples: int) -> settings:
    return settings(
        max_examples=max_examples,
        stateful_step_count=30,
        deadline=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )


class ManyFiles(Files):
    pass


TestFiles = Files.TestCase
TestFiles.settings = _settings(max_examples=100)
TestManyFiles = pytest.mark.timeout(1800)(pytest.mark.long(ManyFiles.TestCase))
TestManyFiles.settings = _settings(max_examples=3000)
