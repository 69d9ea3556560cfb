"""The one command: which sub-command gets what, what it costs to start, and the exit status of each kind of problem."""

from __future__ import annotations

import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest
from logferry.ops.cli import main as cli
from logferry.ops.cli.problems import Problem, Unavailable, WrongUse
from logferry.ops.commands import topics, up


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[list[str]], int]], None]:
    """Adds a sub-command ``try`` that runs a function."""

    def add(main: Callable[[list[str]], int]) -> None:
        module = types.ModuleType("logferry.ops.tried")
        module.main = main  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setitem(cli.COMMANDS, "try", cli.Command(module.__name__, "ops", "tried"))

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
    assert cli.main(given) == 0
    assert seen == [passed_on]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (Problem("the answer is no"), 1),
        (WrongUse("that is wrong"), 2),
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
    assert cli.main(["try"]) == status
    said = capsys.readouterr().err
    assert said == "" if status == 130 else said.startswith("logferry: ")


def test_a_fault_of_ours_is_not_hidden(command: Callable[..., None]) -> None:
    def main(argv: list[str]) -> int:
        raise ModuleNotFoundError("no", name="logferry.gone")

    command(main)
    with pytest.raises(ModuleNotFoundError):
        cli.main(["try"])


def test_no_or_a_wrong_command_is_wrong_use(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert cli.main(["topic"]) == 2
    assert "did you mean topics?" in capsys.readouterr().err


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    listed = capsys.readouterr().out
    assert all(f"  {name} " in listed and command.summary in listed for name, command in cli.COMMANDS.items())


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_help_with_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    status: object = None
    try:
        status = cli.main([name, "--help"])
    except SystemExit as ended:
        status = ended.code
    assert status == 0
    assert f"logferry {name}" in capsys.readouterr().out.partition("example")[2]


def test_the_command_and_push_load_nothing_but_the_standard_library() -> None:
    """`-S` leaves out site-packages, so what is not of the standard library cannot be found but by its folder."""
    root = Path(cli.__file__).parents[1]
    program = (
        "import sys, types\n"
        "package = types.ModuleType('logferry'); package.__path__ = [sys.argv[1]]; sys.modules['logferry'] = package\n"
        "from logferry.ops import cli\n"
        "sys.exit(cli.main(['push', '--help']))"
    )
    run = subprocess.run([sys.executable, "-I", "-S", "-c", program, root], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "logferry push" in run.stdout


# ---- --config ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[up]\nprot = 1", r"up\.prot: there is no such setting"),
        ("[up]\nport = '1'", r"up\.port: '1' is not of the type int"),
        ("[up]\njson = 1", r"up\.json: 1 is not of the type bool"),
        ("[up]\nport = true", r"up\.port: True is not of the type int"),
        ("up = 1", "up is not a table"),
        ("[up", "not TOML"),
    ],
)
def test_a_wrong_file_is_refused_with_the_setting(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "f.toml").write_text(text)
    with pytest.raises(WrongUse, match=said):
        up.main(["--config", str(tmp_path / "f.toml")])


def test_a_missing_file_is_refused() -> None:
    with pytest.raises(WrongUse, match="No such file"):
        up.main(["--config=/nowhere.toml"])


def test_the_command_line_wins_over_the_file(tmp_path: Path) -> None:
    (tmp_path / "f.toml").write_text('[topics]\nurl = "ftp://from-the-file"')
    with pytest.raises(WrongUse, match="from-the-file"):
        topics.main(["--config", str(tmp_path / "f.toml")])
    with pytest.raises(WrongUse, match="from-the-line"):
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
