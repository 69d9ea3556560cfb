"""Tokens and TLS of the mirror, from outside: real workers on a real Kafka, the commands, and a reload."""

from __future__ import annotations

import asyncio
import json
import signal
import ssl
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import trustme
from logferry.gateway.token_command import new_token
from logferry.ops.cli.main import main as command
from logferry.ops.stack.kafka_cluster import KafkaCluster
from logferry.ops.stack.processes import Child, Setting, configuration, free_ports, stop_all

SECRET, SHA256 = new_token()
NEW_SECRET, NEW_SHA256 = new_token()
_PATIENCE_S = 60


def entry(name: str, sha256: str) -> str:
    return f'\n[[tokens]]\nname = "{name}"\nsha256 = "{sha256}"\nadmin = ["*"]\n'


class Workers:
    """Two of a mirror whose remote does not answer: status and commands are served all the same."""

    def __init__(self, kafka: KafkaCluster, folder: Path) -> None:
        self.folder, self.file, self.ca_file = folder, folder / "mirror.toml", folder / "ca.pem"
        port = free_ports(2)[0]
        self.urls = [f"https://127.0.0.1:{port + number}" for number in range(2)]
        self._settings: dict[str, Setting] = {
            "dc": "dc2",
            "prefix": folder.name[:40],
            "listen": f"127.0.0.1:{port}",
            "workers": 2,
            "accept_weak_kafka": ["replication", "min-isr"],
            "tls": {"certificate": str(folder / "cert.pem"), "key": str(folder / "key.pem")},
            "remote": [{"dc": "dc1", "kafka": {"bootstrap_servers": "127.0.0.1:9"}}],
            "kafka": {"bootstrap_servers": kafka.bootstrap},
        }
        self.renew(trustme.CA())
        self.write(entry("operator", SHA256))
        self.token_file = folder / "operator.token"
        self.token_file.write_text(SECRET)
        module = ["-m", "logferry.mirror", "--config", str(self.file), "--worker"]
        self.children = [
            Child(f"mirror-{number}", [sys.executable, *module, str(number)], folder / f"{number}.log")
            for number in range(2)
        ]

    def renew(self, authority: trustme.CA) -> None:
        """A certificate of this authority, which is the one that callers know from now on."""
        made = authority.issue_cert("127.0.0.1")
        made.private_key_pem.write_to_path(self.folder / "key.pem")
        (self.folder / "cert.pem").write_bytes(b"".join(blob.bytes() for blob in made.cert_chain_pems))
        authority.cert_pem.write_to_path(self.ca_file)

    def write(self, tokens: str) -> None:
        self.file.write_text(configuration(self._settings) + tokens)

    def ask(self, path: str, token: str | None, worker: int = 0) -> int:
        """The status of the answer; 0: there is none."""
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        context = ssl.create_default_context(cafile=str(self.ca_file))
        try:
            request = urllib.request.Request(self.urls[worker] + path, headers=headers)
            with urllib.request.urlopen(request, context=context, timeout=10) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0

    def becomes(self, wanted: int, path: str, token: str | None, worker: int) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while (found := self.ask(path, token, worker)) != wanted:
            assert time.monotonic() < deadline, (found, self.children[worker].log_tail())
            assert self.children[worker].running, self.children[worker].log_tail()
            time.sleep(0.05)

    def until(self, true: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while not true():
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.05)

    def refused(self, reloads: int) -> bool:
        return self.said().count("configuration_not_reloaded") == reloads

    def said(self) -> str:
        return "".join(child.log.read_text(encoding="utf-8") for child in self.children)


@pytest.fixture
def secured(kafka: KafkaCluster, tmp_path: Path) -> Iterator[Workers]:
    workers = Workers(kafka, tmp_path)
    for child in workers.children:
        child.start()
    try:
        for number in range(2):
            workers.becomes(200, "/readyz", None, number)
        yield workers
    finally:
        assert not stop_all(workers.children, 60)
    for secret in (SECRET, SHA256, NEW_SECRET, NEW_SHA256):
        assert secret not in workers.said()


async def test_the_commands_need_the_token_and_the_authority(
    secured: Workers, capsys: pytest.CaptureFixture[str]
) -> None:
    async def run(*arguments: str) -> tuple[int, str]:
        exit_status = await asyncio.to_thread(command, list(arguments))
        said = capsys.readouterr()
        return exit_status, said.out + said.err

    access = ("--ca-file", str(secured.ca_file), "--token-file", str(secured.token_file))
    for url in secured.urls:
        for path in ("/v1/status", "/metrics"):
            assert [secured.ask(path, token) for token in (None, "lf_unknown", SECRET)] == [401, 401, 200]
        exit_status, said = await run("status", "--mirror", url, "--json", *access)
        found = json.loads(said)["workers"]
        # Both were asked, each with the token.
        assert sorted(found) == secured.urls
        assert exit_status == 1  # the remote does not answer
        assert (await run("status", "--mirror", url, *access[:2]))[0] == 2
        assert (await run("status", "--mirror", url, *access[2:]))[0] == 3
        # One of the two workers has the lane of each partition; the other one names it.
        for partition in range(4):
            resume = ("mirror", "resume", "dc1.nginx", str(partition), "--from", "earliest", "--url", url)
            assert (await run(*resume, *access))[0] == 1
            exit_status, said = await run(*resume, *access[:2])
            assert (exit_status, "--token-file" in said) == (2, True)


def test_tokens_and_certificate_are_reloaded(secured: Workers) -> None:
    secured.write(entry("operator", NEW_SHA256))
    secured.renew(trustme.CA())
    pids = [child.pid for child in secured.children]
    for number, child in enumerate(secured.children):
        child.send(signal.SIGHUP)
        secured.becomes(200, "/v1/status", NEW_SECRET, number)
        assert secured.ask("/v1/status", SECRET, number) == 401
    # A wrong file, or one without tokens, changes nothing.
    for refusals, tokens in enumerate(("", "\nlane = 3\n"), 1):
        secured.write(tokens)
        for child in secured.children:
            child.send(signal.SIGHUP)
        # Two signals that are under way at once are one: the next file waits until both workers have read this one.
        secured.until(partial(secured.refused, 2 * refusals))
    for number in range(2):
        assert (secured.ask("/v1/status", NEW_SECRET, number), secured.ask("/v1/status", None, number)) == (200, 401)
    assert [child.pid for child in secured.children] == pids
