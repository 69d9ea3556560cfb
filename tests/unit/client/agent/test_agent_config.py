"""The command line: what is wrong is named, with exit status 2."""

from pathlib import Path
from typing import Any

import pytest
from logferry.client.agent.config import parse
from logferry.client.agent.main import main

GOOD = ["--url", "http://h:1", "--topic", "t", "--state-dir", "s", "*.log"]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "required"),
        (GOOD[:-1], "GLOB"),
        (["--url", "h:1", *GOOD[2:]], "--url 'h:1'"),
        (["--url", "ftp://h", *GOOD[2:]], "--url 'ftp://h'"),
        (["--url", "http://", *GOOD[2:]], "--url 'http://'"),
        (["--url", "http://h:x", *GOOD[2:]], "--url 'http://h:x'"),
        (["--url", "http://user:pw@h", *GOOD[2:]], "--url"),
        ([*GOOD, "--topic", "a b"], "topic: 'a b'"),
        ([*GOOD, "--attr", "x"], "--attr 'x' must be NAME=VALUE"),
        ([*GOOD, "--attr", "X=1"], "the name 'X'"),
        ([*GOOD, "--attr", "path=1"], "--attr path"),
        ([*GOOD, "--attr", "a=\udcff"], "--attr"),
        ([*GOOD, "--token-file", "/nowhere/token"], "--token-file /nowhere/token"),
        ([*GOOD, "--chunk-bytes", "10"], "--chunk-bytes 10"),
        ([*GOOD, "--chunk-bytes", "2000", "--line-bytes", "1999"], "--chunk-bytes 2000 is not between 1024 and 1999"),
        ([*GOOD, "--linger-ms", "0"], "--linger-ms 0"),
        ([*GOOD, "--threads", "0"], "--threads 0"),
        ([*GOOD, "--nice", "20"], "--nice 20"),
        ([*GOOD, "--bytes-per-s", "-1"], "--bytes-per-s -1"),
        ([*GOOD, "--cpu-percent", "nan"], "--cpu-percent nan"),
        ([*GOOD, "--timeout", "nan"], "--timeout nan"),
        ([*GOOD, "--host", "x" * 256], "--host"),
        ([*GOOD, "--ca-file", "/nowhere/ca.pem"], "--ca-file /nowhere/ca.pem: No such file"),
        ([*GOOD, "--ca-file", __file__], f"--ca-file {__file__}"),
        ([*GOOD, "--config", "/nowhere/push.toml"], "--config /nowhere/push.toml: No such file"),
        ([*GOOD, "--pin", "00"], "--pin: '00'"),
        ([*GOOD, "--record-start", "("], "--record-start: '(' is no regular expression"),
    ],
)
def test_wrong_use(argv: Any, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    assert said in capsys.readouterr().err


def test_help_shows_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "logferry push --url http://" in capsys.readouterr().out


def test_what_is_given_and_what_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "token").write_text("secret\n")
    config = parse([*GOOD, "--url", "https://i/base/", "--attr", "env=a=b", "--token-file", "token", "--host", "w"])
    (centre,) = config.data_centres
    assert centre.urls == ("http://h:1", "https://i/base/")
    assert (config.state_dir, config.patterns) == (str(tmp_path / "s"), (str(tmp_path / "*.log"),))
    assert (config.files[0].attributes, centre.token, config.host) == ({"env": "a=b"}, "secret", "w")
    assert (config.chunk_bytes, config.linger_s, config.compression, config.once) == (262144, 0.2, "gzip", False)


@pytest.mark.parametrize("content", [b"", b"a b", b"a\nb", b"\xff"])
def test_a_token_file_without_a_token(content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "token").write_bytes(content)
    assert main([*GOOD, "--token-file", str(tmp_path / "token")]) == 2
    assert "--token-file" in capsys.readouterr().err


def test_the_token_of_the_environment_gives_way_to_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert parse(GOOD).data_centres[0].token is None
    monkeypatch.setenv("LOGFERRY_TOKEN", "one")
    assert parse(GOOD).data_centres[0].token == "one"
    (tmp_path / "token").write_text("two")
    assert parse([*GOOD, "--token-file", str(tmp_path / "token")]).data_centres[0].token == "two"
    monkeypatch.setenv("LOGFERRY_TOKEN", "o ne")
    assert main(GOOD) == 2
    said = capsys.readouterr().err
    assert "LOGFERRY_TOKEN" in said
    assert "o ne" not in said


def test_pins_and_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://proxy:1")
    config = parse([*GOOD, "--pin", "AB" * 32, "--pin", "cd" * 32])
    assert config.pins == ("ab" * 32, "cd" * 32)
    assert config.proxies["http"] == "http://proxy:1"
