"""A token that crosses the network in plain text is named, once a gateway, whoever sends it; nothing is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

if sys.version_info < (3, 11):
    pytest.skip("the loader needs Python 3.11", allow_module_level=True)

from logferry.client.transport import cluster
from logferry.client.transport.cluster import GatewayCluster
from logferry.gateway.contract.names import is_plain
from logferry.loaders.batches.execute import GatewayClock
from logferry.loaders.config import GatewayAccess
from logferry.loaders.errors import LoadError
from logferry.loaders.runs.segment_check import ask_gateways

AWAY = "http://gateway.invalid:8080"
EVENT = "token-unencrypted url=http://gateway.invalid:8080"


@pytest.fixture(autouse=True)
def nothing_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "_named", set())


@pytest.mark.parametrize(
    ("url", "plain"),
    [
        ("http://gateway:8080", True),
        ("http://10.0.0.1", True),
        ("http://[2001:db8::1]:8080/v1/topics", True),
        ("HTTP://127.0.0.1.example.com", True),
        ("http://localhost.example.com", True),
        ("https://gateway:8080", False),
        ("http://127.0.0.1:8080", False),
        ("http://127.8.0.1", False),
        ("http://LOCALHOST:8080", False),
        ("http://[::1]:8080", False),
        ("ftp://gateway", False),
    ],
)
def test_what_crosses_the_network_in_plain_text(url: str, plain: bool) -> None:
    assert is_plain(url) == plain


def test_a_library_names_each_gateway_once(caplog: pytest.LogCaptureFixture) -> None:
    for url in (AWAY, AWAY + "/", "http://other.invalid", "https://safe.invalid", "http://127.0.0.1:1"):
        for _ in range(2):
            GatewayCluster([url], None).authorization(url + "/v1/topics")
            assert GatewayCluster([url], "secret").authorization(url + "/v1/topics")
    assert [record.getMessage().split(" why=")[0] for record in caplog.records] == [
        EVENT,
        "token-unencrypted url=http://other.invalid:80",
    ]
    assert {record.levelname for record in caplog.records} == {"WARNING"}
    assert "secret" not in caplog.text


def test_a_token_for_one_gateway_is_not_named_for_others(caplog: pytest.LogCaptureFixture) -> None:
    assert not GatewayCluster(["https://safe.invalid"], "secret").authorization(AWAY)
    assert not caplog.records


def test_a_loader_names_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "token").write_text("secret")
    access = {"dc1": GatewayAccess(urls=["http://127.0.0.1:1", AWAY], token_file=tmp_path / "token")}
    for _ in range(2):
        with pytest.raises(LoadError):
            ask_gateways(access, ["dc1.a"], GatewayClock())
    assert caplog.text.count(EVENT) == 1


PROGRAM = """
from logferry.client import Unknown, Writer
writer = Writer({url!r}, "t", "s", token="secret")
try:
    writer.open(0.5)
except Unknown:
    writer.close()
"""
ASYNC_PROGRAM = """
import asyncio
from logferry.client import AsyncReader, Unknown
async def main():
    async with AsyncReader({url!r}, "t", token="secret") as reader:
        pass
async def limited():
    try:
        await asyncio.wait_for(main(), 1.0)
    except (asyncio.TimeoutError, Unknown):
        pass
asyncio.run(limited())
"""


@pytest.mark.parametrize("url", [AWAY, "http://127.0.0.1:1"])
@pytest.mark.parametrize(
    "command",
    [
        pytest.param(["-c", PROGRAM], id="writer"),
        pytest.param(["-c", ASYNC_PROGRAM], id="async reader"),
        pytest.param(["-m", "logferry.ops.cli.main", "topics", "--url", "{url}"], id="topics"),
        pytest.param(["-m", "logferry.ops.cli.main", "status", "--url", "{url}"], id="status"),
        pytest.param(
            ["-m", "logferry.client", "--url", "{url}", "--topic", "t", "--once", "--timeout", "0.3"], id="push"
        ),
    ],
)
def test_processes_name_it_on_standard_error(command: list[str], url: str, tmp_path: Path) -> None:
    (tmp_path / "a.log").write_bytes(b"line\n")
    given = [word.replace("{url!r}", repr(url)).replace("{url}", url) for word in command]
    if "--once" in given:
        (tmp_path / "token").write_text("secret")
        given += ["--token-file", str(tmp_path / "token"), "--state-dir", str(tmp_path / "state"), f"{tmp_path}/*.log"]
    environment = {**os.environ, "LOGFERRY_TOKEN": "secret"}
    done = subprocess.run([sys.executable, *given], capture_output=True, text=True, timeout=60, env=environment)
    assert done.stderr.count(EVENT) == (url == AWAY), done.stderr
    assert "secret" not in done.stderr + done.stdout
