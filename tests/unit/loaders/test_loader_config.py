"""The loader's configuration: what is wrong is refused with its place, before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from logferry.loaders import config
from logferry.loaders.errors import LoaderConfigError
from logferry.loaders.location import Location

GOOD = """
dc = "dc2"
[kafka]
bootstrap_servers = "127.0.0.1:9092"
[spark]
master = "local[3]"
[[tables]]
path = "nginx"
topics = ["*.nginx", "dc1.apache"]
"""


def load(tmp_path: Path, text: str) -> config.Config:
    file = tmp_path / "load.toml"
    file.write_text(text)
    return config.load_config(file)


def test_a_whole_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    settings = load(tmp_path, GOOD)
    (table,) = settings.tables
    assert settings.dc == "dc2"
    assert settings.spark.master == "local[3]"
    assert table.path == Location.of(tmp_path / "nginx")
    assert table.topics == ["*.nginx", "dc1.apache"]


WRONG = {
    "not TOML": ("dc = ", "not TOML"),
    "no tables": ('kafka.bootstrap_servers = "x:1"', "tables"),
    "no kafka": ('[[tables]]\npath = "a"\ntopics = ["b"]', "kafka"),
    "a key that is none": (GOOD + "max_record = 5", "tables.0.max_record"),
    "no topics": (GOOD.replace('"*.nginx", "dc1.apache"', ""), "tables.0.topics"),
    "a topic that is none": (GOOD.replace("*.nginx", "a b"), "tables.0.topics.0: String should match pattern"),
    "no such number": (GOOD + "max_records = 0", "tables.0.max_records"),
    "a data centre that is none": (GOOD.replace("dc2", "DC 2"), "dc"),
    "a heap that is none": (GOOD.replace('master = "local[3]"', 'driver_memory = "lots"'), "spark.driver_memory"),
    "a store that is unknown": (GOOD.replace('path = "nginx"', 'path = "ftp://host/nginx"'), "ftp:// is not known"),
    "half a URI": (GOOD.replace('path = "nginx"', 'path = "s3:/bucket/nginx"'), "neither a path nor a URI"),
    "a bucket alone": (GOOD.replace('path = "nginx"', 'path = "s3://bucket"'), "a bucket or host, and a path"),
    "a way out": (GOOD.replace('path = "nginx"', 'path = "s3://bucket/a/../b"'), "without empty parts and dots"),
    "a path that cannot be quoted": (GOOD.replace('path = "nginx"', 'path = "a`b"'), "holds none of `"),
    "no path": (GOOD.replace('path = "nginx"', 'path = "/"'), "path"),
    "a name without a schema": (GOOD + 'register = "nginx"', "tables.0.register"),
    "a name with quotes": (GOOD + 'register = "logs.`nginx`"', "tables.0.register"),
    "one name for each topic": (GOOD + 'register = "logs.{topic}"', "in both the path and the name"),
    "a name twice": (
        GOOD + 'register = "logs.t"\n[[tables]]\npath = "b"\ntopics = ["b"]\nregister = "logs.T"',
        "logs.t would stand for two tables",
    ),
    "twice the same": (GOOD + '[[tables]]\npath = "nginx"\ntopics = ["b"]', "two tables"),
    "one beside another": (GOOD + '[[tables]]\npath = "nginx_ledger"\ntopics = ["b"]', "two tables"),
}


@pytest.mark.parametrize("case", WRONG)
def test_an_error_names_its_place(case: str, tmp_path: Path):
    text, said = WRONG[case]
    with pytest.raises(LoaderConfigError, match=r"load\.toml: ") as error:
        load(tmp_path, text)
    assert said in str(error.value)
    assert error.value.exit_status == 2


def test_names_in_a_catalog(tmp_path: Path):
    for path, name in {"nginx": "logs.nginx", "a": "unity.logs.nginx", "{topic}": "logs.raw_{topic}"}.items():
        text = GOOD.replace('path = "nginx"', f'path = "{path}"\nregister = "{name}"')
        assert load(tmp_path, text).tables[0].register_as == name


def test_no_file(tmp_path: Path):
    with pytest.raises(LoaderConfigError, match="No such file"):
        config.load_config(tmp_path / "none.toml")
