"""Network namespaces as hosts, a switch in each data centre, and the link between them.

The namespaces have no names: they are held by open files of this process, and end with it and its children, whatever
happens. Nothing of the machine's own network is changed.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from logferry.ops.cli.problems import Unavailable
from logferry.ops.stack.processes import Child

from tests.datacenters.plan import DCS, LINK, Host, hosts, hosts_file, other, router
from tests.datacenters.relay import DEVICE

DELAY_MS: Final = 40
LOSS: Final = 0.01
_CLONE_NEWNS, _CLONE_NEWNET = 0x00020000, 0x40000000
_MS_REC, _MS_PRIVATE, _MS_BIND = 0x4000, 0x40000, 0x1000
_READY_S: Final = 20.0
_LIBC: Final = ctypes.CDLL(None, use_errno=True)
WHAT_TO_DO: Final = (
    "this needs network namespaces: run it as root, or with CAP_SYS_ADMIN and CAP_NET_ADMIN (in a container:"
    " --privileged --device /dev/net/tun), or allow unprivileged user namespaces (sysctl"
    " kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0)"
)


def _called(name: str, *arguments: object) -> None:
    """Raises Unavailable with what to do."""
    if getattr(_LIBC, name)(*arguments):
        number = ctypes.get_errno()
        raise Unavailable(f"{name}: {os.strerror(number)}; {WHAT_TO_DO}")


class Network:
    """``emulation``: what delays and loses packets, ``netem`` or ``relay``. From `__enter__` on this process sees the
    hosts' names; its threads are in the network of the host that `enter` was called with."""

    def __init__(self, folder: Path) -> None:
        self.hosts = {host.name: host for host in hosts()}
        self.emulation = ""
        self._folder = folder
        self._files: dict[str, int] = {}
        self._relay: Child | None = None

    def __enter__(self) -> Network:
        """Call it before any thread is started. Raises Unavailable."""
        self._mount_names()
        for name in (*DCS, *self.hosts):
            self._files[name] = _new_namespace()
        for dc in DCS:
            self._make_switch(dc)
        for number, host in enumerate(self.hosts.values()):
            self._connect(host, number)
        self._make_link()
        return self

    def __exit__(self, *_: object) -> None:
        if self._relay is not None:
            self._relay.stop(5)
        for file in self._files.values():
            os.close(file)

    def command(self, place: str, *command: str) -> list[str]:
        """The command in the network of a host, or of a data centre's switch."""
        return ["nsenter", f"--net={self.path(place)}", "--", *command]

    def path(self, place: str) -> str:
        return f"/proc/{os.getpid()}/fd/{self._files[place]}"

    def enter(self, place: str) -> None:
        """This thread, and those that it starts, are in that network from now on."""
        _called("setns", self._files[place], _CLONE_NEWNET)

    def cut(self) -> None:
        """Nothing passes the link any more, in either direction, and no error tells so."""
        if self._relay is not None:
            self._relay.send(signal.SIGUSR1)
        else:
            self._shape("loss", "100%")

    def mend(self) -> None:
        if self._relay is not None:
            self._relay.send(signal.SIGUSR2)
        else:
            self._shape("delay", f"{DELAY_MS}ms", "loss", f"{LOSS:%}")

    # ---- parts -------------------------------------------------------------------------------------------------------

    def _mount_names(self) -> None:
        """The names of the hosts, for this process and its children alone."""
        file = self._folder / "hosts"
        # Programs look up the name of the machine, too.
        file.write_text(f"{hosts_file()}127.0.0.1 {socket.gethostname()}\n", encoding="ascii")
        _called("unshare", _CLONE_NEWNS)
        _called("mount", b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)
        _called("mount", str(file).encode(), b"/etc/hosts", None, _MS_BIND, None)

    def _ip(self, place: str, *arguments: str) -> None:
        self._run(place, "ip", *arguments)

    def _run(self, place: str, *command: str) -> None:
        done = subprocess.run(self.command(place, *command), check=False, capture_output=True, text=True)
        if done.returncode:
            raise Unavailable(f"{' '.join(command)}: {done.stderr.strip()}; {WHAT_TO_DO}")

    def _make_switch(self, dc: str) -> None:
        self._ip(dc, "link", "set", "lo", "up")
        self._ip(dc, "link", "add", "switch", "type", "bridge")
        self._ip(dc, "addr", "add", f"{router(dc)}/24", "dev", "switch")
        self._ip(dc, "link", "set", "switch", "up")
        self._run(dc, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")

    def _connect(self, host: Host, number: int) -> None:
        port = f"port{number}"
        self._ip(host.dc, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", self.path(host.name))
        self._ip(host.dc, "link", "set", port, "master", "switch", "up")
        self._ip(host.name, "link", "set", "lo", "up")
        self._ip(host.name, "addr", "add", f"{host.address}/24", "dev", "eth0")
        self._ip(host.name, "link", "set", "eth0", "up")
        self._ip(host.name, "route", "add", "default", "via", router(host.dc))

    def _make_link(self) -> None:
        one, two = DCS
        self._ip(one, "link", "add", DEVICE, "type", "veth", "peer", "name", DEVICE, "netns", self.path(two))
        try:
            self._shape("delay", f"{DELAY_MS}ms", "loss", f"{LOSS:%}", act="add")
            self.emulation = "netem"
        except Unavailable:
            self.emulation = "relay"
            self._ip(one, "link", "delete", DEVICE)
            for dc in DCS:
                self._ip(dc, "tuntap", "add", DEVICE, "mode", "tun")
        for dc in DCS:
            self._ip(dc, "addr", "add", LINK[dc], "peer", LINK[other(dc)], "dev", DEVICE)
            self._ip(dc, "link", "set", DEVICE, "up")
            network = f"{router(other(dc)).rpartition('.')[0]}.0/24"
            self._ip(dc, "route", "add", network, "via", LINK[other(dc)], "dev", DEVICE)
        if self.emulation == "relay":
            self._start_relay()

    def _shape(self, *rule: str, act: str = "change") -> None:
        for dc in DCS:
            self._run(dc, "tc", "qdisc", act, "dev", DEVICE, "root", "netem", "limit", "10000", *rule)

    def _start_relay(self) -> None:
        places = [self.path(dc) for dc in DCS]
        command = [sys.executable, "-m", "tests.datacenters.relay", *places, str(DELAY_MS / 1000), str(LOSS)]
        self._relay = Child("relay", command, self._folder / "logs" / "relay.log")
        self._relay.start()
        deadline = time.monotonic() + _READY_S
        while "ready" not in self._relay.log_tail():
            if not self._relay.running or time.monotonic() > deadline:
                raise self._relay.failed("does not start")
            time.sleep(0.05)


def _new_namespace() -> int:
    """An open file that holds a new network. Raises Unavailable."""
    made: list[int] = []
    failed: list[Unavailable] = []

    def make() -> None:
        try:
            _called("unshare", _CLONE_NEWNET)
            made.append(os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC))
        except Unavailable as error:
            failed.append(error)

    _in_thread(make)
    if failed:
        raise failed[0]
    return made[0]


def _in_thread(call: Callable[[], None]) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


def as_root(command: Sequence[str]) -> None:
    """Without root: this program again in a user namespace, where it is. Returns where that is not possible."""
    if os.geteuid() == 0 or os.environ.get("LOGFERRY_IN_USER_NAMESPACE"):
        return
    unshare = ["unshare", "--user", "--map-root-user"]
    if subprocess.run([*unshare, "true"], check=False, capture_output=True).returncode == 0:
        os.environ["LOGFERRY_IN_USER_NAMESPACE"] = "1"
        os.execvp(unshare[0], [*unshare, "--", *command])
