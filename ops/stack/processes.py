"""Processes that this one starts and that never outlive it, not even if it is killed by SIGKILL.

Linux sends a chosen signal to a process when its parent goes (``PR_SET_PDEATHSIG``), and "parent" is the
*thread* that started it. So one thread of this module starts them all and lives as long as the process. The
signal is asked for by a small launcher that then becomes the program itself (same pid): no Python runs between
fork and exec in this process, which would not be safe beside other threads.
"""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path

from logferry.ops.cli.problems import Unavailable

_LOG_BYTES_MAX = 16 << 20
_TAIL_LINES = 25

# The parent may be gone before the launcher asks for the signal; then it ends by itself.
_LAUNCHER = """
import os, sys
if sys.platform == "linux":
    import ctypes
    ctypes.CDLL(None, use_errno=True).prctl(1, 9, 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execvp(sys.argv[2], sys.argv[2:])
"""


class Child:
    """One program with its log file; started, ended and started again under the same name, by any thread.

    Its standard input is empty, both outputs are appended to the log. It has a process group of its own: Ctrl-C
    reaches this process, which then ends its children in order.
    """

    def __init__(self, name: str, command: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> None:
        self.name = name
        self.log = log
        self._command = list(command)
        self._env = dict(env) if env is not None else None
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0
        self._starting = threading.RLock()

    def start(self) -> bool:
        """Starts it unless it runs; whether it was started."""
        with self._starting:
            if not self.running:
                self._start()
                return True
        return False

    def restart(self) -> None:
        """Ends it by SIGKILL if it runs, and starts it."""
        with self._starting:
            self.send(signal.SIGKILL)
            self._start()

    def _start(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        if self.log.exists() and self.log.stat().st_size > _LOG_BYTES_MAX:
            self.log.replace(self.log.with_name(self.log.name + ".1"))
        with self.log.open("ab") as log:
            self._log_start = log.tell()
            command = [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), *self._command]
            self._process = _starter.start(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._env, start_new_session=True
            )

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int | None:
        """None unless it is running."""
        return self._process.pid if self._process is not None and self.running else None

    @property
    def exit_status(self) -> int | None:
        """Of the last run, negative for a signal; None while it runs or before the first."""
        return self._process.poll() if self._process is not None else None

    def send(self, number: int) -> None:
        """Sends a signal; nothing happens if it is not running. After SIGKILL it is gone when this returns."""
        if self._process is not None:
            self._process.send_signal(number)
            if number == signal.SIGKILL:
                self._process.wait()

    def stop(self, timeout_s: float) -> bool:
        """SIGTERM, and SIGKILL after the time-out. Whether it went by itself; calling again is safe."""
        if self._process is None:
            return True
        self.ask_to_stop()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            return False
        return True

    def ends_by_itself(self, timeout_s: float | None = None) -> bool:
        """Waits for the end of its present run; False if it still runs after the time-out."""
        if self._process is not None:
            try:
                self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                return False
        return True

    def ask_to_stop(self) -> None:
        """SIGTERM without waiting; a stopped process is continued, or it would never hear of it."""
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            self._process.send_signal(signal.SIGCONT)

    def said(self) -> str:
        """The end of what it wrote to its log since it was started."""
        try:
            with self.log.open("rb") as log:
                log.seek(self._log_start)
                text = log.read().decode(errors="replace")
        except FileNotFoundError:
            return ""
        return "\n".join(text.splitlines()[-_TAIL_LINES:])

    def failed(self, what: str) -> Unavailable:
        """The error that says ``what``, with the end of the log."""
        return Unavailable(f"{self.name} {what}. The end of {self.log}:\n{self.said()}")


def stop_together(children: Sequence[Child], timeout_s: float) -> list[str]:
    """Asks all to stop, waits for them, kills the rest after the time-out. The names of those that were killed."""
    for child in children:
        child.ask_to_stop()
    deadline = time.monotonic() + timeout_s
    return [child.name for child in children if not child.stop(max(0.0, deadline - time.monotonic()))]


def processes_with(*texts: str) -> list[int]:
    """The processes that have all of ``texts`` in their command lines; none where there is no /proc."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = file.read_bytes()
            if all(text.encode() in command for text in texts):
                found.append(int(file.parent.name))
        except OSError:  # it ended meanwhile
            continue
    return found


class _Starter:
    """The thread that starts processes; a new one after a fork, in which threads do not come along."""

    def __init__(self) -> None:
        self._reset()
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._calls: queue.SimpleQueue[tuple[Future[subprocess.Popen[bytes]], list[str], dict[str, object]]]
        self._calls = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self, command: list[str], **options: object) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="starts-processes", daemon=True)
                self._thread.start()
        future: Future[subprocess.Popen[bytes]] = Future()
        self._calls.put((future, command, options))
        return future.result()

    def _run(self) -> None:
        while True:
            future, command, options = self._calls.get()
            try:
                future.set_result(subprocess.Popen(command, **options))  # type: ignore[call-overload]
            except (OSError, ValueError, subprocess.SubprocessError) as error:
                future.set_exception(error)


_starter = _Starter()
