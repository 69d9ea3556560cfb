"""A table moves between two Kafka clusters with TLS, logins and authorizers. Each has an authority of its own, and a
user that the other one does not know, with exactly the rights of operations/kafka.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
from logferry.gateway.config import KafkaSettings
from logferry.loaders.batches.execute import Loader
from logferry.loaders.batches.mirror_offsets import MirrorOffsets
from logferry.loaders.errors import CannotMove
from logferry.loaders.location import Location
from logferry.loaders.runs import table_run
from logferry.loaders.runs.table_facts import table_facts
from logferry.loaders.spark.kafka_access import kafka_topics
from logferry.loaders.storage.ledger import read_ledger
from pyspark.sql import SparkSession

from tests.support.kafka_rights import grant, rights_of_script
from tests.support.loader import check_exact, chunks_of, stored
from tests.support.loader_process import run_table
from tests.support.mirror import PREFIX, Mirror, Places, both_ways
from tests.support.mirrored_topic import mirroring
from tests.support.secured_kafka import PASSWORD, SecuredKafka, as_toml
from tests.support.table_loads import LoaderDied, die

pytestmark = [
    pytest.mark.spark,
    pytest.mark.timeout(300),
    # PySpark's own, of the check of a parser.
    pytest.mark.filterwarnings("ignore:Exception ignored in. <socket:pytest.PytestUnraisableExceptionWarning"),
]

USERS: Final = {"dc1": "loader1", "dc2": "loader2"}
OTHER: Final = {"dc1": "dc2", "dc2": "dc1"}
WAYS: Final = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER", "certificate")


class SecuredCentres:
    def __init__(self, folder: Path) -> None:
        self._clusters = {dc: SecuredKafka(folder / dc, [user]) for dc, user in USERS.items()}

    def cluster(self, dc: str) -> SecuredKafka:
        return self._clusters[dc]

    def settings(self, dc: str, way: str) -> KafkaSettings:
        return self.cluster(dc).settings(USERS[dc], way)

    @contextmanager
    def loader(self, spark: SparkSession, dc: str, way: str, *, notes: bool = True) -> Iterator[Loader]:
        """``notes``: it notes where positions are in the originals."""
        here, there = self.settings(dc, way), {OTHER[dc]: self.settings(OTHER[dc], way)}
        with closing(MirrorOffsets(here, PREFIX, dc)) as offsets, kafka_topics(spark, here) as kafka:
            yield Loader(spark, kafka, dc, "run", mirror_offsets=offsets if notes else None, other_kafka=there)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, spark: SparkSession) -> Iterator[SecuredCentres]:
    """With mirrors both ways, on the plain listeners."""
    folder = tmp_path_factory.mktemp("centres")
    found = SecuredCentres(folder)
    with ExitStack() as opened:
        for dc in USERS:
            opened.enter_context(found.cluster(dc))
        for dc, user in USERS.items():
            with kafka_topics(spark, KafkaSettings(bootstrap_servers=found.cluster(dc).bootstrap)) as plain:
                found.cluster(dc).create_users(plain)
            asyncio.run(grant(found.cluster(dc).bootstrap, user, rights_of_script(dc, OTHER[dc], folder)["loader"]))
            plain_there = {"bootstrap_servers": found.cluster(OTHER[dc]).bootstrap}
            mirror = Mirror(found, folder, PREFIX, 1, dc, remote=[{"dc": OTHER[dc], "kafka": plain_there}])
            opened.enter_context(mirroring(mirror))
        yield found


@pytest.fixture
async def places(stack: Any, topic_name: str, warehouse: Location) -> Places:
    found = Places(stack, topic_name[-40:].lstrip("-"), warehouse / "logs")
    await both_ways(found, partitions=2)
    return found


async def write(places: Places, round_: int) -> None:
    """Chunks in both data centres, and aborted ones in between: so offsets differ."""
    for dc, topic in places.topics.items():
        chunks = [one for s in "abcd" for one in chunks_of(f"{dc}-{s}", b"line %d\n" % round_, start=round_ * 1000)]
        await topic.write(chunks[:2], partitions=2)
        await topic.write(chunks_of(f"{dc}-x", b"aborted\n"), partitions=2, commit=False)
        await topic.write(chunks[2:], partitions=2)
    await places.mirrored()


@pytest.mark.parametrize("way", [WAYS[0], *(pytest.param(way, marks=pytest.mark.long) for way in WAYS[1:])])
async def test_positions_and_a_planned_batch_move_with_every_login(
    way: str, stack: SecuredCentres, places: Places, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
):
    """The positions have no note, so the mirror of the old data centre is asked; its Kafka has the planned batch."""
    await write(places, 0)
    with stack.loader(spark, "dc1", way, notes=False) as one, stack.loader(spark, "dc2", way) as two:
        places.load(one)
        assert not any(entry.originals for entry in read_ledger(Location.of(places.table)))
        await write(places, 1)
        with monkeypatch.context() as patch:
            patch.setattr(table_run, "do_batch", die)
            with pytest.raises(LoaderDied):
                places.load(one)
        said = places.move(two, wait_s=30)
        assert said is not None
        assert any(move.before != move.after for move in said), "offsets that are alike would show nothing"
        assert {row["dc"] for row in stored(places.table)} == {"dc1"}
        await write(places, 2)
        assert sum(batch.records for batch in places.load(two)) == 8
        check_exact(places.table, places.sent)


@pytest.mark.long
async def test_the_command_connects_by_the_section_of_the_other_data_centre(
    stack: SecuredCentres, places: Places, spark: SparkSession
):
    """Without it: by the ledger's address with the security of here, which the other data centre refuses."""
    await write(places, 0)
    with stack.loader(spark, "dc1", "SCRAM-SHA-512", notes=False) as one:
        places.load(one)
        with stack.loader(spark, "dc2", "SCRAM-SHA-512") as two, pytest.raises(CannotMove) as caught:
            places.move(replace(two, other_kafka={}))
    here, there = (stack.cluster(dc).plain_settings(USERS[dc]) for dc in ("dc2", "dc1"))
    assert there["bootstrap_servers"] in str(caught.value)
    assert "other_kafka.dc1" in str(caught.value)
    assert PASSWORD not in str(caught.value)
    file = Path(places.table.with_name("load-dc2.toml"))
    tables = f'[[tables]]\npath = "{places.table}"\ntopics = {list(places.job.topics)}\n'
    spark_settings = '[spark]\nmaster = "local[1]"\ndriver_memory = "512m"\n'
    file.write_text(
        'dc = "dc2"\n' + as_toml("kafka", here) + as_toml("other_kafka.dc1", there) + spark_settings + tables
    )
    command = ["move", str(places.table), "--config", str(file), "--to", "dc2", "--wait", "30", "--yes"]
    ended = await asyncio.to_thread(run_table, command)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert table_facts(Location.of(places.table))["last"]["dc"] == "dc2"
    await write(places, 1)
    with stack.loader(spark, "dc2", "SCRAM-SHA-512") as two:
        places.load(two)
    check_exact(places.table, places.sent)
    for text in (ended.stdout, ended.stderr, str(read_ledger(Location.of(places.table)))):
        assert PASSWORD not in text
