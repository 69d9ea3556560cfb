"""The world of the push-client's model: files, data centres, one client, and what must hold at the end.

`tests/model/test_client_model.py` has the rules and the promise.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import re
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

from logferry.client.agent.agent import Agent
from logferry.client.agent.config import Config, DataCentre
from logferry.client.agent.config import FileGroup as Patterns
from logferry.client.agent.schedule import PushJob
from logferry.client.agent.workers import Pusher
from logferry.client.files.checkpoint import EXPIRED_AFTER_MS, Checkpoint, CheckpointEntry
from logferry.client.files.identity import HEAD_BYTES
from logferry.client.transport.cluster import GatewayCluster

from tests.model.power_loss import SyncedFolder
from tests.model.two_centres import FIRST, SECOND, TwoCentres
from tests.support.fake_gateway import Killed, Stored

NAMES = ("a.log", "b.log", "sub/c.log")
LONGEST_PAUSE_S = 400.0  # longer than any pause of the client's


@dataclass
class Incarnation:
    """``must``: so many bytes have to arrive; None: all of them.

    ``copies``: so many sources more may begin behind what was sent. ``short_copies``: of these, so many may begin at 0.
    ``losses``: of power; each may cause another source. ``before``: what the file held when the power failed; up to
    ``common`` it has the same bytes. ``proven``: the client can know that it has these up to here. ``is_copy``: it is a
    file that was made when the one that the client knew was copied and truncated. ``is_found``: the client saw that.
    """

    content: bytearray = field(default_factory=bytearray)
    must: int | None = None
    seen: bool = False
    copies: int = 0
    short_copies: int = 0
    losses: int = 0
    before: Incarnation | None = None
    common: int = 0
    proven: int = 0
    is_copy: bool = False
    is_found: bool = False


class Told(logging.Handler):
    """Sources of which the client said that they ended before all of them was sent."""

    def __init__(self) -> None:
        super().__init__()
        self.over: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        event, _, fields = record.getMessage().partition(" source=")
        if event in ("source-over", "file-gone"):
            self.over.add(fields.partition(" ")[0])


class ClientWorld:
    """A folder of files, the data centres and the client, if it runs; ``now`` is the clock."""

    def __init__(
        self, record_start: re.Pattern[bytes] | None, centres: int, close_s: float = 0.0, topics: int = 1
    ) -> None:
        self.record_start = record_start
        self.close_s = close_s
        self.topics = ["t", "u"][:topics]  # of every file
        self.fallbacks = (DataCentre("second", (SECOND,)),) * (centres - 1)
        self.root = Path(tempfile.mkdtemp(prefix="logferry-model-"))
        (self.root / "logs" / "sub").mkdir(parents=True)
        (self.root / "elsewhere").mkdir()
        self.centres = TwoCentres()
        for url, gateway in self.centres.of.items():
            gateway.other_url = f"{url}/owner"
            gateway.is_one_of_many = centres > 1
            gateway.topics.update(self.topics)
        self.at: dict[str, Incarnation] = {}  # files under a name that patterns see
        self.gone: list[tuple[Incarnation, bool]] = []  # no longer; is it still in its folder?
        self.unseen: dict[Path, Incarnation] = {}  # renamed to where no pattern sees them
        self.all: list[Incarnation] = []
        self.serial, self.now = 0, 1000.0
        self.host = "h"
        self.copies = 0  # of the state folder
        self.is_renumbered = False
        self.renamed: tuple[str, Path, Incarnation] | None = None  # the last change of a name: from, to
        self.boots = 1
        self.boot = patch("logferry.client.files.checkpoint.boot", lambda: f"boot {self.boots}")
        self.boot.start()
        self.state = SyncedFolder(self.root / "state")
        self.state.__enter__()
        self.client: tuple[Agent, Checkpoint, Pusher] | None = None
        self.strays: list[PushJob] = []  # requests of which a copy is still on its way
        self.told = Told()
        logging.getLogger("logferry.client").addHandler(self.told)

    # ---- the client ------------------------------------------------------------------------------------------

    def start(self) -> None:
        config = Config(
            (DataCentre("first", (FIRST,)), *self.fallbacks),
            failover_s=20.0,
            failback_s=30.0,
            state_dir=str(self.root / "state"),
            host=self.host,
            files=(self.patterns(),),
            chunk_bytes=1024,
            line_bytes=2048,
            request_bytes=2048,
            linger_s=0.0,
            threads=4,
        )
        checkpoint = Checkpoint.open(Path(config.state_dir))
        agent = Agent(config, checkpoint, self.now)
        self.client = agent, checkpoint, Pusher(self.clusters(config), self.centres)

    def patterns(self) -> Patterns:
        every = (str(self.root / "logs" / "**" / "*.log*"),)
        of_topic = Patterns(every, "", record_start=self.record_start, close_inactive_s=self.close_s)
        first, *more = (of_topic._replace(topic=topic) for topic in self.topics)
        return first._replace(more=tuple(more))

    def clusters(self, config: Config) -> list[GatewayCluster]:
        return [GatewayCluster(centre.urls, None) for centre in config.data_centres]

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
            if incarnation.must is None and not (in_folder and self.is_known(incarnation)):
                incarnation.must = self.recorded(incarnation)

    def look(self) -> None:
        """So much later that the client looks for new files again."""
        assert self.client
        self.now += 5.0
        agent, _, pusher = self.client
        dc = agent.centres.probe(self.now)
        if dc is not None:
            agent.centres.record(dc, pusher.probe(dc), self.now)
        agent.tick(self.now)
        for incarnation in self.at.values():
            incarnation.seen = incarnation.is_found = True

    def step(self, room: int, late_s: float = 0.0, dice: random.Random | None = None) -> bool:
        """One round of the main loop; False when there was nothing to send, or only heartbeats.

        ``late_s``: so much later than the one before, and before the client looks at files of its own accord.
        With ``dice`` several requests of a source are under way: they arrive, and are answered, in any order, and some
        arrive twice, much later.
        """
        assert self.client
        agent, _, pusher = self.client
        if late_s:
            self.now += late_s
        else:
            self.look()
        jobs = agent.jobs(self.now, room)
        for _ in range(dice.randint(1, 3) if dice else 0):
            for source, job in jobs:
                agent.sent(source, job, self.now)
            jobs += agent.jobs(self.now, room)
        asked = any(job.beat is None or job.beat.finished for _, job in jobs)
        try:
            if dice:
                for job in self.strays:
                    pusher.perform(job)
                self.strays = [job for _, job in jobs if job.batch is not None and dice.random() < 0.2]
                dice.shuffle(jobs)
            outcomes = [(source, job, pusher.perform(job)) for source, job in jobs]
            if dice:
                dice.shuffle(outcomes)
            for source, job, outcome in outcomes:
                agent.finish(source, job, outcome, self.now)
        except Killed:
            self.kill()
        return asked

    def renumber_devices(self) -> None:
        """A reboot while the client is down, or a new mount."""
        self.is_renumbered = True  # then a file that is gone is not told from one that is not mounted
        checkpoint = Checkpoint.open(self.root / "state")
        for layer in self.layers(checkpoint):
            for entry in layer.entries.values():
                entry.device += 1
            layer.save()
        checkpoint.close()

    def layers(self, checkpoint: Checkpoint) -> list[Checkpoint]:
        return [checkpoint.layer(number) for number in range(len(self.topics))]

    def copy_to_another_host(self) -> None:
        """The first host continues and writes more; the client starts with the files and the state on another one."""
        self.copies += 1
        self.host = f"h{self.copies}"
        for gateway in self.centres.of.values():
            gateway.is_one_of_many = True  # what lies before a source's begin is recorded under another name
            for stored in gateway.sources.values():
                stored.recorded = None if stored.recorded is None else stored.recorded + 100

    def power_fails(self, ends: dict[str, tuple[int, bool]], undone: bool, survives: bool) -> None:
        """``ends``: how much of each file's end is lost, and whether NUL bytes are there instead. ``undone``: the last
        change of a name is. ``survives``: what the client wrote and did not sync is there all the same.
        """
        if self.client:
            self.kill()
        checkpoint = Checkpoint.open(self.root / "state")  # of saves that returned
        entries = {entry.inode: entry for entry in checkpoint.entries.values()}
        checkpoint.close()
        if not survives:
            self.state.lose()
        self.boots += 1
        for gateway in self.centres.of.values():
            gateway.is_one_of_many = True  # a source may begin behind what another one has
        if undone and self.renamed:
            self.undo_rename(*self.renamed)
        self.renamed = None
        unlisted = {self.path(name): each for name, each in self.at.items() if name not in ends}  # has its old name
        for path, incarnation in (*self.unseen.items(), *unlisted.items()):  # may need another source, too
            self.lose_marks(incarnation, entries.get(path.stat().st_ino), len(incarnation.content))
        for name, (lost, zeros) in ends.items():
            if name in self.at:
                self.lose_end(name, lost, zeros, entries.get(self.path(name).stat().st_ino))

    def undo_rename(self, name: str, new: Path, incarnation: Incarnation) -> None:
        """A file that was made under the old name since then is lost."""
        if lost := self.at.pop(name, None):
            lost.must = self.recorded(lost)
            del lost.content[lost.must :]
        self.at = {key: value for key, value in self.at.items() if value is not incarnation}
        self.gone = [each for each in self.gone if each[0] is not incarnation]
        new.replace(self.path(name))
        self.unseen.pop(new, None)
        self.at[name], incarnation.must = incarnation, None

    def lose_end(self, name: str, lost: int, zeros: bool, entry: CheckpointEntry | None) -> None:
        incarnation = self.at[name]
        old, sent = bytes(incarnation.content), self.recorded(incarnation)
        kept = max(len(old) - lost, 0)
        left = bytearray(old[:kept] + bytes(len(old) - kept) * zeros)
        common = next((at for at, (was, now) in enumerate(zip(old, left, strict=False)) if was != now), len(left))
        proven = self.lose_marks(incarnation, entry, common)
        if common < sent:
            incarnation.must = sent
            del incarnation.content[sent:]
            before, incarnation = incarnation, Incarnation(left, None, False, before=incarnation)
            incarnation.losses, incarnation.short_copies = before.losses, before.short_copies
            incarnation.copies, incarnation.common, incarnation.proven = before.copies, common, proven
            self.at[name] = incarnation
            self.all.append(incarnation)
            self.serial += 1
            left += b"!%d!" % self.serial  # what comes now is not what was there
        incarnation.proven = min(incarnation.proven, proven)
        incarnation.content = left
        self.path(name).write_bytes(left)
        self.serial += 1
        os.utime(self.path(name), (self.serial, self.serial))

    def lose_marks(self, incarnation: Incarnation, entry: CheckpointEntry | None, common: int) -> int:
        """Another source may begin, behind what a mark proves, which is returned."""
        known = [entry.position, *(at for at, _ in entry.marks)] if entry and entry.head.length <= common else []
        proven = max((at for at in known if at <= common), default=0)
        incarnation.losses += 1
        incarnation.short_copies += not proven
        return proven

    # ---- the files -------------------------------------------------------------------------------------------

    def path(self, name: str) -> Path:
        return self.root / "logs" / name

    def recorded(self, incarnation: Incarnation) -> int:
        """So much of it is in each topic."""
        found = dict.fromkeys(self.topics, 0)
        for stored in self.centres.together().values():
            if stored.chunks and fits(incarnation, stored):
                found[stored.topic] = max(found[stored.topic], begin_of(stored) + len(stored.content()))
        return min(found.values())

    def line(self, size: int = 0, end: bytes = b"\n") -> bytes:
        """Unlike all others in each part, not UTF-8, with a NUL."""
        self.serial += 1
        return b"%d\xff\x00%b" % (self.serial, (b"%d." % self.serial * size)[:size]) + end

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
        self.renamed = None
        os.truncate(self.path(name), 0)
        self.at[name] = Incarnation(seen=incarnation.seen)
        self.all.append(self.at[name])

    def copy_and_truncate(self, name: str, late: int) -> None:
        """As logrotate does, under a name that the patterns fit. ``late``: so often the client looks in between."""
        incarnation = self.at[name]
        self.renamed = None
        self.serial += 1
        copy = f"{name}.{self.serial}"
        shutil.copyfile(self.path(name), self.path(copy))
        if late:  # the client may see the copy while the original is whole
            incarnation.copies += 1
            # Of a copy of a copy both are new to it.
            is_known = incarnation.is_found or not incarnation.is_copy
            is_short = len(incarnation.content) < HEAD_BYTES or nuls_of(incarnation.content) == len(incarnation.content)
            incarnation.short_copies += is_short or not is_known
            for gateway in self.centres.of.values():
                gateway.is_one_of_many = True
        for _ in range(late):
            if self.client:
                self.step(1)
        os.truncate(self.path(name), 0)
        self.at[copy], self.at[name] = incarnation, Incarnation(seen=incarnation.seen)
        incarnation.seen, incarnation.is_copy, incarnation.is_found = False, True, False
        self.all.append(self.at[name])

    def expire(self) -> None:
        """The client is down, and the gateway forgets the sources that were silent for long; their chunks stay."""
        checkpoint = Checkpoint.open(self.root / "state")
        for name, entry in checkpoint.entries.items():
            stored = self.centres.of[FIRST].sources.get(name)
            if stored is not None and stored.recorded == entry.position and entry.heard_ms:
                entry.heard_ms -= EXPIRED_AFTER_MS
                stored.recorded = stored.base = None
        checkpoint.save()
        checkpoint.close()
        self.centres.of[FIRST].is_one_of_many = True  # so a heartbeat may be beyond what it knows

    def take(self, name: str) -> Incarnation:
        """It will have another name, or none. The client cannot read the rest of one that it has closed."""
        incarnation = self.at.pop(name)
        facts = self.path(name).stat()
        source = self.client[0].watch.source_at((facts.st_dev, facts.st_ino)) if self.client else None
        if source is not None and source.tail is not None and not source.tail.is_open:
            incarnation.seen = False
        return incarnation

    def goes(self, incarnation: Incarnation, in_folder: bool) -> None:
        """No pattern sees it any more: what can still arrive of it?"""
        self.renamed = None
        if not incarnation.seen and not (in_folder and self.is_known(incarnation)):
            incarnation.must = self.recorded(incarnation)
        self.gone.append((incarnation, in_folder))

    def is_known(self, incarnation: Incarnation) -> bool:
        """Will the client find its file by the inode, in its folder under any name? That of a copy is a new one."""
        if not incarnation.is_copy or not self.recorded(incarnation):
            return bool(self.recorded(incarnation))
        if not incarnation.is_found:
            return False
        inodes = {path.stat().st_ino for path, each in self.unseen.items() if each is incarnation}
        checkpoint = self.client[1] if self.client else Checkpoint.open(self.root / "state")
        layers = self.layers(checkpoint)
        is_known = all(any(entry.inode in inodes for entry in layer.entries.values()) for layer in layers)
        if not self.client:
            checkpoint.close()
        return is_known

    # ---- the end ---------------------------------------------------------------------------------------------

    def close(self) -> None:
        with contextlib.suppress(AssertionError):
            self.kill()
        logging.getLogger("logferry.client").removeHandler(self.told)
        self.boot.stop()
        self.state.__exit__()
        shutil.rmtree(self.root)

    def come_to_rest(self) -> None:
        for gateway in self.centres.of.values():
            gateway.faults.clear()
            gateway.is_away = False
            gateway.topics.update(self.topics)
        if not self.client:
            self.start()
        quiet = 0
        for _ in range(300):
            quiet = 0 if self.step(100) else quiet + 1  # room for the heartbeats of all, too
            self.now += LONGEST_PAUSE_S
            if quiet == 4:
                return
        raise AssertionError("the client does not come to rest")

    def check(self) -> None:
        for topic in self.topics:
            sources = {name: stored for name, stored in self.centres.together().items() if stored.chunks}
            self.check_topic({name: stored for name, stored in sources.items() if stored.topic == topic})

    def check_topic(self, sources: dict[str, Stored]) -> None:
        """All of this holds for each topic, whatever is in the other one."""
        found: dict[int, dict[str, tuple[int, int]]] = {}
        fitting = {
            name: [number for number, incarnation in enumerate(self.all) if fits(incarnation, stored)]
            for name, stored in sources.items()
        }
        for name, stored in sorted(sources.items(), key=lambda each: len(fitting[each[0]])):
            begin = position = begin_of(stored)
            for chunk in stored.chunks:
                prev = position if chunk.prev is None else chunk.prev  # the gateway looks at whether it may be so
                assert (prev, chunk.seqno - len(chunk.data)) == (position, position), (name, chunk)
                if "split" not in chunk.attributes:
                    assert chunk.data.endswith(b"\n"), (name, chunk)
                    if position > begin:
                        assert stored.content()[: position - begin].endswith(b"\n"), (name, chunk)
                        if self.record_start:
                            assert self.record_start.match(chunk.data), (name, chunk)
                position = chunk.seqno
            numbers = fitting[name]
            assert numbers, f"{name} holds what no file held: {stored.content()!r}"
            # Only what a power failure cut or zeroed may look like another file: then it is one that has no source yet.
            assert len(numbers) == 1 or any(self.all[number].losses for number in numbers), (name, numbers)
            number = min(numbers, key=lambda each: self.misfit(each, stored, each in found))
            incarnation = self.all[number]
            assert not begin or self.copies or incarnation.copies or incarnation.losses, f"{name} begins at {begin}"
            found.setdefault(number, {})[name] = (begin, position)
        arrived: dict[int, int] = {}  # by the incarnation
        nuls = max((nuls_of(stored.content()) for stored in sources.values() if not begin_of(stored)), default=0)
        for number, incarnation in enumerate(self.all):
            before, spans = incarnation.before, found.get(number, {})
            got = 0 if before is None else min(incarnation.common, arrived[id(before)])
            got = max(got, min(nuls_of(incarnation.content), nuls))  # not told from those of another file
            # Of a copy made before all device numbers changed nothing is known: inode and path are others, too.
            unknown = self.is_renumbered and incarnation.is_copy
            more = self.copies + incarnation.copies + incarnation.losses + unknown
            assert len(spans) <= 1 + more, f"{list(spans)} hold the same"
            whole = [name for name, (begin, _) in spans.items() if not begin]
            assert len(whole) <= 1 + self.copies + incarnation.short_copies + unknown, f"{whole} hold the same"
            for begin, end in sorted(spans.values()):
                assert begin <= got, f"{spans}: nobody has what lies before {begin}"
                got = max(got, end)
                assert begin >= incarnation.proven, f"{spans}: {incarnation.proven} bytes are known"
            arrived[id(incarnation)] = got
            must = len(incarnation.content) if incarnation.must is None else incarnation.must
            assert got >= must, f"{incarnation}: {got} of {must} bytes arrived"
            is_excused = self.copies or self.is_renumbered or incarnation.losses
            if spans and got < len(incarnation.content) and not is_excused:
                assert self.told.over.issuperset(spans), f"{list(spans)}: {got} bytes, and nobody said so"

    def misfit(self, number: int, stored: Stored, has_another: bool) -> tuple[bool, bool, bool]:
        """Of several files with the same bytes, such as NUL bytes alone, the source is of one that must be there."""
        incarnation = self.all[number]
        return has_another, incarnation.content != stored.content(), incarnation.must is not None


def begin_of(stored: Stored) -> int:
    """Where the source begins: 0, but after its state folder was copied."""
    return stored.chunks[0].seqno - len(stored.chunks[0].data)


def nuls_of(content: bytes | bytearray) -> int:
    """So many NUL bytes are at its beginning."""
    return len(content) - len(content.lstrip(b"\0"))


def fits(incarnation: Incarnation, stored: Stored) -> bool:
    return bytes(incarnation.content).startswith(stored.content(), begin_of(stored))
