"""``logferry read`` as a user runs it: formats, where it begins and ends, exit statuses, pipes that are cut."""

from __future__ import annotations

import asyncio
import io
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgpack
import pytest
from logferry.client import Cursors, Reader, Writer
from logferry.ops.cli import main
from logferry.ops.cli.problems import Unavailable, UsageError
from logferry.ops.commands import read

from tests.support.checker import committed_records
from tests.support.gateway import Gateway

DATA = [b"one\ntwo\n", b"\xff\x00\n", b"three, and no newline"]


@pytest.fixture
def topic(workers: Gateway, topic_name: str) -> str:
    """A topic of one partition with `DATA` in it."""
    asyncio.run(workers.make_topic(topic_name, 1))
    write(workers, topic_name, *DATA)
    return topic_name


def write(workers: Gateway, topic: str, *chunks: bytes) -> None:
    with Writer(workers.urls, topic, "s", attributes={"env": "test"}) as writer:
        for data in chunks:
            writer.write(data)
    asyncio.run(committed_records(workers.kafka.bootstrap, f"dc1.{topic}"))  # Kafka shows it a moment later


@contextmanager
def running(workers: Gateway, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "logferry.ops.cli.main", "read", *arguments, "--url", workers.urls[0]]
    # What a shell starts in the background ignores Ctrl-C, and so does what that starts.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        signal.signal(signal.SIGINT, before)
        try:
            yield process
        finally:
            process.kill()


Ran = Callable[..., tuple[int, bytes, str]]


@pytest.fixture
def ran(workers: Gateway, capfdbinary: pytest.CaptureFixture[bytes]) -> Ran:
    """``ran(…)``: exit status, output, and what was said."""

    def run(*arguments: str) -> tuple[int, bytes, str]:
        status = main.main(["read", *arguments, "--url", workers.urls[0]])
        output, said = capfdbinary.readouterr()
        return status, output, said.decode()

    return run


def test_the_data_alone_byte_for_byte(ran: Ran, topic: str) -> None:
    assert ran(topic, "--until-end") == (0, b"".join(DATA), "")
    assert ran(f"dc1.{topic}", "--max", "2") == (0, b"".join(DATA[:2]), "")


def test_all_that_is_known_of_each_chunk(ran: Ran, topic: str) -> None:
    status, output, _ = ran(topic, "--until-end", "--format", "ndjson")
    objects = [json.loads(line) for line in output.splitlines()]
    assert [(one["offset"], one["seqno"], one["prev"], one["source_id"]) for one in objects] == [
        (0, 1, None, "s"), (1, 2, 1, "s"), (2, 3, 2, "s"),
    ]  # fmt: skip
    assert [one.get("data", one.get("data_base64")) for one in objects] == ["one\ntwo\n", "/wAK", DATA[2].decode()]
    packed_status, packed, _ = ran(topic, "--until-end", "--format", "msgpack")
    assert [row[-1] for row in msgpack.Unpacker(io.BytesIO(packed))] == DATA
    assert status == packed_status == 0


def test_where_it_begins_and_what_it_leaves_out(ran: Ran, topic: str) -> None:
    cursor = f"dc1.{topic}:0:1"
    assert ran(topic, "--until-end", "--from", cursor)[:2] == (0, b"".join(DATA[1:]))
    assert ran(topic, "--until-end", "--from", "-1h")[:2] == (0, b"".join(DATA))
    assert ran(topic, "--until-end", "--from", "latest")[:2] == (0, b"")
    assert ran(topic, "--until-end", "--filter", "env=test", "--source-prefix", "s")[1] == b"".join(DATA)
    assert ran(topic, "--until-end", "--filter", "env=other")[:2] == (0, b"")


def test_its_options_stand_in_a_file_too(ran: Ran, topic: str, tmp_path: Path) -> None:
    file = tmp_path / "read.toml"
    file.write_text(f'[read]\nfrom = "dc1.{topic}:0:1"\nuntil-end = true\nfilter = ["env=test"]\nmax = 1\n')
    assert ran(topic, "--config", str(file)) == (0, DATA[1], "")


def test_a_consumer_continues_after_its_output(ran: Ran, topic: str) -> None:
    consumer = ("--consumer", f"c-{topic}")
    assert ran(topic, *consumer, "--max", "2") == (0, b"".join(DATA[:2]), "")
    assert ran(topic, *consumer, "--until-end") == (0, DATA[2], "")


def test_it_follows_until_it_is_interrupted_and_has_committed_then(workers: Gateway, ran: Ran, topic: str) -> None:
    consumer = ("--consumer", f"c-{topic}")
    with running(workers, topic, *consumer) as process:
        assert process.stdout is not None
        assert process.stdout.read(len(b"".join(DATA))) == b"".join(DATA)
        write(workers, topic, b"later\n")
        assert process.stdout.readline() == b"later\n"
        process.send_signal(signal.SIGINT)
        rest, said = process.communicate(timeout=60)
    assert (process.returncode, rest, said) == (130, b"", b"")
    assert ran(topic, *consumer, "--until-end") == (0, b"", "")


def test_it_ends_quietly_when_nobody_reads_its_output(workers: Gateway, topic: str) -> None:
    """As in ``| head``: though nothing more comes that could not be written."""
    with running(workers, topic) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == b"one\n"
        process.stdout.close()
        assert process.wait(60) == 141
        assert process.stderr.read() == b""


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (("{topic}-not",), 1, "logferry topics create"),
        (("{topic}", "--from", "dc1.{topic}:0:99"), 1, "outside the retained offsets 0 to"),
        (("{topic}", "--from", "banana"), 2, "--from banana: expected earliest"),
        (("{topic}", "--filter", "env"), 2, "--filter env: expected NAME=VALUE"),
        (("*.x",), 2, "a pattern needs a consumer"),
    ],
)
def test_an_error_is_reported(ran: Ran, topic: str, arguments: tuple[str, ...], status: int, says: str) -> None:
    found, output, said = ran(*(argument.format(topic=topic) for argument in arguments))
    assert (found, output) == (status, b"")
    assert says in said
    assert "Traceback" not in said


def test_no_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read, "_OPEN_S", 0.2)
    with pytest.raises(Unavailable, match=r"no gateway answers at http://127\.0\.0\.1:9"):
        read.main(["t", "--url", "http://127.0.0.1:9"])


# ---- --from -----------------------------------------------------------------------------------------------------


def test_times() -> None:
    start, _ = read._start("2026-05-04T10:00:00Z")
    assert start == datetime(2026, 5, 4, 10, tzinfo=UTC)
    local, _ = read._start("2026-05-04")
    assert local == datetime(2026, 5, 4).astimezone()
    for text, back in (("-90s", timedelta(seconds=90)), ("-15m", timedelta(minutes=15)), ("-7d", timedelta(days=7))):
        ago, _ = read._start(text)
        assert timedelta() <= datetime.now(UTC) - ago - back < timedelta(minutes=1)


def test_cursors_name_the_partitions() -> None:
    assert read._start("dc1.t:3:17,dc1.t:1:5") == (Cursors.parse("dc1.t:3:17,dc1.t:1:5"), [3, 1])
    assert read._start(None) == ("earliest", None)


@pytest.mark.parametrize("text", ["", "-1x", "-1", "1h", "dc1.t", "-99999999999d", "-999999999d"])
def test_what_is_no_place_to_begin(text: str) -> None:
    with pytest.raises(UsageError, match="--from"):
        read._start(text)


def test_a_gateway_that_goes_away_in_the_middle_is_reported_after_a_bounded_wait(
    monkeypatch: pytest.MonkeyPatch, ran: Ran, topic: str
) -> None:
    """The reader is stopped from hearing anything; how long it is waited for is shortened."""
    monkeypatch.setattr(read, "_SILENCE_S", 0.5)
    monkeypatch.setattr(Reader, "read", lambda reader, timeout_s: None)
    status, output, said = ran(topic, "--until-end")
    assert (status, output) == (3, b"")
    assert "has not answered" in said
