"""Errors that the user can fix, sorted by the exit status of the command line.

Standard library only and Python 3.9+: the command line maps them for every sub-command.
"""

from __future__ import annotations


class CommandError(Exception):
    """An error that the user can fix. The text says what is wrong and what to do; it is shown without a traceback."""

    exit_status = 1


class UsageError(CommandError):
    """The arguments, the configuration or a folder cannot be used."""

    exit_status = 2


class Unavailable(CommandError):
    """Java, Kafka, a gateway or the network is missing or does not answer."""

    exit_status = 3
