"""The one command: which sub-command gets what, what it costs to start, and the exit status of each kind of problem."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import tomllib
import types
from collections.abc import Callable
from pathlib import Path

import pytest
from logferry.client import __version__
from logferry.ops.cli import main as cli_main
from logferry.ops.cli.problems import CommandError, Unavailable, UsageError
from logferry.ops.commands import topics, up


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[list[str]], int]], None]:
    """Adds a sub-command ``try`` that runs a function."""

    def add(main: Callable[[list[str]], int]) -> None:
        module = types.ModuleType("logferry.ops.tried")
        module.main = main  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setitem(cli_main.COMMANDS, "try", cli_main.Command(module.__name__, "ops", "tried"))

    return add


@pytest.mark.parametrize(
    ("given", "passed_on"),
    [
        (["try"], []),
        (["try", "--help", "x"], ["--help", "x"]),
        (["try", "--config", "f"], ["--config", "f"]),
        (["--config", "f", "try", "x"], ["--config", "f", "x"]),
        (["--config=f", "try"], ["--config=f"]),
    ],
)
def test_a_sub_command_gets_the_rest(command: Callable[..., None], given: list[str], passed_on: list[str]) -> None:
    seen: list[list[str]] = []

    def main(argv: list[str]) -> int:
        seen.append(argv)
        return 0

    command(main)
    assert cli_main.main(given) == 0
    assert seen == [passed_on]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (CommandError("the answer is no"), 1),
        (UsageError("that is wrong"), 2),
        (Unavailable("it is away"), 3),
        (ModuleNotFoundError("no", name="rich.console"), 2),
        (KeyboardInterrupt(), 130),
    ],
)
def test_problems_become_an_exit_status_without_traceback(
    command: Callable[..., None], capsys: pytest.CaptureFixture[str], error: BaseException, status: int
) -> None:
    def main(argv: list[str]) -> int:
        raise error

    command(main)
    assert cli_main.main(["try"]) == status
    said = capsys.readouterr().err
    assert said == "" if status == 130 else said.startswith("logferry: ")


def test_a_fault_of_ours_is_not_hidden(command: Callable[..., None]) -> None:
    def main(argv: list[str]) -> int:
        raise ModuleNotFoundError("no", name="logferry.gone")

    command(main)
    with pytest.raises(ModuleNotFoundError):
        cli_main.main(["try"])


def test_no_or_a_wrong_command_is_wrong_use(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli_main.main([]) == 2
    assert cli_main.main(["topic"]) == 2
    assert "did you mean topics?" in capsys.readouterr().err


def test_help_lists_every_command_on_one_screen(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli_main.main(["--help"]) == 0
    listed = capsys.readouterr().out
    for name, command in cli_main.COMMANDS.items():
        assert f"  {name} " in listed or not command.group
        assert command.summary in listed or not command.group
        assert f"logferry {name}" in listed or command.group
    assert len(listed.splitlines()) <= 24
    assert max(map(len, listed.splitlines())) <= 80


@pytest.mark.parametrize("name", cli_main.COMMANDS)
def test_the_help_of_every_command_begins_with_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    status: object = None
    try:
        status = cli_main.main([name, "--help"])
    except SystemExit as ended:
        status = ended.code
    assert status == 0
    before_options = capsys.readouterr().out.partition("\noptions:")[0]
    assert f"logferry {name}" in before_options.partition("\nexample")[2]


def test_there_is_one_version(capsys: pytest.CaptureFixture[str]) -> None:
    """That of pyproject.toml, which the metadata of the installed package hold."""
    project = tomllib.loads((Path(cli_main.__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))[
        "project"
    ]
    assert cli_main.main(["--version"]) == 0
    assert capsys.readouterr().out == f"logferry {__version__}\n"
    assert __version__ == importlib.metadata.version("logferry") == project["version"]


# ---- completion --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_commands_actions_and_options(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli_main.main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(name in script for name in cli_main.COMMANDS)
    for word in ("grow", "until-end", "no-restart"):
        assert word in script


def test_bash_completes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli_main.main(["completion", "bash"]) == 0
    (tmp_path / "logferry.bash").write_text(capsys.readouterr().out, encoding="utf-8")

    def completed(*words: str) -> list[str]:
        line = " ".join(f"'{word}'" for word in words)
        program = (
            f"source {tmp_path}/logferry.bash; COMP_WORDS=({line}); COMP_CWORD={len(words) - 1};"
            ' _logferry; echo "${COMPREPLY[@]}"'
        )
        return subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True).stdout.split()

    assert completed("logferry", "to") == ["topics", "token"]
    assert completed("logferry", "topics", "c") == ["create"]
    assert completed("logferry", "up", "--wo") == ["--workers"]


def test_the_command_and_push_load_nothing_but_the_standard_library() -> None:
    """`-S` leaves out site-packages, so what is not of the standard library cannot be found but by its folder."""
    root = Path(cli_main.__file__).parents[2]
    program = (
        "import sys, types\n"
        "package = types.ModuleType('logferry'); package.__path__ = [sys.argv[1]]; sys.modules['logferry'] = package\n"
        "from logferry.ops.cli import main as cli_main\n"
        "sys.exit(cli_main.main(['push', '--help']))"
    )
    run = subprocess.run([sys.executable, "-I", "-S", "-c", program, root], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "logferry push" in run.stdout


# ---- --config ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[up]\nprot = 1", r"up\.prot: unknown setting; the known ones are dc, "),
        ("[up]\nport = '1'", r"up\.port: '1' is not of type int"),
        ("[up]\njson = 1", r"up\.json: 1 is not of type bool"),
        ("[up]\nport = true", r"up\.port: True is not of type int"),
        ("up = 1", "up must be a table"),
        ("[up", "not valid TOML"),
    ],
)
def test_a_wrong_file_is_refused_with_the_setting(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "f.toml").write_text(text)
    with pytest.raises(UsageError, match=said):
        up.main(["--config", str(tmp_path / "f.toml")])


def test_a_missing_file_is_refused() -> None:
    with pytest.raises(UsageError, match="No such file"):
        up.main(["--config=/nowhere.toml"])


def test_the_command_line_wins_over_the_file(tmp_path: Path) -> None:
    (tmp_path / "f.toml").write_text('[topics]\nurl = "ftp://from-the-file"')
    with pytest.raises(UsageError, match="from-the-file"):
        topics.main(["--config", str(tmp_path / "f.toml")])
    with pytest.raises(UsageError, match="from-the-line"):
        topics.main(["--config", str(tmp_path / "f.toml"), "--url", "ftp://from-the-line"])


@pytest.mark.parametrize(
    "argv",
    [
        ["create", "t"],
        ["create", "--partitions", "1"],
        ["grow", "t", "--partitions", "0"],
        ["grow", "t", "--partitions", "x"],
        ["grow", "t", "--partitions", "2", "--retention-ms", "1"],
        ["list", "t"],
        ["drop", "t"],
    ],
)
def test_wrong_use_of_topics(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        topics.main(argv)
    assert ended.value.code == 2


def test_options_may_stand_between_arguments() -> None:
    argv = ["create", "--url", "ftp://from-the-line", "t", "--partitions", "1"]
    with pytest.raises(UsageError, match="from-the-line"):
        topics.main(argv)
