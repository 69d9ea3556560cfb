"""A table on S3 by the commands that a user types, with the keys in files: loaded, damaged, reloaded, compacted, shown,
and queried; and no key in what they print or store.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest
from logferry.loaders.location import Location, S3Access
from logferry.loaders.storage.files import file_system, list_files
from logferry.loaders.storage.ledger import existing_table
from logferry.ops.stack.s3_server import BUCKET, S3Server

from tests.support.loader import Topic, check_exact, chunks_of
from tests.support.loader_process import java_env

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]
KEYS = {"access": "AKIA-of-this-test", "secret": "sEcReT/of+this=test"}


async def test_the_commands_of_a_user(topic: Topic, tmp_path: Path):
    await topic.create(partitions=2)
    await topic.write(chunks_of("web1", b"one\ntwo\n\xff\n", b"three\n"), partitions=2)
    env = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    said: list[str] = []
    with S3Server(tmp_path / "s3") as server:
        for name, key in KEYS.items():
            (tmp_path / name).write_text(f"{key}\n")
        access = S3Access(server.endpoint, None, tmp_path / "access", tmp_path / "secret")
        table = Location.of(f"s3a://{BUCKET}/warehouse/logs", access)
        s3 = f'[s3]\nendpoint = "{server.endpoint}"\naccess_key_file = "access"\nsecret_key_file = "secret"\n'
        load = tmp_path / "load.toml"
        load.write_text(
            f'kafka.bootstrap_servers = "{topic.bootstrap}"\n{s3}'
            f'[spark]\nmaster = "local[2]"\ndriver_memory = "512m"\nscratch = "{tmp_path / "runs"}"\n'
            f'[[tables]]\npath = "{table.for_spark}"\ntopics = ["{topic.name}"]\npartition_by = ["recorded_date"]\n'
        )

        def run(*arguments: str, status: int = 0, more: Mapping[str, str] = MappingProxyType({})) -> str:
            done = subprocess.run(
                [sys.executable, "-m", "logferry.ops", *arguments],
                capture_output=True,
                text=True,
                check=False,
                cwd=tmp_path,
                env={**env, **java_env(), **more},
                stdin=subprocess.DEVNULL,
            )
            said.append(done.stdout + done.stderr)
            assert done.returncode == status, said[-1]
            return done.stdout

        of_load = ("--config", str(load))
        assert json.loads(run("load", *of_load, "--json"))["rows"] == 3
        check_exact(table, topic.committed)
        existing_table(table).delete("line = 1")
        run("table", "reload", str(table), *of_load, "--from", topic.name, "--yes")
        check_exact(table, topic.committed)
        await topic.write(chunks_of("web1", b"four\n", start=9), partitions=2)
        run("load", *of_load)
        run("table", "compact", *of_load, "--version-retention-hours", "1")
        check_exact(table, topic.committed)
        (state,) = json.loads(run("table", "state", *of_load, "--json"))
        assert (state["table"], state["last"]["batch"]) == (str(table), 2)
        keys = {"AWS_ENDPOINT_URL": server.endpoint, "AWS_ACCESS_KEY_ID": KEYS["access"]}
        keys["AWS_SECRET_ACCESS_KEY"] = KEYS["secret"]
        sql = ("query", "SELECT count(*) AS n FROM logs", "--table", str(table), "--no-tail", "--format", "csv")
        assert run(*sql, more=keys) == "n\n4\n"
        elsewhere = ("load", "--topics", topic.name, "--bootstrap", topic.bootstrap, "--table", "s3://nowhere/t")
        run(*elsewhere, status=3, more=keys)
        assert "NoSuchBucket" in said[-1], said[-1]
        run("load", *of_load, "--table", str(table), status=2)
        stored = file_system(table.parent)
        contents = [stored.open_input_file(file.name).readall() for file in list_files(table.parent)]
        (tmp_path / "secret").unlink()
        run("table", "state", *of_load, status=3)
        assert not any(key.encode() in content for key in KEYS.values() for content in contents)
        assert "Traceback" not in "".join(said)
        assert [text for text in said if any(key in text for key in KEYS.values())] == []
