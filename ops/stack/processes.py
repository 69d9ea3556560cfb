"""Child processes that never outlive this process, not even when it is killed by SIGKILL.

Linux sends a chosen signal to a process when its parent ends (``PR_SET_PDEATHSIG``); the parent is the *thread* that
started it. So one thread of this module starts all children and lives as long as the process. A small launcher
requests the signal and then executes the program (same pid): no Python code of this process runs between fork and
exec, which would not be safe beside other threads.

The services among them are configured by a TOML file and answer HTTP at free ports of the loopback address. These are
below the kernel's range for outgoing connections: when a killed broker restarts, no client's connection may hold its
port.
"""

from __future__ import annotations

import fcntl
import http.client
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Union
from urllib.parse import urlsplit

from logferry.ops.cli.problems import CommandError, Unavailable, UsageError

_LOG_BYTES_MAX = 16 << 20
_TAIL_LINES = 25
_ASK_TIMEOUT_S = 5.0
_EXIT_WRONG_USE = 2
_LOWEST = 10_240
_TRIES = 2_000
# Those that this process was given: what is to listen there may not have begun. Other processes of the user see it by
# locks on the bytes of a file, one for each port, which the kernel drops when this process ends.
_given: set[int] = set()
_LOCKS = Path(f"/tmp/logferry-ports-{os.getuid()}")

Setting = Union[str, int, float, bool, Sequence["Setting"], Mapping[str, "Setting"]]

# The parent may end before the launcher requests the signal; then the launcher exits.
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
    """One program with its log file; any thread may start, stop and restart it.

    Its standard input is empty; both outputs are appended to the log. It has its own process group: Ctrl-C reaches
    this process only, which then stops its children in order.
    """

    def __init__(self, name: str, command: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> None:
        self.name = name
        self.log = log
        self._command = list(command)
        self._env = dict(env) if env is not None else None
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0
        self._starting = threading.RLock()

    def start(self) -> None:
        """Starts it unless it runs."""
        with self._starting:
            if self.running:
                return
            self.log.parent.mkdir(parents=True, exist_ok=True)
            if self.log.exists() and self.log.stat().st_size > _LOG_BYTES_MAX:
                self.log.replace(self.log.with_name(self.log.name + ".1"))
            with self.log.open("ab") as log:
                self._log_start = log.tell()
                command = [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), *self._command]
                self._process = _starter.start(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._env, start_new_session=True
                )

    def restart(self) -> None:
        """Kills it if it runs, and starts it."""
        with self._starting:
            self.send(signal.SIGKILL)
            self.start()

    def replace(self, command: Sequence[str], timeout_s: float) -> None:
        """Stops it, with SIGKILL after the time-out, and starts this command in its place."""
        with self._starting:
            self.stop(timeout_s)
            self._command = list(command)
            self.start()

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int | None:
        """None unless it runs."""
        return self._process.pid if self._process is not None and self.running else None

    @property
    def exit_status(self) -> int | None:
        """Exit status of the last run, negative for a signal; None while it runs or before the first run."""
        return self._process.poll() if self._process is not None else None

    def send(self, number: int) -> None:
        """Sends a signal if it runs. After SIGKILL the process has ended when this returns."""
        if self._process is not None:
            self._process.send_signal(number)
            if number == signal.SIGKILL:
                self._process.wait()

    def kill_group(self) -> None:
        """SIGKILL to what is left of its process group, as systemd does after the end of a service, and to itself."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def stop(self, timeout_s: float) -> bool:
        """SIGTERM, and SIGKILL after the time-out. Returns False if SIGKILL was needed. Calling it again is safe."""
        self.request_stop()
        if self.wait_for_end(timeout_s):
            return True
        self.send(signal.SIGKILL)
        return False

    def wait_for_end(self, timeout_s: float | None = None) -> bool:
        """Waits for the end of the present run. Returns False if it still runs after the time-out."""
        if self._process is not None:
            try:
                self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                return False
        return True

    def request_stop(self) -> None:
        """SIGTERM without waiting. A stopped process (SIGSTOP) is continued, so that it receives the signal."""
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            self._process.send_signal(signal.SIGCONT)

    def log_tail(self) -> str:
        """The last lines of its log since it was started."""
        try:
            with self.log.open("rb") as log:
                log.seek(self._log_start)
                text = log.read().decode(errors="replace")
        except FileNotFoundError:
            return ""
        return "\n".join(text.splitlines()[-_TAIL_LINES:])

    def failed(self, what: str) -> Unavailable:
        """An error with this text and the last lines of the log."""
        return Unavailable(f"{self.name} {what}. The end of {self.log}:\n{self.log_tail()}")

    def ended(self) -> Unavailable:
        """The error for a process that ended by itself."""
        return self.failed(f"ended with status {self.exit_status}")

    def check_end(self) -> None:
        """Raises Unavailable unless it ended with status 0."""
        if self.exit_status != 0:
            raise self.ended()


def stop_all(children: Sequence[Child], timeout_s: float) -> list[str]:
    """Stops all at once; kills the rest after the time-out. Returns the names of the killed ones."""
    for child in children:
        child.request_stop()
    deadline = time.monotonic() + timeout_s
    return [child.name for child in children if not child.stop(max(0.0, deadline - time.monotonic()))]


def processes_with(*texts: str) -> list[int]:
    """Ids of the processes whose command lines contain all of ``texts``; none on a system without /proc."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # the process has ended
            command = file.read_bytes()
            if all(text.encode() in command for text in texts):
                found.append(int(file.parent.name))
    return found


class _Starter:
    """The thread that starts processes; a new one after a fork, because threads are not inherited."""

    def __init__(self) -> None:
        self._reset()
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        self._thread = ThreadPoolExecutor(1, "starts-processes")

    def start(self, command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        return self._thread.submit(lambda: subprocess.Popen[bytes](command, **options)).result()


_starter = _Starter()


def free_ports(count: int) -> range:
    """Consecutive ports without a listener now; none is given twice, as long as the process lives that it was given to.

    Another program may still take one first.
    """
    choice = random.SystemRandom()
    for _ in range(_TRIES):
        first = choice.randrange(_LOWEST, _first_ephemeral_port() - count)
        block = range(first, first + count)
        if _given.isdisjoint(block) and all(map(is_free, block)) and _locks.take(block):
            _given.update(block)
            return block
    raise Unavailable(f"found no {count} consecutive free ports on 127.0.0.1; end programs that listen there")


class _PortLocks:
    """The file is never closed: the process would lose all of its locks."""

    def __init__(self) -> None:
        self._file: int | None = None

    def take(self, block: range) -> bool:
        """False: another process was given one of them. Without the file there is nothing to ask."""
        try:
            if self._file is None:
                self._file = os.open(_LOCKS, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except OSError:
            return True
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, len(block), block.start)
        except (BlockingIOError, PermissionError):
            return False
        return True


_locks = _PortLocks()


def is_free(port: int) -> bool:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return True
    return False


def _first_ephemeral_port() -> int:
    try:
        first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        first = 32_768
    return first if first > _LOWEST + 1000 else 65_536


class ServiceWorker:
    """One worker: its process, port and URL. Name and port stay the same over restarts."""

    def __init__(
        self, name: str, configuration: Path, number: int, port: int, log: Path, module: str = "logferry.gateway"
    ) -> None:
        command = [sys.executable, "-m", module, "--config", str(configuration), "--worker", str(number)]
        self.child = Child(name, command, log)
        self.port = port
        self.url = f"http://127.0.0.1:{port}"

    def is_ready(self) -> bool:
        """Whether it serves its lanes."""
        return get(self.url, "/readyz")[0] == http.client.OK

    def startup_error(self) -> CommandError:
        """The error for a worker that ended before it was ready: UsageError if its configuration is wrong."""
        problem = self.child.ended()
        return UsageError(str(problem)) if self.child.exit_status == _EXIT_WRONG_USE else problem


def get(url: str, path: str, method: str = "GET") -> tuple[int, bytes]:
    """Status and body of one request on a new connection; 0 and nothing if the worker does not answer."""
    try:
        with closing(http.client.HTTPConnection(urlsplit(url).netloc, timeout=_ASK_TIMEOUT_S)) as link:
            link.request(method, path)
            answer = link.getresponse()
            return answer.status, answer.read()
    except (OSError, http.client.HTTPException):
        return 0, b""


def json_of(url: str, path: str) -> dict[str, Any]:
    """The JSON document of an answer; empty if there is none."""
    with suppress(ValueError):
        return dict(json.loads(get(url, path)[1]))
    return {}


def configuration(settings: Mapping[str, Setting], within: str = "") -> str:
    """The settings as TOML: plain values first, then the tables, in the given order. ``within``: a table and a dot."""
    plain = [f"{name} = {_value(value)}" for name, value in settings.items() if not isinstance(value, Mapping)]
    tables = [
        f"\n[{within}{name}]\n{configuration(value, f'{within}{name}.')}"
        for name, value in settings.items()
        if isinstance(value, Mapping)
    ]
    return "\n".join([*plain, *tables]) + "\n"


def _value(value: Setting) -> str:
    """Strings, numbers and booleans have the same syntax in JSON and TOML."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name} = {_value(inner)}" for name, inner in value.items()) + "}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "[" + ", ".join(map(_value, value)) + "]"
    return json.dumps(value, ensure_ascii=False)
