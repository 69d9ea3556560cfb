"""Maps exceptions of the JVM to errors of the loader, by the classes of the exception and its causes.

Spark wraps a failure in several layers, and PySpark turns some of them into exceptions of its own; only the class names
of the whole chain are reliable.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Final

from logferry.loaders.errors import (
    ExecutorLost,
    KafkaRefused,
    KafkaUnavailable,
    LoadError,
    SparkFailed,
    SparkUnavailable,
    StorageUnavailable,
    TopicChanged,
)
from logferry.loaders.location import without_secrets
from py4j.protocol import Py4JError, Py4JNetworkError
from pyspark.errors.exceptions.captured import CapturedException
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

JVM_ERRORS: Final = (Py4JError, CapturedException, ConnectionError)

# What Kafka or its certificate refuses, and what to do.
_REFUSED: Final = (
    (re.compile(r"\S*\.SslAuthenticationException"), "check kafka.ca_file and the certificate of the broker"),
    (re.compile(r"\S*\.\w*AuthenticationException"), "check the user and the file of the password or token"),
    (re.compile(r"\S*\.\w+AuthorizationException"), "a right is missing: Read and DescribeConfigs on the topic"),
)
# Errors by "class: message" of an exception in the chain, the most specific first.
_KINDS: Final = (
    (r"^\S*(OffsetOutOfRange|UnknownTopicOrPartition|UnknownTopicId)Exception:", TopicChanged),
    (r"Some data may have been lost", TopicChanged),
    # Spark retries what it can; data that only one executor had is lost with it.
    (r"CHECKPOINT_RDD_BLOCK_ID_NOT_FOUND|Checkpoint block rdd_\S+ not found|ExecutorLostFailure", ExecutorLost),
    (r"^(org\.apache\.kafka\.\S*|java\.util\.concurrent\.TimeoutException):", KafkaUnavailable),
    (
        r"^(java\.(io|net|nio\.file|nio\.channels)\.\w+|javax\.net\.ssl\.\w+|org\.apache\.hadoop\.\S+):",
        StorageUnavailable,
    ),
)


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


def sorted_error(error: BaseException, doing: str) -> LoadError:
    """The loader's error for a Java one, with its text: the exception itself is readable only while its JVM lives."""
    chain = java_chain(error)
    if not chain:
        return SparkUnavailable(
            f"{doing}: Spark's JVM has ended; its own output says why. Without a word it was killed, mostly for "
            "memory: set a smaller batch_bytes, or give the host more"
        )
    name, message = chain[-1]
    said = without_secrets(f"{doing}: {name.rpartition('.')[2]}: {message.splitlines()[0] if message else ''}")
    for refusal, advice in _REFUSED:
        if found := next((n for n, _ in chain if refusal.fullmatch(n)), None):
            return KafkaRefused(f"{said}; Kafka refuses ({found.rpartition('.')[2]}): {advice}")
    whole = [f"{name}: {text}" for name, text in chain]
    for pattern, kind in _KINDS:
        if any(re.search(pattern, one) for one in whole):
            return kind(said)
    return SparkFailed(without_secrets(f"{doing}: " + "; caused by ".join(whole)))


def released() -> AbstractContextManager[None]:
    """For releasing resources of the JVM; ignores that the JVM has ended, which released them already."""
    return suppress(Py4JNetworkError, ConnectionError)


@contextmanager
def sorted_errors(doing: str) -> Iterator[None]:
    """Turns exceptions of the JVM into errors of the loader."""
    try:
        yield
    except JVM_ERRORS as error:
        raise sorted_error(error, doing) from error


def collected(frame: DataFrame) -> list[dict[str, Any]]:
    """The rows of a small result, over the existing connection: Spark's `collect` opens a socket for each result."""
    whole = F.to_json(F.collect_list(F.struct("*")), {"ignoreNullFields": "false"})
    jvm_frame: Any = frame.agg(whole)._jdf
    rows: list[dict[str, Any]] = json.loads(jvm_frame.head().getString(0))
    return rows
