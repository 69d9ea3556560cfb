"""The samples for hosts fit the client: options, folders and exit status are those that it has."""

from __future__ import annotations

import configparser
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from logferry.client.agent.options import read
from logferry.gateway.config import Limits
from logferry.loaders import config
from logferry.ops.cli.main import COMMANDS

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "ops" / "deploy"
INSTALLED = "/opt/logferry-services/current/bin/logferry"


@pytest.fixture
def service() -> configparser.SectionProxy:
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(DEPLOY / "logferry-push.service")
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
    file = DEPLOY / "load-parsers.toml"
    samples = re.findall(r"^# (.*)\n\[\[tables\]\]", file.read_text(encoding="utf-8"), re.MULTILINE)
    patterns = [table.parser.pattern or "" for table in config.load_config(file).tables]
    assert len(samples) == len(patterns) == 5
    found = [
        re.fullmatch(pattern.replace("(?<", "(?P<"), line) for pattern, line in zip(patterns, samples, strict=True)
    ]
    assert all(match is not None and match["at"] and match["message"] for match in found)


# ---- the load from a scheduler ---------------------------------------------------------------------------------


def cron_line() -> tuple[dict[str, str], str]:
    """The variables of the file, and the command of its only job."""
    *settings, job = (line for line in (DEPLOY / "logferry-load.cron").read_text().splitlines() if line[0] != "#")
    minute, *rest = job.split(maxsplit=6)
    assert (minute, rest[:4], rest[4]) == ("*/5", ["*"] * 4, "logferry")
    assert "%" not in rest[5], "cron makes it a new line"
    return dict(line.split("=", 1) for line in settings), rest[5]


# Exit status of the load → whether cron has something to send.
CRON = {"true": False, "exit 3": False, "exit 130": False, "exit 1": True, "exit 2": True}


@pytest.mark.parametrize("load", CRON)
def test_cron_sends_what_an_operator_must_see(load: str, tmp_path: Path):
    done = run_cron_line(tmp_path, f"echo report; {load}")
    assert (done.returncode, done.stdout, done.stderr) == (0, "report\n" * CRON[load], "")


def test_cron_sends_the_error_of_a_wrong_configuration(tmp_path: Path):
    done = run_cron_line(tmp_path, f'exec {sys.executable} -m logferry.loaders "$@"')
    assert "load.toml: No such file" in done.stdout


def run_cron_line(folder: Path, load: str) -> subprocess.CompletedProcess[str]:
    """As cron does: with /bin/sh, and no environment but its own. ``load``: in place of the installed command."""
    settings, command = cron_line()
    (folder / "logferry").write_text(f'#!/bin/sh\n[ "$1" = load ] || exit 99\nshift\n{load}\n')
    (folder / "logferry").chmod(0o755)
    for installed, here in {INSTALLED: str(folder / "logferry"), "/var/lib/logferry": str(folder)}.items():
        assert installed in command
        command = command.replace(installed, here)
    env = {**settings, "PATH": "/usr/bin:/bin", "HOME": str(folder), "LOGNAME": "logferry", "SHELL": "/bin/sh"}
    if "PYTHONPATH" in os.environ:
        env["PYTHONPATH"] = os.environ["PYTHONPATH"]
    given = {"capture_output": True, "text": True, "stdin": subprocess.DEVNULL}
    return subprocess.run(["/bin/sh", "-c", command], env=env, timeout=60, check=False, **given)  # type: ignore[call-overload,no-any-return]


def test_a_second_cron_job_does_not_wait_for_the_first(tmp_path: Path):
    holder = subprocess.Popen(
        ["flock", str(tmp_path / "load.lock"), "sh", "-c", "echo held; cat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    (tmp_path / "load.log").write_text("of the first one")
    try:
        done = run_cron_line(tmp_path, "echo report; exit 1")
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        assert (tmp_path / "load.log").read_text() == "of the first one"
    finally:
        holder.communicate(b"")


@pytest.mark.parametrize("name", ["logferry-load.service", "logferry-load.timer"])
def test_a_unit_is_that_of_the_guide(name: str):
    guide = (ROOT / "ops" / "docs" / "operations" / "production.md").read_text(encoding="utf-8")
    assert f"```ini\n{(DEPLOY / name).read_text(encoding='utf-8')}```" in guide


UNITS = sorted(DEPLOY.glob("*.service"))
needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")


@needs_systemd
def test_systemd_takes_the_units(tmp_path: Path):
    for file in (*UNITS, *DEPLOY.glob("*.timer")):
        text = file.read_text(encoding="utf-8").replace(INSTALLED, "/bin/true")
        (tmp_path / file.name).write_text(text.replace("/usr/local/sbin/logferry-job", "/bin/true"))
    (tmp_path / "notify-operator@.service").write_text("[Service]\nType=oneshot\nExecStart=/bin/true\n")
    verify = ["systemd-analyze", "verify", *(str(file) for file in sorted(tmp_path.glob("logferry-*")))]
    env = {**os.environ, "SYSTEMD_UNIT_PATH": f"{tmp_path}:"}
    done = subprocess.run(verify, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@needs_systemd
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_a_unit_is_hardened(unit: Path, tmp_path: Path):
    assert exposure(unit) <= 2.0
    # The rating sees what is taken away.
    opened = tmp_path / unit.name
    opened.write_text(
        re.sub(r"^(SystemCallFilter|CapabilityBoundingSet|ProtectSystem)=.*\n", "", unit.read_text(), flags=re.M)
    )
    assert exposure(opened) > 2.0


def exposure(unit: Path) -> float:
    command = ["systemd-analyze", "security", "--offline=true", "--no-pager", str(unit)]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    found = re.search(r"Overall exposure level for \S+: ([\d.]+)", said)
    assert found is not None, said
    return float(found[1])


@pytest.mark.parametrize("name", ["gateway", "mirror", "deliver", "keeper"])
def test_the_command_of_a_unit_is_one(name: str):
    unit = configparser.ConfigParser(interpolation=None, strict=False)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(DEPLOY / f"logferry-{name}.service")
    assert unit["Service"]["ExecStart"] == f"{INSTALLED} {name} --config /etc/logferry/{name}.toml"
    assert name in COMMANDS
    assert int(unit["Service"]["LimitNOFILE"]) >= Limits().connections + 512


@pytest.mark.skipif(shutil.which("systemd-sysusers") is None, reason="systemd-sysusers is not installed")
@pytest.mark.skipif(os.geteuid() != 0, reason="creating users below another root needs root")
def test_user_and_folders_are_created(tmp_path: Path):
    """By systemd's own tools, below another root."""
    (tmp_path / "etc").mkdir()
    (tmp_path / "var" / "lib" / "node_exporter").mkdir(parents=True)
    for tool, options in (("sysusers", []), ("tmpfiles", ["--create"])):
        command = [f"systemd-{tool}", f"--root={tmp_path}", *options, str(DEPLOY / f"logferry.{tool}")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
    [user] = [line.split(":") for line in (tmp_path / "etc" / "passwd").read_text().splitlines() if "logferry:" in line]
    assert user[5:] == ["/var/lib/logferry", "/usr/sbin/nologin"]
    modes = {name: f"{(tmp_path / name).stat().st_mode & 0o777:o}" for name in ("etc/logferry", "var/lib/logferry")}
    assert modes == {"etc/logferry": "750", "var/lib/logferry": "750"}
    assert (tmp_path / "var/lib/logferry").stat().st_uid == int(user[2])
    assert ((tmp_path / "etc/logferry").stat().st_uid, (tmp_path / "etc/logferry").stat().st_gid) == (0, int(user[3]))
