"""How the process of ``logferry`` ends while threads of Arrow still read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

# A command that leaves a scan behind: Arrow reads ahead in threads of its own, from a store that is Python.
# Python needs a moment to take itself down.
COMMAND = """
import sys, threading, time
import pyarrow as pa, pyarrow.dataset, pyarrow.fs, pyarrow.parquet
from logferry.ops.cli import main as cli

class Stored:
    closed = False
    def __init__(self, path): self.file = open(path, "rb")
    def read(self, n=-1): time.sleep(0.001); return self.file.read(n)
    def seek(self, *to): return self.file.seek(*to)
    def tell(self): return self.file.tell()
    def close(self): time.sleep(0.001)
    def readable(self): return True
    def seekable(self): return True
    def writable(self): return False
    def __del__(self, sleep=time.sleep): sleep(0.01)

class Store(pyarrow.fs.FileSystemHandler):
    def get_type_name(self): return "slow"
    def normalize_path(self, path): return path
    def get_file_info(self, paths): return pyarrow.fs.LocalFileSystem().get_file_info(paths)
    def open_input_file(self, path): return pa.PythonFile(Stored(path), "r")

Store.__abstractmethods__ = frozenset()

def command(argv=None):
    pa.set_io_thread_count(32)
    paths = [f"{sys.argv[1]}/{number}.parquet" for number in range(200)]
    for path in paths:
        pyarrow.parquet.write_table(pa.table({"a": list(range(1000))}), path, row_group_size=100)
    rows = pa.dataset.dataset(paths, filesystem=pyarrow.fs.PyFileSystem(Store()), format="parquet").to_batches()
    print(next(rows).num_rows)
    threading.Thread(target=lambda: list(rows), daemon=True).start()
    return 7

class Late:
    def __del__(self, sleep=time.sleep): sleep(0.3)

late = Late()
cli.main = command
cli.program()
"""


def test_a_command_that_leaves_readers_behind_ends_with_its_own_status(tmp_path: Path):
    for _ in range(3):
        command = [sys.executable, "-c", COMMAND, str(tmp_path)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert (ended.returncode, ended.stdout, ended.stderr) == (7, "100\n", "")
