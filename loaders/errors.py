"""What can go wrong with a load, named for what the caller must do.

``ConfigError``: mend the call or the configuration. ``Terminal``: the load is refused, and will be refused again
until somebody has looked at it; nothing was skipped. ``Transient``: something that the load needs is away; the same
call later goes on exactly where this one stopped.
"""

from __future__ import annotations

from typing import Final

EXIT_DONE: Final = 0
EXIT_REFUSED: Final = 1
EXIT_USAGE: Final = 2
EXIT_AWAY: Final = 3
EXIT_INTERRUPTED: Final = 130


class LoadError(Exception):
    """The text says what happened, to which table, topic or offset."""

    exit_status = EXIT_REFUSED


class ConfigError(LoadError):
    exit_status = EXIT_USAGE


class Terminal(LoadError):
    """Going on would lose rows or double them."""


class ForeignTable(Terminal):
    """The table holds rows, or columns, that no ledger of ours accounts for."""


class LedgerBroken(Terminal):
    """Table, quarantine and ledger do not fit together: an entry is missing, or one of them was put back."""


class TopicChanged(Terminal):
    """What Kafka holds is not what the ledger speaks of: topic removed or created anew, records gone."""


class CannotMove(Terminal):
    """A position is not known in the data centre that a table is to move to."""


class SparkFailed(Terminal):
    """Something in Spark that nobody foresaw; the text holds the chain of Java's exceptions."""


class Transient(LoadError):
    exit_status = EXIT_AWAY


class KafkaAway(Transient):
    pass


class StorageAway(Transient):
    pass


class GatewayAway(Transient):
    pass


class MirrorBehind(Transient):
    """The mirror has not brought all that the table holds."""


class ExecutorLost(Transient):
    """An executor of the cluster has ended, and with it what it kept of a batch."""


class Overtaken(Transient):
    """Another loader has done what this one was at."""


class SparkAway(Transient):
    """The JVM cannot be started, or it ended."""
