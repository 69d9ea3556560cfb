"""The store of a run's tables: ``pytest --store s3``, ``s3proxy``, ``gs`` or ``hdfs``; without it, a folder."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest
from logferry.loaders.location import Location
from logferry.ops.stack.gcs_server import INSTALL, GcsServer, fake_gcs_server
from logferry.ops.stack.hdfs_cluster import HdfsCluster
from logferry.ops.stack.s3_server import BUCKET, S3Proxy, S3Server

_SERVERS: Final = {"s3": S3Server, "s3proxy": S3Proxy, "gs": GcsServer}
STORES: Final = ("folder", *_SERVERS, "hdfs")
needs_gcs: Final = pytest.mark.skipif(fake_gcs_server() is None, reason=f"no fake-gcs-server: {INSTALL}")
_numbers = itertools.count(1)


@contextmanager
def running_store(name: str, folder: Path) -> Iterator[str]:
    """The root for tables; empty for folders. The environment says how the store is accessed."""
    if name == "gs" and fake_gcs_server() is None:
        pytest.skip(f"no fake-gcs-server: {INSTALL}")
    if name in _SERVERS:
        with _SERVERS[name](folder) as server, pytest.MonkeyPatch.context() as patch:
            for variable, value in server.environment.items():
                patch.setenv(variable, value)
            yield f"{'gs' if name == 'gs' else 's3'}://{BUCKET}"
    elif name == "hdfs":
        with HdfsCluster(folder) as cluster:
            yield cluster.uri
    else:
        yield ""


def new_warehouse(root: str, folder: Path) -> Location:
    """An empty place for the tables of one test. ``folder``: for folders."""
    return Location.of(f"{root}/test-{next(_numbers)}" if root else folder)
