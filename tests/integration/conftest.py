"""One Spark session for all tests of this folder: a process can have but one, and starting it takes seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from logferry.gateway.config import KafkaSettings
from logferry.loaders.batches.execute import Loader
from logferry.loaders.config import SparkSettings
from logferry.loaders.location import Location
from logferry.loaders.spark.kafka_access import KafkaTopics, kafka_topics
from logferry.loaders.spark.session import spark_session
from logferry.loaders.spark.stores import settings_for
from logferry.ops.stack.kafka_cluster import KafkaCluster
from pyspark.sql import SparkSession

from tests.support.loader_process import java_env


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory, spark_jar_paths: list[Path], store: str) -> Iterator[SparkSession]:
    settings = SparkSettings(master="local[2]", driver_memory="1g")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in java_env().items():
            patch.setenv(name, value)
        access = settings_for([Location.of(f"{store}/any")] if store else [])
        with spark_session(settings, spark_jar_paths, tmp_path_factory.mktemp("spark"), access) as session:
            yield session


@pytest.fixture(scope="session")
def kafka_view(spark: SparkSession, kafka: KafkaCluster) -> Iterator[KafkaTopics]:
    with kafka_topics(spark, KafkaSettings(bootstrap_servers=kafka.bootstrap)) as topics:
        yield topics


@pytest.fixture
def loader(spark: SparkSession, kafka_view: KafkaTopics) -> Callable[..., Loader]:
    """``loader("run")``: what a run with that name shares among its tables."""
    return lambda run="run", dc="dc1": Loader(spark, kafka_view, dc, run)
