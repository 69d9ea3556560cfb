"""Every command with a table in every kind of place, as a user types it: the rows are exact, and no key of the store is
in what the commands print or store, in the processes' arguments, or in Spark's page and event log.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import MappingProxyType

import pytest
from logferry.loaders.errors import StorageUnavailable
from logferry.loaders.location import Access, AzureAccess, GsAccess, Location, S3Access
from logferry.loaders.storage.files import list_files, open_table, read_text
from logferry.loaders.storage.ledger import existing_table, last_batch
from logferry.ops.stack.azure_server import ROOT, AzureServer
from logferry.ops.stack.gcs_server import GcsServer
from logferry.ops.stack.hdfs_cluster import HdfsCluster
from logferry.ops.stack.kafka_cluster import KafkaCluster
from logferry.ops.stack.processes import free_ports
from logferry.ops.stack.s3_server import BUCKET, S3Proxy

from tests.support.audit import World
from tests.support.loader import WAIT_S, Topic, chunks_of, quarantine, stored
from tests.support.loader_process import java_env, wait_for
from tests.support.stores import needs_azure, needs_gcs

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]
# Those of Azure are in base64.
KEYS = ("AKIA-of-this-test", "sEcReT/of+this/test+")
OTHER_KEYS = ("AKIA-of-the-next-day", "aNoThEr/sEcReT+key++")
# How a user may write the place; the bucket, HDFS's root and the test's folder come before it.
PLACES = (
    *("s3a://", "s3://", "hdfs://", "/", "file://"),
    pytest.param("gs://", marks=needs_gcs),
    pytest.param("abfss://", marks=needs_azure),
)
HOUR = datetime.now(UTC).replace(minute=0, second=0, microsecond=0) - timedelta(hours=3)


Server = S3Proxy | GcsServer | AzureServer


class Warehouse:
    """A store, and the commands of its user. ``said``: what they printed."""

    def __init__(self, root: str, server: Server | None, folder: Path, bootstrap: str) -> None:
        """``server``: with keys, but for Google's."""
        self.server, self.folder, self.bootstrap, self.said = server, folder, bootstrap, list[str]()
        self.has_keys = isinstance(server, S3Proxy | AzureServer)
        self.typed = f"{root}/warehouse/logs"
        access: Access | None = None
        match server:
            case S3Proxy(endpoint=endpoint):
                access = S3Access(endpoint, None, folder / "access", folder / "secret")
            case GcsServer(endpoint=endpoint):
                access = GsAccess(endpoint)
            case AzureServer():
                access = AzureAccess(folder / "secret")
        self.table = Location.of(self.typed, access)
        self.env = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")} | java_env()
        self.ui_port = free_ports(1)[0]
        self.started: list[subprocess.Popen[str]] = []
        self.write_keys(KEYS)

    def write_keys(self, keys: tuple[str, str]) -> None:
        for name, key in zip(("access", "secret"), keys, strict=True):
            (self.folder / name).write_text(f"{key}\n")

    @property
    def elsewhere(self) -> str:
        """A bucket that is not there."""
        return self.typed.replace(f"//{BUCKET}", "//nowhere")

    @property
    def access(self) -> str:
        """Of the store, in a configuration."""
        match self.server:
            case GcsServer(endpoint=endpoint):
                return f'[gs]\nendpoint = "{endpoint}"\n'
            case AzureServer():
                return '[azure]\naccount_key_file = "secret"\n'
            case S3Proxy(endpoint=endpoint):
                return f'[s3]\nendpoint = "{endpoint}"\naccess_key_file = "access"\nsecret_key_file = "secret"\n'
        return ""

    def config(self, topic: str, pattern: str) -> str:
        """Writes ``load.toml`` and returns its name."""
        (self.folder / "events").mkdir(exist_ok=True)
        (self.folder / "load.toml").write_text(
            f'kafka.bootstrap_servers = "{self.bootstrap}"\nfollow_s = 0.2\n{self.access}'
            f'[spark]\nmaster = "local[2]"\ndriver_memory = "512m"\nscratch = "{self.folder / "runs"}"\n'
            f'[spark.conf]\n"spark.eventLog.enabled" = "true"\n"spark.eventLog.dir" = "{self.folder / "events"}"\n'
            f'"spark.ui.enabled" = "true"\n"spark.ui.port" = "{self.ui_port}"\n'
            f'[[tables]]\npath = "{self.typed}"\ntopics = ["{topic}"]\npartition_by = ["recorded_date"]\n'
            f'segments = {{ late_wait_s = 0, source_idle_s = 1, success = "{self.typed.removesuffix("logs")}done" }}\n'
            f"[tables.parser]\nformat = \"regex\"\npattern = '{pattern}'\n"
            'event_time = { column = "at", formats = ["iso"] }\n'
        )
        return "load.toml"

    def start(self, *arguments: str, more: Mapping[str, str] = MappingProxyType({})) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "logferry.ops", *arguments]
        pipe = subprocess.PIPE
        env = {**self.env, **more}
        process = subprocess.Popen(
            command, stdout=pipe, stderr=pipe, stdin=subprocess.DEVNULL, text=True, cwd=self.folder, env=env
        )
        self.started.append(process)
        return process

    def end(self) -> None:
        """None is left behind."""
        for process in self.started:
            if process.poll() is None:
                process.kill()
                process.communicate()

    def run(self, *arguments: str, status: int = 0, more: Mapping[str, str] = MappingProxyType({})) -> str:
        process = self.start(*arguments, more=more)
        out, err = process.communicate()
        self.said.append(out + err)
        assert process.returncode == status, (arguments, self.said[-1])
        return out

    @property
    def key_variables(self) -> dict[str, str]:
        """For commands without a configuration."""
        if self.server is None:
            return {}
        keys = {"AWS_ACCESS_KEY_ID": KEYS[0], "AWS_SECRET_ACCESS_KEY": KEYS[1]}
        return self.server.environment | (keys if isinstance(self.server, S3Proxy) else {})


@contextmanager
def warehouse_at(place: str, folder: Path, bootstrap: str) -> Iterator[Warehouse]:
    with ExitStack() as stack:
        root = f"{place if place == 'file://' else ''}{folder}"
        server: Server | None = None
        if place.startswith("s3"):
            root, server = f"{place}{BUCKET}", stack.enter_context(S3Proxy(folder / "s3", keys=KEYS))
        elif place == "gs://":
            root, server = f"{place}{BUCKET}", stack.enter_context(GcsServer(folder / "gcs"))
        elif place == "abfss://":
            root, server = ROOT, stack.enter_context(AzureServer(folder / "azure", KEYS[1]))
        elif place == "hdfs://":
            root = stack.enter_context(HdfsCluster(folder / "hdfs")).uri
        user = Warehouse(root, server, folder, bootstrap)
        stack.callback(user.end)
        yield user


class KeyWatch:
    """Looks all the time for keys in the arguments of all processes and on Spark's page. ``seen``: where they were."""

    def __init__(self, keys: Sequence[str], ui_port: int) -> None:
        self.seen: set[str] = set()
        self.pages = 0
        self._keys = [key.encode() for key in keys]
        self._url = f"http://127.0.0.1:{ui_port}/environment/"
        self._over = threading.Event()
        self._threads = [threading.Thread(target=work) for work in (self._arguments, self._page)]

    def __enter__(self) -> KeyWatch:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _arguments(self) -> None:
        while not self._over.wait(0.05):
            for file in Path("/proc").glob("[0-9]*/cmdline"):
                with suppress(OSError):
                    self._look(file.read_bytes(), "arguments")

    def _page(self) -> None:
        while not self._over.wait(0.3):
            with suppress(OSError):
                page = urllib.request.urlopen(self._url, timeout=5).read()
                self.pages += b"fs.s3a.secret.key" in page or b"fs.azure.account.key" in page
                self._look(page, "Spark's page")

    def _look(self, content: bytes, where: str) -> None:
        if any(key in content for key in self._keys):
            self.seen.add(f"{where}: {content[:60]!r}")


def lines(word: str, *minutes: int) -> bytes:
    return b"".join(f"{(HOUR + timedelta(minutes=m)).isoformat()} {word} {m}\n".encode() for m in minutes)


@pytest.fixture
async def topic(kafka: KafkaCluster, topic_name: str) -> Topic:
    """Where an audit finds what it needs of a gateway."""
    world = World(kafka.bootstrap, topic_name[-60:].lstrip("-"))
    await world.create()
    return Topic(kafka.bootstrap, world.topic)


def texts(table: Location) -> list[str]:
    return sorted(row["text"] for row in stored(table))


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("place", PLACES)
async def test_every_command_in_every_place(place: str, topic: Topic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    start, bad = lines("one", 1, 2, 3), lines("two words", 4)
    await topic.write(chunks_of("web1", start, bad), partitions=1)
    with warehouse_at(place, tmp_path, topic.bootstrap) as user, KeyWatch(KEYS, user.ui_port) as watch:
        if isinstance(user.server, AzureServer):
            for name, value in user.server.emulator.items():
                monkeypatch.setenv(name, value)
                user.env[name] = value
        table, of_load = user.table, ("--config", user.config(topic.name, r"(?<at>\S+) (?<what>\w+) (?<n>\d+)"))
        run = user.run

        assert json.loads(run("load", *of_load, "--json"))["rows"] == 3
        assert texts(table) == sorted(start.decode().split("\n")[:-1])
        assert [row["bytes"] for row in quarantine(table)] == [bad.rstrip(b"\n")]

        existing_table(table).delete("line = 1")
        run("table", "reload", user.typed, *of_load, "--from", topic.name, "--yes")
        assert texts(table) == sorted(start.decode().split("\n")[:-1])

        user.config(topic.name, r"(?<at>\S+) (?<what>.*) (?<n>\d+)")
        run("table", "requarantine", user.typed, *of_load)
        assert texts(table) == sorted((start + bad).decode().split("\n")[:-1])
        assert quarantine(table) == []

        follower = user.start("load", *of_load, "--follow")
        later = lines("late", 5) + f"{datetime.now(UTC).isoformat()} now 1\n".encode()
        await topic.write(chunks_of("web1", later, start=9000))
        whole = sorted((start + bad + later).decode().split("\n")[:-1])
        wait_for(lambda: count(table) == len(whole), "the rows that came later")
        assert texts(table) == whole
        done = Location.of(table.with_name("done")) / HOUR.strftime("%Y-%m-%dT%H") / "_SUCCESS"
        wait_for(lambda: (HOUR.strftime("%Y-%m-%dT%H") + "/_SUCCESS") in names(table.with_name("done")), str(done))
        assert json.loads(read_text(done))["rows"] == 5
        follower.terminate()
        out, err = follower.communicate(timeout=WAIT_S)
        user.said.append(out + err)
        assert follower.returncode == 0, user.said[-1]

        (state,) = json.loads(run("table", "state", *of_load, "--json"))
        assert (state["table"], state["last"]["batch"]) == (str(table), last_batch(open_table(table)))
        segments = json.loads(run("table", "segments", "list", *of_load, "--json"))
        assert sum(segment["rows"] for segment in segments["segments"]) == 6
        run("table", "segments", "wait", user.typed, HOUR.strftime("%Y-%m-%dT%H"), *of_load, "--timeout-s", "0")

        keys = user.key_variables
        sql = ("query", "SELECT count(*) AS n FROM logs", "--table", user.typed, "--no-tail", "--format", "csv")
        assert run(*sql, more=keys) == run(*sql, "--stores", "load.toml") == "n\n6\n"
        assert view(user, topic.name) == 6
        name = topic.name.partition(".")[2]
        audit = f'dc = "dc1"\nprefix = "{name}"\nkafka.bootstrap_servers = "{topic.bootstrap}"\n'
        audit += f'topics = ["{name}"]\ntables = ["{user.typed}"]\n{user.access}'
        (tmp_path / "audit.toml").write_text(audit)
        report = user.start("audit", "--config", "audit.toml")
        out, err = report.communicate()
        user.said.append(out + err)
        assert "6 rows: 6 compared with the log" in out, user.said[-1]

        run("table", "compact", *of_load, "--version-retention-hours", "1", "--retain-days", "1")
        assert texts(table) == whole
        run("table", "reset", user.typed, *of_load, "--to", f"{topic.name}:0=0", "--yes")
        assert json.loads(run("load", *of_load, "--json"))["rows"] == 6
        assert texts(table) == sorted(whole * 2), "the operator asked for them once more"
        check_refusals(user, topic.name)
        if user.has_keys:
            assert watch.pages, "Spark's page was not looked at"
    assert watch.seen == set()
    contents = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    kept = {tmp_path / "access", tmp_path / "secret", tmp_path / "s3" / "s3proxy.properties"}
    assert [file for file, content in contents.items() if has_key(content) and file not in kept] == []
    assert list((tmp_path / "events").iterdir()), "no event log was looked at"
    assert "Traceback" not in "".join(user.said)
    assert [text for text in user.said if has_key(text.encode())] == []


def has_key(content: bytes) -> bool:
    return any(key.encode() in content for key in (*KEYS, *OTHER_KEYS))


def names(folder: Location) -> list[str]:
    return [file.name for file in list_files(folder)]


_VIEW = """
import sys
from pathlib import Path
from logferry.loaders.config import SparkSettings
from logferry.loaders.location import Location
from logferry.loaders.query import realtime
from logferry.loaders.spark.session import spark_session
from logferry.loaders.spark.stores import settings_for
from logferry.ops.commands.load import stores_in
from logferry.ops.runtime.jars import spark_jars
table, topic, scratch = sys.argv[1:]
stores = settings_for([Location.of(table)])
with spark_session(SparkSettings(master="local[2]"), spark_jars(**stores_in([table])), Path(scratch), stores) as spark:
    print("rows:", realtime(spark, table, topics=[topic]).count())
"""


def view(user: Warehouse, topic: str) -> int:
    """The rows that `realtime` shows to a program, with the keys in its environment."""
    env = {**user.env, **user.key_variables}
    command = [sys.executable, "-c", _VIEW, user.typed, topic, str(user.folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env, stdin=subprocess.DEVNULL)
    user.said.append(done.stdout + done.stderr)
    found = re.search(r"rows: (\d+)", done.stdout)
    assert found, user.said[-1]
    return int(found[1])


def check_refusals(user: Warehouse, topic: str) -> None:
    """Wrong places and keys end each command with its status and a name, and no key is repeated."""
    run = user.run
    of_load = ("--config", "load.toml")
    run("load", *of_load, "--table", user.typed, status=2)
    with_keys = f"s3://{OTHER_KEYS[0]}:{OTHER_KEYS[1]}@{BUCKET}/t"
    topics = ("--topics", topic, "--bootstrap", user.bootstrap)
    refused: list[tuple[str, ...]] = [
        ("load", "--table", with_keys, *topics),
        ("table", "state", with_keys),
        ("table", "compact", with_keys),
        ("table", "segments", "list", with_keys),
        ("query", "SELECT 1", "--table", with_keys),
    ]
    for command in refused:
        run(*command, status=2)
        assert "no user and no password" in user.said[-1], user.said[-1]
    if user.server is None:
        return
    run("load", *topics, "--table", user.elsewhere, status=3, more=user.key_variables)
    missing = {S3Proxy: "NoSuchBucket", AzureServer: "ContainerNotFound", GcsServer: "nowhere"}
    assert missing[type(user.server)] in user.said[-1], user.said[-1]
    if not user.has_keys:
        return
    user.write_keys(OTHER_KEYS)
    commands: list[tuple[str, ...]] = [
        ("table", "state", *of_load),
        ("table", "compact", *of_load),
        ("load", *of_load),
    ]
    for command in commands:
        run(*command, status=3)
        # Of Spark, delta-rs and Arrow.
        reasons = "InvalidAccessKeyId", "INVALID_ACCESS_KEY_ID", "403", "AuthorizationFailure"
        assert any(reason in user.said[-1] for reason in reasons), user.said[-1]
    (user.folder / "secret").unlink()
    run("table", "state", *of_load, status=3)


@pytest.mark.long
async def test_keys_that_change_while_a_load_follows(topic: Topic, tmp_path: Path):
    """The store takes other keys from one moment on: the load continues with those that the files hold then."""
    with warehouse_at("s3://", tmp_path, topic.bootstrap) as user:
        assert isinstance(user.server, S3Proxy)
        config = user.config(topic.name, r"(?<at>\S+) (?<what>\w+) (?<n>\d+)")
        await topic.write(chunks_of("web1", lines("one", 1)))
        follower = user.start("load", "--config", config, "--follow")
        wait_for(lambda: count(user.table) == 1, "the first row")
        user.server.kill()
        with S3Proxy(tmp_path / "s3", user.server.port, OTHER_KEYS):
            await topic.write(chunks_of("web1", lines("two", 2), start=9000))
            user.write_keys(OTHER_KEYS)
            wait_for(lambda: count(user.table) == 2, "the row of the new keys")
            follower.terminate()
            out, err = follower.communicate(timeout=WAIT_S)
            assert quarantine(user.table) == []
        assert follower.returncode == 0, out + err
        assert not has_key((out + err).encode())


def count(table: Location) -> int:
    """Zero while the store does not answer."""
    with suppress(StorageUnavailable, OSError):
        found = open_table(table)
        return 0 if found is None else int(found.to_pyarrow_dataset().count_rows())
    return 0
