"""``logferry demo`` as a user runs it: a process of its own, real kills, and an end that can also be no."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from deltalake import DeltaTable
from logferry.ops.stack.kafka_cluster import KafkaCluster

LOGFERRY = [sys.executable, "-m", "logferry.ops"]
LIMIT_S = 900

ODD_FILES = {
    "crlf.log": b"first line\r\nsecond line\r\n\r\nfourth\r\n",
    "no newline at the end.log": "Привет, мир\nthe last line has no end".encode(),
    "not utf-8 [a]*.log": b"good\n\xff\xfe bad \x80 line\ngood again \xc3\xa9\n\xe2\x82\nend\n",
    "one line.log": b"x" * 70_000 + b"\n",
}


class Ended(NamedTuple):
    status: int
    said: str

    @property
    def lines(self) -> list[str]:
        return self.said.splitlines()


def logferry(*arguments: str | Path, **environment: str) -> Ended:
    run = subprocess.run(
        [*LOGFERRY, *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, **environment},
        timeout=LIMIT_S,
        check=False,
    )
    return Ended(run.returncode, run.stdout.decode())


def processes_of(folder: Path) -> dict[int, str]:
    """The command lines that name the folder; nothing that the demo starts could do without."""
    found = {}
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = file.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if f"{folder}/" in text:
            found[int(file.parent.name)] = text
    return found


def killed(ended: Ended) -> list[str]:
    return [line.split("SIGKILL: ")[1] for line in ended.lines if "SIGKILL: " in line]


# ---- wrong use --------------------------------------------------------------------------------------------------


@pytest.fixture
def full_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "full"
    folder.mkdir()
    (folder / "mine").write_text("do not touch")
    return folder


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--file", "/nowhere/at/all.log"], "/nowhere/at/all.log: No such file"),
        (["--file", "/"], "--file /: Is a directory"),
        (["--file", os.devnull], f"{os.devnull}: empty, or not a regular file"),
        (["--seconds", "0"], "--seconds must be from 1 to 3600"),
        (["--data", "/dev/null/x"], "--data /dev/null/x: Not a directory"),
        (["--port", "65535"], "need ports from 1 to 65535"),
        (["--colour"], "unrecognized arguments: --colour"),
    ],
)
def test_wrong_use_is_reported_and_leaves_nothing(arguments: list[str], word: str, tmp_path: Path) -> None:
    ended = logferry("demo", *arguments, TMPDIR=str(tmp_path))
    assert ended.status == 2
    assert word in ended.said
    assert "Traceback" not in ended.said
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_holds_something_is_left_alone(full_folder: Path) -> None:
    ended = logferry("demo", "--data", full_folder)
    assert ended.status == 2
    assert "the folder is not empty" in ended.said
    assert [path.name for path in full_folder.iterdir()] == ["mine"]


# ---- its end, wanted or not -------------------------------------------------------------------------------------


@contextmanager
def running_demo(*arguments: str | Path, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [*LOGFERRY, "demo", *map(str, arguments)]
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
    ) as demo:
        try:
            yield demo
        finally:
            demo.kill()


def heard(demo: subprocess.Popen[bytes], word: str) -> str:
    """What it says up to the first line with the word."""
    assert demo.stdout is not None
    said = ""
    for line in demo.stdout:
        said += line.decode()
        if word in said:
            return said
    raise AssertionError(f"it ended without {word!r}:\n{said}")


def gone(folder: Path) -> dict[int, str]:
    """The processes that are left after a minute, none as soon as there is none."""
    deadline = time.monotonic() + 60
    while (left := processes_of(folder)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def until_java_runs(folder: Path, jar: str) -> None:
    deadline = time.monotonic() + LIMIT_S / 4
    while not any(jar in text for text in processes_of(folder).values()):
        assert time.monotonic() < deadline, "no loader's JVM"
        time.sleep(0.05)


@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_all_that_it_started_ends_with_it(tmp_path: Path, number: signal.Signals) -> None:
    with running_demo("--seconds", "600", TMPDIR=str(tmp_path)) as demo:
        heard(demo, "loader run 1 starts")
        (folder,) = tmp_path.glob("logferry-demo-*")
        until_java_runs(folder, "spark")
        names = " ".join(processes_of(folder).values())
        for program in (
            "kafka",
            "logferry.gateway",
            "logferry.mirror",
            "logferry.client",
            "logferry.ops.generate",
            "logferry.loaders",
        ):
            assert program in names
        demo.send_signal(number)
        rest = demo.communicate(timeout=120)[0].decode()
    assert demo.returncode == 130
    assert "stopping" in rest
    assert "Traceback" not in rest
    assert processes_of(folder) == {}
    assert not folder.exists()


@pytest.mark.timeout(LIMIT_S)
@pytest.mark.long
def test_nothing_outlives_a_demo_that_is_killed(tmp_path: Path) -> None:
    with running_demo("--seconds", "600", "--data", tmp_path / "data") as demo:
        heard(demo, "loader run 1 starts")
        until_java_runs(tmp_path / "data", "spark")
        demo.kill()
    assert gone(tmp_path / "data") == {}


@pytest.mark.timeout(LIMIT_S)
@pytest.mark.long
def test_what_ends_by_itself_ends_the_demo_with_the_end_of_its_log(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with running_demo("--seconds", "600", "--data", data) as demo:
        said = heard(demo, "the first chunk is readable")
        (generator,) = [pid for pid, text in processes_of(data).items() if "logferry.ops.generate" in text]
        os.kill(generator, signal.SIGKILL)
        said += demo.communicate(timeout=120)[0].decode()
    assert demo.returncode == 3
    assert "generator ended with status -9" in said
    assert str(data / "runs" / "generator.log") in said
    assert f"kept: {data}" in said
    assert processes_of(data) == {}


# ---- the whole of it --------------------------------------------------------------------------------------------


class Kept(NamedTuple):
    """A demo of odd files that was kept."""

    ended: Ended
    data: Path
    files: list[Path]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Kept:
    folder = tmp_path_factory.mktemp("odd")
    for name, content in ODD_FILES.items():
        (folder / name).write_bytes(content)
    files = sorted(folder.iterdir())
    data = tmp_path_factory.mktemp("demo") / "data"
    return Kept(logferry("demo", "--data", data, "--keep-data", "--file", *files), data, files)


@pytest.fixture(scope="module")
def stored(kept: Kept) -> Iterator[str]:
    """Kafka as the demo left it: where it is reached."""
    with KafkaCluster("dc1", kept.data / "stack" / "dc1" / "kafka") as cluster:
        yield cluster.bootstrap


def audited(bootstrap: str, table: Path, files: list[Path]) -> tuple[int, dict[str, Any]]:
    ended = logferry("audit", "--bootstrap", bootstrap, "--table", table, "--json", "--file", *files)
    return ended.status, json.loads(ended.lines[-1])


@pytest.mark.long
@pytest.mark.spark
@pytest.mark.timeout(LIMIT_S)
class TestFilesOfTheUser:
    def test_every_byte_arrives(self, kept: Kept) -> None:
        assert kept.ended.status == 0, kept.ended.said
        assert f"YES: every line of the {len(ODD_FILES)} files is in the table once" in kept.ended.said
        assert sorted(what.split(" ")[0].split("-")[0] for what in killed(kept.ended)) == [
            "gateway",
            "loader",
            "mirror",
            "push",
        ]
        assert all(path.read_bytes() == ODD_FILES[path.name] for path in kept.files)
        assert processes_of(kept.data) == {}

    def test_lines_that_are_not_utf8_are_in_the_quarantine(self, kept: Kept) -> None:
        assert kept.ended.status == 0, kept.ended.said
        lines = DeltaTable(str(kept.data / "warehouse" / "nginx_quarantine")).to_pyarrow_table().to_pylist()
        assert sorted(line["bytes"] for line in lines) == [b"\xe2\x82", b"\xff\xfe bad \x80 line"]
        rows = DeltaTable(str(kept.data / "warehouse" / "nginx")).to_pyarrow_table(columns=["text"])
        texts = rows["text"].to_pylist()
        assert {"first line\r", "\r", "the last line has no end", "good again é", "x" * 70_000} <= set(texts)
        assert len(texts) + len(lines) == sum(len(content.splitlines()) for content in ODD_FILES.values())

    def test_the_audit_says_yes_again_afterwards(self, kept: Kept, stored: str) -> None:
        status, said = audited(stored, kept.data / "warehouse" / "nginx", kept.files)
        assert (status, said["exact"]) == (0, True)

    def test_a_changed_byte_of_a_file_is_found(self, kept: Kept, stored: str) -> None:
        path = kept.files[0]
        before = path.read_bytes()
        path.write_bytes(before[:-4] + b"#" + before[-3:])
        try:
            status, said = audited(stored, kept.data / "warehouse" / "nginx", kept.files)
        finally:
            path.write_bytes(before)
        assert status == 1
        assert f"first difference is at position {len(before) - 4}" in json.dumps(said)

    @pytest.mark.parametrize("harm", ["a row is gone", "a row is there twice"])
    def test_a_changed_table_is_found(self, kept: Kept, stored: str, tmp_path: Path, harm: str) -> None:
        shutil.copytree(kept.data / "warehouse", tmp_path / "warehouse")
        table = tmp_path / "warehouse" / "nginx"
        if harm == "a row is gone":
            DeltaTable(str(table)).delete("text = 'good again é'")
        else:
            delta = DeltaTable(str(table))
            rows = delta.to_pyarrow_table(filters=[("text", "=", "good again é")])
            assert rows.num_rows == 1
            write_again(delta, rows)
        status, said = audited(stored, table, kept.files)
        assert status == 1
        assert said["verdict"].startswith("NOT exact")


def write_again(table: DeltaTable, rows: Any) -> None:
    from deltalake import write_deltalake

    write_deltalake(table, rows, mode="append")


@pytest.mark.long
@pytest.mark.spark
@pytest.mark.timeout(LIMIT_S)
def test_what_is_not_as_it_was_sent_makes_the_verdict_no(tmp_path: Path) -> None:
    path = tmp_path / "mine.log"
    path.write_bytes(b"a line\nanother one\nthe third\n")
    with running_demo("--file", path, TMPDIR=str(tmp_path)) as demo:
        said = heard(demo, "all is acknowledged")
        path.write_bytes(b"a line\nanother one\nthe 3rd.\n")
        said += demo.communicate(timeout=LIMIT_S)[0].decode()
    assert demo.returncode == 1, said
    assert "the first difference is at position 23" in said
    assert "NOT exact: 1 × file-differs" in said
    assert "NO: the stored data differs from the data sent." in said
    (folder,) = tmp_path.glob("logferry-demo-*")
    assert f"kept: {folder}" in said
    assert processes_of(folder) == {}


@pytest.mark.long
@pytest.mark.spark
@pytest.mark.timeout(LIMIT_S)
def test_generated_logs_while_all_is_killed(tmp_path: Path) -> None:
    ended = logferry("demo", "--seconds", "12", "--seed", "42", TMPDIR=str(tmp_path))
    assert ended.status == 0, ended.said
    gateway, loader, mirror, client = sorted(killed(ended))
    assert re.search(r"^mirror \(pid \d+\), on the way from dc1 to dc2", mirror)
    assert re.search(r"exact: dc1 to dc2: 4 partitions, .* nothing twice; a reader moved", ended.said)
    assert re.search(r"^gateway-[01] \(pid \d+\), which served [1-8] lanes and had [1-9][\d,]* bytes of", gateway)
    assert re.search(r"^push-client \(pid \d+\), with [\d,]+ bytes not readable yet", client)
    assert re.search(r"^loader \(pid \d+\) in mid-write: batch 0 is in the ledger, .* uncommitted", loader)
    # None is cut off where the killed worker had only requests that the other one had passed on.
    assert re.search(r"caught up(; \d+ requests were cut off, \d+ refused for a while: all repeated)?\n", ended.said)
    assert "all 8 lanes are served again" in ended.said
    assert "seed 42" in ended.said
    assert "shop.log.1 " in ended.said  # the rotated one
    assert "10 rows of the table" in ended.said
    assert "chunk created" in ended.said
    assert "line written" in ended.said
    assert ended.lines[-1].startswith("YES: every line of the 9 files is in the table once, byte for byte")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
@pytest.mark.spark
@pytest.mark.timeout(LIMIT_S)
def test_the_table_on_an_object_store(tmp_path: Path) -> None:
    """The same way, kills and audit, with the table on an S3 server that the demo starts."""
    ended = logferry("demo", "--store", "s3", "--seconds", "8", "--seed", "7", TMPDIR=str(tmp_path))
    assert ended.status == 0, ended.said
    assert sorted(what.split(" ")[0].split("-")[0] for what in killed(ended)) == ["gateway", "loader", "mirror", "push"]
    assert re.search(r"^loader \(pid \d+\) in mid-write: batch 0 is in the ledger", "\n".join(killed(ended)), re.M)
    assert "s3://" in ended.said
    assert ended.lines[-1].startswith("YES: every line of the 9 files is in the table once, byte for byte")
    assert list(tmp_path.iterdir()) == []
