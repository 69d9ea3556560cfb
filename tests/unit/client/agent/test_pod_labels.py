"""The labels of pods as attributes, from a kubelet that answers, fails, and comes back."""

from __future__ import annotations

import http.server
import json
import math
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme
from logferry.client.agent.config import FileGroup, parse
from logferry.client.files.containers import container_rules
from logferry.client.transport.kubelet import KubeletSettings, label_attributes, labels_of_pods, with_labels

from tests.support.container_log import cri
from tests.support.fake_gateway import FakeGateway
from tests.unit.client.agent.conftest import Client

BOUND_S = 120.0
UID = "8a1c0b7e-0a0c-4d1b-9c65-2f1d0c0f2c11"


class Kubelet(http.server.ThreadingHTTPServer):
    """``/pods`` over TLS, for a token."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.pods: dict[str, dict[str, str]] = {}
        self.token, self.asked = "first", 0
        self.uid, self.garbage = UID, b""
        authority = trustme.CA()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert("127.0.0.1").configure_cert(context)
        authority.cert_pem.write_to_path(str(folder / "kubelet-ca.pem"))
        (folder / "kubelet-token").write_text("first")
        self.socket = context.wrap_socket(self.socket, server_side=True)
        self.settings = KubeletSettings(
            f"https://127.0.0.1:{self.server_port}", str(folder / "kubelet-token"), str(folder / "kubelet-ca.pem")
        )

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that does not trust it."""


class Handler(http.server.BaseHTTPRequestHandler):
    server: Kubelet

    def do_GET(self) -> None:
        assert self.path == "/pods"
        self.server.asked += 1
        is_known = self.headers["Authorization"] == f"Bearer {self.server.token}"
        items = [
            {"metadata": {"namespace": "shop", "name": name, "uid": self.server.uid, "labels": labels}}
            for name, labels in self.server.pods.items()
        ]
        body = json.dumps({"kind": "PodList", "items": items}).encode() if is_known else b"Unauthorized"
        body = self.server.garbage or body
        self.send_response(200 if is_known else 401)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def kubelet(tmp_path: Path) -> Iterator[Kubelet]:
    server = Kubelet(tmp_path)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


Following = Callable[[KubeletSettings], Client]


@pytest.fixture
def following(tmp_path: Path) -> Iterator[Following]:
    started = []

    def start(kubelet: KubeletSettings) -> Client:
        files = FileGroup((str(tmp_path / "pods/*/*/*.log"),), "t", rules=container_rules("cri", "", None))
        started.append(Client(tmp_path, FakeGateway(), files=(files,), kubelet=kubelet, linger_s=0.0))
        return started[-1]

    yield start
    for client in started:
        client.close()


def write(root: Path, pod: str, message: bytes, uid: str = UID) -> None:
    folder = root / "pods" / f"shop_{pod}_{uid}" / "main"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "0.log").open("ab") as file:
        file.write(cri(1, "stdout", message, False))


def until_stored(client: Client, count: int) -> list[Any]:
    """The chunks."""
    deadline = time.monotonic() + BOUND_S
    while True:
        chunks = [chunk for stored in client.gateway.sources.values() for chunk in stored.chunks]
        if len(chunks) >= count:
            return chunks
        assert time.monotonic() < deadline
        client.step(0.1)
        time.sleep(0.005)


def test_the_first_chunk_of_a_pod_has_its_labels(
    tmp_path: Path, kubelet: Kubelet, following: Following, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of one that comes up later. The client's clock is fast, so it waits for as long as the kubelet takes."""
    monkeypatch.setattr("logferry.client.transport.kubelet.WAIT_S", math.inf)
    kubelet.pods["web"] = {"app.kubernetes.io/name": "shop", "Tier": "front"}
    client = following(kubelet.settings)
    write(tmp_path, "web", b"one")
    (chunk,) = until_stored(client, 1)
    assert chunk.data == b"one\n"
    assert chunk.attributes["label.app.kubernetes.io_name"] == "shop"
    assert (chunk.attributes["label.tier"], chunk.attributes["pod"]) == ("front", "web")
    kubelet.pods["db"] = {"app": "db"}
    write(tmp_path, "db", b"two")
    _, chunk = until_stored(client, 2)
    assert {name: value for name, value in chunk.attributes.items() if name.startswith("label.")} == {"label.app": "db"}
    asked = kubelet.asked
    write(tmp_path, "web", b"three")
    assert until_stored(client, 3)
    assert kubelet.asked == asked, "what is known is not asked for"


def test_a_pod_that_is_made_again_under_its_name_has_its_own_labels(
    tmp_path: Path, kubelet: Kubelet, following: Following, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of a StatefulSet are; the rest of the old one keeps the old ones."""
    monkeypatch.setattr("logferry.client.transport.kubelet.WAIT_S", math.inf)
    kubelet.pods["db-0"] = {"version": "1"}
    client = following(kubelet.settings)
    write(tmp_path, "db-0", b"one")
    until_stored(client, 1)
    kubelet.uid, kubelet.pods["db-0"] = UID.replace("8", "9"), {"version": "2"}
    write(tmp_path, "db-0", b"two", kubelet.uid)
    write(tmp_path, "db-0", b"last")
    chunks = until_stored(client, 3)
    labels = {chunk.data: chunk.attributes["label.version"] for chunk in chunks}
    assert labels == {b"one\n": "1", b"two\n": "2", b"last\n": "1"}


@pytest.mark.parametrize("trouble", ["token", "no token", "authority", "away", "garbage", "unknown pod"])
def test_a_kubelet_that_fails_holds_up_no_line(
    tmp_path: Path, kubelet: Kubelet, following: Following, trouble: str, caplog: pytest.LogCaptureFixture
) -> None:
    settings = kubelet.settings
    if trouble == "token":
        kubelet.token = "other"
    elif trouble == "no token":
        (tmp_path / "kubelet-token").unlink()
    elif trouble == "authority":
        settings = settings._replace(ca_file=None)
    elif trouble == "garbage":
        kubelet.garbage = b"[" * 100_000
    elif trouble == "away":
        settings = settings._replace(url="https://127.0.0.1:1")
    client = following(settings)
    write(tmp_path, "web", b"one")
    (chunk,) = until_stored(client, 1)
    assert chunk.data == b"one\n"
    assert not [name for name in chunk.attributes if name.startswith("label.")]
    deadline = time.monotonic() + BOUND_S
    while trouble != "unknown pod" and "kubelet-unusable" not in caplog.text:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert ("kubelet-unusable" in caplog.text) is (trouble != "unknown pod")
    assert "first" not in caplog.text, "the token is in no log"


def test_names_of_labels() -> None:
    labels = {"app.kubernetes.io/name": "x", "a b": "1", "a_b": "2", "k" * 80: "v", "big": "ü" * 4000}
    found = label_attributes(labels)
    assert found["label.app.kubernetes.io_name"] == "x"
    assert found["label.a_b"] == "1", "the first of two"
    assert found["label." + "k" * 58] == "v"
    assert len(found["label.big"].encode()) == 4096
    many = label_attributes({f"l{number:03d}": "" for number in range(100)})
    assert len(many) == 32
    own = {f"own{number}": "" for number in range(40)}
    assert len(with_labels(many, own)) == 56
    assert with_labels({"label.a": "new"}, {"label.a": "old", "b": "c"}) == {"label.a": "new", "b": "c"}


@pytest.mark.parametrize("document", [None, [], {}, {"items": [{}]}, {"items": [{"metadata": {"namespace": "a"}}]}])
def test_what_is_no_list_of_pods(document: object) -> None:
    with pytest.raises(ValueError, match="not a list of pods"):
        labels_of_pods(document)


def test_pods_without_labels() -> None:
    pods = {
        "items": [
            {"metadata": {"namespace": "a", "name": "b"}},
            {"metadata": {"namespace": "a", "name": "c", "labels": None}},
        ]
    }
    assert labels_of_pods(pods) == {("a", "b", ""): {}, ("a", "c", ""): {}}


def test_a_static_pod_has_the_folder_of_its_hash() -> None:
    facts = {"namespace": "a", "name": "b", "uid": "1", "annotations": {"kubernetes.io/config.hash": "2"}}
    assert {uid for _, _, uid in labels_of_pods({"items": [{"metadata": facts}]})} == {"", "1", "2"}


def test_a_token_goes_over_https_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(
            ["--url", "http://127.0.0.1:1", "--state-dir", str(tmp_path), "--topic", "t", "--kubelet-url",
             "http://10.0.0.7:10255", "--kubelet-token-file", "/x", "/x/*.log"]
        )  # fmt: skip
    assert "https" in capsys.readouterr().err
