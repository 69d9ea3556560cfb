"""`logferry doctor` on this host: each finding is provoked once, and is gone once its remedy was followed."""

from __future__ import annotations

import json
import shutil
import socket
import ssl
import threading
from collections import namedtuple
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import trustme
from logferry.gateway.config import KafkaSettings, Tls
from logferry.ops.cli.problems import UsageError
from logferry.ops.doctor import command
from logferry.ops.doctor.host import check_cluster_network, check_gateway, check_host, clock
from logferry.ops.doctor.role import Check, Cluster, Endpoint, Role, State, TopicRights, Unreadable, read_role
from logferry.ops.stack.processes import free_ports


def states(checks: Iterator[Check], area: str) -> list[tuple[State, str]]:
    return [(check.state, check.text) for check in checks if check.area == area]


def issued(folder: Path, name: str, days: float, host: str = "gw1.example") -> Tls:
    """A certificate that ends in so many days, and its key."""
    now = datetime.now(UTC)
    leaf = trustme.CA().issue_cert(host, not_before=now - timedelta(days=60), not_after=now + timedelta(days=days))
    leaf.cert_chain_pems[0].write_to_path(str(folder / f"{name}.pem"))
    leaf.private_key_pem.write_to_path(str(folder / f"{name}.key"))
    return Tls(certificate=folder / f"{name}.pem", key=folder / f"{name}.key")


@pytest.mark.parametrize(
    ("days", "host", "state", "text"),
    [
        (90, "gw1.example", State.OK, "(90 days)"),
        (13, "gw1.example", State.WARNING, "(13 days)"),
        (-1, "gw1.example", State.WRONG, "expired"),
        (90, "gw2.example", State.WRONG, "Hostname mismatch"),
    ],
)
def test_the_certificate_of_a_service(tmp_path: Path, days: float, host: str, state: State, text: str) -> None:
    tls = issued(tmp_path, "gateway", days + 0.5)
    [(found, said)] = states(check_host(Role("gateway", tls=tls, host=host)), "certificates")
    assert found == state
    assert text in said


def test_a_key_of_another_certificate_is_named(tmp_path: Path) -> None:
    one, other = issued(tmp_path, "one", 90), issued(tmp_path, "other", 90)
    tls = Tls(certificate=one.certificate, key=other.key)
    [(state, text)] = states(check_host(Role("gateway", tls=tls, host="gw1.example")), "certificates")
    assert state == State.WRONG
    assert "KEY_VALUES_MISMATCH" in text


def test_a_secret_that_everybody_may_read(tmp_path: Path) -> None:
    secret = tmp_path / "token"
    secret.write_text("lf_secret\n")
    role = Role("push", secrets=[secret, tmp_path / "missing"])
    secret.chmod(0o644)
    assert states(check_host(role), "files") == [
        (State.WRONG, "everybody may read it (mode 644)"),
        (State.WRONG, "No such file or directory"),
    ]
    secret.chmod(0o640)
    assert states(check_host(role), "files")[0] == (State.OK, "mode 640")


@pytest.mark.parametrize(
    ("free", "state"), [(50, State.OK), (19, State.WARNING), (4, State.WRONG)], ids=["room", "low", "full"]
)
def test_the_disk_of_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, state: State) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(100, 100 - free, free))
    [(found, text)] = states(check_host(Role("push", folders=[("state_dir", tmp_path)])), "disk")
    assert (found, text) == (state, f"0.0 GB free ({free}%)")


def test_a_folder_whose_parent_is_not_there_either(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    role = Role("push", folders=[("state_dir", tmp_path / "made" / "by" / "the" / "client")])
    assert states(check_host(role), "disk")[0][0] == State.OK


def test_the_version_is_said_and_java_where_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "Python 3." in states(check_host(Role("push")), "versions")[0][1]


def test_names_and_ports_of_kafka() -> None:
    [closed] = free_ports(1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        servers = f"nowhere.invalid:9092,127.0.0.1:{closed},127.0.0.1:{server.getsockname()[1]},broker"
        cluster = Cluster("kafka", KafkaSettings(bootstrap_servers=servers), ())
        found = list(check_cluster_network(Role("gateway"), cluster))
    assert [(check.area, check.state) for check in found] == [
        ("names", State.WRONG),
        ("names", State.OK),
        ("ports", State.WRONG),
        ("names", State.OK),
        ("ports", State.OK),
        ("names", State.WRONG),
    ]
    assert "nowhere.invalid" in found[0].text
    assert "firewall" in found[2].remedy


@contextmanager
def served(ahead_s: float = 0.0, tls: ssl.SSLContext | None = None, status: int = 200) -> Iterator[str]:
    """A server that answers /healthz with its own time. Yields host and port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response_only(status if self.path == "/healthz" else 404)
            self.send_header("Date", formatdate(datetime.now(UTC).timestamp() + ahead_s, usegmt=True))
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    class Quiet(HTTPServer):
        def handle_error(self, request: object, client_address: object) -> None:
            pass

    with Quiet(("127.0.0.1", 0), Handler) as server:
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("ahead_s", "state"), [(0, State.OK), (60, State.WARNING), (-60, State.WARNING), (3600, State.WRONG)]
)
def test_the_clock_of_a_gateway(ahead_s: float, state: State) -> None:
    with served(ahead_s) as address:
        found = list(check_gateway(Role("push"), Endpoint(f"http://{address}", None)))
    assert [(check.area, check.state) for check in found] == [
        ("names", State.OK), ("ports", State.OK), ("clocks", state)
    ]  # fmt: skip
    assert ("behind" in found[-1].text) is (ahead_s > 0) or ahead_s == 0


def test_a_server_that_is_no_gateway() -> None:
    with served(status=404) as address:
        *_, last = check_gateway(Role("push"), Endpoint(f"http://{address}", None))
    assert (last.state, last.text) == (State.WRONG, "/healthz answers 404")


def test_clocks_are_compared_with_the_bounds_of_the_gateway() -> None:
    assert [clock("x", s).state for s in (5, -5, 5.1, 300, 301)] == [
        State.OK, State.OK, State.WARNING, State.WARNING, State.WRONG
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("days", "known", "state", "text"),
    [(90, True, State.OK, "days)"), (5, True, State.WARNING, "(5 days)"), (-1, True, State.WRONG, "expired"),
     (90, False, State.WRONG, "self-signed certificate")],
)  # fmt: skip
def test_the_certificate_of_a_gateway(tmp_path: Path, days: int, known: bool, state: State, text: str) -> None:
    authority, now = trustme.CA(), datetime.now(UTC)
    (authority if known else trustme.CA()).cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    leaf = authority.issue_cert(
        "127.0.0.1", not_before=now - timedelta(days=60), not_after=now + timedelta(days=days, hours=12)
    )
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    leaf.configure_cert(context)
    with served(tls=context) as address:
        found = list(check_gateway(Role("push"), Endpoint(f"https://{address}", str(tmp_path / "ca.pem"))))
    [(area_state, said)] = [(check.state, check.text) for check in found if check.area == "certificates"]
    assert area_state == state
    assert text in said or "unable to get local issuer" in said
    assert any(check.area == "clocks" for check in found) is (state != State.WRONG)


# ---- configuration -----------------------------------------------------------------------------------------------

FILES = {
    "gateway": 'dc = "dc1"\nlanez = 3\n[kafka]\nbootstrap_servers = "k:9092"\n',
    "mirror": 'dc = "dc1"\n[kafka]\nbootstrap_servers = "k:9092"\n',
    "deliver": 'dc = "dc1"\nlanes = 0\n[kafka]\nbootstrap_servers = "k:9092"\n',
    "load": '[kafka]\nbootstrap_servers = "k:9092"\n',
    "audit": "[kafka]\n",
    "push": 'url = "ftp://h"\ntopic = "t"\nstate_dir = "/tmp/s"\n[[files]]\npaths = ["/var/log/*.log"]\n',
}
NAMED = {"gateway": "lanez", "mirror": "remote", "deliver": "lanes", "load": "tables", "audit": "bootstrap_servers",
         "push": "ftp://h"}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_the_setting_of_a_wrong_file_is_named(name: str, tmp_path: Path) -> None:
    file = tmp_path / f"{name}.toml"
    file.write_text(FILES[name])
    with pytest.raises(Unreadable, match=NAMED[name]):
        read_role(name, file)
    with pytest.raises(Unreadable):
        read_role(name, tmp_path / "missing.toml")


def test_a_wrong_file_ends_the_checks_of_its_role_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("gateway", "push"):
        (tmp_path / f"{name}.toml").write_text(FILES[name].replace("ftp://h", "http://nowhere.invalid:8080"))
    arguments = [f"--{name}={tmp_path / name}.toml" for name in ("gateway", "push")]
    assert command.main([*arguments, "--json"]) == 1
    checks = json.loads(capsys.readouterr().out)["checks"]
    wrong = [(check["area"], check["subject"].partition(":")[0]) for check in checks if check["state"] == "wrong"]
    assert wrong == [("configuration", "gateway"), ("names", "push")]
    assert command.main(arguments) == 1
    assert "2 wrong, 0 warnings" in capsys.readouterr().out


def test_without_a_file_it_is_wrong_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "FOLDER", tmp_path)
    with pytest.raises(UsageError, match="--gateway"):
        command.main([])


@pytest.mark.parametrize(
    ("need", "topic", "takes"),
    [
        (TopicRights("dc1.", True, ()), "dc1.nginx", True),
        (TopicRights("dc1.", True, ()), "dc10.nginx", False),
        (TopicRights("*.nginx", True, ()), "dc2.nginx", True),
        (TopicRights("*.nginx", True, ()), "nginx", False),
        (TopicRights("dc1.nginx", True, ()), "dc1.nginx2", False),
        (TopicRights("__transaction_state", False, ()), "__transaction_state", True),
    ],
)
def test_which_topics_a_right_is_for(need: TopicRights, topic: str, takes: bool) -> None:
    assert need.takes(topic) is takes
