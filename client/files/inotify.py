"""inotify(7) as a hint: which files to look at now, and where a file or folder appeared. It decides nothing.

A followed file is *armed*: one event of it, for its first change or for the loss of a name, and the watch is gone. So a
busy file costs no events; it is armed again when it is quiet. The watch is that of the open inode, so it holds through
renames, other names and bind mounts. A watched folder reports what appears in it and what leaves it.

What no event can tell is polled, and `Hints.polled` says why: file systems that others write (`_LOCAL` has the ones
that are fine), watches beyond our share of the user's limit, and folders in which a change came without an event.
"""

from __future__ import annotations

import errno
import os
import select
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from logferry.client.files.discover import FileKey

try:
    import ctypes
except ImportError:  # Python was built without it
    ctypes = None  # type: ignore[assignment]

COALESCE_S = 0.01  # events of so long are taken together
SHARE = 4  # at most the fourth part of the user's watches: others, such as a kubelet, need theirs
RETRY_S = 60.0  # after a limit was reached

_MODIFY, _ATTRIB, _MOVED_FROM, _MOVED_TO, _CREATE, _DELETE = 0x2, 0x4, 0x40, 0x80, 0x100, 0x200
_MOVE_SELF, _OVERFLOW, _IGNORED, _ONLYDIR, _EXCL_UNLINK, _ONESHOT = 0x800, 0x4000, 0x8000, 1 << 24, 1 << 26, 1 << 31
_OF_FILE = _MODIFY | _ATTRIB | _ONESHOT
_OF_FOLDER = _ATTRIB | _MOVED_FROM | _MOVED_TO | _CREATE | _DELETE | _MOVE_SELF | _ONLYDIR | _EXCL_UNLINK
_EVENT = struct.Struct("=iIII")
_READ_BYTES = 1 << 16
_MAX_WATCHES = Path("/proc/sys/fs/inotify/max_user_watches")
# statfs(2): f_type of file systems on which whoever writes does so through this kernel.
_LOCAL = {
    0xEF53: "ext4", 0x58465342: "xfs", 0x9123683E: "btrfs", 0x01021994: "tmpfs", 0x794C7630: "overlay",
    0x2FC12FC1: "zfs", 0xF2F52010: "f2fs", 0x858458F6: "ramfs", 0xCA451A4E: "bcachefs", 0x3153464A: "jfs",
}  # fmt: skip
_REMOTE = {
    0x6969: "nfs",
    0xFF534D42: "cifs",
    0xFE534D42: "smb2",
    0x65735546: "fuse",
    0x01021997: "9p",
    0xC36400: "ceph",
}
_LIMIT = "fs.inotify.max_user_watches is reached"


class Found(NamedTuple):
    """``files``: that may have changed. ``paths``: that appeared. ``gone``: that left, with whether each is a folder.

    ``lost``: events were lost, so anything may have happened. ``unwritten``: files that had another change before any
    write, as that of their names.
    """

    files: list[FileKey]
    paths: list[str]
    gone: list[str]
    lost: bool
    unwritten: list[FileKey]


class Hints:
    """``polled``: reason → how many files are polled because of it. ``unusable``: why there are no hints; or empty.

    ``sharers``: so many of these use our share of the user's watches.
    """

    def __init__(self, is_wanted: bool = True, sharers: int = 1) -> None:
        self._share = SHARE * sharers
        self.unusable = "" if is_wanted else "not wanted"
        self.is_due = False  # `take` has something; set by the thread of `start`
        self._fd = -1
        self._armed: dict[FileKey, int] = {}
        self._files: dict[int, FileKey] = {}
        self._folders: dict[str, int] = {}
        self._paths: dict[int, set[str]] = {}  # links may lead to one folder under several
        self._reasons: dict[int, str] = {}  # device → why its files are polled; empty: they are not
        self._silent: set[str] = set()  # folders in which a change came without an event
        self._unarmed: dict[FileKey, str] = {}
        self._limited_until = 0.0
        self._most = 0
        self._stop = threading.Event()
        self._taken = threading.Event()
        self._pipe: tuple[int, int] | None = None
        if is_wanted:
            self._open()

    def _open(self) -> None:
        try:
            self._libc: Any = ctypes.CDLL(None, use_errno=True)
            fd = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
            self._most = int(_MAX_WATCHES.read_text(encoding="ascii")) // self._share
        except (OSError, ValueError, AttributeError, MemoryError) as error:
            self.unusable = f"this system has no inotify: {error}"
            return
        if fd < 0:
            code = ctypes.get_errno()
            limit = "fs.inotify.max_user_instances is reached"
            self.unusable = limit if code == errno.EMFILE else os.strerror(code)
            return
        self._fd = fd

    @property
    def polled(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        for why in self._unarmed.values():
            counts[why] = counts.get(why, 0) + 1
        return counts

    @property
    def armed(self) -> int:
        return len(self._armed)

    # ---- watches -----------------------------------------------------------------------------------------

    def watch_folders(self, paths: set[str], now: float) -> bool:
        """These folders and no others. False: one of them cannot be watched, so what appears there must be polled."""
        if self._fd < 0:
            return False
        for path in [path for path in self._folders if path not in paths]:
            self._forget_folder(path)
        are_told = [self._watch_folder(path, now) for path in paths]
        return all(are_told)

    def watch_folder(self, path: str, now: float) -> bool:
        return self._fd >= 0 and self._watch_folder(path, now)

    def _watch_folder(self, path: str, now: float) -> bool:
        raw = os.fsencode(path)
        why = self._why_not(raw)
        wd = -1 if why else self._add(raw, _OF_FOLDER, now, path in self._folders)
        if self._folders.get(path, wd) != wd:
            self._forget_folder(path)
        if wd < 0:
            return not why and not os.path.isdir(path)  # noqa: PTH112  (gone again: its own folder tells)
        self._folders[path] = wd
        self._paths.setdefault(wd, set()).add(path)
        return True

    def _forget_folder(self, path: str) -> None:
        wd = self._folders.pop(path, -1)
        paths = self._paths.get(wd, set())
        paths.discard(path)
        if not paths:
            self._paths.pop(wd, None)
            self._libc.inotify_rm_watch(self._fd, wd)

    def arm(self, path: bytes, key: FileKey, folder: str, now: float) -> bool:
        """The next change of the file is an event. Look at the file afterwards: it may have changed before."""
        if self._fd < 0:
            return False
        if key[0] not in self._reasons:
            self._reasons[key[0]] = self._why_not(path)
        why = "changes come without events" if folder in self._silent else self._reasons[key[0]]
        wd = -1 if why else self._add(path, _OF_FILE, now)
        if self._files.get(wd, key) != key:  # a closed file was replaced just now, by one that is armed
            return False
        if wd < 0:
            self._unarmed[key] = why or _LIMIT
            return False
        self._unarmed.pop(key, None)
        self._armed[key], self._files[wd] = wd, key
        return True

    def is_armed(self, key: FileKey) -> bool:
        return key in self._armed

    def disarm(self, key: FileKey) -> None:
        """The file is closed."""
        self._unarmed.pop(key, None)
        wd = self._armed.pop(key, -1)
        if wd >= 0:
            del self._files[wd]
            self._libc.inotify_rm_watch(self._fd, wd)

    def missed(self, key: FileKey, folder: str) -> None:
        """The armed file changed without an event: its folder is polled from now on."""
        self.disarm(key)
        self._silent.add(folder)

    def _add(self, path: bytes, mask: int, now: float, is_known: bool = False) -> int:
        """-1: not now. ``is_known``: there is a watch for this path, but it may lead elsewhere by now."""
        is_full = now < self._limited_until or len(self._files) + len(self._paths) >= self._most
        if is_full and not is_known:
            return -1
        wd = int(self._libc.inotify_add_watch(self._fd, path, ctypes.c_uint32(mask)))
        if wd < 0 and ctypes.get_errno() in (errno.ENOSPC, errno.ENOMEM):
            self._limited_until = now + RETRY_S
        return wd

    def _why_not(self, path: bytes) -> str:
        """Why changes below ``path`` come without events; empty: they do not."""
        buffer = ctypes.create_string_buffer(256)
        if self._libc.statfs(path, buffer):
            return ""  # it is gone
        kind = struct.unpack_from("=l" if ctypes.sizeof(ctypes.c_long) == 4 else "=q", buffer.raw)[0] & 0xFFFFFFFF
        return "" if kind in _LOCAL else f"on {_REMOTE.get(kind, f'a file system of type {kind:#x}')}"

    # ---- events ------------------------------------------------------------------------------------------

    def take(self) -> Found:
        """What happened since the last call; never waits."""
        found = Found([], [], [], False, [])
        self.is_due = False
        while self._fd >= 0:
            try:
                raw = os.read(self._fd, _READ_BYTES)
            except BlockingIOError:
                break
            at = 0
            while at < len(raw):
                wd, mask, _, size = _EVENT.unpack_from(raw, at)
                at += _EVENT.size + size
                if mask & _OVERFLOW:
                    found = found._replace(lost=True)
                elif wd in self._files:
                    key = self._files.pop(wd)
                    del self._armed[key]
                    found.files.append(key)
                    found.unwritten.extend(() if mask & _MODIFY else (key,))
                elif wd in self._paths:
                    self._of_folder(found, wd, mask, raw[at - size : at].rstrip(b"\0"))
        for key in (*self._armed,) if found.lost else ():
            self.disarm(key)  # its one event may be among the lost ones
        self._taken.set()
        return found

    def _of_folder(self, found: Found, wd: int, mask: int, name: bytes) -> None:
        for folder in (*self._paths[wd],):
            if mask & (_IGNORED | _MOVE_SELF):  # it was removed, or has another name
                self._forget_folder(folder)
                found.gone.append(folder)
                continue
            path = os.path.join(folder, os.fsdecode(name)) if name else folder  # noqa: PTH118
            (found.gone if mask & (_MOVED_FROM | _DELETE) else found.paths).append(path)

    def start(self, wake: Callable[[], None]) -> None:
        """A thread that calls ``wake`` when there is something to `take`."""
        if self._fd >= 0:
            self._pipe = os.pipe()
            threading.Thread(target=self._wait, args=(wake, self._pipe[0]), name="inotify", daemon=True).start()

    def _wait(self, wake: Callable[[], None], ends: int) -> None:
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        poll.register(ends, select.POLLIN | select.POLLHUP)
        while not self._stop.wait(COALESCE_S):
            if any(fd == ends for fd, _ in poll.poll()):
                return
            self._taken.clear()
            self.is_due = True
            wake()
            self._taken.wait()

    def close(self) -> None:
        self._stop.set()
        self._taken.set()
        fd, self._fd = self._fd, -1
        for each in (fd, *(self._pipe or ())[1:]):
            if each >= 0:
                with suppress(OSError):
                    os.close(each)
