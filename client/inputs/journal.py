"""systemd's journal → spool, each entry once: the cursor of the last entry is in the spool itself.

``journalctl`` reads the journal: it knows every version of the format, and its filters. It is asked for the entries
*from* the last cursor on, and the first one must have that cursor. If it has another one, the entry is no longer there,
and others may be missing with it: that is said (`journal-cursor-gone`). The entries follow from there.

While the spool is full, ``journalctl`` waits. What journald removes in that time it still has open, as far as it had
begun to read the file.
"""

from __future__ import annotations

import os
import select
import subprocess
import threading
from collections.abc import Sequence
from contextlib import suppress

from logferry.client.events import log_event
from logferry.client.inputs.counters import InputCounters
from logferry.client.inputs.journal_export import CURSOR, DamagedExport, ExportParser
from logferry.client.inputs.spool import Spool

READ_BYTES = 1 << 16
AGAIN_S = (1.0, 60.0)
_MARK = b'"' + CURSOR.encode() + b'":"'


class JournalInput:
    """``command``: journalctl with the options that say which entries; `journal_command` makes it."""

    def __init__(self, spool: Spool, counters: InputCounters, command: Sequence[str], from_end: bool) -> None:
        self._spool = spool
        self._counters = counters
        self._command = list(command)
        self._from_end = from_end
        self._cursor = ""
        self._ended = threading.Event()
        self._wake, self._end = os.pipe()
        self._thread = threading.Thread(target=counters.guard(self._work), name="journal", daemon=True)

    def start(self) -> None:
        self._cursor = cursor_of(self._spool.last_line())
        self._thread.start()

    def reload(self) -> None:
        """Nothing can be read again."""

    def close(self, timeout_s: float) -> None:
        self._ended.set()
        os.write(self._end, b"\0")
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def _work(self) -> None:
        pause_s = AGAIN_S[0]
        while not self._ended.is_set():
            before = self._counters.messages
            try:
                if not self._cursor and self._from_end:
                    self._begin_at_end()
                reason = self._follow()
            except (OSError, DamagedExport) as error:
                reason = getattr(error, "strerror", None) or str(error)
            if self._ended.is_set():
                return
            pause_s = AGAIN_S[0] if self._counters.messages > before else min(2 * pause_s, AGAIN_S[1])
            if reason != self._counters.error:
                log_event("journal-ended", input=self._counters.name, reason=reason)
            self._counters.error = reason
            self._ended.wait(pause_s)

    def _begin_at_end(self) -> None:
        """The last entry of now counts as read; an empty journal is read from its beginning."""
        command = [*self._command, "--lines=1"]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False, env=_environment())
        if done.returncode:
            raise OSError(done.returncode, _last_line(done.stderr) or f"journalctl: status {done.returncode}")
        entries = ExportParser().feed(done.stdout)
        if entries:
            self._cursor = entries[-1][0]
            self._spool.note(b'{"' + CURSOR.encode() + b'":"' + self._cursor.encode() + b'"}')
        self._from_end = False

    def _follow(self) -> str:
        """Until the client ends, or journalctl does: then why."""
        options = ["--follow", "--no-tail", *([f"--cursor={self._cursor}"] if self._cursor else [])]
        with subprocess.Popen(
            [*self._command, *options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=_environment(),
        ) as process:
            try:
                said = self._take_all(process)
            finally:
                process.kill()
        return _last_line(said) or f"journalctl ended with status {process.returncode}"

    def _take_all(self, process: subprocess.Popen[bytes]) -> bytes:
        """Its entries into the spool. Returns the end of its standard error."""
        if process.stdout is None or process.stderr is None:
            return b""
        out, err = process.stdout.fileno(), process.stderr.fileno()
        parser, said, open_ones = ExportParser(), b"", {out, err}
        expected = self._cursor
        while out in open_ones:
            ready, _, _ = select.select([*open_ones, self._wake], [], [], AGAIN_S[0])
            if not ready:
                self._counters.error = ""  # it runs, and nothing is new
            if self._wake in ready:
                return said
            if err in ready:
                more = os.read(err, READ_BYTES)
                said = (said + more)[-READ_BYTES:]
                open_ones.discard(err if not more else -1)
            if out not in ready:
                continue
            data = os.read(out, READ_BYTES)
            if not data:
                open_ones.discard(out)
            for cursor, line in parser.feed(data):
                if expected and cursor == expected:
                    expected = ""
                    continue
                if expected:
                    log_event("journal-cursor-gone", input=self._counters.name, cursor=expected, next=cursor)
                    expected = ""
                if not self._spool.put_when_room(line):
                    return said
                self._cursor = cursor
                self._counters.took(1, len(line))
                self._counters.error = ""
        return said


def journal_command(units: Sequence[str], directory: str | None, namespace: str | None) -> list[str]:
    command = ["journalctl", "--quiet", "--no-pager", "--output=export"]
    command += [f"--unit={unit}" for unit in units]
    command += [f"--directory={directory}"] if directory else []
    return [*command, *([f"--namespace={namespace}"] if namespace else [])]


def cursor_of(line: bytes) -> str:
    """Of the last record; empty: there is none."""
    begin = line.find(_MARK)
    if begin < 0:
        return ""
    begin += len(_MARK)
    return line[begin : line.index(b'"', begin)].decode()


def _environment() -> dict[str, str]:
    return {**os.environ, "LC_ALL": "C", "SYSTEMD_COLORS": "0"}


def _last_line(said: bytes) -> str:
    with suppress(IndexError):
        return said.decode(errors="replace").strip().splitlines()[-1]
    return ""
