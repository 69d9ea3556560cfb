"""Sequences of what happens to files, gateway and client, against a model of what must arrive.

The model knows every *incarnation*: the bytes that one file held from its creation, or its truncation, to its
end. What must hold when everything has come to rest:

* Each source holds, from position 0 and without hole, the bytes of one incarnation, or a beginning of them; its
  chunks meet end to end.
* No incarnation is in two sources: nothing is doubled. But after a copy of the state folder to another host a new
  source begins behind the position that the checkpoint had.
* An incarnation is there whole, unless it was out of the client's reach: truncated (what had not been sent is
  lost), removed while the client was down or had closed it, or renamed to where no pattern sees it before the client
  had ever seen it. Then what was recorded at that moment is there at least.
* Where an incarnation of which something was recorded did not arrive whole, the client told which source it is.
* Where there are two data centres, which go away and come back: all of this holds for what both have together, after
  equal copies were dropped. Chunks of the same source and seqno hold the same bytes.
* Where a file has two topics, which may be refused for a while: all of this holds for each of them, and their order
  may change.
* A chunk without ``split`` holds whole lines; where lines are gathered into records, it begins with a record.

* After a loss of power a file has less, or other bytes at its end: another incarnation, if bytes are missing that were
  sent. It is there whole, too; a new source may begin where the client can prove that the bytes are the same.
* NUL bytes at the beginning of a file, where a power failure left them, may be missing if another source begins with as
  many: a file that was truncated, or another one, then has the very bytes of the file that the client knows.

A client is killed between any two steps, before a request leaves and after its answer was lost: it is then
thrown away and a new one begins from the state folder.
"""

from __future__ import annotations

import gzip
import random
import re

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from logferry.client.files.chunking import starts_record

from tests.model.client_world import NAMES, ClientWorld
from tests.model.two_centres import FIRST, SECOND
from tests.support.fake_gateway import FAULTS, Killed


class Files(RuleBasedStateMachine):
    @initialize(
        record_start=st.sampled_from((None, starts_record(r"\d*[05]\D"))),
        centres=st.integers(1, 2),
        close_s=st.sampled_from((0.0, 4.0)),
        topics=st.integers(1, 2),
    )
    def begin(self, record_start: re.Pattern[bytes] | None, centres: int, close_s: float, topics: int) -> None:
        self.world = ClientWorld(record_start, centres, close_s, topics)

    # ---- the client ------------------------------------------------------------------------------------------

    @precondition(lambda self: self.world.client is None)
    @rule()
    def client_starts(self) -> None:
        self.world.start()

    @precondition(lambda self: self.world.client and len(self.world.topics) > 1)
    @rule(killed=st.booleans(), size=st.sampled_from((0, 300)))
    def client_starts_again_with_another_order_of_topics(self, killed: bool, size: int) -> None:
        for _ in range(3):
            self.world.append(NAMES[0], 1, size)
            if self.world.client:
                self.world.step(9)
        if self.world.client:
            assert killed or self.world.client[0].remember(self.world.now)
            self.world.kill()
        self.world.topics.reverse()
        self.world.start()

    @precondition(lambda self: self.world.client is None)
    @rule()
    def devices_are_renumbered(self) -> None:
        self.world.renumber_devices()

    @precondition(lambda self: len(self.world.topics) > 1)
    @rule(url=st.sampled_from((FIRST, SECOND)), topic=st.sampled_from("tu"), is_there=st.booleans())
    def a_topic_is_refused_or_taken_again(self, url: str, topic: str, is_there: bool) -> None:
        topics = self.world.centres.of[url].topics
        (topics.add if is_there else topics.discard)(topic)

    @precondition(lambda self: not self.world.fallbacks and not self.world.copies and len(self.world.topics) == 1)
    @rule(data=st.data(), undone=st.booleans(), survives=st.booleans())
    def the_power_fails(self, data: st.DataObject, undone: bool, survives: bool) -> None:
        end = st.tuples(st.sampled_from((0, 1, 40, 700, 3000, 1 << 20)), st.booleans())
        self.world.power_fails({name: data.draw(end) for name in sorted(self.world.at)}, undone, survives)

    @precondition(lambda self: self.world.client is None and self.world.boots == 1)
    @rule()
    def the_state_is_copied_to_another_host(self) -> None:
        self.world.copy_to_another_host()

    @precondition(lambda self: self.world.client is None and not self.world.fallbacks)
    @rule()
    def the_gateway_forgets_silent_sources(self) -> None:
        self.world.expire()

    @precondition(lambda self: self.world.client)
    @rule()
    def client_is_killed(self) -> None:
        self.world.kill()

    @precondition(lambda self: self.world.client)
    @rule()
    def client_ends(self) -> None:
        assert self.world.client
        assert self.world.client[0].remember(self.world.now)
        self.world.kill()

    @precondition(lambda self: self.world.client)
    @rule(
        rounds=st.integers(1, 6),
        room=st.integers(1, 4),
        pause_s=st.sampled_from((0.0, 0.2, 2.0, 40.0)),
        dice=st.one_of(st.none(), st.randoms(use_true_random=False)),
    )
    def client_works(self, rounds: int, room: int, pause_s: float, dice: random.Random | None) -> None:
        """``dice``: several requests of a source are under way at a time."""
        for _ in range(rounds):
            if self.world.client:
                self.world.step(room, dice=dice)
            self.world.now += pause_s

    @precondition(lambda self: self.world.client and self.world.close_s)
    @rule()
    def files_are_quiet(self) -> None:
        """So long that the client closes them."""
        for _ in range(4):
            if self.world.client:
                self.world.step(9)
            self.world.now += self.world.close_s

    @precondition(lambda self: self.world.client)
    @rule(late_s=st.sampled_from((0.5, 2.0, 400.0)))
    def lines_come_before_a_late_round(self, late_s: float) -> None:
        for pause_s in (0.0, 0.0, 0.0, late_s):
            for name in sorted(self.world.at):
                self.world.append(name, 1)
            if self.world.client:
                self.world.step(9, pause_s)

    @precondition(lambda self: self.world.client)
    @rule()
    def client_dispatches_then_files_change(self) -> None:
        """A request is on its way while files are changed: its answer comes in a later step."""
        assert self.world.client
        agent, _, pusher = self.world.client
        self.world.look()
        jobs = agent.jobs(self.world.now, 2)
        for name in sorted(self.world.at):
            self.world.truncate(name)
            self.world.append(name, 1)
        agent.tick(self.world.now)
        try:
            for source, job in jobs:
                agent.finish(source, job, pusher.perform(job), self.world.now)
        except Killed:
            self.world.kill()

    @rule(fault=st.sampled_from((*FAULTS, "kill before", "kill after", "")), url=st.sampled_from((FIRST, SECOND)))
    def something_fails(self, fault: str, url: str) -> None:
        self.world.centres.of[url].faults.append(fault)

    @precondition(lambda self: self.world.fallbacks)
    @rule(url=st.sampled_from((FIRST, SECOND)))
    def a_data_centre_fails(self, url: str) -> None:
        self.world.centres.of[url].is_away = True

    @precondition(lambda self: self.world.fallbacks and self.world.client)
    @rule(last=st.sampled_from(("", "cut after", "cut before")), killed=st.booleans(), size=st.sampled_from((30, 300)))
    def the_client_continues_elsewhere(self, last: str, killed: bool, size: int) -> None:
        """``last``: what becomes of the last request before; ``killed``: then the client is, too."""
        assert self.world.client
        here = self.world.client[0].centres.here
        at, other = (self.world.centres.of[url] for url in ((FIRST, SECOND), (SECOND, FIRST))[here])
        other.is_away = False
        at.faults.clear()
        other.faults.clear()
        for fault in ("", "", last):
            self.world.append(NAMES[here], 2, size)
            at.faults.extend([fault] if fault else [])
            if self.world.client:
                self.world.step(2)
        at.is_away = True
        if killed and self.world.client:
            self.world.kill()
        if not self.world.client:
            self.world.start()
        self.world.append(NAMES[here], 2, size)
        for _ in range(30):
            if self.world.client and self.world.client[0].centres.here == here:
                self.world.step(2)
                self.world.now += 2.0

    @precondition(lambda self: any(gateway.is_away for gateway in self.world.centres.of.values()))
    @rule(data=st.data())
    def a_data_centre_comes_back(self, data: st.DataObject) -> None:
        gateways = [gateway for gateway in self.world.centres.of.values() if gateway.is_away]
        data.draw(st.sampled_from(gateways)).is_away = False

    # ---- the files -------------------------------------------------------------------------------------------

    @rule(name=st.sampled_from(NAMES), lines=st.integers(0, 5), size=st.sampled_from((0, 30, 300, 900)))
    def lines_are_written(self, name: str, lines: int, size: int) -> None:
        self.world.append(name, lines, size)

    @rule(name=st.sampled_from(NAMES), size=st.sampled_from((0, 500, 1500, 5000)))
    def half_a_line_is_written(self, name: str, size: int) -> None:
        self.world.append(name, 1, size, end=b"")

    @precondition(lambda self: self.world.at)
    @rule(data=st.data(), where=st.sampled_from(("seen", "moved", "elsewhere")), late=st.integers(0, 2))
    def a_file_is_renamed(self, data: st.DataObject, where: str, late: int) -> None:
        """``late``: so often its writer, who has it open, still writes; the client may look in between."""
        name = data.draw(st.sampled_from(sorted(self.world.at)))
        incarnation = self.world.take(name)
        self.world.serial += 1
        new = {
            "seen": self.world.path(f"{name}.{self.world.serial}"),
            "moved": self.world.path(name).with_name(f"old-{self.world.serial}"),
            "elsewhere": self.world.root / "elsewhere" / str(self.world.serial),
        }[where]
        self.world.path(name).rename(new)
        if where == "seen":
            self.world.at[f"{name}.{self.world.serial}"] = incarnation
        else:
            self.world.unseen[new] = incarnation
            self.world.goes(incarnation, in_folder=where == "moved")
        self.world.renamed = name, new, incarnation
        for _ in range(late):
            self.world.write(new, incarnation, self.world.line())
            if self.world.client:
                self.world.step(1)

    @precondition(lambda self: self.world.at)
    @rule(data=st.data(), size=st.sampled_from((0, 30, 2000)), copy=st.booleans())
    def a_file_is_truncated(self, data: st.DataObject, size: int, copy: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.world.at)))
        self.world.truncate(name)
        if copy:
            self.world.append(name, 3, size)

    @precondition(lambda self: self.world.at)
    @rule(data=st.data(), late=st.integers(0, 3))
    def a_file_is_copied_and_truncated(self, data: st.DataObject, late: int) -> None:
        self.world.copy_and_truncate(data.draw(st.sampled_from(sorted(self.world.at))), late)

    @precondition(lambda self: self.world.at)
    @rule(data=st.data())
    def a_file_is_removed(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.world.at)))
        incarnation = self.world.take(name)
        self.world.path(name).unlink()
        self.world.goes(incarnation, in_folder=False)

    @precondition(lambda self: self.world.at)
    @rule(data=st.data())
    def a_file_is_compressed(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.world.at)))
        path = self.world.path(name)
        packed = path.with_name(path.name + ".gz")
        packed.unlink(missing_ok=True)  # as gzip does: a new file
        packed.write_bytes(gzip.compress(path.read_bytes(), 1))
        self.world.goes(self.world.take(name), in_folder=False)
        path.unlink()

    @precondition(lambda self: self.world.at)
    @rule(data=st.data(), lines=st.integers(1, 5), size=st.sampled_from((0, 30, 900)))
    def a_file_is_recreated(self, data: st.DataObject, lines: int, size: int) -> None:
        """With the same inode, where the file system uses it again and no client has it open."""
        name = data.draw(st.sampled_from(sorted(self.world.at)))
        self.world.goes(self.world.take(name), in_folder=False)
        self.world.path(name).unlink()
        self.world.append(name, lines, size)

    @precondition(lambda self: self.world.at)
    @rule(data=st.data())
    def a_file_is_replaced(self, data: st.DataObject) -> None:
        """A new file is renamed over it."""
        name = data.draw(st.sampled_from(sorted(self.world.at)))
        self.world.goes(self.world.take(name), in_folder=False)
        self.world.append(".new", 2)
        self.world.at[name] = self.world.at.pop(".new")
        self.world.path(".new").rename(self.world.path(name))

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        try:
            self.world.come_to_rest()
            self.world.check()
        finally:
            self.world.close()


def _settings(max_examples: int, *, drawn: bool) -> settings:
    """``drawn``: other sequences in each run; else always the same."""
    return settings(
        max_examples=max_examples,
        derandomize=not drawn,
        stateful_step_count=30,
        deadline=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )


class ManyFiles(Files):
    pass


TestFiles = Files.TestCase
TestFiles.settings = _settings(max_examples=100, drawn=False)
TestManyFiles = pytest.mark.timeout(1800)(pytest.mark.long(ManyFiles.TestCase))
TestManyFiles.settings = _settings(max_examples=3000, drawn=True)
