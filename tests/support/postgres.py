"""A PostgreSQL server of the tests' own, as Debian installs its programs; skipped where they are missing."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

_PATIENCE_S = 60


def program(name: str) -> str | None:
    """In PATH, else of Debian's newest version."""
    found = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
    return shutil.which(name) or (str(found[-1]) if found else None)


@contextmanager
def postgresql() -> Iterator[str]:
    """Its connection string, by a socket in a folder of its own. It does not run as root: then it is another user's."""
    initdb, server = program("initdb"), program("pg_ctl")
    if initdb is None or server is None:
        pytest.skip("needs PostgreSQL's initdb and pg_ctl (Debian: apt-get install postgresql)")
    folder = Path(tempfile.mkdtemp(prefix="pg-", dir="/tmp"))
    who: dict[str, Any] = {}
    if os.geteuid() == 0:
        nobody = pwd.getpwnam("nobody")
        os.chown(folder, nobody.pw_uid, nobody.pw_gid)
        who = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}

    def run(*command: str) -> None:
        subprocess.run(command, cwd=folder, check=True, timeout=_PATIENCE_S, stdout=subprocess.DEVNULL, **who)

    data, log = str(folder / "data"), str(folder / "log")
    options = f"-c listen_addresses= -c unix_socket_directories={folder} -c fsync=off"
    try:
        run(initdb, "-D", data, "-U", "test", "-A", "trust", "--no-sync")
        run(server, "-D", data, "-l", log, "-o", options, "-w", "start")
        try:
            yield f"host={folder} user=test dbname=postgres"
        finally:
            run(server, "-D", data, "-m", "immediate", "-w", "stop")
    finally:
        shutil.rmtree(folder)
