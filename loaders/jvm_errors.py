"""What the JVM throws, sorted into our errors by the classes of the exception and its causes.

Spark wraps what happened in several layers, and PySpark turns some of them into exceptions of its own; the class
names of the whole chain are what can be relied on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

from logferry.loaders.errors import (
    ExecutorLost,
    KafkaAway,
    LoadError,
    SparkAway,
    SparkFailed,
    StorageAway,
    TopicChanged,
)
from py4j.protocol import Py4JError, Py4JNetworkError
from pyspark.errors.exceptions.captured import CapturedException
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

JVM_ERRORS: Final = (Py4JError, CapturedException, ConnectionError)

# Delta's way to say that another commit came first.
_RACES: Final = re.compile(
    r"io\.delta\.exceptions\.(Concurrent\w+|ProtocolChanged|MetadataChanged)Exception"
    r"|org\.apache\.spark\.sql\.delta\.(Concurrent\w+|ProtocolChanged|MetadataChanged)Exception"
    r"|\S*FileAlreadyExistsException"
)
_KAFKA_LOST: Final = re.compile(r"\S*(OffsetOutOfRange|UnknownTopicOrPartition|UnknownTopicId)Exception")
# Spark tries again what it can; what an executor alone had is gone with it.
_EXECUTOR: Final = re.compile(
    r"CHECKPOINT_RDD_BLOCK_ID_NOT_FOUND|Checkpoint block rdd_\S+ not found|ExecutorLostFailure"
)
_LOST_TEXT: Final = "Some data may have been lost"
_KAFKA: Final = re.compile(r"org\.apache\.kafka\..*|java\.util\.concurrent\.TimeoutException")
_STORAGE: Final = re.compile(r"java\.io\.\w+|java\.nio\.file\.\w+|org\.apache\.hadoop\.\S+")


def java_chain(error: BaseException) -> list[tuple[str, str]]:
    """(class name, message) of the Java exception and its causes, outermost first; empty for a dead JVM."""
    java: Any = getattr(error, "java_exception", None) or getattr(error, "_origin", None)
    chain: list[tuple[str, str]] = []
    try:
        while java is not None and len(chain) < 20:
            chain.append((java.getClass().getName(), str(java.getMessage() or "")))
            java = java.getCause()
    except (Py4JNetworkError, ConnectionError):
        return []
    return chain


def lost_race(error: BaseException) -> bool:
    return any(_RACES.fullmatch(name) for name, _ in java_chain(error))


def sorted_error(error: BaseException, doing: str) -> LoadError:
    """Our error for a Java one. It holds the text: the exception itself can only be asked while its JVM lives."""
    chain = java_chain(error)
    if not chain:
        return SparkAway(f"{doing}: Spark's JVM has ended")
    name, message = chain[-1]
    said = f"{doing}: {name.rpartition('.')[2]}: {message.splitlines()[0] if message else ''}"
    names = [n for n, _ in chain]
    if any(_KAFKA_LOST.fullmatch(n) for n in names) or any(_LOST_TEXT in text for _, text in chain):
        return TopicChanged(said)
    if any(_EXECUTOR.search(text) for _, text in chain):
        return ExecutorLost(said)
    if any(_KAFKA.fullmatch(n) for n in names):
        return KafkaAway(said)
    if any(_STORAGE.fullmatch(n) for n in names):
        return StorageAway(said)
    return SparkFailed(f"{doing}: " + "; caused by ".join(f"{name}: {text}" for name, text in chain))


@contextmanager
def released() -> Iterator[None]:
    """For giving back what the JVM holds: when it has ended, all of that is given back already."""
    with suppress(Py4JNetworkError, ConnectionError):
        yield


@contextmanager
def sorted_errors(doing: str) -> Iterator[None]:
    """Turns the JVM's exceptions into ours."""
    try:
        yield
    except JVM_ERRORS as error:
        raise sorted_error(error, doing) from error


def collected(frame: DataFrame) -> list[dict[str, Any]]:
    """The rows of a small result, by the connection that there is: Spark's own way opens a socket for each result."""
    whole = F.to_json(F.collect_list(F.struct("*")), {"ignoreNullFields": "false"})
    jvm_frame: Any = frame.agg(whole)._jdf
    rows: list[dict[str, Any]] = json.loads(jvm_frame.head().getString(0))
    return rows
