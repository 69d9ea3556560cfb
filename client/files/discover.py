"""Glob patterns → regular files, each once, however many names it has."""

# Paths stay text: thousands of them are checked again and again.
# ruff: noqa: PTH100, PTH110, PTH112, PTH113, PTH114, PTH116, PTH118, PTH119, PTH120
# ruff: noqa: PTH206, PTH207

from __future__ import annotations

import fnmatch
import glob
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from logferry.client.files.checkpoint import CheckpointEntry

# A rotated file that was compressed is not a new source: its plain incarnation was one. Only a pattern that ends with
# such a suffix matches these files.
COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".lz4", ".Z")

FileKey = tuple[int, int]  # device, inode


def find_files(
    patterns: Sequence[str],
    skip_folder: str,
    exclude: Sequence[str] = (),
    roots: Sequence[str] = (),
    below: str | None = None,
) -> dict[FileKey, str]:
    """Regular files by device and inode, with an absolute path of each, in the order of the paths.

    ``**`` matches any number of folders. ``exclude``: patterns of file names to leave out or, with a slash, of whole
    paths, where ``*`` matches slashes, too. A file with several names gets the first in order, preferably one that no
    link leads out (`leads_out`), and that is not a symbolic link. Skipped are files under ``skip_folder`` that a
    wildcard matched, and the file of our own standard error, which would feed itself. Files that vanish meanwhile are
    left out. ``below``: only this path, or what is below it.
    """

    def rank(path: str) -> tuple[bool, bool]:
        return leads_out(path, os.path.realpath(path), patterns, roots), os.path.islink(path)

    names: dict[FileKey, str] = {}
    for path, why_not in _matches(patterns, skip_folder, exclude, below):
        try:
            facts = None if why_not else os.stat(path)
        except OSError:
            continue
        if facts is not None and stat.S_ISREG(facts.st_mode):
            other = names.setdefault((facts.st_dev, facts.st_ino), path)
            if other != path and rank(path) < rank(other):
                names[facts.st_dev, facts.st_ino] = path
    with suppress(OSError):
        own = os.fstat(2)
        names.pop((own.st_dev, own.st_ino), None)
    return names


def find_by_entry(
    entries: Sequence[tuple[Sequence[str], Sequence[str], Sequence[str]]], skip_folder: str, below: str | None = None
) -> dict[FileKey, tuple[str, int]]:
    """Each file with its path, and the number of the first entry that fits and out of which no link leads it.

    ``entries``: patterns, exclude and roots, as of `find_files`. A file that links lead out of all has the last one.
    """
    found: dict[FileKey, tuple[str, int]] = {}
    for number, (patterns, exclude, roots) in enumerate(entries):
        for key, path in find_files(patterns, skip_folder, exclude, roots, below).items():
            other, first = found.setdefault(key, (path, number))
            if first != number and leads_out(other, os.path.realpath(other), entries[first][0], entries[first][2]):
                found[key] = path, number
    return found


def left_out(patterns: Sequence[str], skip_folder: str, exclude: Sequence[str], roots: Sequence[str]) -> dict[str, str]:
    """Paths that match a pattern and that `find_files` leaves out, with the reason. Folders are not listed."""
    taken = set(find_files(patterns, skip_folder, exclude, roots).values())
    reasons = {}
    for path, why_not in _matches(patterns, skip_folder, exclude):
        if path not in taken and not os.path.isdir(path):
            reasons[path] = why_not or ("another name of a file" if os.path.isfile(path) else "not a regular file")
    return reasons


def _matches(
    patterns: Sequence[str], skip_folder: str, exclude: Sequence[str], below: str | None = None
) -> list[tuple[str, str]]:
    """Paths in order, each with the reason against it; empty: there is none."""
    paths: dict[str, str] = {}
    for pattern in patterns:
        wanted = [pattern] if below is None else narrowed(pattern, below)
        for path in (path for each in wanted for path in glob.iglob(each, recursive=True)):
            if pattern.endswith(COMPRESSED) or not path.endswith(COMPRESSED):
                paths[os.path.abspath(path)] = ""
            else:
                paths.setdefault(os.path.abspath(path), "compressed: its plain incarnation was a source")
    for path, why_not in paths.items():
        if path.startswith(skip_folder + os.sep) and glob.escape(path) not in patterns:
            paths[path] = "in the state folder"
        elif not why_not and _is_excluded(path, exclude):
            paths[path] = "excluded"
    return sorted(paths.items())


def _is_excluded(path: str, exclude: Sequence[str]) -> bool:
    name = os.path.basename(path)
    return any(fnmatch.fnmatchcase(path if "/" in pattern else name, pattern) for pattern in exclude)


def narrowed(pattern: str, path: str) -> list[str]:
    """Patterns that match what ``pattern`` matches of ``path`` itself and of all below it."""
    rests = rests_of(pattern, path)
    is_folder = any(rests) and os.path.isdir(path)
    return [os.path.join(glob.escape(path), *rest) for rest in rests if is_folder or not rest]


def rests_of(pattern: str, path: str) -> set[tuple[str, ...]]:
    """What is left of the pattern behind ``path``: nothing where it matches this. Empty: it matches nothing there."""
    parts, places = pattern.split(os.sep), {0}
    for name in path.split(os.sep):
        places = {there for at in places for there in _steps(parts, at, name)}
    return {tuple(parts[at:]) for at in _with_none(parts, places)}


def _with_none(parts: Sequence[str], places: Iterable[int]) -> set[int]:
    """The places, and those behind a ``**``, which may match no folder. The last one of a pattern matches something."""
    found: set[int] = set()
    for at in places:
        found.add(at)
        while at < len(parts) - 1 and parts[at] == "**":
            at += 1
            found.add(at)
    return found


def _steps(parts: Sequence[str], place: int, name: str) -> Iterator[int]:
    """The places in the pattern after ``name``, as `glob` matches it."""
    for at in _with_none(parts, [place]):
        if at == len(parts):
            continue
        part = parts[at]
        if not glob.has_magic(part):
            if part == name:
                yield at + 1
        elif part.startswith(".") or not name.startswith("."):
            if part == "**":
                yield from (at, at + 1) if at == len(parts) - 1 else (at,)
            elif fnmatch.fnmatchcase(name, part):
                yield at + 1


def folders_of(patterns: Iterable[str], below: str | None = None) -> set[str]:
    """Existing folders in which a file, or a folder on the way to one, may appear that a pattern matches.

    Where the first ones of a pattern are missing, the last folder that is there. ``below``: this one and those in it.
    """
    folders = set()
    for pattern in patterns if below is None else [one for each in patterns for one in narrowed(each, below)]:
        parts = pattern.split(os.sep)
        first = next((at for at, part in enumerate(parts) if glob.has_magic(part)), len(parts) - 1)
        start = os.sep.join(parts[:first]) or os.sep
        while below is None and not os.path.isdir(start):
            start = os.path.dirname(start)
        folders.add(start)
        for at in range(first, len(parts) - 1):
            folders.update(glob.iglob(os.path.join(os.sep.join(parts[: at + 1]), ""), recursive=True))
        if parts[-1] == "**":
            folders.update(glob.iglob(os.path.join(pattern, ""), recursive=True))
    return {os.path.abspath(folder) for folder in folders}


def missing(patterns: Iterable[str]) -> list[str]:
    """Patterns without wildcards, that is names of files, which do not exist."""
    return [pattern for pattern in patterns if not glob.has_magic(pattern) and not os.path.exists(pattern)]


# The kubelet's links: /var/log/containers → /var/log/pods → the folder of the container engine.
_OF_KUBELET = ("/var/log/containers", "/var/log/pods")
_FOR_KUBELET = ("/var/log/pods", "/var/lib/docker/containers")


def leads_out(path: str, real: str, patterns: Iterable[str], roots: Iterable[str]) -> bool:
    """Whether symbolic links lead ``path`` to a file, ``real``, outside the folders that they may lead into.

    These are ``roots``, and of the pattern the folder before the first wildcard if ``path`` is in it, else the one that
    this wildcard matched; of several patterns the innermost counts. Whoever may write a folder of logs could make the
    client, which often runs as root, send any file of the host otherwise. A link in place of the matched folder may
    lead to another one within the folder before the wildcard.
    """
    if real == path:
        return False
    folders = [os.path.dirname(re.split(r"[*?[]", pattern, maxsplit=1)[0]) for pattern in patterns]
    before = max((folder for folder in folders if _is_under(path, [folder])), key=len, default="")
    matched = os.path.join(before, path[len(before) :].lstrip(os.sep).partition(os.sep)[0])
    within = os.path.realpath(before if matched == path else matched)
    allowed = [within] if before and _is_under(within + os.sep, [os.path.realpath(before)]) else []
    kubelet = _FOR_KUBELET if _is_under(path, _OF_KUBELET) else ()
    return not _is_under(real, [*allowed, *(os.path.realpath(folder) for folder in (*roots, *kubelet))])


def _is_under(path: str, folders: Iterable[str]) -> bool:
    return any(path.startswith(folder.rstrip(os.sep) + os.sep) for folder in folders)


def files_beside(path: str, fits: Callable[[str, os.DirEntry[str]], bool]) -> Iterator[str]:
    """The regular files of its folder that fit to the name of ``path``, in order.

    Of a symbolic link also those that fit to what it leads to, in that folder: there the file is rotated.
    """
    for each in dict.fromkeys((path, os.path.realpath(path))):
        folder, name = os.path.split(each)
        try:
            with os.scandir(folder) as entries:  # a look at a file costs more than its name: only at those that fit
                found = sorted(one.path for one in entries if fits(name, one) and one.is_file(follow_symlinks=False))
        except OSError:
            continue
        yield from found


def find_moved(path: str, key: FileKey) -> str | None:
    """The present path of the file that was ``path``, if it was renamed beside it; None: it is not there."""
    return next(files_beside(path, lambda _, entry: entry.inode() == key[1]), None)


def leads_to(path: str, key: FileKey) -> bool:
    try:
        facts = os.stat(path)
    except OSError:
        return False
    return (facts.st_dev, facts.st_ino) == key


def replace_lost_links(entries: Iterable[CheckpointEntry]) -> None:
    """Of a file that was found under a symbolic link, only this may be gone."""
    for entry in entries:
        if entry.real_path and not os.path.lexists(entry.last_path):
            entry.last_path, entry.away = entry.real_path, True


def folder_is_on(path: str, device: int) -> bool:
    """Whether the folder of ``path`` exists on the file system that the file was on."""
    try:
        return os.stat(os.path.dirname(path)).st_dev == device
    except OSError:
        return False


# A client keeps such numbers for each of ten thousand files: equal ones are one object.
_devices: dict[int, int] = {}


def file_key(facts: os.stat_result) -> FileKey:
    return _devices.setdefault(facts.st_dev, facts.st_dev), facts.st_ino


def one_of(value: int, known: int) -> int:
    """``value``; the object ``known`` if they are equal."""
    return known if value == known else value


def file_system_is_on(path: str, device: int) -> bool:
    """Whether the folder of ``path``, or what is left above it, is on the file system that the file was on."""
    folder = os.path.dirname(path)
    while True:
        try:
            return os.stat(folder).st_dev == device
        except (FileNotFoundError, NotADirectoryError):
            folder = os.path.dirname(folder)
        except OSError:
            return False


def inodes_in(folder: str) -> dict[int, str]:
    """Paths of the regular files of the folder, by their inodes."""
    try:
        with os.scandir(folder) as entries:
            return {entry.inode(): entry.path for entry in entries if entry.is_file(follow_symlinks=False)}
    except OSError:
        return {}
