"""The store in which a run of the tests has its tables: ``pytest --store s3``, ``s3proxy`` or ``hdfs``; or a folder."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest
from logferry.loaders.location import Location
from logferry.ops.stack.hdfs_cluster import HdfsCluster
from logferry.ops.stack.s3_server import BUCKET, S3Proxy, S3Server

S3_SERVERS: Final = {"s3": S3Server, "s3proxy": S3Proxy}
STORES: Final = ("folder", *S3_SERVERS, "hdfs")
_numbers = itertools.count(1)


@contextmanager
def running_store(name: str, folder: Path) -> Iterator[str]:
    """The root for tables; empty for folders. The environment says how S3 is accessed."""
    if name in S3_SERVERS:
        with S3_SERVERS[name](folder) as server, pytest.MonkeyPatch.context() as patch:
            for variable, value in server.environment.items():
                patch.setenv(variable, value)
            yield f"s3://{BUCKET}"
    elif name == "hdfs":
        with HdfsCluster(folder) as cluster:
            yield cluster.uri
    else:
        yield ""


def new_warehouse(root: str, folder: Path) -> Location:
    """An empty place for the tables of one test. ``folder``: for folders."""
    return Location.of(f"{root}/test-{next(_numbers)}" if root else folder)
