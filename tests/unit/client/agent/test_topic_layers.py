"""The layers of a file with several topics, where one of them is not as the others are."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from logferry.client.files.inotify import Hints
from logferry.client.transport.source_request import NO_ANSWER, GatewayAnswer, Outcome

from tests.unit.client.agent.test_file_topics import LONG, Topics, client, gateway, start

__all__ = ["client", "gateway"]  # fixtures


@pytest.mark.parametrize("is_truncated", [False, True])
def test_a_removed_topic_continues_in_a_copy_only_if_the_file_was_truncated(
    client: Any, gateway: Topics, is_truncated: bool
) -> None:
    client.write("a.log", LONG)
    client.settle()
    assert client.agent.remember(client.now)
    start(client, "app")
    client.settle()
    shutil.copyfile(client.root / "a.log", client.root / "a.log.1")
    if is_truncated:
        os.truncate(client.root / "a.log", 0)
    client.write("a.log", b"after\n")
    client.settle()
    assert client.agent.remember(client.now)
    start(client, "app")
    client.settle()
    assert client.agent.remember(client.now)
    start(client, "app", "audit")
    client.write("a.log", b"more\n")
    client.settle()
    wanted = [LONG, b"after\nmore\n"] if is_truncated else [LONG + b"after\nmore\n"]
    assert gateway.content("app") == gateway.content("audit") == sorted(wanted)


def test_a_topic_that_is_added_to_an_old_file_begins_at_its_end(client: Any, gateway: Topics) -> None:
    """Also where the other topics' checkpoint was last written before that file was made: the client was there."""
    client.write("a.log", b"a\n")
    client.settle()
    assert client.agent.remember(client.now)
    start(client, "app")
    client.write("b.log", b"b\n")
    client.settle()
    assert client.agent.remember(client.now)
    written = Path(client.config.state_dir, "checkpoint.json")
    os.utime(written, ns=(0, written.stat().st_mtime_ns + 3600 * 10**9))
    start(client, "app", "audit", starts_at_end=True)
    client.settle()
    client.write("b.log", b"more\n")
    client.settle()
    assert gateway.content("app") == [b"a\n", b"b\nmore\n"]
    assert gateway.content("audit") == [b"a\n", b"more\n"]


def test_the_watch_of_a_file_is_not_taken_by_one_that_it_replaced(tmp_path: Path) -> None:
    """A closed file is armed by its path, where another one may be by now."""
    hints, path = Hints(), tmp_path / "a.log"
    if hints.unusable:
        pytest.skip(hints.unusable)
    path.write_bytes(b"")
    found = path.stat()
    key = found.st_dev, found.st_ino
    assert hints.arm(os.fsencode(path), key, str(tmp_path), 0.0)
    assert not hints.arm(os.fsencode(path), (0, 0), str(tmp_path), 0.0)
    path.write_bytes(b"more")
    assert hints.take().files == [key]
    hints.disarm((0, 0))
    hints.disarm(key)
    hints.close()


def test_what_is_known_of_paths_is_forgotten_with_the_files(client: Any, gateway: Topics) -> None:
    """Rotation gives new names all the time; some of them no pattern shows, so two files are under one path."""
    for turn in range(5):
        for name in ("a.log", "b.log"):
            client.write(name, b"%d\n" % turn)
        client.settle()
        (client.root / "a.log").rename(client.root / f"a.log-2026112{turn}")
        (client.root / "b.log").rename(client.root / f"b-{turn}")
        client.write("b.log", b"new\n")
        client.settle()
        shutil.copyfile(client.root / "b.log", client.root / "b.log.old")
        for name in ("b.log", f"b-{turn}"):
            os.truncate(client.root / name, 0)
        client.settle()
    for watch in client.agent.watches:
        live = watch._live
        known = {*live._at.values(), *live._beside}
        assert {*live.values()} <= known
        assert all(source in live.under([source.tail.path]) for source in live.values())
    for path in (*client.root.glob("[ab].log*"), *client.root.glob("b-*")):
        path.unlink()
    client.step(1000.0)
    client.settle()
    client.step(1000.0)
    client.settle()
    assert [[watch._live, watch._live._at, watch._live._beside] for watch in client.agent.watches] == [[{}, {}, {}]] * 2


def test_what_a_topic_loses_of_a_removed_file_is_said_with_the_topic(
    client: Any, gateway: Topics, caplog: pytest.LogCaptureFixture
) -> None:
    """The topic that is behind loses it, the other one has it."""
    client.close()
    client.config = client.config._replace(max_deleted_bytes=1000)
    client.begin()
    client.write("a.log", LONG)
    client.settle()
    gateway.busy.add("audit")
    client.write("a.log", LONG)
    client.step()
    client.write("a.log", LONG)
    while client.step(0.01):
        pass
    (client.root / "a.log").unlink()
    client.step(1.0)
    client.step(20.0)
    lost = [line.partition(" topic=")[2] for line in caplog.messages if line.startswith("deleted-dropped")]
    assert lost == [f"audit sent_to={2 * len(LONG)} size={3 * len(LONG)}"]
    gateway.busy.clear()
    client.step(400.0)
    client.settle()
    assert (gateway.content("app"), gateway.content("audit")) == ([3 * LONG], [2 * LONG])


@pytest.mark.parametrize("stuck", ["app", "audit"])
def test_a_topic_whose_requests_hang_leaves_a_thread_to_the_other(client: Any, gateway: Topics, stuck: str) -> None:
    """However many files there are."""
    for number in range(20):
        client.write(f"{number}.log", b"%d\n" % number)
    hanging: list[Any] = []
    for _ in range(100):
        client.now += 1.0
        client.agent.tick(client.now)
        for source, job in client.agent.jobs(client.now, client.config.threads - len(hanging)):
            if job.topic == stuck:
                hanging.append((source, job))
            else:
                client.agent.finish(source, job, client.pusher.perform(job), client.now)
    other = {"app": "audit", "audit": "app"}[stuck]
    assert (len(gateway.content(other)), gateway.content(stuck)) == (20, [])
    assert len(hanging) == client.config.threads - 1
    for source, job in hanging:
        client.agent.finish(source, job, client.pusher.perform(job), client.now)
    client.settle()
    assert gateway.content("app") == gateway.content("audit")


def test_topics_whose_requests_hang_leave_a_thread_to_another_one(client: Any, gateway: Topics) -> None:
    """From their first requests on that got no answer, although one of their files is answered at once."""
    gateway.topics.add("debug")
    start(client, "app", "audit", "debug")
    for number in range(20):
        client.write(f"{number}.log", b"%d\n" % number)
    no_answer = Outcome(GatewayAnswer(NO_ANSWER, detail="timed out"), None)
    hanging: list[Any] = []
    full: list[int] = []
    for second in range(400):
        client.now += 1.0
        client.write("0.log", b"more\n")
        client.agent.tick(client.now)
        for source, job in [one for one in hanging if client.now - one[1].at >= 30.0]:
            client.agent.finish(source, job, no_answer, client.now)
            hanging.remove((source, job))
        for source, job in client.agent.jobs(client.now, client.config.threads - len(hanging)):
            if job.topic == "debug" or "/0.log#" in job.source_id:
                client.agent.finish(source, job, client.pusher.perform(job), client.now)
            else:
                hanging.append((source, job))
        full += [second] * (len(hanging) == client.config.threads)
    assert full  # at first they had all threads
    assert max(full) < 40
    assert len(gateway.content("debug")) == 20
    for source, job in hanging:
        client.agent.finish(source, job, client.pusher.perform(job), client.now)
    client.settle()
    assert gateway.content("app") == gateway.content("audit") == gateway.content("debug")


def test_topics_that_all_hang_use_all_threads(client: Any) -> None:
    for number in range(20):
        client.write(f"{number}.log", b"%d\n" % number)
    no_answer = Outcome(GatewayAnswer(NO_ANSWER, detail="timed out"), None)
    for _ in range(3):
        hanging: list[Any] = []
        for _ in range(10):
            client.now += 1.0
            client.agent.tick(client.now)
            hanging += client.agent.jobs(client.now, client.config.threads - len(hanging))
        assert len(hanging) == client.config.threads
        client.now += 30.0
        for source, job in hanging:
            client.agent.finish(source, job, no_answer, client.now)
