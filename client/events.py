"""Every log event of the push-client, and the line on standard error that it becomes.

A line is ``<time> <LEVEL> <event> key=value …``; values with spaces or quotes are JSON strings. ERROR means that an
operator must act.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import suppress

DEBUG, INFO, WARNING, ERROR = 10, 20, 30, 40  # as in `logging`
LEVELS = {DEBUG: "DEBUG", INFO: "INFO", WARNING: "WARNING", ERROR: "ERROR"}

# Every event by its level. What each means and what to do: ops/docs/reference/log-events.md, held equal by a test.
_BY_LEVEL = {
    DEBUG: """
        session sent retry
    """,
    INFO: """
        started stopped source-new source-resumed source-copied source-away source-finished gateway-back
        data-centre-back state-new credentials-read config-read hbase-serving
        hbase-announced-again hbase-tailing folder-polled spool-renewed
    """,
    WARNING: """
        file-limit nothing-matches file-gone source-over gateway-forgot nul-hole recut smaller gateway-away
        data-centre-left state-copied source-expired link-refused gateway-silent writer-unclosed token-unencrypted
        hbase-refused hbase-call-failed hbase-silent hbase-bulk-load hbase-table-missing
        kubelet-unusable hbase-wal-cut hbase-wal-waits hbase-unreported hbase-order-unknown spool-cut spool-left
    """,
    ERROR: """
        metrics-unusable file-missing file-unreadable deleted-dropped source-stopped refused gateway-timeout
        state-corrupt state-unusable state-write-failed credentials-unusable config-unusable
        hbase-not-recorded hbase-wal-gap hbase-wal-passed-over hbase-wal-refused
        spool-write-failed journal-ended journal-cursor-gone
    """,
}
EVENTS = {name: level for level, names in _BY_LEVEL.items() for name in names.split()}

_least_level: int | None = None  # None: not a program of its own


def set_up(verbose: bool) -> None:
    """Events go to standard error from now on, and not to `logging`, which takes a megabyte of memory."""
    global _least_level
    _least_level = DEBUG if verbose else INFO


def log_event(event: str, **fields: object) -> None:
    """Logs an event of `EVENTS`; an unknown name is a KeyError, so that a misspelt one fails its test."""
    level = EVENTS[event]
    if _least_level is None:
        import logging

        log = logging.getLogger("logferry.client")
        if log.isEnabledFor(level):
            log.log(level, "%s", _line(event, fields))
    elif level >= _least_level:
        now = time.time()
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now))
        with suppress(OSError, ValueError):  # standard error is closed
            sys.stderr.write(f"{at}.{int(now % 1 * 1000):03d}Z {LEVELS[level]} {_line(event, fields)}\n")
            sys.stderr.flush()


def _line(event: str, fields: dict[str, object]) -> str:
    return " ".join([event, *(f"{name}={_value(value)}" for name, value in fields.items())])


def _value(value: object) -> str:
    text = str(value)
    plain = text.isprintable() and text and not any(mark in text for mark in ' "=')
    return text if plain else json.dumps(text, ensure_ascii=not text.isprintable())
