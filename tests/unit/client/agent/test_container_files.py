"""The files of containers, rotated as the kubelet does it, against what the containers wrote."""

from __future__ import annotations

import gzip
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from logferry.client.agent.config import FileGroup, parse
from logferry.client.files.containers import FORMS, ContainerRules, container_rules

from tests.support.container_log import ContainerLog, cri, lines_of
from tests.support.fake_gateway import FAULTS, FakeGateway, Killed, Stored
from tests.unit.client.agent.conftest import Client

UID = "8a1c0b7e-0a0c-4d1b-9c65-2f1d0c0f2c11"
FOLDER = f"pods/shop_web-7d_{UID}/nginx"
LIMITS = {"chunk_bytes": 4096, "line_bytes": 128 << 10, "request_bytes": 128 << 10}


DEPLOYED = Path(__file__).parents[4] / "ops" / "deploy" / "kubernetes" / "push.toml"


class Node:
    """A container's file below the folder of pods, and the client, with the patterns that are deployed."""

    def __init__(self, root: Path, rng: random.Random, form: str, idle_s: float) -> None:
        self.rng, self.gateway = rng, FakeGateway()
        self.log = ContainerLog(form, rng)
        self.folder = root / FOLDER
        self.folder.mkdir(parents=True)
        self.rotations = 0
        self.file = (self.folder / "0.log").open("ab", buffering=0)
        deployed = re.findall(r'"/var/log/(pods/[^"]*)"', DEPLOYED.read_text())
        patterns = tuple(str(root / one) for one in deployed)
        files = FileGroup(patterns, "t", rules=container_rules(form, "time stream", None))
        self.client = Client(root, self.gateway, files=(files,), idle_s=idle_s, **LIMITS)

    def write(self, entries: int) -> None:
        """As a runtime does: an entry in a write, and now and then in two."""
        for _ in range(entries):
            entry = self.log.entry()
            at = self.rng.randrange(len(entry)) if self.rng.random() < 0.1 else len(entry)
            self.file.write(entry[:at])
            if at < len(entry):
                self.step()
                self.file.write(entry[at:])

    def may_rotate(self) -> bool:
        """A part of every file was sent: of one that is rotated twice before, a client that is down knows nothing."""
        return len(self.stored()) == self.rotations + 1 and self.client.agent.remember(self.client.now)

    def stored(self) -> list[Stored]:
        return [each for each in self.gateway.sources.values() if each.chunks]

    def rotate(self) -> None:
        """Renames, and compresses older ones; the runtime reopens its file a moment later."""
        self.rotations += 1
        older = sorted(path for path in self.folder.iterdir() if path.name[-1].isdigit())
        (self.folder / "0.log").rename(self.folder / f"0.log.20261122-{self.rotations:06d}")
        self.write(self.rng.randrange(3))
        self.file.close()
        self.file = (self.folder / "0.log").open("ab", buffering=0)
        self.log.end()  # a source is a file: what the rotation parts stays parted
        for path in older:
            with path.open("rb") as plain, gzip.open(f"{path}.tmp", "wb") as packed:
                shutil.copyfileobj(plain, packed)
            Path(f"{path}.tmp").rename(f"{path}.gz")
            path.unlink()

    def step(self) -> None:
        try:
            self.client.step(self.rng.choice((0.2, 1.0, 5.0)))
        except Killed:
            self.client.restart()

    def check(self, may_part: bool) -> None:
        """Every message once, in the order of its stream."""
        stored = self.stored()
        assert len(stored) == self.rotations + 1, [each.recorded for each in stored]
        lines = lines_of(b"".join(each.content() for each in stored))
        parted = sum(len(c.attributes.get("unfinished", "").split()) for each in stored for c in each.chunks)
        malformed = sum(int(c.attributes.get("malformed", 0)) for each in stored for c in each.chunks)
        assert (malformed, [line for _, line in lines[""]]) == (len(self.log.malformed), self.log.malformed)
        told = self.log.told
        for stream in ("stdout", "stderr"):
            assert b"".join(text for _, text in lines[stream]) == b"".join(text for _, text in told[stream])
            if not may_part:
                assert lines[stream] == told[stream]
        assert sum(map(len, lines.values())) - len(lines[""]) - sum(map(len, told.values())) <= parted


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    return random.Random(request.param)


@pytest.mark.parametrize("rng", range(6), indirect=True)
@pytest.mark.parametrize("idle_s", [15.0, 1e9])
@pytest.mark.parametrize("form", FORMS)
def test_each_message_is_recorded_once_whatever_is_killed_and_rotated(
    tmp_path: Path, rng: random.Random, form: str, idle_s: float
) -> None:
    """``idle_s``: with the long one no message is parted that has an end in its file."""
    node = Node(tmp_path, rng, form, idle_s)
    for _ in range(40):
        node.write(rng.choice((0, 1, 5, 60)))
        if rng.random() < 0.3:
            node.gateway.faults.append(rng.choice((*FAULTS, "kill before", "kill after")))
        if rng.random() < 0.15:
            node.client.restart()
        if rng.random() < 0.15 and node.may_rotate():
            node.rotate()
        if rng.random() < 0.7:
            node.step()
    node.write(1)  # the last file is not empty
    node.log.end()
    node.gateway.faults.clear()
    node.client.config = node.client.config._replace(idle_s=15.0)  # the container is gone: its end is awaited no longer
    node.client.agent._config = node.client.config
    node.client.settle()
    for _ in range(20):  # through pauses after faults
        node.client.step(60.0)
    node.check(may_part=idle_s < 1e6)
    node.client.close()
    node.file.close()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path, random.Random(1), "cri", 30.0)
    yield node
    node.client.close()
    node.file.close()


def test_a_message_that_a_rotation_parts_becomes_two_lines(node: Node) -> None:
    node.file.write(cri(1, "stdout", b"one ", True))
    node.client.step()
    (node.folder / "0.log").rename(node.folder / "0.log.20261122-000001")
    (node.folder / "0.log").write_bytes(cri(2, "stdout", b"line", False))
    for _ in range(10):
        node.client.step()
    old, new = node.stored()
    assert lines_of(old.content())["stdout"] == [(1, b"one ")]
    assert old.chunks[0].attributes["unfinished"] == "stdout"
    assert lines_of(new.content())["stdout"] == [(2, b"line")]
    assert {name: new.chunks[0].attributes.get(name) for name in ("namespace", "pod", "container", "pod_uid")} == {
        "namespace": "shop", "pod": "web-7d", "container": "nginx", "pod_uid": UID
    }  # fmt: skip


def test_two_rotations_while_the_client_is_down_lose_nothing(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file that was made and rotated in that time has no name that the client has seen."""
    node.write(20)
    node.client.step()
    node.client.close()
    monkeypatch.setattr(node, "step", lambda: None)
    for _ in range(2):
        node.write(20)
        node.rotate()
    (node.folder / "0.log.20261122-000001.tmp").write_bytes(b"the kubelet compresses\n")
    node.write(20)
    node.log.end()
    node.client.begin()
    for _ in range(20):
        node.client.step()
    lines = lines_of(b"".join(each.content() for each in node.stored()))
    assert {stream: sorted(lines[stream]) for stream in node.log.told} == node.log.told
    assert len(node.stored()) == 3


def test_an_open_message_holds_up_the_other_stream_for_a_while_only(node: Node) -> None:
    """A prompt, and a stream that is never quiet."""
    node.file.write(cri(1, "stdout", b"password: ", True))
    for number in range(2, 20):
        node.file.write(cri(number, "stderr", b"busy", False))
        node.client.step(2.0)
        assert bool(node.stored()) == (number >= 18), number
    assert node.stored()[0].chunks[0].attributes["unfinished"] == "stdout"


def test_the_kubelets_links_lead_to_a_file_that_is_sent_once(tmp_path: Path) -> None:
    """``/var/log/containers`` → ``/var/log/pods``, and a pattern for each."""
    node = Node(tmp_path, random.Random(1), "cri", 30.0)
    (tmp_path / "containers").mkdir()
    (tmp_path / "containers" / f"web-7d_shop_nginx-{'0' * 64}.log").symlink_to(node.folder / "0.log")
    both = tuple(str(tmp_path / each) for each in ("containers/*.log", "pods/*/*/*.log"))
    node.client.config = node.client.config._replace(
        files=(node.client.config.files[0]._replace(patterns=both, link_roots=(str(tmp_path),)),)
    )
    node.client.restart()
    node.write(50)
    node.log.end()
    for _ in range(20):
        node.client.step()
    node.check(may_part=True)
    node.client.close()
    node.file.close()


def test_the_settings(tmp_path: Path) -> None:
    def files(text: str) -> FileGroup:
        (tmp_path / "push.toml").write_text(
            f'url = "http://127.0.0.1:1"\nstate_dir = "{tmp_path}"\ntopic = "t"\n{text}'
        )
        return parse(["--config", str(tmp_path / "push.toml")]).files[0]

    rules = files('[[files]]\npaths = "/var/log/pods/*/*/*.log"\nformat = "cri"\nexclude_lines = "health"').rules
    assert isinstance(rules, ContainerRules)
    assert (rules.form, rules.fields) == (FORMS["cri"], ("time", "stream"))
    assert rules.lines.exclude
    rules = files('format = "docker"\nline_fields = ""\n[[files]]\npaths = "/x/*.log"').rules
    assert isinstance(rules, ContainerRules)
    assert (rules.form, rules.fields) == (FORMS["docker"], ())
    assert files('[[files]]\npaths = "/x/*.log"\nformat = "lines"').rules is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('format = "crio"', "files[0].format: 'crio' is not one of lines, cri, docker"),
        ('format = "cri"\nrecord_start = "x"', "record_start"),
        ('format = "cri"\ncut_lines = true', "cut_lines"),
        ('format = "cri"\nline_fields = "flag"', "line_fields"),
        ('format = "docker"\nencoding = "latin-1"', "encoding"),
        ('format = "cri"\nattributes = { unfinished = "x" }', "unfinished"),
    ],
)
def test_settings_that_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, words: str) -> None:
    (tmp_path / "push.toml").write_text(
        f'url = "http://127.0.0.1:1"\nstate_dir = "{tmp_path}"\ntopic = "t"\n[[files]]\npaths = "/x/*.log"\n{text}'
    )
    with pytest.raises(SystemExit):
        parse(["--config", str(tmp_path / "push.toml")])
    assert words in capsys.readouterr().err


def test_a_line_limit_that_is_too_small_for_an_entry_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(
            ["--url", "http://127.0.0.1:1", "--state-dir", str(tmp_path), "--topic", "t", "--format", "cri",
             "--line-bytes", "65536", "/x/*.log"]
        )  # fmt: skip
    assert "line_bytes" in capsys.readouterr().err
