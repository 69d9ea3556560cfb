"""What tests share: a running Kafka and gateway, started when the first test asks for them and ended
with the session."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from hypothesis import HealthCheck, settings
from logferry.loaders.location import Location
from logferry.ops.commands.load import stores_in
from logferry.ops.runtime.jars import spark_jars
from logferry.ops.stack.kafka_cluster import KafkaCluster

from tests.support.gateway import Gateway, gateway
from tests.support.main_ways import MAIN_WAYS
from tests.support.stores import STORES, new_warehouse, running_store

_TESTS: Final = Path(__file__).parent
_numbers = itertools.count(1)

# A busy machine is no reason to fail.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("untimed")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--store", choices=STORES, default=STORES[0], help="where the loader's tests have their tables")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Every test below ``tests/crash`` is a crash test; of the integration tests, those off the main ways are full.

    In a store, only tests run that have tables there.
    """
    if config.getoption("--store") != STORES[0]:
        elsewhere = [item for item in items if "warehouse" not in getattr(item, "fixturenames", ())]
        config.hook.pytest_deselected(items=elsewhere)
        items[:] = [item for item in items if item not in elsewhere]
    for item in items:
        folder, *rest = item.path.relative_to(_TESTS).parts
        if folder == "crash":
            item.add_marker(pytest.mark.crash)
        elif folder == "integration":
            main = MAIN_WAYS.get("/".join(rest), "-")
            if main and item.name.partition("[")[0] not in main.split():
                item.add_marker(pytest.mark.full)


@pytest.fixture(scope="session")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaCluster]:
    """A cluster of one broker for all tests of the session: use topics of your own, and leave the broker alone."""
    with KafkaCluster("tests", tmp_path_factory.mktemp("kafka")) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def workers(kafka: KafkaCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """Two gateway workers that share the lanes: use topics of your own, and leave the processes alone."""
    with gateway(kafka, tmp_path_factory.mktemp("workers"), "shared") as running:
        yield running


@pytest.fixture
def topic_name(request: pytest.FixtureRequest) -> str:
    """A topic name that no other test of this session has."""
    plain = "".join(letter if letter.isalnum() else "-" for letter in request.node.name)
    return f"{plain[:80]}-{next(_numbers)}"


@pytest.fixture(scope="session")
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The root for tables in the store of this run; empty: folders."""
    with running_store(request.config.getoption("--store"), tmp_path_factory.mktemp("store")) as root:
        yield root


@pytest.fixture
def warehouse(store: str, tmp_path: Path) -> Location:
    """An empty place for the tables of this test."""
    return new_warehouse(store, tmp_path)


@pytest.fixture(scope="session")
def spark_jar_paths(store: str) -> list[Path]:
    """The jars that go beside pyspark's own."""
    return spark_jars(**stores_in([store]))
