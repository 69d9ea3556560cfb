"""Sorting of what the JVM throws, by the class names of the exception and its causes."""

from __future__ import annotations

from typing import Any

import pytest
from logferry.loaders.errors import KafkaAway, SparkAway, SparkFailed, StorageAway, TopicChanged
from logferry.loaders.jvm_errors import lost_race, sorted_error, sorted_errors
from py4j.protocol import Py4JJavaError, Py4JNetworkError


class Java:
    """A Java exception as py4j shows it."""

    def __init__(self, names: list[tuple[str, str]]) -> None:
        self._name, self._message = names[0]
        self._cause = Java(names[1:]) if names[1:] else None

    def getClass(self) -> Any:
        return self

    def getName(self) -> str:
        return self._name

    def getMessage(self) -> str:
        return self._message

    def getCause(self) -> Java | None:
        return self._cause


class Thrown(Py4JJavaError):
    def __init__(self, *names: tuple[str, str]) -> None:
        self.java_exception = Java(list(names))

    def __str__(self) -> str:
        return "thrown"


SPARK = ("org.apache.spark.SparkException", "Job aborted")
DELTA = "io.delta.exceptions."
SORTED = {
    "records gone": (
        Thrown(SPARK, ("java.lang.IllegalStateException", "Cannot fetch offset 3. Some data may have been lost")),
        TopicChanged,
    ),
    "out of range": (
        Thrown(SPARK, ("org.apache.kafka.clients.consumer.OffsetOutOfRangeException", "")),
        TopicChanged,
    ),
    "topic gone": (
        Thrown(
            ("java.util.concurrent.ExecutionException", ""),
            ("org.apache.kafka.common.errors.UnknownTopicOrPartitionException", "no"),
        ),
        TopicChanged,
    ),
    "no broker": (
        Thrown(
            ("java.util.concurrent.ExecutionException", ""), ("org.apache.kafka.common.errors.TimeoutException", "no")
        ),
        KafkaAway,
    ),
    "no polling": (Thrown(SPARK, ("java.util.concurrent.TimeoutException", "Cannot fetch record")), KafkaAway),
    "disk full": (Thrown(SPARK, ("java.io.IOException", "No space left on device")), StorageAway),
    "dead": (Py4JNetworkError("gone"), SparkAway),
    "refused": (ConnectionRefusedError(), SparkAway),
    "not foreseen": (Thrown(SPARK, ("java.lang.NullPointerException", "")), SparkFailed),
}


@pytest.mark.parametrize("case", SORTED)
def test_sorting(case: str):
    error, kind = SORTED[case]
    ours = sorted_error(error, "reading dc1.a")
    assert type(ours) is kind
    assert str(ours).startswith("reading dc1.a: ")


def test_what_cannot_be_foreseen_is_told_whole():
    with pytest.raises(SparkFailed, match=r"SparkException: Job aborted; caused by java\.lang\.NullPointer"):
        with sorted_errors("reading"):
            raise Thrown(SPARK, ("java.lang.NullPointerException", "x"))


@pytest.mark.parametrize("name", ["ConcurrentTransaction", "ProtocolChanged", "MetadataChanged", "ConcurrentAppend"])
def test_lost_races(name: str):
    assert lost_race(Thrown(SPARK, (f"{DELTA}{name}Exception", "")))


def test_other_errors_are_no_lost_races():
    assert not lost_race(Thrown(SPARK, (f"{DELTA}DeltaIllegalStateException", "")))
    assert not lost_race(Py4JNetworkError("gone"))
