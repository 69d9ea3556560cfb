"""A journald of its own, in a namespace that no other program uses; needs root and Debian's systemd."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import struct
import subprocess
import time
from pathlib import Path

SERVER = "/lib/systemd/systemd-journald"
_RUN = Path("/run/systemd")


def missing() -> str:
    """What this machine does not have; empty: nothing."""
    if os.geteuid():
        return "journald needs root"
    if shutil.which("journalctl") is None:
        return "no journalctl"
    return "" if Path(SERVER).exists() and Path("/etc/machine-id").exists() else "no systemd-journald"


class Journal:
    """``send`` writes an entry; every entry has the field ``N``, its number."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.sent = 0
        self._settings = _RUN / f"journald@{name}.conf.d"
        self._settings.mkdir(parents=True)
        text = "[Journal]\nStorage=volatile\nRateLimitIntervalSec=0\nRuntimeMaxFileSize=1M\nRuntimeMaxUse=64M\n"
        (self._settings / "test.conf").write_text(text)
        self.folder = Path("/run/log/journal") / f"{Path('/etc/machine-id').read_text().strip()}.{name}"
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def _socket(self) -> Path:
        return _RUN / f"journal.{self.name}" / "socket"

    def start(self) -> None:
        self._socket.unlink(missing_ok=True)
        self._process = subprocess.Popen([SERVER, self.name], stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while not self._socket.exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def kill(self, number: int) -> None:
        if self._process is not None:
            self._process.send_signal(number)

    def stop(self, number: int = signal.SIGTERM) -> None:
        if self._process is not None:
            self.kill(number)
            self._process.wait(60)

    def send(self, message: bytes, **fields: str) -> None:
        """As sd_journal_send(3) does."""
        parts = [f"{name}={value}\n".encode() for name, value in {**fields, "N": str(self.sent)}.items()]
        parts.append(b"MESSAGE\n" + struct.pack("<Q", len(message)) + message + b"\n")
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.sendto(b"".join(parts), str(self._socket))
        self.sent += 1

    def settle(self) -> None:
        """Returns when journald has the last entry that was sent. What it did not read dies with it."""
        command = ["journalctl", "-q", "-D", str(self.folder), "-o", "cat", f"N={self.sent - 1}"]
        deadline = time.monotonic() + 60
        while self.sent and not subprocess.run(command, capture_output=True, check=False).stdout:
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def rotate(self) -> None:
        self.kill(signal.SIGUSR2)

    def clean(self) -> None:
        self.stop()
        for folder in (self._settings, self._socket.parent, self.folder):
            shutil.rmtree(folder, ignore_errors=True)
