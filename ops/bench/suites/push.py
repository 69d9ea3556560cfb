"""Benchmarks of the push-client against rsyslog (``imfile`` to ``omkafka``) and syslog-ng (``wildcard-file`` to
``kafka-c``): same files, same Kafka, in turn; and its cost on idle files, its speed among many, and over a long way.

Without gzip. Our time ends when the gateway has acknowledged the last chunk and the client has exited, theirs when
Kafka has all lines. CPU and memory are those of the client or of their daemon alone, because the gateway runs on
another host.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, urlsplit
from urllib.request import urlopen

import uvloop
from aiokafka import AIOKafkaConsumer
from logferry.gateway.kafka.client import LATEST
from logferry.ops.bench.harness import peers
from logferry.ops.bench.harness.figures import Figure, Rounds, Side, alternate, compared, median_ratio, medians
from logferry.ops.bench.harness.gateways import PARTITIONS, make_topic, running_stack
from logferry.ops.bench.harness.kafka import access_line, connected
from logferry.ops.bench.harness.usage import Program, exact_cpu_s, memory_mb, rss_mb
from logferry.ops.stack.stack import Stack

_ROUNDS: Final = 5
_FILES: Final = 100
_LINES: Final = 15_000  # of a file; about 300 MB in all
_KILLED_LINES: Final = 3_000
_QUIET_S: Final = 3.0
# The bare interpreter prints its own /proc/PID/status.
_BARE: Final = "import http.client, ssl; print(open('/proc/self/status').read())"

_MANY: Final = (100, 10_000)
_HOT_LINE: Final = b"x" * 199 + b"\n"
_HOT_BYTES: Final = 200_000_000
_HOT_ROUNDS: Final = 3

_FAR_HOST: Final = "127.0.0.2"
_RTTS_MS: Final = (0, 26, 80)
_WAN_LINES: Final = 3_000_000  # about 600 MB
_WAN_ROUNDS: Final = 3

_IDLE_FILES: Final = 1000
_IDLE_FOLDERS: Final = 20
_IDLE_ROUNDS: Final = 3
_IDLE_S: Final = 15.0
_SETTLED_S: Final = 60.0  # after this silence the client looks at a file once a second

_Measured = tuple[Rounds, tuple[Side, Side]]


def push_drain_vs_rsyslog() -> Figure:
    """MB/s of a backlog of 100 files; lines doubled and lost after a SIGKILL in the middle of another one."""
    rounds, killed = _measured()
    ours, theirs = (medians(side) | after for side, after in zip(rounds, killed, strict=True))
    return Figure("MB/s ours / theirs", ours, theirs, _ROUNDS, median_ratio(rounds, "mb_s"))


def push_cpu_vs_rsyslog() -> Figure:
    """CPU seconds per GB of lines, without gzip."""
    return compared("CPU ours / theirs", "cpu_s_per_gb", _measured()[0])


def push_drain_vs_syslog_ng() -> Figure:
    """As `push_drain_vs_rsyslog`."""
    rounds, killed = _measured(peers.start_syslog_ng)
    ours, theirs = (medians(side) | after for side, after in zip(rounds, killed, strict=True))
    return Figure("MB/s ours / theirs", ours, theirs, _ROUNDS, median_ratio(rounds, "mb_s"))


def push_cpu_vs_syslog_ng() -> Figure:
    """CPU seconds per GB of lines, without gzip."""
    return compared("CPU ours / theirs", "cpu_s_per_gb", _measured(peers.start_syslog_ng)[0])


def push_rss_mb() -> Figure:
    """Peak memory while a backlog of 100 files is drained; the limit is the bare interpreter plus 8 MB."""
    ours, theirs = map(medians, _measured()[0])
    done = subprocess.run([sys.executable, "-c", _BARE], capture_output=True, text=True, check=True)
    bare = memory_mb(done.stdout, "VmHWM:")
    allowed = {"allowed_mb": bare + 8, "bare_mb": bare, "rsyslog_mb": theirs["rss_mb"]}
    return Figure("MB while draining", {"rss_mb": ours["rss_mb"]}, allowed, _ROUNDS, value=ours["rss_mb"])


def push_idle_cpu_percent() -> Figure:
    """CPU share of one processor with 1,000 files in 20 folders, all silent for a minute."""
    with running_stack(1) as stack:
        client = _with_quiet_files(stack, "idle", _IDLE_FILES)
        try:
            time.sleep(_SETTLED_S)
            percents = []
            for _ in range(_IDLE_ROUNDS):
                began, before_s = time.perf_counter(), exact_cpu_s(client.pid)
                time.sleep(_IDLE_S)
                used_s = exact_cpu_s(client.pid) - before_s
                percents.append(100 * used_s / (time.perf_counter() - began))
            ours = {"cpu_percent": round(statistics.median(percents), 2), "rss_mb": rss_mb([client.pid])}
        finally:
            client.kill()
    return Figure("% of a processor", ours, {}, _IDLE_ROUNDS, value=ours["cpu_percent"])


def push_wan_mb_s() -> Figure:
    """MB/s of one file to a gateway that is far away, at round trips of 26 and 80 ms: a relay delays every byte. Beside
    it those through the same relay without a delay, which are what this machine can do.

    Without gzip, and without a limit on the bandwidth: the requests under way are what limits it.
    """
    with running_stack(1, gateway_settings={"advertised_host": _FAR_HOST}) as stack:
        folder = stack.data / "far"
        _write(folder, _WAN_LINES, 1)
        size = sum(path.stat().st_size for path in folder.iterdir())
        port = urlsplit(stack.urls()[0]).port
        found: dict[int, Side] = {}
        for rtt_ms in _RTTS_MS:
            relay = [_FAR_HOST, str(port), "127.0.0.1", str(rtt_ms / 2000)]
            command = [sys.executable, "-m", "logferry.ops.bench.harness.far_relay", *relay]
            with subprocess.Popen(command, stdout=subprocess.PIPE) as far:
                try:
                    assert far.stdout is not None
                    far.stdout.readline()
                    sides = [_far_side(stack, f"far{rtt_ms}-{number}", folder, size) for number in range(_WAN_ROUNDS)]
                finally:
                    far.kill()
            found[rtt_ms] = medians(sides)
    near, *others = _RTTS_MS
    ours = {f"{name}_at_{rtt_ms}_ms": value for rtt_ms in others for name, value in found[rtt_ms].items()}
    return Figure("MB/s at 26 ms", ours, found[near], _WAN_ROUNDS, value=ours["mb_s_at_26_ms"])


def _far_side(stack: Stack, topic: str, folder: Path, size: int) -> Side:
    make_topic(stack, topic)
    url = stack.urls()[0].replace("127.0.0.1", _FAR_HOST)
    return _side(_client(stack, folder.parent / f"state-{topic}", folder, topic, "--once", urls=[url]).until(), size)


def push_many_files() -> Figure:
    """MB/s of a hot file among 10,000 quiet ones, by its MB/s among 100; and memory, and the time until a line of a
    quiet file is recorded.
    """
    with running_stack(1) as stack:
        sides = {files: _among(stack, files) for files in _MANY}
    few, many = sides[_MANY[0]], sides[_MANY[-1]]
    return Figure("MB/s among 10,000 / 100", many, few, _HOT_ROUNDS, value=round(many["mb_s"] / few["mb_s"], 2))


def _among(stack: Stack, files: int) -> Side:
    topic = f"many{files}"
    client = _with_quiet_files(stack, topic, files)
    try:
        speeds = [_hot_mb_s(stack, topic, number) for number in range(_HOT_ROUNDS)]
        waits_ms = [_wait_ms(stack, topic, stack.data / topic / "0" / f"{n * _IDLE_FOLDERS}.log") for n in range(5)]
        return {
            "mb_s": round(statistics.median(speeds), 1),
            "rss_mb": rss_mb([client.pid]),
            "line_ms": round(statistics.median(waits_ms), 1),
        }
    finally:
        client.kill()


def _with_quiet_files(stack: Stack, topic: str, files: int) -> Program:
    """A client that has sent so many files in folders, one line each."""
    folder, state = stack.data / topic, stack.data / f"state-{topic}"
    for number in range(files):
        path = folder / str(number % _IDLE_FOLDERS) / f"{number}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{number}\n")
    make_topic(stack, topic)
    client = _client(stack, state, folder / "**", topic, "--host", "h")
    return client.until(lambda: _is_sent(state / "status.json", files))


def _hot_mb_s(stack: Stack, topic: str, number: int) -> float:
    """A backlog that appears as a new file, until the gateway has recorded it."""
    path = stack.data / topic / "0" / f"hot{number}.log"
    with path.open("wb") as file:
        began = time.perf_counter()
        file.write(_HOT_LINE)
        file.flush()
        source = _source_of(stack, topic, path)
        file.write(_HOT_LINE * (_HOT_BYTES // len(_HOT_LINE) - 1))
    while _recorded(stack, topic, source) < _HOT_BYTES:
        time.sleep(0.01)
    return _HOT_BYTES / 1e6 / (time.perf_counter() - began)


def _wait_ms(stack: Stack, topic: str, path: Path) -> float:
    """From a line in a quiet file to the gateway's record of it."""
    source = _source_of(stack, topic, path)
    before = _recorded(stack, topic, source)
    time.sleep(_QUIET_S)
    with path.open("ab") as file:
        began = time.perf_counter()
        file.write(b"more\n")
        file.flush()
        while _recorded(stack, topic, source) == before:
            time.sleep(0.001)
        return 1e3 * (time.perf_counter() - began)


def _source_of(stack: Stack, topic: str, path: Path) -> str:
    while True:
        found = _asked(stack, f"{topic}/sources?prefix={quote(f'h:{path}#', safe='')}")["sources"]
        if found:
            return str(found[0]["source_id"])
        time.sleep(0.01)


def _recorded(stack: Stack, topic: str, source: str) -> int:
    return int(_asked(stack, f"{topic}/sources/{quote(source, safe='')}")["recorded_seqno"] or 0)


def _asked(stack: Stack, path: str) -> dict[str, Any]:
    with urlopen(f"{stack.urls()[0]}/v1/topics/{path}") as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def _is_sent(status: Path, files: int) -> bool:
    totals = json.loads(status.read_text())["totals"] if status.exists() else {}
    return bool(totals) and totals["files"] == files and not totals["lag_bytes"]


@cache
def _measured(start: Callable[[Path, Path, str, str], Program] = peers.start_rsyslog) -> _Measured:
    """Rounds of ours and theirs, and the effect of the kill on each: one run for all figures of a peer."""
    (peers.find_rsyslogd if start is peers.start_rsyslog else peers.find_syslog_ng)()
    with running_stack(2) as stack:
        folder, bootstrap = stack.data / "host", stack.cluster().bootstrap
        lines = _write(folder / "logs", _LINES)
        size = sum(path.stat().st_size for path in (folder / "logs").iterdir())

        def ours(number: int) -> Side:
            make_topic(stack, f"ours{number}")
            client = _client(stack, folder / f"state{number}", folder / "logs", f"ours{number}", "--once")
            return _side(client.until(), size)

        def theirs(number: int) -> Side:
            topic = make_topic(stack, f"theirs{number}")
            with _ends(bootstrap, topic) as written:
                daemon = start(folder / f"work{number}", folder / "logs", topic, bootstrap)
                return _side(daemon.until(lambda: written() >= lines), size)

        rounds = alternate(_ROUNDS, ours, theirs)
        few = folder / "few"
        few_lines = _write(few, _KILLED_LINES)
        topics = make_topic(stack, "ours-killed"), make_topic(stack, "theirs-killed")
        client = partial(_client, stack, folder / "state-killed", few, "ours-killed", "--once")
        daemon = partial(start, folder / "work-killed", few, topics[1], bootstrap)
        return rounds, (
            _killed(bootstrap, topics[0], client, 30, few_lines),  # chunks of 256 KiB
            _killed(bootstrap, topics[1], daemon, few_lines // 3, few_lines, ends=False),
        )


def _side(run: Program, size_bytes: int) -> Side:
    cpu_s = run.kill()
    return {"mb_s": size_bytes / run.took_s / 1e6, "cpu_s_per_gb": cpu_s / (size_bytes / 1e9), "rss_mb": run.peak_mb}


# ---- with a kill ------------------------------------------------------------------------------------------


def _killed(
    bootstrap: str, topic: str, start: Callable[[], Program], enough: int, lines: int, *, ends: bool = True
) -> Side:
    """Kills a program as soon as ``enough`` records are in the topic, and starts it again. ``ends``: by itself."""
    with _ends(bootstrap, topic) as written:
        start().until(lambda: written() > enough).kill()
        again, before = start(), -1
        if ends:
            again.until()
        while before != written():  # the number of doubled lines is unknown: wait until no line arrives for a while
            before = written()
            time.sleep(_QUIET_S)
        again.kill()
    return uvloop.run(_account(bootstrap, topic, lines))


async def _account(bootstrap: str, topic: str, lines: int) -> Side:
    """Reads all lines; each begins with its number."""
    seen = Counter[int]()
    options = {"isolation_level": "read_committed", "auto_offset_reset": "earliest"}
    async with AIOKafkaConsumer(topic, bootstrap_servers=bootstrap, **options) as consumer:
        while found := await consumer.getmany(timeout_ms=5000):
            for record in chain.from_iterable(found.values()):
                seen.update(int(line.split(b" ", 1)[0]) for line in (record.value or b"").splitlines())
    return {"doubled_after_kill": float(seen.total() - len(seen)), "lost_after_kill": float(lines - len(seen))}


# ---- programs and files --------------------------------------------------------------------------------------


def _client(
    stack: Stack, state: Path, logs: Path, topic: str, *options: str, urls: Sequence[str] | None = None
) -> Program:
    given = [part for url in urls or stack.urls() for part in ("--url", url)]
    command = [
        sys.executable,
        "-m",
        "logferry.client",
        *given,
        "--topic",
        topic,
        "--state-dir",
        str(state),
        "--no-gzip",
    ]
    return Program([*command, *options, str(logs / "*.log")], stderr=subprocess.DEVNULL)


@contextmanager
def _ends(bootstrap: str, topic: str) -> Iterator[Callable[[], int]]:
    """A function that returns the number of records, markers included, in the topic now."""
    places = [(topic, number) for number in range(PARTITIONS)]
    clients = AsyncExitStack()
    with asyncio.Runner() as runner:
        kafka = runner.run(clients.enter_async_context(connected(bootstrap)))
        try:
            yield lambda: sum(runner.run(kafka.offsets(places, LATEST)).values())
        finally:
            runner.run(clients.aclose())


def _write(folder: Path, lines: int, files: int = _FILES) -> int:
    """Files of numbered lines, each number once. Returns the number of lines."""
    folder.mkdir(parents=True)
    rng = random.Random(7)
    some = [access_line(rng, second) for second in range(2000)]
    for number in range(files):
        with (folder / f"{number:03d}.log").open("w") as file:
            file.writelines(f"{number * lines + n} {some[(number + n) % len(some)]}" for n in range(lines))
    return files * lines
