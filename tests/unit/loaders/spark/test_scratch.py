"""The folder of a run: removed at its end, and by the next run if it could not be."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from logferry.loaders.spark.session import remove_stale, scratch_folder


def test_a_run_has_its_own_folder_and_leaves_nothing(tmp_path: Path):
    with scratch_folder(tmp_path) as one, scratch_folder(tmp_path) as two:
        assert one != two
        (one / "block").write_bytes(b"x")
    assert not list(tmp_path.iterdir())


def test_an_error_leaves_nothing_either(tmp_path: Path):
    with pytest.raises(KeyError), scratch_folder(tmp_path):
        raise KeyError
    assert not list(tmp_path.iterdir())


def test_the_folder_of_a_run_that_is_gone_is_removed(tmp_path: Path):
    dead = tmp_path / "run-dead"
    dead.mkdir()
    (dead / "lock").touch()
    (dead / "block").write_bytes(b"x")
    unlocked = tmp_path / "run-just-made"
    unlocked.mkdir()
    with scratch_folder(tmp_path) as alive:
        assert not dead.exists()
        assert remove_stale(tmp_path) == []
        assert alive.exists()
        assert unlocked.exists()


@pytest.mark.parametrize("case", ["link", "open to others"])
def test_a_folder_that_somebody_else_prepared_is_refused(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its name in the shared temporary folder can be guessed."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    base = tmp_path / f"logferry-loader-{os.getuid()}"
    if case == "link":
        (tmp_path / "elsewhere").mkdir()
        base.symlink_to(tmp_path / "elsewhere")
    else:
        base.mkdir()
        base.chmod(0o777)
    with pytest.raises(PermissionError, match="others may write"), scratch_folder():
        pass
    assert not list(base.iterdir())
    base.unlink() if case == "link" else base.rmdir()
    with scratch_folder() as folder:
        assert folder.parent == base
