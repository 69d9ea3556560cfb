"""The samples for hosts fit the client: options, folders and exit status are those that it has."""

from __future__ import annotations

import configparser
import re
import shlex
from pathlib import Path

import pytest
from logferry.client.agent.options import read
from logferry.loaders import config

ROOT = Path(__file__).parents[3]


@pytest.fixture
def service() -> configparser.SectionProxy:
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(ROOT / "ops" / "deploy" / "logferry-push.service")
    return unit["Service"]


def test_the_command_of_the_service_is_one(service, tmp_path):
    python, isolated, pyz, *arguments = shlex.split(service["ExecStart"])
    assert (python, isolated, Path(pyz).name) == ("/usr/bin/python3", "-I", "logferry-push.pyz")
    (tmp_path / "push.toml").write_text('url = "http://h"\n')
    given = read([str(tmp_path / "push.toml") if argument.endswith(".toml") else argument for argument in arguments])
    assert given.get("token_file") == "${CREDENTIALS_DIRECTORY}/push-token"


def test_its_state_folder_is_that_of_the_guide(service):
    guide = (ROOT / "ops" / "docs" / "guides" / "push-client.md").read_text(encoding="utf-8")
    assert f'state_dir = "/var/lib/{service["StateDirectory"]}"' in guide
    assert service["LoadCredential"] == "push-token:/etc/logferry/push-token"


def test_each_sample_of_a_log_fits_its_parser():
    file = ROOT / "ops" / "deploy" / "load-parsers.toml"
    samples = re.findall(r"^# (.*)\n\[\[tables\]\]", file.read_text(encoding="utf-8"), re.MULTILINE)
    patterns = [table.parser.pattern or "" for table in config.load_config(file).tables]
    assert len(samples) == len(patterns) == 5
    found = [
        re.fullmatch(pattern.replace("(?<", "(?P<"), line) for pattern, line in zip(patterns, samples, strict=True)
    ]
    assert all(match is not None and match["at"] and match["message"] for match in found)
