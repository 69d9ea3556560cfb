"""The failures of a load, named for what the caller must do.

``LoaderConfigError``: correct the call or the configuration. ``Terminal``: the load is refused, and will be until an
operator acts; nothing was skipped. ``Transient``: something that the load needs is unavailable; the same call later
resumes exactly where this one stopped.
"""

from __future__ import annotations

from typing import Final

EXIT_DONE: Final = 0
EXIT_REFUSED: Final = 1
EXIT_USAGE: Final = 2
EXIT_UNAVAILABLE: Final = 3
EXIT_SIGNAL: Final = 130


class LoadError(Exception):
    """The text states what happened, and to which table, topic or offset."""

    exit_status = EXIT_REFUSED


class LoaderConfigError(LoadError):
    exit_status = EXIT_USAGE


class Terminal(LoadError):
    """To continue would lose or duplicate rows."""


class ForeignTable(Terminal):
    """The table has rows or columns that the ledger does not account for."""


class UnsupportedFeature(Terminal):
    """The table uses a feature of Delta that this loader cannot keep; the text names it."""


class LedgerBroken(Terminal):
    """Table, quarantine and ledger do not match: an entry is missing, or one of the tables was restored."""


class TopicChanged(Terminal):
    """Kafka no longer has what the ledger refers to: a topic was removed or recreated, or records are gone."""


class CannotMove(Terminal):
    """A position is unknown in the data centre to which a table is to move."""


class ClockAhead(Terminal):
    """The clock of this host seems to be ahead, so that rows would be dropped too early."""


class SparkFailed(Terminal):
    """An unexpected failure in Spark; the text has the chain of Java exceptions."""


class Transient(LoadError):
    exit_status = EXIT_UNAVAILABLE


class KafkaUnavailable(Transient):
    pass


class KafkaRefused(Transient):
    """Kafka refuses the certificate, the credentials or a right, until an operator mends it there or in the files."""


class StorageUnavailable(Transient):
    pass


class GatewayUnavailable(Transient):
    pass


class MirrorBehind(Transient):
    """The mirror has not copied all that the table holds."""


class ExecutorLost(Transient):
    """An executor of the cluster ended, and its part of a batch with it."""


class Overtaken(Transient):
    """Another loader did this first."""


class SparkUnavailable(Transient):
    """The JVM cannot be started, or it ended."""
