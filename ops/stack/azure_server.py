"""A local storage account of Azure for tests: Azurite's Blob service, with its objects in memory.

    with AzureServer(folder) as server: ...     # server.environment

It has the container ``warehouse``, and checks the signature of each request. A PUT with ``If-None-Match: *`` is refused
where the object exists. It has no DFS service: Hadoop's driver works by the Blob service, as with accounts that have no
hierarchical namespace.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from base64 import b64encode
from pathlib import Path
from typing import Final, Self

from logferry.ops.cli.problems import Unavailable
from logferry.ops.stack.processes import Child, free_ports, get
from logferry.ops.stack.s3_server import BUCKET
from pyarrow.fs import AzureFileSystem

INSTALL: Final = "npm install --prefix .venv azurite@3.35.0"
ACCOUNT: Final = "logferry"
KEY: Final = b64encode(b"a key of the emulator, not a secret").decode()
ROOT: Final = f"abfss://{BUCKET}@{ACCOUNT}.dfs.core.windows.net"
_READY_S: Final = 60.0
_STOP_S: Final = 5.0
_LOOK_S: Final = 0.1


def azurite() -> str | None:
    """The program: in the environment of Python, or in PATH."""
    places = [str(Path(sys.prefix, "node_modules", ".bin")), os.environ.get("PATH", os.defpath)]
    return shutil.which("azurite-blob", path=os.pathsep.join(places))


class AzureServer:
    """``key``: of the account, in base64. ``emulator``: the variables that lead to it."""

    def __init__(self, folder: Path, key: str = KEY) -> None:
        program = azurite()
        if program is None:
            raise Unavailable(f"azurite-blob is missing: {INSTALL}")
        (self.port,), self._key = free_ports(1), key
        options = ["--inMemoryPersistence", "--disableTelemetry", "--skipApiVersionCheck", "--silent"]
        command = [program, *options, "--blobHost", "127.0.0.1", "--blobPort", str(self.port)]
        env = {**os.environ, "AZURITE_ACCOUNTS": f"{ACCOUNT}:{key}"}
        self._child = Child("azurite", command, folder / "azurite.log", env=env)

    @property
    def emulator(self) -> dict[str, str]:
        return {"AZURE_STORAGE_USE_EMULATOR": "true", "AZURITE_BLOB_STORAGE_URL": f"http://127.0.0.1:{self.port}"}

    @property
    def environment(self) -> dict[str, str]:
        """The variables by which every command and library finds it."""
        return {**self.emulator, "AZURE_STORAGE_ACCOUNT_KEY": self._key}

    def __enter__(self) -> Self:
        """Returns when it has the container. Raises Unavailable."""
        self._child.start()
        deadline = time.monotonic() + _READY_S
        while not get(f"http://127.0.0.1:{self.port}", "/")[0]:
            if not self._child.running or time.monotonic() > deadline:
                self.__exit__()
                raise Unavailable(f"the server of abfss:// does not start:\n{self._child.log_tail()}")
            time.sleep(_LOOK_S)
        client_of(self.emulator["AZURITE_BLOB_STORAGE_URL"], self._key).create_dir(BUCKET)
        return self

    def __exit__(self, *_: object) -> None:
        self._child.stop(_STOP_S)


def client_of(emulator: str, key: str) -> AzureFileSystem:
    """pyarrow's client, which the loader does not use."""
    host = emulator.removeprefix("http://")
    service = {"blob_storage_authority": host, "blob_storage_scheme": "http"}
    return AzureFileSystem(ACCOUNT, account_key=key, **service, dfs_storage_authority=host, dfs_storage_scheme="http")
