"""The store of a run's tables: ``pytest --store`` with one of `STORES`; without it, a folder."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest
from logferry.loaders.location import Location
from logferry.ops.cli.problems import Unavailable
from logferry.ops.stack import azure_server, gcs_server
from logferry.ops.stack.azure_server import AzureServer
from logferry.ops.stack.gcs_server import GcsServer
from logferry.ops.stack.hdfs_cluster import HdfsCluster
from logferry.ops.stack.s3_server import BUCKET, S3Proxy, S3Server

_SERVERS: Final = {"s3": S3Server, "s3proxy": S3Proxy, "gs": GcsServer, "azure": AzureServer}
_ROOTS: Final = {"gs": f"gs://{BUCKET}", "azure": azure_server.ROOT}
STORES: Final = ("folder", *_SERVERS, "hdfs")
_NO_GCS: Final = f"no fake-gcs-server: {gcs_server.INSTALL}"
_NO_AZURE: Final = f"no azurite-blob: {azure_server.INSTALL}"
needs_gcs: Final = pytest.mark.skipif(gcs_server.fake_gcs_server() is None, reason=_NO_GCS)
needs_azure: Final = pytest.mark.skipif(azure_server.azurite() is None, reason=_NO_AZURE)
_numbers = itertools.count(1)


@contextmanager
def running_store(name: str, folder: Path) -> Iterator[str]:
    """The root for tables; empty for folders. The environment says how the store is accessed."""
    if name in _SERVERS:
        try:
            running = _SERVERS[name](folder)
        except Unavailable as problem:
            pytest.skip(str(problem))
        with running as server, pytest.MonkeyPatch.context() as patch:
            for variable, value in server.environment.items():
                patch.setenv(variable, value)
            yield _ROOTS.get(name, f"s3://{BUCKET}")
    elif name == "hdfs":
        with HdfsCluster(folder) as cluster:
            yield cluster.uri
    else:
        yield ""


def new_warehouse(root: str, folder: Path) -> Location:
    """An empty place for the tables of one test. ``folder``: for folders."""
    return Location.of(f"{root}/test-{next(_numbers)}" if root else folder)
