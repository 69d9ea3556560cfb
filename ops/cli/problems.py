"""What goes wrong for reasons that the user can mend, sorted by the exit status of the command line.

Standard library only and Python 3.9+: the command line maps these for every sub-command.
"""

from __future__ import annotations


class Problem(Exception):
    """Something that the user can mend; the text says what is wrong and what to do. Shown without a traceback."""

    exit_status = 1


class WrongUse(Problem):
    """The call, the configuration or a folder given to it cannot be used as it is."""

    exit_status = 2


class Unavailable(Problem):
    """Something from outside is not there or does not answer: Java, Kafka, a gateway, the network."""

    exit_status = 3
