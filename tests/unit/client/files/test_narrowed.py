"""What a pattern matches of one path: the same as the whole pattern finds there."""

from __future__ import annotations

import glob
import os
import random
from pathlib import Path

import pytest
from logferry.client.files.discover import find_files, folders_of, narrowed

NAMES = ("a", "b.log", ".h", "x[1].log", "c.gz", "**")
PARTS = ("*", "**", "*.log", "a", "[ab]*", ".*", "?", "x[[]1].log", "c.gz", "b.log")


@pytest.mark.parametrize("seed", range(8))
def test_narrowed_patterns_match_what_the_pattern_matches_there(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(30):
        path = tmp_path.joinpath(*rng.choices(NAMES, k=rng.randint(1, 4)))
        if not any(parent.is_file() for parent in path.parents) and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"x")
    places = [Path(folder) / name for folder, names, files in os.walk(tmp_path) for name in (*names, *files)]
    found = 0
    for _ in range(40):
        pattern = os.path.join(tmp_path, *rng.choices(PARTS, k=rng.randint(1, 4)))  # noqa: PTH118
        whole = {path for path in glob.glob(pattern, recursive=True) if Path(path).is_file()}  # noqa: PTH207
        whole = {path for path in whole if not path.endswith(os.sep)}  # glob takes x/ for a folder unseen
        for place in map(str, places):
            ours = {
                path
                for each in narrowed(pattern, place)
                for path in glob.glob(each, recursive=True)  # noqa: PTH207
                if Path(path).is_file() and not path.endswith(os.sep)
            }
            expected = {path for path in whole if path == place or path.startswith(place + os.sep)}
            assert ours == expected, f"seed {seed}: {pattern} at {place}"
            found += len(ours)
        for each in whole:
            assert str(Path(each).parent) in folders_of([pattern]), f"seed {seed}: {pattern}"
    assert found > 20


def test_the_folders_on_the_way_are_watched_also_those_that_are_missing(tmp_path: Path) -> None:
    (tmp_path / "srv" / "app" / "other").mkdir(parents=True)
    srv = tmp_path / "srv"
    assert folders_of([str(srv / "*" / "logs" / "*.log")]) == {str(srv), str(srv / "app")}
    assert folders_of([str(tmp_path / "no" / "such" / "x.log")]) == {str(tmp_path)}
    assert folders_of([str(srv / "x.log")]) == {str(srv)}
    (srv / "app" / "logs").mkdir()
    assert str(srv / "app" / "logs") in folders_of([str(srv / "*" / "logs" / "*.log")], str(srv / "app"))


def test_a_compressed_file_belongs_to_patterns_that_name_it(tmp_path: Path) -> None:
    path = tmp_path / "app.log.gz"
    path.write_bytes(b"x")
    assert not find_files([str(tmp_path / "*")], "/state", below=str(path))
    assert find_files([str(tmp_path / "*.gz")], "/state", below=str(path))
