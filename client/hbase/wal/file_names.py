"""The names of HBase's write-ahead logs. Pure.

A region server writes one file after another: ``HOST%2CPORT%2CSTART.TIME``, with several logs at a time
``HOST%2CPORT%2CSTART.GROUP.TIME``. What is before the time names the log here, and the time orders its files. The
folder of a live server is ``HOST,PORT,START``, of a dead one ``HOST,PORT,START-splitting``; in ``oldWALs`` the files of
all servers lie together.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_NAME = re.compile(r"(?P<log>[^/]+%2C\d+%2C\d+(?:\.[^/]+?)?)\.(?P<number>\d{10,})\Z")
# Of hbase:meta, of the master's own region, and of the procedures of an HBase before 2.3.
_WITHOUT_TABLES = re.compile(r".*\.meta\Z|.*\$masterlocalwal\$\Z|pv2-\d+\.log\Z")


class WalFile(NamedTuple):
    """``log``: of which it is a part. ``is_closed``: it lies in ``oldWALs``, and nobody writes to it."""

    log: str
    number: int
    path: str
    is_closed: bool


def log_file(name: str, path: str, is_closed: bool) -> WalFile | None:
    """None: a file of another kind."""
    match = _NAME.match(name)
    return WalFile(match["log"], int(match["number"]), path, is_closed) if match else None


def has_no_tables(name: str) -> bool:
    """Whether a file of another kind is known to hold no changes of users' tables. Logs of synchronous replication
    (``….syncrep``) hold some.
    """
    return _WITHOUT_TABLES.match(name) is not None
