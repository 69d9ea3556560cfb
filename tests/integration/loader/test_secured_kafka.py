"""Tables from a Kafka with TLS, logins and an authorizer, by users with exactly the rights of operations/kafka.md."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from logferry.gateway.config import KafkaSettings
from logferry.loaders.batches.execute import Loader
from logferry.loaders.errors import KafkaRefused, LoaderConfigError
from logferry.loaders.location import Location
from logferry.loaders.query.realtime_view import realtime
from logferry.loaders.runs.table_run import load_table
from logferry.loaders.spark.kafka_access import kafka_topics
from logferry.ops.audit.audit import audit
from logferry.ops.audit.config import AuditConfig
from logferry.ops.cli import main
from logferry.ops.cli.problems import CommandError
from pyspark.sql import SparkSession

from tests.support.audit import World
from tests.support.kafka_rights import grant
from tests.support.loader import Topic, check_exact, chunks_of, stored
from tests.support.loader_process import run_module
from tests.support.secured_kafka import PASSWORD, PASSWORDS, Right, SecuredKafka, as_toml
from tests.support.table_loads import job

pytestmark = [
    pytest.mark.spark,
    # PySpark's own, of the check of a parser.
    pytest.mark.filterwarnings("ignore:Exception ignored in. <socket:pytest.PytestUnraisableExceptionWarning"),
    # asyncio's, of a connection whose TLS handshake fails.
    pytest.mark.filterwarnings(
        "ignore:Exception ignored in. <function _SelectorTransport.__del__:pytest.PytestUnraisableExceptionWarning"
    ),
]

LOADER: Final[list[Right]] = [
    ("TOPIC", "dc1.", "PREFIXED", "READ"),
    ("TOPIC", "dc1.", "PREFIXED", "DESCRIBE_CONFIGS"),
    ("TOPIC", "logferry.mirror.dc1.", "PREFIXED", "READ"),
]
AUDIT: Final[list[Right]] = [
    ("TOPIC", "dc1.", "PREFIXED", "READ"),
    ("TOPIC", "audited.gateway.dc1.state", "LITERAL", "READ"),
]
RIGHTS: Final[dict[str, list[Right]]] = {
    "loader": LOADER,
    "audit": AUDIT,
    # Sees names and offsets, but no record.
    "looker": [("TOPIC", "dc1.", "PREFIXED", "DESCRIBE"), ("TOPIC", "dc1.", "PREFIXED", "DESCRIBE_CONFIGS")],
    "reader": [("TOPIC", "dc1.", "PREFIXED", "READ")],
}
# No escape changes it.
SECRET_PART: Final = b"; with = all"
EVERY_WAY: Final = (*PASSWORDS, "OAUTHBEARER", "certificate")


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """A folder, beside which the tests have their files."""
    return tmp_path / "logs"


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory, spark: SparkSession) -> Iterator[SecuredKafka]:
    kafka = SecuredKafka(
        tmp_path_factory.mktemp("secured") / "files", ["loader", "audit", "looker", "reader", "nobody"]
    )
    with kafka:
        with kafka_topics(spark, KafkaSettings(bootstrap_servers=kafka.bootstrap)) as plain:
            kafka.create_users(plain)
        for user, rights in RIGHTS.items():
            asyncio.run(grant(kafka.bootstrap, user, rights))
        yield kafka


@pytest.fixture
def topic(secured: SecuredKafka, topic_name: str) -> Topic:
    return Topic(secured.bootstrap, f"dc1.{topic_name}")


Load = Callable[[KafkaSettings, Path, str], list[Any]]


@pytest.fixture
def load(spark: SparkSession) -> Load:
    def run(settings: KafkaSettings, table: Path, topic: str) -> list[Any]:
        with kafka_topics(spark, settings) as kafka:
            return list(load_table(Loader(spark, kafka, "dc1", "run"), job(Location.of(table), topic)))

    return run


@pytest.mark.parametrize("way", EVERY_WAY)
async def test_load_view_and_query_with_every_login(
    way: str, secured: SecuredKafka, spark: SparkSession, topic: Topic, table: Path, load: Load, capfd: Any
):
    await topic.create(2)
    await topic.write(chunks_of("a", b"1\n2\n") + chunks_of("b", b"3\n"), partitions=2)
    settings = secured.settings("loader", way)
    load(settings, table, topic.name)
    check_exact(table, topic.committed)
    await topic.write(chunks_of("a", b"4\n", start=9), partitions=2)
    shown = realtime(spark, table, kafka=settings)
    assert shown.count() == 4
    plan = shown._jdf.queryExecution().toString()
    file = table.with_name("kafka.toml")
    file.write_text(as_toml("kafka", secured.plain_settings("loader", way)))
    query = ["query", "SELECT count(*) AS n FROM logs", "--table", str(table), "--kafka", str(file), "--format", "csv"]
    status = await asyncio.to_thread(main.main, query)
    output, said = capfd.readouterr()
    assert (status, output.split()) == (0, ["n", "4"]), said
    for text in (plan, said, *(row["origin"] for row in stored(table.with_name("logs_ledger")))):
        assert SECRET_PART.decode() not in text
        assert "jaas" not in text


WRONG: Final = {
    "password": ({"sasl_password_file": "wrong-password"}, "loader", "SaslAuthentication", "the file of the password"),
    "unknown authority": ({"ca_file": "other-ca.pem"}, "loader", "SslAuthentication", "kafka.ca_file"),
    "expired": ({"bootstrap_servers": "EXPIRED"}, "loader", "SslAuthentication", "certificate of the broker"),
    "no right at all": ({}, "nobody", "TopicAuthorization", "dc1."),
    "no right to the configuration": ({}, "reader", "TopicAuthorization", "DescribeConfigs"),
    "no right to read": ({}, "looker", "TopicAuthorization", "dc1."),
}


@pytest.mark.parametrize("case", WRONG)
async def test_what_kafka_refuses_is_named_and_loses_nothing(
    case: str, secured: SecuredKafka, topic: Topic, table: Path, load: Load
):
    changes, user, kind, named = WRONG[case]
    files = {name: str(secured.folder / value) for name, value in changes.items() if name.endswith("file")}
    addresses = {name: secured.address(value) for name, value in changes.items() if name == "bootstrap_servers"}
    settings = secured.settings(user, **files, **addresses)
    await topic.create()
    await topic.write(chunks_of("a", b"1\n"))
    with pytest.raises(KafkaRefused) as caught:
        load(settings, table, topic.name)
    said = str(caught.value)
    assert kind in said
    assert named in said
    assert settings.bootstrap_servers in said or topic.name in said
    assert PASSWORD not in said
    assert "a wrong one" not in said
    load(secured.settings("loader"), table, topic.name)
    check_exact(table, topic.committed)


async def test_a_topic_whose_right_was_revoked_does_not_pass_for_a_removed_one(
    secured: SecuredKafka, topic: Topic, table: Path, load: Load
):
    await topic.create()
    await topic.write(chunks_of("a", b"1\n"))
    load(secured.settings("loader"), table, topic.name)
    with pytest.raises(KafkaRefused, match="right is missing"):
        load(secured.settings("nobody"), table, "dc1.*")


async def test_a_renewed_password_or_token_needs_no_new_loader(
    secured: SecuredKafka, spark: SparkSession, topic: Topic, table: Path
):
    await topic.create()
    await topic.write(chunks_of("a", b"1\n"))
    for way, name, good, bad in (
        ("SCRAM-SHA-256", "sasl_password_file", PASSWORD, "a wrong one"),
        ("OAUTHBEARER", "sasl_token_file", secured.token("loader"), secured.token("nobody")),
    ):
        file = table.with_name(name)
        file.write_text(bad)
        with kafka_topics(spark, secured.settings("loader", way, **{name: str(file)})) as kafka:
            loader = Loader(spark, kafka, "dc1", "run")
            with pytest.raises(KafkaRefused):
                list(load_table(loader, job(Location.of(table), topic.name)))
            file.write_text(good)
            list(load_table(loader, job(Location.of(table), topic.name)))
        check_exact(table, topic.committed)


async def test_the_command_with_an_event_log_shows_no_secret(secured: SecuredKafka, topic: Topic, table: Path):
    await topic.create()
    await topic.write(chunks_of("a", b"1\n2\n"))
    events, file = table.with_name("events"), table.with_name("load.toml")
    events.mkdir()
    kafka = as_toml("kafka", secured.plain_settings("loader"))
    file.write_text(
        f'{kafka}[spark]\nmaster = "local[1]"\ndriver_memory = "512m"\nscratch = "{table.with_name("scratch")}"\n'
        f'[spark.conf]\n"spark.eventLog.enabled" = "true"\n"spark.eventLog.dir" = "{events}"\n'
        '"spark.eventLog.compress" = "false"\n'
        f'[[tables]]\npath = "{table}"\ntopics = ["{topic.name}"]\n'
    )
    ended = run_module(["--config", str(file), "--json"])
    assert ended.returncode == 0, ended.stdout + ended.stderr
    check_exact(table, topic.committed)
    written = [path for path in table.parent.rglob("*") if path.is_file()]
    assert any(events in path.parents for path in written)
    for path in written:
        assert SECRET_PART not in path.read_bytes(), path
    file.write_text(file.read_text().replace("/password", "/wrong-password"))
    ended = run_module(["--config", str(file), "--json"])
    assert ended.returncode == 3
    said = json.loads(ended.stdout)["tables"][0]["error"]
    assert secured.address("SECURED") in said
    assert "as loader" in said
    assert "a wrong one" not in ended.stdout + ended.stderr


def test_a_file_that_cannot_be_used_is_named_before_anything_starts(secured: SecuredKafka, spark: SparkSession):
    missing = secured.settings("loader", sasl_password_file=str(secured.folder / "none"))
    with pytest.raises(LoaderConfigError, match=r"kafka\.sasl_password_file: .*none"), kafka_topics(spark, missing):
        pass


@pytest.mark.parametrize("way", EVERY_WAY[:-1])
async def test_audit_with_its_rights(way: str, secured: SecuredKafka, topic_name: str, tmp_path: Path, load: Load):
    world = AuditedWorld(secured.bootstrap, topic_name)
    await world.create()
    await world.write(world.plan(), transactional_id=world.name)
    load(secured.settings("loader"), tmp_path / "t", world.topic)
    settings = AuditConfig(
        dc="dc1",
        prefix="audited",
        kafka=secured.settings("audit", way),
        topics=[world.name],
        tables=[Location.of(tmp_path / "t")],
    )
    report = await audit(settings)
    assert not report.findings.counts
    assert report.table is not None
    assert report.table.compared == report.table.rows == report.lines


REFUSED_AUDITS: Final = {
    "password": ({"sasl_password_file": "wrong-password"}, "audit", 3, "Authentication failed"),
    "unknown authority": ({"ca_file": "other-ca.pem"}, "audit", 3, "certificate verify failed"),
    "expired": ({"bootstrap_servers": "EXPIRED"}, "audit", 3, "certificate has expired"),
    "no right at all": ({}, "nobody", 2, "no state topic"),
}


@pytest.mark.parametrize("case", REFUSED_AUDITS)
async def test_an_audit_that_kafka_refuses_says_why(case: str, secured: SecuredKafka, topic_name: str):
    changes, user, status, named = REFUSED_AUDITS[case]
    files = {name: str(secured.folder / value) for name, value in changes.items() if name.endswith("file")}
    addresses = {name: secured.address(value) for name, value in changes.items() if name == "bootstrap_servers"}
    settings = secured.settings(user, **files, **addresses)
    with pytest.raises(CommandError) as caught:
        await audit(AuditConfig(dc="dc1", prefix="audited", kafka=settings))
    assert caught.value.exit_status == status
    assert named in str(caught.value)
    assert PASSWORD not in str(caught.value)


class AuditedWorld(World):
    @property
    def prefix(self) -> str:
        return "audited"
