"""Which files are there: glob patterns → regular files, each once, however many names it has."""

# Paths stay text: thousands of them are looked at again and again.
# ruff: noqa: PTH100, PTH110, PTH112, PTH113, PTH116, PTH119, PTH120, PTH207

from __future__ import annotations

import fnmatch
import glob
import os
import stat
from collections.abc import Iterable, Sequence

# A rotated file that was compressed is not a new source: its plain incarnation was one. A pattern that ends
# with such a suffix asks for these files in so many words and gets them.
COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".lz4", ".Z")

FileKey = tuple[int, int]  # device, inode


def find(patterns: Iterable[str], skip_folder: str, exclude: Sequence[str] = ()) -> dict[FileKey, str]:
    """Regular files by device and inode, with an absolute path of each, in the order of the paths.

    ``**`` stands for any number of folders. ``exclude``: names that do not count, as patterns of the file's name
    or, with a slash, of its whole path, where ``*`` stands for slashes, too. A file with several names gets the
    first in order, one that is not a symbolic link if there is one. Skipped: what lies under ``skip_folder``, and
    where our own standard error goes to, which would feed itself. Files that vanish meanwhile are left out.
    """
    names: dict[FileKey, str] = {}
    links: dict[FileKey, str] = {}
    for path, why_not in _matches(patterns, skip_folder, exclude):
        if why_not:
            continue
        try:
            plain = os.lstat(path)
            link = stat.S_ISLNK(plain.st_mode)
            facts = os.stat(path) if link else plain
        except OSError:
            continue
        if stat.S_ISREG(facts.st_mode):
            (links if link else names).setdefault((facts.st_dev, facts.st_ino), path)
    for key, path in links.items():
        names.setdefault(key, path)
    names.pop(_standard_error(), None)
    return names


def left_out(patterns: Iterable[str], skip_folder: str, exclude: Sequence[str] = ()) -> dict[str, str]:
    """What fits a pattern and yet is not among what `find` finds, and why. Folders are no matter."""
    taken = set(find(patterns, skip_folder, exclude).values())
    reasons = {}
    for path, why_not in _matches(patterns, skip_folder, exclude):
        if path not in taken and not os.path.isdir(path):
            reasons[path] = why_not or ("another name of a file" if os.path.isfile(path) else "not a regular file")
    return reasons


def _matches(patterns: Iterable[str], skip_folder: str, exclude: Sequence[str]) -> list[tuple[str, str]]:
    """Paths in order, with what speaks against each."""
    paths: dict[str, str] = {}
    for pattern in patterns:
        for path in glob.iglob(pattern, recursive=True):
            if pattern.endswith(COMPRESSED) or not path.endswith(COMPRESSED):
                paths[os.path.abspath(path)] = ""
            else:
                paths.setdefault(os.path.abspath(path), "compressed: its plain incarnation was a source")
    for path, why_not in paths.items():
        if path.startswith(skip_folder + os.sep):
            paths[path] = "in the state folder"
        elif not why_not and _is_excluded(path, exclude):
            paths[path] = "excluded"
    return sorted(paths.items())


def _is_excluded(path: str, exclude: Sequence[str]) -> bool:
    name = os.path.basename(path)
    return any(fnmatch.fnmatchcase(path if "/" in pattern else name, pattern) for pattern in exclude)


def _standard_error() -> FileKey:
    try:
        facts = os.fstat(2)
    except OSError:
        return (-1, -1)
    return (facts.st_dev, facts.st_ino)


def missing(patterns: Iterable[str]) -> list[str]:
    """Patterns without wildcards, that is: names of files, that are not there."""
    return [pattern for pattern in patterns if not glob.has_magic(pattern) and not os.path.exists(pattern)]


def find_moved(path: str, key: FileKey) -> str | None:
    """Where a file that was ``path`` is now, if it was renamed within its folder; None when it is not there."""
    try:
        with os.scandir(os.path.dirname(path)) as entries:
            for entry in entries:
                if entry.inode() == key[1] and entry.is_file(follow_symlinks=False):
                    return entry.path
    except OSError:
        return None
    return None


def folder_is_on(path: str, device: int) -> bool:
    """Whether the folder of ``path`` is there, on the file system that the file was on."""
    try:
        return os.stat(os.path.dirname(path)).st_dev == device
    except OSError:
        return False
