"""The configuration is refused as a whole, with the file, the setting and what is wrong with it."""

from __future__ import annotations

from pathlib import Path

import pytest
from logferry.gateway.config import Config, ConfigError, load

GOOD = """
dc = "dc1"
data_centres = ["dc1", "dc2"]
listen = "127.0.0.1:18080"
workers = 2
lanes = 4
accept_weak_kafka = ["replication", "min-isr"]
[kafka]
bootstrap_servers = "127.0.0.1:9092,127.0.0.1:9093"
[limits]
chunk_bytes = 1048576
"""
LEAST = 'dc = "dc1"\n[kafka]\nbootstrap_servers = "127.0.0.1:9092"\n'


def loaded(tmp_path: Path, text: str) -> Config:
    path = tmp_path / "gateway.toml"
    path.write_text(text, encoding="utf-8")
    return load(path)


def test_what_is_named_is_taken(tmp_path: Path) -> None:
    config = loaded(tmp_path, GOOD)
    assert (config.dc, config.data_centres, config.workers, config.lanes) == ("dc1", ["dc1", "dc2"], 2, 4)
    assert config.kafka.bootstrap_servers == "127.0.0.1:9092,127.0.0.1:9093"
    assert config.accept_weak_kafka == ["replication", "min-isr"]
    assert config.limits.chunk_bytes == 1 << 20
    assert [config.url(worker) for worker in range(2)] == ["http://127.0.0.1:18080", "http://127.0.0.1:18081"]


def test_names_in_kafka_are_fixed(tmp_path: Path) -> None:
    """They hold what is recorded: other names would be another, empty gateway."""
    config = loaded(tmp_path, LEAST)
    assert config.state_topic == "logferry.gateway.dc1.state"
    assert config.group == "logferry.gateway.dc1"
    assert config.lane(5).transactional_id == "logferry.gateway.dc1.lane-5"
    assert config.lanes == 8


def test_no_weakness_is_accepted_by_default(tmp_path: Path) -> None:
    assert loaded(tmp_path, LEAST).accept_weak_kafka == []


REFUSED = [
    ("", ["dc", "kafka"]),
    ("dc = ", ["not TOML"]),
    ('dc = "dc1"', ["kafka"]),
    (LEAST.replace("dc1", "DC1"), ["dc:"]),
    (LEAST + "bootstrap = 1", ["kafka.bootstrap:"]),
    ("lane = 4\n" + LEAST, ["lane:"]),
    (LEAST + "[limits]\nchunk_byte = 5000", ["limits.chunk_byte:"]),
    (LEAST + "[limits]\nchunk_bytes = 1", ["limits.chunk_bytes:"]),
    (LEAST + "[limits]\nrequest_bytes = 1000000000", ["limits.request_bytes:"]),
    (LEAST + "[limits]\nbody_timeout_s = 0", ["limits.body_timeout_s:"]),
    (LEAST.replace("127.0.0.1:9092", ""), ["kafka.bootstrap_servers:"]),
    ("lanes = 0\n" + LEAST, ["lanes:"]),
    ("lanes = 1025\n" + LEAST, ["lanes:"]),
    ('lanes = "eight"\n' + LEAST, ["lanes:"]),
    ("workers = 0\n" + LEAST, ["workers:"]),
    ('codec = "brotli"\n' + LEAST, ["codec:"]),
    ('prefix = "a.b"\n' + LEAST, ["prefix:"]),
    ('prefix = "dc1"\n' + LEAST, ["prefix", "data centre"]),
    ('data_centres = ["dc1", "Paris"]\n' + LEAST, ["data_centres:", "Paris"]),
    ('accept_weak_kafka = ["everything"]\n' + LEAST, ["accept_weak_kafka.0:"]),
    ('listen = "8080"\n' + LEAST, ["listen:", "<address>:<port>"]),
    ('listen = "127.0.0.1:0"\n' + LEAST, ["listen:"]),
    ('listen = "127.0.0.1:65536"\n' + LEAST, ["listen:"]),
    ('listen = "0.0.0.0:8080"\n' + LEAST, ["listen:", "loopback"]),
    ('listen = ":8080"\n' + LEAST, ["listen:"]),
    ('listen = "127.0.0.1:65535"\nworkers = 2\n' + LEAST, ["listen", "2 workers"]),
    ("lanes = 0\nworkers = 0\n" + LEAST, ["lanes:", "workers:"]),
]


@pytest.mark.parametrize(("text", "named"), REFUSED)
def test_refused_by_file_and_setting(tmp_path: Path, text: str, named: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path, text)
    assert str(caught.value).startswith(str(tmp_path / "gateway.toml"))
    for name in named:
        assert name in str(caught.value)


def test_a_file_that_is_not_there_or_not_text(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml: No such file"):
        load(tmp_path / "none.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not TOML"):
        load(tmp_path / "bytes.toml")
