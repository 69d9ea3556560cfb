"""What tests share: a running Kafka and gateway, started when the first test asks for them and ended
with the session."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from logferry.ops.runtime.jars import spark_jars
from logferry.ops.stack.kafka_cluster import Cluster

from tests.support.gateway import Gateway, gateway

_numbers = itertools.count(1)

# A busy machine is no reason to fail.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("untimed")


@pytest.fixture(scope="session")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster of one broker for all tests of the session: use topics of your own, and leave the broker alone."""
    with Cluster("tests", tmp_path_factory.mktemp("kafka")) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def workers(kafka: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """Two gateway workers that share the lanes: use topics of your own, and leave the processes alone."""
    with gateway(kafka, tmp_path_factory.mktemp("workers"), "shared") as running:
        yield running


@pytest.fixture
def topic_name(request: pytest.FixtureRequest) -> str:
    """A topic name that no other test of this session has."""
    plain = "".join(letter if letter.isalnum() else "-" for letter in request.node.name)
    return f"{plain[:80]}-{next(_numbers)}"


@pytest.fixture(scope="session")
def spark_jar_paths() -> list[Path]:
    """The jars that go beside pyspark's own."""
    return spark_jars()
