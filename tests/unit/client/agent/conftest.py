"""Sources, files and checkpoint together, driven step by step without threads, clock or sockets."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from logferry.client.agent.agent import Agent
from logferry.client.agent.config import Config, DataCentre, FileGroup
from logferry.client.agent.workers import Pusher
from logferry.client.files.checkpoint import Checkpoint
from logferry.client.transport.cluster import GatewayCluster

from tests.support.fake_gateway import FakeGateway


class Client:
    """An agent over a folder and a fake gateway; `restart` is what a SIGKILL and a new start do."""

    def __init__(self, root: Path, gateway: FakeGateway, **options: Any) -> None:
        self.root = root
        self.gateway = gateway
        self.now = 0.0
        names = ("exclude", "record_start", "cut_lines", "close_inactive_s")
        of_files = {name: options.pop(name) for name in names if name in options}
        files = FileGroup((str(root / "*.log*"),), "t", attributes={"env": "test"}, **of_files)
        self.config = Config(
            options.pop("data_centres", (DataCentre("g:1", ("http://g:1",)),)), state_dir=str(root / "state"), host="h",
            files=options.pop("files", (files,)), **options,
        )  # fmt: skip
        self.begin()

    def begin(self) -> None:
        self.checkpoint = Checkpoint.open(Path(self.config.state_dir))
        self.agent = Agent(self.config, self.checkpoint, self.now)
        clusters = [GatewayCluster(centre.urls, centre.token) for centre in self.config.data_centres]
        self.pusher = Pusher(clusters, self.gateway)

    def close(self) -> None:
        self.agent.close()
        self.checkpoint.close()

    def restart(self) -> None:
        self.close()
        self.begin()

    def step(self, later_s: float = 5.0) -> int:
        """One round of the main loop; how many requests it sent."""
        self.now += later_s
        while (dc := self.agent.centres.probe(self.now)) is not None:
            self.agent.centres.record(dc, self.pusher.probe(dc), self.now)
        self.agent.tick(self.now)
        jobs = self.agent.jobs(self.now, self.config.threads)
        for source, job in jobs:
            self.agent.finish(source, job, self.pusher.perform(job), self.now)
        return len(jobs)

    def settle(self) -> None:
        for _ in range(100):
            if not self.step() and not self.step():  # what is found to be another file is sent in the next round
                return
        raise AssertionError("it does not come to rest")

    def write(self, name: str, content: bytes, mode: str = "ab") -> None:
        with (self.root / name).open(mode) as file:
            file.write(content)

    def stored(self) -> list[bytes]:
        return [stored.content() for stored in self.gateway.sources.values() if stored.chunks]


@pytest.fixture(autouse=True)
def searches_take_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests have a clock of their own. On a slow machine, too, a search is due as soon as it may be."""
    monkeypatch.setattr("logferry.client.agent.search.SHARE", math.inf)
    monkeypatch.setattr("logferry.client.agent.search.HINTED_SHARE", math.inf)


@pytest.fixture
def gateway() -> Any:
    return FakeGateway()


@pytest.fixture
def client(tmp_path: Path, gateway: FakeGateway, request: pytest.FixtureRequest) -> Iterator[Any]:
    client = Client(tmp_path, gateway, **getattr(request, "param", {}))
    yield client
    client.close()
