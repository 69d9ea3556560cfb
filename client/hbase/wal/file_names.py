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


class LogFile(NamedTuple):
    """``log``: of which it is a part. ``is_closed``: it lies in ``oldWALs``, and nobody writes to it."""

    log: str
    number: int
    path: str
    is_closed: bool


def log_file(name: str, path: str, is_closed: bool) -> LogFile | None:
    """None: a file that holds no table's changes, as the logs of hbase:meta (``….meta``) and of the master's own
    region (``…$masterlocalwal$``).
    """
    match = _NAME.match(name)
    return LogFile(match["log"], int(match["number"]), path, is_closed) if match else None
