"""Symbolic links: followed within the folders of their pattern, and out of them only where the operator allows it."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest
from logferry.client.agent.config import Config, FileGroup, parse
from logferry.client.files.discover import find_by_entry, leads_out
from logferry.client.files.identity import HEAD_BYTES


@pytest.mark.parametrize(
    ("path", "real", "pattern", "roots", "out"),
    [
        ("/srv/a/x.log", "/srv/a/x.log", "/srv/*/x.log", (), False),
        ("/srv/a/x.log", "/srv/a/b/y", "/srv/*/x.log", (), False),
        ("/srv/a/x.log", "/srv/b/y", "/srv/*/x.log", (), True),
        ("/srv/a/x.log", "/srv/ab/y", "/srv/*/x.log", (), True),
        ("/srv/a/x.log", "/srv/b/y", "/srv/**/x.log", (), True),
        ("/srv/x.log", "/srv/b/y", "/srv/**/x.log", (), False),
        ("/srv/x.log", "/srv/b/y", "/srv/*.log", (), False),
        ("/srv/app-1/x.log", "/srv/app-2/y", "/srv/app-*/x.log", (), True),
        ("/home/a/logs/x.log", "/home/b/.ssh/id_rsa", "/home/*/logs/*.log", (), True),
        ("/var/logs/x.log", "/etc/shadow", "/*/logs/*.log", (), True),
        ("/var/logs/x.log", "/var/lib/y", "/*/logs/*.log", (), False),
        ("/x.log", "/etc/y", "/*.log", (), False),
        ("/srv/a/x.log", "/etc/shadow", "/srv/*/x.log", (), True),
        ("/srv/a/x.log", "/srv2/y", "/srv/*/x.log", (), True),
        ("/srv/a/x.log", "/etc/shadow", "/srv/a/x.log", (), True),
        ("/srv/a/x.log", "/data/y", "/srv/*/x.log", ("/data",), False),
        ("/srv/a/x.log", "/data/y", "/srv/*/x.log", ("/",), False),
        ("/var/log/app/x.log", "/var/log/auth.log", "/var/log/app/*.log", (), True),
        ("/var/log/containers/x.log", "/var/log/pods/p/0.log", "/var/log/containers/*.log", (), False),
        ("/var/log/containers/x.log", "/var/lib/docker/containers/c/c-json.log", "/var/log/containers/*", (), False),
        ("/var/log/pods/p/0.log", "/var/lib/docker/containers/c/c-json.log", "/var/log/pods/*/*", (), False),
        ("/var/log/containers/x.log", "/etc/shadow", "/var/log/containers/*.log", (), True),
        ("/var/log/app/x.log", "/var/lib/docker/containers/c/c-json.log", "/var/log/app/*.log", (), True),
    ],
)
def test_where_links_may_lead(path: str, real: str, pattern: str, roots: tuple[str, ...], out: bool) -> None:
    assert leads_out(path, real, [pattern], roots) is out


def test_the_innermost_of_the_patterns_decides() -> None:
    patterns = ["/*/logs/*.log", "/home/*/logs/*.log", "/home/b/x.log"]
    assert leads_out("/home/a/logs/x.log", "/home/b/.ssh/id_rsa", patterns, ())
    assert leads_out("/home/a/logs/x.log", "/home/b/x.log", patterns, ())
    assert not leads_out("/home/a/logs/x.log", "/home/a/data/y", patterns, ())


def test_what_the_first_wildcard_matches_may_be_a_link_beside_it(tmp_path: Path) -> None:
    """As a deployment makes it; whoever may write there names what is followed."""
    (tmp_path / "srv").mkdir()
    (tmp_path / "srv" / "current").symlink_to("release-2")
    (tmp_path / "srv" / "out").symlink_to("/etc")
    srv, patterns = str(tmp_path / "srv"), [str(tmp_path / "srv" / "*" / "logs" / "*.log")]
    assert not leads_out(f"{srv}/current/logs/x.log", f"{srv}/release-2/logs/x.log", patterns, ())
    assert leads_out(f"{srv}/current/logs/x.log", f"{srv}/release-1/logs/x.log", patterns, ())
    assert leads_out(f"{srv}/out/logs/x.log", "/etc/logs/x.log", patterns, ())
    assert not leads_out(f"{srv}/out/logs/x.log", "/etc/logs/x.log", patterns, ("/etc",))


def following(client: Any, *link_roots: str) -> None:
    """The client follows `logs/` alone."""
    group = FileGroup((str(client.root / "logs" / "**" / "*.log"),), "t", link_roots=link_roots)
    client.config = client.config._replace(files=(group,))
    client.restart()


@pytest.fixture
def secret(client: Any) -> Any:
    (client.root / "logs").mkdir()
    (client.root / "secrets").mkdir()
    client.write("secrets/shadow.log", b"root:secret\n")
    return client.root / "secrets" / "shadow.log"


@pytest.mark.parametrize("is_folder", [False, True])
def test_a_link_out_of_the_folder_is_refused_and_named_once(
    client: Any, gateway: Any, secret: Path, is_folder: bool, caplog: pytest.LogCaptureFixture
) -> None:
    link = client.root / "logs" / ("linked" if is_folder else "x.log")
    link.symlink_to(secret.parent if is_folder else secret)
    following(client)
    client.write("logs/own.log", b"own\n")
    client.settle()
    assert client.stored() == [b"own\n"]
    ((path, why),) = client.agent.failures().items()
    assert path.startswith(str(link))
    assert "--link-root" in why
    assert caplog.text.count("link-refused") == 1
    link.unlink()
    client.settle()
    assert not client.agent.failures()


def test_a_link_of_another_user_hides_no_file(client: Any) -> None:
    """The name through it is the first in order, and refused; the file has another one."""
    group = FileGroup((str(client.root / "home" / "*" / "logs" / "*.log"),), "t")
    client.config = client.config._replace(files=(group,))
    client.restart()
    for folder in ("a", "b/data"):
        (client.root / "home" / folder).mkdir(parents=True)
    (client.root / "home/a/logs").symlink_to("../b/data")
    (client.root / "home/b/logs").symlink_to("data")
    client.write("home/b/data/x.log", b"of b\n")
    client.settle()
    assert client.stored() == [b"of b\n"]
    (source,) = client.agent.watch.sources.values()
    assert source.entry.path == str(client.root / "home/b/logs/x.log")


@pytest.mark.parametrize("later", ["the file itself", "the link, allowed", "neither"])
@pytest.mark.parametrize("once", [False, True])
def test_a_refused_link_hides_no_file_of_a_later_entry(
    client: Any, secret: Path, once: bool, later: str, caplog: pytest.LogCaptureFixture
) -> None:
    logs = (str(client.root / "logs" / "*.log"),)
    (client.root / "logs" / "x.log").symlink_to(secret)
    client.write("logs/own.log", b"own\n")
    entries = {
        "the file itself": FileGroup((str(secret.parent / "*.log"),), "later"),
        "the link, allowed": FileGroup(logs, "later", link_roots=(str(secret.parent),)),
        "neither": FileGroup(logs, "later"),
    }
    client.config = client.config._replace(files=(FileGroup(logs, "t"), entries[later]), once=once)
    client.gateway.topics.add("later")
    client.restart()
    client.settle()
    client.restart()
    client.settle()
    sent = {(stored.topic, stored.content()) for stored in client.gateway.sources.values() if stored.chunks}
    is_hidden = later == "neither"
    assert sent == {("t", b"own\n"), *(() if is_hidden else [("later", b"root:secret\n")])}
    assert ("link-refused" in caplog.text, bool(client.agent.failures())) == (is_hidden, is_hidden)


def test_a_link_into_a_folder_that_is_allowed_is_followed(client: Any, secret: Path) -> None:
    (client.root / "logs" / "x.log").symlink_to(secret)
    following(client, str(secret.parent))
    client.settle()
    assert client.stored() == [b"root:secret\n"]


def test_a_folder_of_the_pattern_itself_may_be_a_link(client: Any) -> None:
    (client.root / "data").mkdir()
    (client.root / "logs").symlink_to("data")
    client.write("data/x.log", b"one\n")
    following(client)
    client.settle()
    assert client.stored() == [b"one\n"]


def test_a_link_that_is_turned_between_the_search_and_the_opening_is_refused(
    client: Any, secret: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    following(client)
    client.write("logs/real", b"harmless\n")
    link = client.root / "logs" / "x.log"
    link.symlink_to("real")

    def search_then_turn(*arguments: Any) -> Any:
        found = find_by_entry(*arguments)
        link.unlink()
        link.symlink_to(secret)
        return found

    monkeypatch.setattr("logferry.client.agent.search.find_by_entry", search_then_turn)
    client.settle()
    assert client.stored() == []


def test_a_file_behind_a_link_that_was_compressed_while_the_client_was_down_arrives(client: Any, secret: Path) -> None:
    """As the kubelet rotates: in the folder that the link leads to."""
    (client.root / "logs" / "x.log").symlink_to(secret)
    following(client, str(client.root / "secrets"))
    secret.write_bytes(b"first" + b"." * HEAD_BYTES + b"\n")
    client.settle()
    with secret.open("ab") as file:
        file.write(b"not sent yet\n")
    (client.root / "secrets" / "shadow.log.20261122.gz").write_bytes(gzip.compress(secret.read_bytes()))
    secret.unlink()
    secret.write_bytes(b"the next file" + b"." * HEAD_BYTES + b"\n")
    client.restart()
    client.settle()
    assert sorted(content.splitlines()[-1][:12] for content in client.stored()) == [b"not sent yet", b"the next fil"]


@pytest.mark.parametrize("rotated", ["", "renamed", "compressed"])
@pytest.mark.parametrize("down", [False, True])
def test_the_rest_of_a_file_arrives_whose_link_was_removed(
    client: Any, secret: Path, rotated: str, down: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """As the kubelet removes it under /var/log/containers when a container is started again."""
    link = client.root / "logs" / "x.log"
    link.symlink_to(secret)
    following(client, str(secret.parent))
    client.write("secrets/shadow.log", b"." * HEAD_BYTES + b"\n")
    client.settle()
    if down:
        assert client.agent.remember(client.now)
        client.close()
    with secret.open("ab") as file:
        file.write(b"not sent yet\n")
    link.unlink()
    if not down:
        client.agent.tick(client.now + 5)  # it sees that the link is gone, and is killed
        assert client.agent.remember(client.now)
        client.close()
    if rotated == "renamed":
        secret.rename(secret.with_name("shadow.log.1"))
    elif rotated:
        secret.with_name("shadow.log.1.gz").write_bytes(gzip.compress(secret.read_bytes()))
        secret.unlink()
    client.begin()
    client.settle()
    assert client.stored() == [b"root:secret\n" + b"." * HEAD_BYTES + b"\nnot sent yet\n"]
    assert "file-gone" not in caplog.text


def test_the_setting_is_an_option_and_a_key(tmp_path: Path) -> None:
    given = ["--url", "http://a:1", "--topic", "t", "--state-dir", "s"]
    assert parse([*given, "--link-root", "/a", "--link-root", "/b", "/l"]).files[0].link_roots == ("/a", "/b")
    file = tmp_path / "push.toml"
    file.write_text('link_root = ["/data/logs"]\n[[files]]\npaths = "/l"\ntopic = "t"\n')
    config: Config = parse([*given, "--config", str(file)])
    assert config.files[0].link_roots == ("/data/logs",)
