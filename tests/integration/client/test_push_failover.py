"""The push-client and two data centres, real processes: all gateways of the first one die under load and come back."""

from __future__ import annotations

import io
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from urllib.parse import quote

import msgpack
import pytest
from logferry.ops.stack.stack import Stack

PARTITIONS = 2
BOUND_S = 90
REQUEST = 256 << 10  # bytes of one source in a request at most
LASTING = "abc"  # files that are never rotated: they are written before, while and after their data centre is away
ROTATED = "def"
Rows = dict[tuple[str, int], bytes]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("stack")
    with Stack(folder, dcs=("dc1", "dc2"), workers=2, lanes=2, restart=False) as running:
        yield running


class Writer(threading.Thread):
    """Writes lines to files at about 2 MB/s together and rotates half of them, until it is stopped."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.ended = threading.Event()

    def run(self) -> None:
        chance = random.Random(11)
        for number in range(1_000_000):
            name = chance.choice(LASTING + ROTATED)
            path = self.folder / f"{name}.log"
            if name in ROTATED and path.exists() and chance.random() < 0.02:
                path.rename(path.with_name(f"{path.name}.{number}"))
            with path.open("ab") as file:
                file.writelines(b"%d %d %s\n" % (number, n, chance.randbytes(40).hex().encode()) for n in range(200))
            if self.ended.wait(0.01):
                return

    def finish(self) -> list[bytes]:
        self.ended.set()
        self.join()
        return sorted(path.read_bytes() for path in self.folder.iterdir())


def create(url: str, topic: str) -> None:
    body = json.dumps({"partitions": PARTITIONS}).encode()
    request = urllib.request.Request(f"{url}/v1/topics/{quote(topic)}", data=body, method="PUT")
    with urllib.request.urlopen(request, timeout=BOUND_S):
        pass


def stored(stack: Stack, dc: str, topic: str) -> tuple[Rows, Counter[str], set[str]]:
    """By source and seqno, the bytes; each once, in order. How many of each file, and which resumed behind a gap."""
    rows: Rows = {}
    files: Counter[str] = Counter()
    resumed = set()
    last: dict[str, int] = {}
    for partition in range(PARTITIONS):
        offset: str | None = "earliest"
        while offset is not None:
            url = f"{stack.urls(dc)[0]}/v1/topics/{dc}.{quote(topic)}/partitions/{partition}/chunks?offset={offset}"
            with urllib.request.urlopen(url, timeout=BOUND_S) as answer:
                page = list(msgpack.Unpacker(io.BytesIO(answer.read())))
                offset = answer.headers["X-Next-Offset"] if page else None
            for _, _, _, _, source, seqno, prev, _, _, attributes, data in page:
                files[attributes["path"]] += len(data)
                before = last.get(source)
                assert before is None or seqno > before, (source, seqno, before)
                if "resumed_at" in attributes:
                    resumed.add(attributes["path"])
                    assert prev is None
                    assert before is not None
                    assert int(attributes["resumed_at"]) > before
                else:
                    assert prev == (before if before is not None else seqno - len(data)), (source, seqno, prev, before)
                last[source] = seqno
                rows[source, seqno] = data
    return rows, files, resumed


def sizes(stack: Stack, dc: str, topic: str, files: Iterable[str]) -> list[int]:
    """How many bytes of each of these files are stored."""
    found = stored(stack, dc, topic)[1]
    return [found[file] for file in files]


def until(condition: Callable[[], bool], what: str) -> None:
    """Bounded: other processes are waited for."""
    deadline = time.monotonic() + BOUND_S
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {BOUND_S} s"
        time.sleep(0.05)


def test_all_gateways_of_a_data_centre_die_under_load_and_come_back(
    stack: Stack, topic_name: str, tmp_path: Path
) -> None:
    for dc in ("dc1", "dc2"):
        create(stack.urls(dc)[0], topic_name)
    logs = tmp_path / "logs"
    logs.mkdir()
    command = [sys.executable, "-m", "logferry.client", "--topic", topic_name, "--host", "h"]
    command += [part for url in stack.urls("dc1") for part in ("--url", url)]
    command += [part for url in stack.urls("dc2") for part in ("--fallback-url", url)]
    command += ["--failover-s", "2", "--failback-s", "2", "--state-dir", str(tmp_path / "state")]
    command += ["--linger-ms", "20", "--chunk-bytes", "16384", str(logs / "*")]
    gateways = [name for name in stack.pids if name.startswith("dc1/gateway")]
    lasting = {str(logs / f"{name}.log") for name in LASTING}
    first_url = stack.urls("dc1")[0].partition("//")[2]

    def start(*more: str) -> subprocess.Popen[bytes]:
        with (tmp_path / "client.log").open("ab") as log:
            return subprocess.Popen([*command, *more], stderr=log)

    def is_at_first() -> bool:
        content = json.loads((tmp_path / "state" / "status.json").read_text())
        return bool(content["pid"] == client.pid and content["data_centre"]["here"] == first_url)

    writer = Writer(logs)
    writer.start()
    client = start()
    try:
        until(lambda: min(sizes(stack, "dc1", topic_name, lasting)) > 4 * REQUEST, "much of each file in dc1")
        for name in gateways:
            stack.kill(name)
        # More than a request whose answer was lost in dc1.
        until(lambda: min(sizes(stack, "dc2", topic_name, lasting)) > 2 * REQUEST, "some of each file in dc2")
        os.kill(client.pid, signal.SIGKILL)  # while it is away from home
        client.wait()
        client = start()
        for name in gateways:
            stack.child(name).restart()
        stack.wait_ready()
        until(lambda: (tmp_path / "state" / "status.json").exists() and is_at_first(), "its return")
        until(lambda: lasting <= stored(stack, "dc1", topic_name)[2], "each file that lasted is back in dc1")
    finally:
        contents = writer.finish()
        client.kill()
        client.wait()
    assert start("--once").wait(BOUND_S) == 0, (tmp_path / "client.log").read_text()[-2000:]

    together: Rows = {}
    copied: Counter[str] = Counter()
    for dc in ("dc1", "dc2"):
        for place, data in stored(stack, dc, topic_name)[0].items():
            copied[place[0]] += len(data) * (place in together)
            assert together.setdefault(place, data) == data, f"{place} has other bytes in {dc}"
    sources: dict[str, bytes] = {}
    for (source, seqno), data in sorted(together.items()):
        sources[source] = sources.get(source, b"") + data
        assert len(sources[source]) == seqno, f"{source}: something is missing, or twice, before {seqno}"
    assert sorted(sources.values()) == contents
    # Those whose answer was lost, on either way: one request of each source at most, not all over again.
    assert max(copied.values()) <= 3 * REQUEST
