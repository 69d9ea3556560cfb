"""A file with several topics: each has all of it, once, whatever becomes of the others."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from logferry.client.agent.config import DataCentre, FileGroup
from logferry.client.agent.status import render_metrics, write_status
from logferry.client.agent.workers import Pusher
from logferry.client.files import checkpoint as checkpoints
from logferry.client.files.lines import LineRules
from logferry.client.transport.cluster import GatewayCluster
from logferry.client.transport.connections import Body, Reply

from tests.support.fake_gateway import FakeGateway, Killed

LONG = b"".join(b"line %d of a file that is longer than a head\n" % number for number in range(60))


class Topics(FakeGateway):
    """``busy``: topics that take nothing now."""

    def __init__(self) -> None:
        super().__init__(("app", "audit", "third"))
        self.busy: set[str] = set()

    def __call__(self, url: str, headers: dict[str, str], body: Body | None, method: str = "POST") -> Reply:
        if any(f"/topics/{topic}/" in url for topic in self.busy):
            return Reply(503, {"retry-after": "1"}, b'{"type": "overloaded"}')
        return super().__call__(url, headers, body, method)

    def content(self, topic: str) -> list[bytes]:
        found = [stored for stored in self.sources.values() if stored.topic == topic and stored.chunks]
        for stored in found:
            ends = [chunk.seqno for chunk in stored.chunks]
            assert self.is_one_of_many or [chunk.prev for chunk in stored.chunks] == [stored.base, *ends[:-1]]
        return sorted(stored.content() for stored in found)


@pytest.fixture
def gateway() -> Topics:
    return Topics()


def group(root: Path, *topics: str | FileGroup, **settings: Any) -> FileGroup:
    given = [each if isinstance(each, FileGroup) else FileGroup((), each, **settings) for each in topics]
    first, *more = (each._replace(patterns=(str(root / "*.log*"),)) for each in given)
    return first._replace(more=tuple(more))


def start(client: Any, *topics: str | FileGroup, **settings: Any) -> None:
    """As a restart, or SIGHUP, with these topics does; the client that runs is killed."""
    client.close()
    client.config = client.config._replace(files=(group(client.root, *topics, **settings),))
    client.begin()


@pytest.fixture
def client(client: Any) -> Any:
    start(client, "app", "audit")
    return client


def entries(client: Any, *folders: str) -> list[tuple[str, str, int]]:
    body = (Path(client.config.state_dir, *folders) / "checkpoint.json").read_bytes().split(b"\n")[1]
    return [(Path(e["path"]).name, e["topic"], e["position"]) for e in json.loads(body)["entries"]]


# ---- each has all of it -------------------------------------------------------------------------------------


def test_each_topic_has_all_of_the_file_once(client: Any, gateway: Topics) -> None:
    client.write("a.log", b"one\n")
    client.settle()
    client.write("a.log", b"two\n")
    client.write("b.log", b"b\n")
    client.settle()
    for topic in ("app", "audit"):
        assert gateway.content(topic) == [b"b\n", b"one\ntwo\n"]
    assert len(gateway.sources) == 4
    assert client.agent.remember(client.now)
    client.restart()
    client.write("a.log", b"three\n")
    client.settle()
    for topic in ("app", "audit"):
        assert gateway.content(topic) == [b"b\n", b"one\ntwo\nthree\n"]
    assert len(gateway.sources) == 4


def test_each_topic_has_settings_of_its_own(client: Any, gateway: Topics) -> None:
    only = LineRules((re.compile(b"login"),))
    start(client, "app", FileGroup((), "audit", attributes={"kind": "security"}, rules=only))
    client.write("a.log", b"login a\nnoise\nlogin b\n")
    client.settle()
    assert gateway.content("app") == [b"login a\nnoise\nlogin b\n"]
    assert gateway.content("audit") == [b"login a\nlogin b\n"]
    kinds = {stored.topic: stored.chunks[0].attributes.get("kind") for stored in gateway.sources.values()}
    assert kinds == {"app": None, "audit": "security"}
    assert {stored.recorded for stored in gateway.sources.values()} == {22}


@pytest.mark.parametrize("stuck", ["app", "audit"])
@pytest.mark.parametrize("how", ["absent", "busy"])
def test_a_topic_that_takes_nothing_stops_itself_alone(client: Any, gateway: Topics, stuck: str, how: str) -> None:
    other = {"app": "audit", "audit": "app"}[stuck]
    gateway.topics.discard(stuck) if how == "absent" else gateway.busy.add(stuck)
    for number in range(20):
        client.write("a.log", b"%d\n" % number)
        client.step()
    client.settle() if how == "absent" else [client.step() for _ in range(5)]
    whole = (client.root / "a.log").read_bytes()
    assert (gateway.content(other), gateway.content(stuck)) == ([whole], [])
    rows = {
        source.entry.topic: source.status(client.now) for w in client.agent.watches for source in w.sources.values()
    }
    assert (rows[other].lag_bytes, rows[other].error) == (0, "")
    assert rows[stuck].lag_bytes == len(whole)
    assert rows[stuck].error
    page = render_metrics(client.agent.watches, client.now, {}, "g")
    assert f'logferry_push_lag_bytes{{topic="{stuck}"}} {len(whole)}' in page
    assert f'logferry_push_lag_bytes{{topic="{other}"}} 0' in page
    gateway.topics.add(stuck)
    gateway.busy.clear()
    client.step(400.0)
    client.settle()
    assert gateway.content(stuck) == gateway.content(other) == [whole]


# ---- changes of the file, while one of the topics is behind -------------------------------------------------------


def other(topic: str) -> str:
    return {"app": "audit", "audit": "app"}[topic]


def rename(client: Any) -> list[bytes]:
    (client.root / "a.log").rename(client.root / "a.log.1")
    client.write("a.log.1", b"late\n")
    client.write("a.log", b"new\n")
    return [b"new\n", LONG + b"late\n"]


def remove(client: Any) -> list[bytes]:
    (client.root / "a.log").unlink()
    client.write("a.log", b"new\n")
    return [LONG, b"new\n"]


def copy_and_truncate(client: Any) -> list[bytes]:
    shutil.copyfile(client.root / "a.log", client.root / "a.log.1")
    os.truncate(client.root / "a.log", 0)
    client.write("a.log", b"new\n")
    return [LONG, b"new\n"]


def move_away(client: Any) -> list[bytes]:
    (client.root / "a.log").rename(client.root / "archived")
    client.write("archived", b"late\n")
    return [LONG + b"late\n"]


@pytest.mark.parametrize("stuck", ["app", "audit"])
@pytest.mark.parametrize("change", [rename, remove, copy_and_truncate, move_away])
@pytest.mark.parametrize("killed", [False, True])
@pytest.mark.parametrize("close_s", [0.0, 1.0])
def test_a_changed_file_arrives_in_each_topic(
    client: Any, gateway: Topics, stuck: str, change: Callable[[Any], list[bytes]], killed: bool, close_s: float
) -> None:
    """``close_s``: the topic that has all of it closes the file, the other one does not."""
    start(client, "app", "audit", close_inactive_s=close_s)
    client.write("a.log", LONG[:1500])
    client.settle()
    gateway.busy.add(stuck)
    client.write("a.log", LONG[1500:])
    for _ in range(3):
        client.step()
    client.agent.remember(client.now)
    client.step()
    tails = {source.entry.topic: source.tail for watch in client.agent.watches for source in watch.sources.values()}
    assert {topic: tail.is_open for topic, tail in tails.items()} == {stuck: True, other(stuck): not close_s}
    wanted = change(client)
    if not (killed and change is remove):  # what is removed while no client runs is lost
        if killed:
            client.restart()
        for _ in range(5):
            client.step()
        gateway.busy.clear()
        client.step(400.0)
        client.settle()
        assert gateway.content("app") == gateway.content("audit") == sorted(wanted)
        assert len(gateway.sources) == 2 * len(wanted)


def test_deleted_files_count_once_and_are_closed_for_all_topics(client: Any, gateway: Topics) -> None:
    size = 4 * 4096
    for limit, is_kept in ((2 * size + size // 2, True), (2 * size - 1, False)):
        client.close()
        client.config = client.config._replace(max_deleted_bytes=limit)
        client.begin()
        gateway.busy = {"app", "audit"}
        names = [f"{limit}{letter}.log" for letter in "ab"]
        for name in names:
            client.write(name, name.encode() * 100 + b"\n" + b"x" * (size - len(name) * 100 - 2) + b"\n")
            client.step()
            (client.root / name).unlink()
        for _ in range(3):
            client.step()
        held = [source.entry.path for w in client.agent.watches for source in w._live.values()]
        assert sorted(held) == sorted(str(client.root / name) for name in (names if is_kept else names[1:]) * 2)


# ---- topics that come and go, and change their order -----------------------------------------------------------------


@pytest.mark.parametrize("first", [("app",), ("app", "audit")])
def test_a_topic_that_is_added_begins_as_new_files_do(client: Any, gateway: Topics, first: tuple[str, ...]) -> None:
    start(client, *first)
    client.write("a.log", b"one\n")
    client.settle()
    assert client.agent.remember(client.now)
    start(client, *first, "third")
    client.write("a.log", b"two\n")
    client.settle()
    for topic in (*first, "third"):
        assert gateway.content(topic) == [b"one\ntwo\n"]
    assert len(gateway.sources) == len(first) + 1


def test_a_topic_that_is_added_begins_at_the_end_where_files_do(client: Any, gateway: Topics) -> None:
    start(client, "app")
    client.write("a.log", b"one\n")
    client.settle()
    assert client.agent.remember(client.now)
    start(client, "app", "audit", starts_at_end=True)
    client.settle()
    client.write("a.log", b"two\n")
    client.write("new.log", b"new\n")
    client.settle()
    assert gateway.content("app") == [b"new\n", b"one\ntwo\n"]
    assert gateway.content("audit") == [b"new\n", b"two\n"]


def test_a_topic_that_is_added_leaves_old_files_out(client: Any, gateway: Topics) -> None:
    start(client, "app")
    client.write("a.log", b"one\n")
    client.settle()
    assert client.agent.remember(client.now)
    os.utime(client.root / "a.log", (1e9, 1e9))
    start(client, "app", "audit", ignore_older_s=3600.0)
    client.settle()
    assert (gateway.content("app"), gateway.content("audit")) == ([b"one\n"], [])
    client.write("a.log", b"two\n")
    client.settle()
    assert gateway.content("app") == gateway.content("audit") == [b"one\ntwo\n"]


@pytest.mark.parametrize("removed", ["app", "audit"])
def test_a_removed_topic_gets_nothing_more_and_one_that_returns_resumes(
    client: Any, gateway: Topics, removed: str
) -> None:
    (other,) = {"app", "audit"} - {removed}
    client.write("a.log", b"one\n")
    client.settle()
    assert client.agent.remember(client.now)
    for number in range(3):
        start(client, other)
        client.write("a.log", b"%d\n" % number)
        client.settle()
        assert gateway.content(removed) == [b"one\n"]
        assert client.agent.remember(client.now)
    start(client, other, removed)
    client.write("a.log", b"two\n")
    client.settle()
    assert gateway.content("app") == gateway.content("audit") == [b"one\n0\n1\n2\ntwo\n"]
    assert len(gateway.sources) == 2


def test_the_rest_of_a_renamed_file_is_still_sent_to_a_removed_topic(client: Any, gateway: Topics) -> None:
    """As it is where a pattern is removed."""
    client.write("a.log", b"one\n")
    client.settle()
    gateway.busy.add("audit")
    (client.root / "a.log").rename(client.root / "archived")
    client.write("archived", b"two\n")
    client.step()
    client.step()
    assert client.agent.remember(client.now)
    start(client, "app")
    gateway.busy.clear()
    client.settle()
    assert gateway.content("app") == gateway.content("audit") == [b"one\ntwo\n"]


@pytest.mark.parametrize("order", [("audit", "app"), ("third", "audit", "app"), ("audit", "third")])
def test_another_order_sends_nothing_again(client: Any, gateway: Topics, order: tuple[str, ...]) -> None:
    client.write("a.log", LONG)
    client.settle()
    assert client.agent.remember(client.now)
    wanted = LONG
    for number in range(3):
        start(client, *order)
        client.write("a.log", b"%d\n" % number)
        wanted += b"%d\n" % number
        client.settle()
        assert client.agent.remember(client.now)
        for topic in order:
            assert gateway.content(topic) == [wanted]
    assert len(gateway.sources) == len({*order, "app", "audit"})
    os.truncate(client.root / "a.log", 0)
    client.write("a.log", b"after\n")
    client.settle()
    for topic in order:
        assert gateway.content(topic) == sorted([wanted, b"after\n"])


def test_a_topic_that_replaces_the_only_one_has_all_of_the_file(client: Any, gateway: Topics) -> None:
    """As before there were several."""
    start(client, "app", starts_at_end=True)
    client.write("a.log", b"one\n")
    client.write("a.log", b"two\n")
    start(client, "app")
    client.settle()
    assert client.agent.remember(client.now)
    start(client, "third", starts_at_end=True)
    client.settle()
    assert gateway.content("third") == [b"one\ntwo\n"]


# ---- the state folder ------------------------------------------------------------------------------------------------


def test_the_checkpoint_of_one_topic_stays_as_it_was(client: Any, gateway: Topics) -> None:
    """Older versions read it: no file is in it twice, and what they do not know is in another folder."""
    client.write("a.log", b"one\n")
    client.write("b.log", b"two\n")
    client.settle()
    client.restart()
    client.settle()
    assert client.agent.remember(client.now)
    client.restart()
    assert client.agent.remember(client.now)
    assert sorted(entries(client)) == [("a.log", "app", 4), ("b.log", "app", 4)]
    assert sorted(entries(client, "topics", "2")) == [("a.log", "audit", 4), ("b.log", "audit", 4)]


def test_with_one_topic_there_is_no_further_folder(client: Any, gateway: Topics) -> None:
    start(client, "app")
    client.write("a.log", b"one\n")
    client.settle()
    assert client.agent.remember(client.now)
    assert not (Path(client.config.state_dir) / "topics").exists()
    assert len(client.agent.watches) == 1


def test_an_older_version_between_continues_with_the_first_topic(client: Any, gateway: Topics) -> None:
    """It does not know the folder of the others, so they resume where they were."""
    client.write("a.log", b"one\n")
    client.settle()
    assert client.agent.remember(client.now)
    client.close()
    hidden = client.root / "hidden"
    (client.root / "state" / "topics").rename(hidden)
    client.begin()
    start(client, "app")
    client.write("a.log", b"two\n")
    client.settle()
    assert client.agent.remember(client.now)
    client.close()
    hidden.rename(client.root / "state" / "topics")
    client.begin()
    start(client, "app", "audit")
    client.settle()
    assert gateway.content("app") == gateway.content("audit") == [b"one\ntwo\n"]
    assert len(gateway.sources) == 2


def test_a_lost_checkpoint_of_one_topic_doubles_that_one_alone(client: Any, gateway: Topics) -> None:
    client.write("a.log", b"one\n")
    client.settle()
    assert client.agent.remember(client.now)
    client.close()
    (client.root / "state" / "topics" / "2" / "checkpoint.json").write_bytes(b"damaged")
    client.begin()
    client.settle()
    assert gateway.content("app") == [b"one\n"]
    assert gateway.content("audit") == [b"one\n", b"one\n"]


def test_a_newer_checkpoint_of_one_topic_is_refused(client: Any) -> None:
    client.write("a.log", b"one\n")
    client.settle()
    path = client.root / "state" / "topics" / "2" / "checkpoint.json"
    path.write_bytes(path.read_bytes().replace(b'"version": 7', b'"version": 8'))
    client.close()
    with pytest.raises(checkpoints.StateUnusable, match="version 8"):
        client.begin()
    path.write_bytes(path.read_bytes().replace(b'"version": 8', b'"version": 7'))
    client.begin()


def test_a_new_start_of_the_system_and_other_device_numbers(
    client: Any, gateway: Topics, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.write("a.log", LONG)
    client.settle()
    start(client, "audit", "app")
    client.settle()
    assert client.agent.remember(client.now)
    client.close()
    monkeypatch.setattr(checkpoints, "boot", lambda: "another")
    client.begin()
    client.close()
    checkpoint = checkpoints.Checkpoint.open(Path(client.config.state_dir))
    for number in range(2):
        for entry in checkpoint.layer(number).entries.values():
            entry.device += 1
        checkpoint.layer(number).save()
    checkpoint.close()
    client.begin()
    client.write("a.log", b"more\n")
    client.settle()
    assert gateway.content("app") == gateway.content("audit") == [LONG + b"more\n"]


def test_a_copied_state_folder_makes_new_sources_of_each_topic(client: Any, gateway: Topics) -> None:
    client.write("a.log", b"one\n")
    client.settle()
    assert client.agent.remember(client.now)
    client.close()
    client.config = client.config._replace(host="h2")
    gateway.is_one_of_many = True
    client.begin()
    client.write("a.log", b"two\n")
    client.settle()
    assert gateway.content("app") == gateway.content("audit") == [b"one\n", b"two\n"]
    assert len(gateway.sources) == 4


@pytest.mark.parametrize("fault", ["kill before", "kill after"])
@pytest.mark.parametrize("number", range(8))
def test_killed_at_each_request(client: Any, gateway: Topics, fault: str, number: int) -> None:
    client.write("a.log", LONG)
    gateway.faults.extend([""] * number + [fault])
    kills = 0
    for text in (b"", b"more\n", b""):
        client.write("a.log", text)
        try:
            client.settle()
        except Killed:
            kills += 1
            client.restart()
    assert kills == (number < 6)
    assert gateway.content("app") == gateway.content("audit") == [LONG + b"more\n"]
    assert len([stored for stored in gateway.sources.values() if stored.chunks]) == 2


# ---- data centres, bounds ------------------------------------------------------------------------------------------


def test_both_topics_fail_over_and_back(client: Any, gateway: Topics) -> None:
    second = Topics()
    gateway.is_one_of_many = second.is_one_of_many = True
    client.close()
    centres = (DataCentre("first", ("http://g:1",)), DataCentre("second", ("http://s:1",)))
    client.config = client.config._replace(data_centres=centres, failover_s=20.0, failback_s=20.0)

    def exchange(url: str, *rest: Any) -> Reply:
        return (gateway if url.startswith("http://g") else second)(url, *rest)

    client.begin()
    client.pusher = Pusher([GatewayCluster(centre.urls, None) for centre in centres], exchange)
    client.write("a.log", b"one\n")
    client.settle()
    gateway.is_away = True
    client.write("a.log", b"two\n")
    for _ in range(20):
        client.step()
    assert second.content("app") == second.content("audit") == [b"two\n"]
    gateway.is_away = False
    for _ in range(20):
        client.step()
    client.write("a.log", b"three\n")
    client.settle()
    assert gateway.content("app") == gateway.content("audit") == [b"one\nthree\n"]


def test_all_topics_share_the_bound_of_memory(client: Any, gateway: Topics) -> None:
    start(client, "app", "audit", "third")
    for number in range(20):
        client.write(f"{number}.log", b"%d" % number * 100_000 + b"\n")
    gateway.busy = {"app", "audit", "third"}
    limit = (client.config.threads + 2) * client.config.request_bytes
    for _ in range(30):
        client.step()
        assert client.agent.held_bytes() <= limit
    gateway.busy.clear()
    client.step(400.0)
    for _ in range(100):
        client.step()
    contents = [gateway.content(topic) for topic in ("app", "audit", "third")]
    assert contents[0] == contents[1] == contents[2]
    assert len(contents[0]) == 20


@pytest.mark.parametrize("stuck", ["app", "audit"])
def test_a_copy_is_found_after_another_order(client: Any, gateway: Topics, stuck: str) -> None:
    """It belongs to the layer that has the original's topic, whatever the order is by now."""
    gateway.is_one_of_many = True  # a copy that the client sees while the original is whole begins at its end
    client.write("a.log", LONG[:1500])
    client.settle()
    assert client.agent.remember(client.now)
    start(client, "audit", "app")
    client.settle()
    gateway.busy.add(stuck)
    client.write("a.log", LONG[1500:])
    for _ in range(3):
        client.step()
    shutil.copyfile(client.root / "a.log", client.root / "a.log.1")
    for _ in range(5):
        client.step()
    os.truncate(client.root / "a.log", 0)
    client.write("a.log", b"new\n")
    for _ in range(5):
        client.step()
    gateway.busy.clear()
    client.write("a.log.1", b"late\n")
    client.step(200.0)
    client.settle()
    other = {"app": "audit", "audit": "app"}[stuck]
    assert gateway.content(stuck) == sorted([LONG + b"late\n", b"new\n"])
    assert gateway.content(other) == sorted([LONG, b"late\n", b"new\n"])


def test_a_folder_that_cannot_be_written_stops_its_topic_alone(client: Any, gateway: Topics) -> None:
    client.close()
    (client.root / "state" / "topics").write_bytes(b"in the way")
    client.begin()
    client.write("a.log", b"one\n")
    for _ in range(5):
        client.step()
    assert (gateway.content("app"), gateway.content("audit")) == ([b"one\n"], [])
    (client.root / "state" / "topics").unlink()
    client.step(10.0)
    client.settle()
    assert gateway.content("app") == gateway.content("audit") == [b"one\n"]


def test_a_topic_without_inotify_is_polled_and_the_status_says_so(client: Any, gateway: Topics) -> None:
    """Each topic needs an instance, of which a user has 128."""
    for name in ("a.log", "b.log"):
        client.write(name, b"one\n")
    client.settle()
    hints = client.agent.watches[1].looks.hints
    hints.close()
    hints.unusable, hints._fd = "full", -1
    client.write("a.log", b"two\n")
    client.settle()
    assert gateway.content("app") == gateway.content("audit") == [b"one\n", b"one\ntwo\n"]
    folder = Path(client.config.state_dir)
    write_status(folder, client.agent.watches, client.now, client.agent.centres)
    said = json.loads((folder / "status.json").read_text())
    assert (said["inotify"]["polled"]["full"], said["inotify"]["unusable"], said["totals"]["files"]) == (2, "", 4)
