"""Every event that the push-client tells, in one place, and the one line on standard error that each becomes.

A line reads ``<time> <LEVEL> <event> key=value …``; values with spaces or quotes are JSON strings. ERROR
means that somebody must act.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import suppress

DEBUG, INFO, WARNING, ERROR = 10, 20, 30, 40  # as in `logging`
_NAMES = {DEBUG: "DEBUG", INFO: "INFO", WARNING: "WARNING", ERROR: "ERROR"}

EVENTS = {
    # event: (level, when it is told)
    "started": (INFO, "the client begins; which gateway, topic and state folder"),
    "file-limit": (WARNING, "the limit of open files could not be raised"),
    "metrics-unusable": (ERROR, "--metrics-port cannot be listened on; the client does not start"),
    "stopped": (INFO, "the client ends; what it sent"),
    "nothing-matches": (WARNING, "no file matches this pattern"),
    "file-missing": (ERROR, "a file named without wildcards is not there (told with --once)"),
    "file-unreadable": (ERROR, "a file matches but cannot be opened or read"),
    "file-gone": (WARNING, "a file went while the client was down; what it got after `position` is lost"),
    "source-new": (INFO, "a file, or a new incarnation of one, becomes a new source; why"),
    "source-resumed": (INFO, "a file is the one that the checkpoint knows"),
    "source-over": (WARNING, "a source ends before all of it was sent (truncated, replaced); why"),
    "source-away": (INFO, "the file was renamed or removed; it is read on through the open descriptor"),
    "deleted-dropped": (
        ERROR,
        "deleted files are larger than --deleted-bytes; from `sent_to` to `size` this one is lost",
    ),
    "source-finished": (INFO, "a rotated or removed file was sent to its end and is dropped"),
    "source-stopped": (ERROR, "no more is sent for this source until the client is started again; why"),
    "session": (DEBUG, "the gateway opened a session and said what it has recorded"),
    "gateway-forgot": (WARNING, "the gateway has less recorded than it acknowledged; sent again from there"),
    "sent": (DEBUG, "chunks were acknowledged"),
    "nul-hole": (WARNING, "a run of NUL bytes, as a loss of power or a truncation leaves it; sent as it is"),
    "recut": (WARNING, "the gateway has another position recorded; the chunks are cut anew there"),
    "smaller": (WARNING, "the gateway finds chunks too large; smaller ones from now on"),
    "refused": (ERROR, "the gateway refuses; tried again slowly, or given up with --once"),
    "retry": (DEBUG, "no answer, or one that asks to try again"),
    "gateway-away": (WARNING, "the gateway cannot be reached or cannot take chunks; files are the buffer"),
    "gateway-back": (INFO, "the gateway takes chunks again"),
    "data-centre-left": (WARNING, "sources go on in another data centre; which, and why"),
    "data-centre-back": (INFO, "sources come back to a data centre that is preferred; which, and why"),
    "gateway-timeout": (ERROR, "with --once: nothing was acknowledged for --timeout seconds"),
    "state-new": (INFO, "the state folder holds no checkpoint: every file is a new source"),
    "state-corrupt": (ERROR, "the checkpoint cannot be read and was set aside: every file is a new source"),
    "state-unusable": (ERROR, "the state folder cannot be used; the client does not start"),
    "state-write-failed": (ERROR, "the checkpoint cannot be written; new sources wait until it can"),
}

_least_level: int | None = None  # None: not a program of its own


def set_up(verbose: bool) -> None:
    """Sends events to standard error from now on, and not to `logging`: a megabyte that a guest can do without."""
    global _least_level
    _least_level = DEBUG if verbose else INFO


def tell(event: str, **fields: object) -> None:
    """Tells an event of `EVENTS`; an unknown name is a KeyError, so a misspelt one does not pass a test."""
    level, _ = EVENTS[event]
    if _least_level is None:
        import logging

        log = logging.getLogger("logferry.client")
        if log.isEnabledFor(level):
            log.log(level, "%s", _line(event, fields))
    elif level >= _least_level:
        now = time.time()
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now))
        with suppress(OSError, ValueError):  # nobody reads them any more
            sys.stderr.write(f"{at}.{int(now % 1 * 1000):03d}Z {_NAMES[level]} {_line(event, fields)}\n")
            sys.stderr.flush()


def _line(event: str, fields: dict[str, object]) -> str:
    return " ".join([event, *(f"{name}={_value(value)}" for name, value in fields.items())])


def _value(value: object) -> str:
    text = str(value)
    plain = text.isprintable() and text and not any(mark in text for mark in ' "=')
    return text if plain else json.dumps(text, ensure_ascii=not text.isprintable())
