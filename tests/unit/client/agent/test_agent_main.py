"""The client as a process: exit status, what it says, signals."""

import os
import signal
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import trustme
from logferry.ops.stack.processes import free_ports
from prometheus_client.parser import text_string_to_metric_families

from tests.support.fake_gateway import FakeGateway, Served


def command(root: Path, url: str, *options: str, topic: str = "t") -> list[str]:
    return [
        sys.executable, "-m", "logferry.client", "--url", url, "--topic", topic, "--host", "h", "--linger-ms", "10",
        "--state-dir", str(root / "state"), *options,
    ]  # fmt: skip


def run(root: Path, url: str, *options: str, topic: str = "t") -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(root, url, *options, topic=topic), capture_output=True, text=True, timeout=60)


@pytest.fixture
def served() -> Iterator[Any]:
    with Served(FakeGateway()) as served:
        yield served


@pytest.fixture
def logs(tmp_path: Path) -> Any:
    (tmp_path / "a.log").write_bytes(b"one\r\ntwo")
    (tmp_path / "b.log").write_bytes(b"")
    return str(tmp_path / "*.log")


@contextmanager
def running(root: Path, url: str, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(command(root, url, *options), stderr=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:
            process.terminate()


def test_figures_for_prometheus(served: Any, tmp_path: Path, logs: Any) -> None:
    (port,) = free_ports(1)

    def page(path: str = "metrics") -> dict[str, float]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}", timeout=5) as answer:
                text = answer.read().decode()
        except OSError:
            return {}
        families = text_string_to_metric_families(text)  # what Prometheus itself would make of it
        return {sample.name + "".join(sample.labels.values()): sample.value for f in families for sample in f.samples}

    with running(tmp_path, served.url, "--metrics-port", str(port), "--idle-s", "0", logs):
        until(lambda: page().get("logferry_push_sent_bytes_total") == 8)
        found = page()
        assert (found["logferry_push_filest"], found["logferry_push_lag_bytest"]) == (2, 0)
        assert found[f"logferry_push_data_centre127.0.0.1:{served.port}"] == 1
        assert found["logferry_push_process_cpu_seconds_total"] > 0
        assert page("other") == {}
        done = run(tmp_path / "second", served.url, "--metrics-port", str(port), logs)
    assert done.returncode == 2
    assert f"metrics-unusable host=127.0.0.1 port={port}" in done.stderr


def test_its_niceness_is_the_configured_one(served: Any, tmp_path: Path, logs: Any) -> None:
    before = os.getpriority(os.PRIO_PROCESS, 0)
    with running(tmp_path, served.url, "--nice", "7", "--idle-s", "0", logs) as process:
        until(lambda: contents(served) == [b"one\r\ntwo"])
        assert os.getpriority(os.PRIO_PROCESS, process.pid) == min(before + 7, 19)


def contents(served: Served) -> list[bytes]:
    return [stored.content() for stored in served.gateway.sources.values()]


def test_once_sends_what_is_there_and_then_only_what_is_new(served: Any, tmp_path: Path, logs: Any) -> None:
    for more in (b"", b" and more\n", b""):
        with (tmp_path / "a.log").open("ab") as file:
            file.write(more)
        done = run(tmp_path, served.url, "--once", logs)
        assert done.returncode == 0, done.stderr
    assert contents(served) == [b"one\r\ntwo and more\n"]
    assert "status=0 chunks=0 bytes=0" in done.stderr


@pytest.mark.parametrize(
    ("topic", "options", "status", "said"),
    [
        ("nosuch", ["*.log"], 1, "status=404 type=unknown-topic"),
        ("t", ["*.log", "gone.log"], 1, "file-missing path="),
        ("t", ["*.nothing"], 0, "nothing-matches"),
        ("t", ["*.log", "--chunk-bytes", "1"], 2, "--chunk-bytes"),
    ],
)
def test_once_ends_with_a_status(
    served: Any, tmp_path: Path, logs: Any, topic: str, options: Any, status: int, said: str
) -> None:
    patterns = [str(tmp_path / o) if "log" in o or "nothing" in o else o for o in options]
    done = run(tmp_path, served.url, "--once", *patterns, topic=topic)
    assert (done.returncode, said in done.stderr) == (status, True), done.stderr


def test_once_without_a_gateway(served: Any, tmp_path: Path, logs: Any) -> None:
    served.gateway.faults.extend(["503"] * 1000)
    for url in ("http://127.0.0.1:1", served.url):
        done = run(tmp_path, url, "--once", "--timeout", "0.3", logs)
        assert (done.returncode, "gateway-timeout" in done.stderr) == (3, True), done.stderr
    served.gateway.faults.clear()
    assert run(tmp_path, "http://127.0.0.1:1", "--url", served.url, "--once", logs).returncode == 0
    assert contents(served) == [b"one\r\ntwo"]


def test_every_line_it_says_is_one_event(served: Any, tmp_path: Path, logs: Any) -> None:
    done = run(tmp_path, served.url, "--once", "-v", logs)
    lines = done.stderr.splitlines()
    assert [line.split()[2] for line in lines] == [
        "state-new", "started", "source-new", "source-new", "session", "sent", "stopped",
    ]  # fmt: skip
    assert all(line.split()[1] in ("DEBUG", "INFO") for line in lines)


def test_a_token_is_sent(served: Any, tmp_path: Path, logs: Any) -> None:
    served.gateway.token = "secret"
    (tmp_path / "token").write_text("secret\n")
    assert run(tmp_path, served.url, "--once", logs).returncode == 1
    assert run(tmp_path, served.url, "--once", "--token-file", str(tmp_path / "token"), logs).returncode == 0
    assert contents(served) == [b"one\r\ntwo"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_with_its_checkpoint_written(served: Any, tmp_path: Path, logs: Any, number: Any) -> None:
    process = subprocess.Popen(command(tmp_path, served.url, logs), stderr=subprocess.PIPE, text=True)
    until(lambda: contents(served) == [b"one\r\n"])
    process.send_signal(number)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 0, said
    assert '"position": 5' in (tmp_path / "state" / "checkpoint.json").read_text()
    assert "Traceback" not in said


def test_a_second_client_on_the_same_state_folder_does_not_start(served: Any, tmp_path: Path, logs: Any) -> None:
    first = subprocess.Popen(command(tmp_path, served.url, logs), stderr=subprocess.DEVNULL)
    try:
        until(lambda: contents(served) == [b"one\r\n"])
        second = run(tmp_path, served.url, logs)
        assert (second.returncode, "another client" in second.stderr) == (2, True)
    finally:
        first.terminate()
        first.wait()


def test_it_follows_files_that_appear_and_grow(served: Any, tmp_path: Path, logs: Any) -> None:
    process = subprocess.Popen(command(tmp_path, served.url, logs), stderr=subprocess.DEVNULL)
    try:
        until(lambda: contents(served) == [b"one\r\n"])
        (tmp_path / "new.log").write_bytes(b"new\n")
        until(lambda: b"new\n" in contents(served))
        with (tmp_path / "new.log").open("ab") as file:
            file.write(b"newer\n")
        until(lambda: b"new\n" not in contents(served))
        assert b"new\nnewer\n" in contents(served)
    finally:
        process.terminate()
        process.wait()


def until(condition: Any, seconds: float = 30.0) -> None:
    """Bounded polling: another process is waited for."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def test_it_sends_over_tls_that_a_given_authority_signed(served: Any, tmp_path: Path, logs: Any) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    with Served(FakeGateway(), context=context) as secure:
        assert run(tmp_path, secure.url, "--once", "--timeout", "0.3", logs).returncode == 3
        done = run(tmp_path, secure.url, "--once", "--ca-file", str(tmp_path / "ca.pem"), logs)
        assert done.returncode == 0, done.stderr
        assert contents(secure) == [b"one\r\ntwo"]
