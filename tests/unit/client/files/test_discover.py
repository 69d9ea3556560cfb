"""Patterns → files, each once."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from logferry.client.files.discover import find_files, find_moved, folder_is_on, missing
from logferry.client.files.identity import attribute, printable, source_id
from logferry.gateway.contract.names import check_source_id


def names(root: Any, *patterns: str) -> list[str]:
    return [
        os.path.relpath(path, root)
        for path in find_files([str(root / p) for p in patterns], str(root / "state")).values()
    ]


def made(root: Any, *paths: str) -> None:
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(b"")


def test_stars_and_double_stars(tmp_path: Path) -> None:
    made(tmp_path, "a.log", "b.log", "c.txt", "x/d.log", "x/y/e.log", ".hidden.log")
    assert names(tmp_path, "*.log") == ["a.log", "b.log"]
    assert names(tmp_path, "**/*.log") == ["a.log", "b.log", "x/d.log", "x/y/e.log"]
    assert names(tmp_path, "x/**") == ["x/d.log", "x/y/e.log"]
    assert names(tmp_path, "a.*", "*.log", "c.txt") == ["a.log", "b.log", "c.txt"]


def test_what_is_no_file_of_ours_is_left_out(tmp_path: Path) -> None:
    made(tmp_path, "a.log", "a.log.1.gz", "state/checkpoint.json", "stated/b.log")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    assert names(tmp_path, "**") == ["a.log", "stated/b.log"]
    assert names(tmp_path, "*.gz") == ["a.log.1.gz"]


@pytest.mark.parametrize(
    ("exclude", "expected"),
    [
        ([], ["a.log", "x/a.log", "x/b.log"]),
        (["a.*"], ["x/b.log"]),
        (["*/x/*"], ["a.log"]),
        (["*/x/a.*"], ["a.log", "x/b.log"]),
        (["x/*"], ["a.log", "x/a.log", "x/b.log"]),  # a path is absolute
        (["b.log", "*/x/a.log"], ["a.log"]),
        (["?.[l]og"], []),
    ],
)
def test_what_is_excluded_is_left_out(tmp_path: Path, exclude: Any, expected: Any) -> None:
    made(tmp_path, "a.log", "x/a.log", "x/b.log")
    found = find_files([str(tmp_path / "**")], str(tmp_path / "state"), exclude)
    assert [os.path.relpath(path, tmp_path) for path in found.values()] == expected


def test_a_file_with_many_names_is_one(tmp_path: Path) -> None:
    made(tmp_path, "m.log", "other/n.log")
    (tmp_path / "a.log").symlink_to(tmp_path / "m.log")
    os.link(tmp_path / "m.log", tmp_path / "z.log")
    (tmp_path / "b.log").symlink_to(tmp_path / "other" / "n.log")
    assert names(tmp_path, "*.log") == ["m.log", "b.log"]


def test_our_own_standard_error_is_not_read(tmp_path: Path) -> None:
    code = (
        "from logferry.client.files.discover import find_files; "
        f"print(list(find_files(['{tmp_path}/*'], '/x').values()))"
    )
    with (tmp_path / "err.log").open("wb") as stderr:
        made(tmp_path, "a.log")
        done = subprocess.run([sys.executable, "-c", code], stderr=stderr, stdout=subprocess.PIPE, check=True)
    assert done.stdout.decode().strip() == f"['{tmp_path}/a.log']"


def test_a_renamed_file_is_found_in_its_folder_only(tmp_path: Path) -> None:
    made(tmp_path, "a.log", "x/b.log")
    facts = (tmp_path / "a.log").stat()
    key = (facts.st_dev, facts.st_ino)
    (tmp_path / "a.log").rename(tmp_path / "old")
    assert find_moved(str(tmp_path / "a.log"), key) == str(tmp_path / "old")
    (tmp_path / "old").rename(tmp_path / "x" / "old")
    assert find_moved(str(tmp_path / "a.log"), key) is None
    assert find_moved(str(tmp_path / "gone" / "a.log"), key) is None
    assert folder_is_on(str(tmp_path / "a.log"), key[0])
    assert not folder_is_on(str(tmp_path / "a.log"), key[0] + 1)
    assert not folder_is_on(str(tmp_path / "gone" / "a.log"), key[0])


def test_a_file_that_cannot_be_looked_at_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(tmp_path, "a.log", "b.log", "c.log")
    wanted = (tmp_path / "b.log").stat()
    entries = [Entry(path) for path in sorted(tmp_path.iterdir())]
    monkeypatch.setattr(os, "scandir", lambda folder: contextlib.nullcontext(iter(entries)))
    assert find_moved(str(tmp_path / "gone.log"), (wanted.st_dev, wanted.st_ino)) == str(tmp_path / "b.log")


class Entry:
    """Of a file system that does not tell the kinds of its files, and where only ``b.log`` can be looked at."""

    def __init__(self, path: Path) -> None:
        self.path, self.name, self.inode = str(path), path.name, lambda: path.stat().st_ino

    def is_file(self, follow_symlinks: bool) -> bool:
        if self.name != "b.log":
            raise OSError("stale file handle")
        return not follow_symlinks


def test_missing_names_only_what_has_no_wildcard(tmp_path: Path) -> None:
    made(tmp_path, "a.log")
    patterns = [str(tmp_path / name) for name in ("a.log", "b.log", "*.txt")]
    assert missing(patterns) == [str(tmp_path / "b.log")]


def test_names_are_legal_and_different() -> None:
    paths = ["/a", "/%61", "/a\n", "/a%0A", "/\udcff", "/%FF", "/" + "x" * 600, "/" + "x" * 601, "/ä" * 400]
    ids = {source_id("web1", path, 12) for path in paths}
    assert len(ids) == len(paths)
    for name in ids:
        assert check_source_id(name).startswith("web1:/")
        assert name.endswith("#12")
    assert source_id("web1", "/var/log/a b.log", 12) == "web1:/var/log/a b.log#12"
    assert len(attribute("/ä" * 4000).encode()) in range(4090, 4097)
    assert printable("/\udcff\n%") == "/%FF%0A%25"
