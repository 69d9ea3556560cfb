"""Exceptions of the JVM become errors of the loader, by the class names of the exception and its causes."""

from __future__ import annotations

from typing import Any

import pytest
from logferry.loaders.errors import KafkaUnavailable, SparkFailed, SparkUnavailable, StorageUnavailable, TopicChanged
from logferry.loaders.jvm_errors import sorted_error, sorted_errors
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


class Thrown(Py4JJavaError):  # type: ignore[misc]  # py4j has no types
    def __init__(self, *names: tuple[str, str]) -> None:
        self.java_exception = Java(list(names))

    def __str__(self) -> str:
        return "thrown"


SPARK = ("org.apache.spark.SparkException", "Job aborted")
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
        KafkaUnavailable,
    ),
    "no polling": (Thrown(SPARK, ("java.util.concurrent.TimeoutException", "Cannot fetch record")), KafkaUnavailable),
    "disk full": (Thrown(SPARK, ("java.io.IOException", "No space left on device")), StorageUnavailable),
    # As a NameNode that ends leaves them, by the moment.
    "reset": (Thrown(SPARK, ("java.net.SocketException", "Connection reset")), StorageUnavailable),
    "not there": (Thrown(SPARK, ("java.net.ConnectException", "Connection refused")), StorageUnavailable),
    "no name": (Thrown(SPARK, ("java.net.UnknownHostException", "namenode")), StorageUnavailable),
    "closed": (Thrown(SPARK, ("java.nio.channels.ClosedChannelException", "")), StorageUnavailable),
    "TLS cut": (Thrown(SPARK, ("javax.net.ssl.SSLException", "closed")), StorageUnavailable),
    "dead": (Py4JNetworkError("gone"), SparkUnavailable),
    "refused": (ConnectionRefusedError(), SparkUnavailable),
    "not foreseen": (Thrown(SPARK, ("java.lang.NullPointerException", "")), SparkFailed),
}


@pytest.mark.parametrize("case", SORTED)
def test_errors_of_java_become_errors_of_the_loader(case: str):
    error, kind = SORTED[case]
    ours = sorted_error(error, "reading dc1.a")
    assert type(ours) is kind
    assert str(ours).startswith("reading dc1.a: ")


def test_an_unforeseen_error_is_reported_in_full():
    with pytest.raises(SparkFailed, match=r"SparkException: Job aborted; caused by java\.lang\.NullPointer"):
        with sorted_errors("reading"):
            raise Thrown(SPARK, ("java.lang.NullPointerException", "x"))
