"""The tables ``[[inputs]]`` and the options for one input: what is taken, and what is refused, with its key."""

from __future__ import annotations

from pathlib import Path

import pytest
from logferry.client.agent.config import Config, parse
from logferry.client.files.containers import ContainerRules
from logferry.client.files.lines import LineRules

BASE = ["--url", "http://g:1", "--topic", "t", "--host", "h"]


def parsed(root: Path, *options: str, text: str = "") -> Config:
    (root / "push.toml").write_text(text)
    return parse([*BASE, "--state-dir", str(root / "state"), "--config", str(root / "push.toml"), *options])


def test_options_name_one_input_each(tmp_path: Path) -> None:
    config = parsed(tmp_path, "--stdin", "--source", "web1/program", "--attr", "a=b")
    (group,) = config.files
    assert (group.source, dict(group.attributes)) == ("web1/program", {"a": "b", "path": "stdin"})
    assert group.patterns == (str(tmp_path / "state" / "spool" / "stdin.spool"),)
    assert not config.has_files
    config = parsed(tmp_path, "--stdin", "--journald", "--syslog", "tcp://h:1", "--syslog", "unix:///x", "/logs/*")
    assert [each.kind for each in config.inputs] == ["stdin", "syslog", "journald"]
    assert [group.source for group in config.files] == ["h:stdin", "h:syslog", "h:journald", ""]
    assert [address.kind for address in config.inputs[1].listen] == ["tcp", "unix"]
    assert config.has_files


def test_tables_have_settings_of_their_own(tmp_path: Path) -> None:
    text = """
    record_start = '^x'
    attributes = {env = "p"}
    [[inputs]]
    type = "journald"
    name = "system"
    topic = "system"
    units = "ssh.service"
    start = "end"
    spool_bytes = 16777216
    [[inputs]]
    type = "stdin"
    attributes = {a = "b"}
    """
    config = parsed(tmp_path, text=text)
    journal, stdin = config.inputs
    assert (journal.units, journal.from_end, journal.spool_bytes) == (("ssh.service",), True, 16 << 20)
    first, second = config.files
    assert (first.topic, first.source, first.record_start) == ("system", "h:system", None)
    assert (second.topic, second.record_start is not None) == ("t", True)
    assert dict(second.attributes) == {"env": "p", "a": "b", "path": "stdin"}
    assert stdin.name == "stdin"


def test_settings_of_files_leave_nothing_of_an_input_out(tmp_path: Path) -> None:
    """But those about lines hold for all; the lines of syslog and journald are UTF-8 whatever the files are."""
    options = ["--start-at", "end", "--ignore-older-s", "9", "--encoding", "latin-1", "--exclude-lines", "x", "/logs/*"]
    stdin, journal, files = parsed(tmp_path, "--stdin", "--journald", *options).files
    assert [(each.starts_at_end, each.ignore_older_s) for each in (stdin, journal, files)] == [
        (False, 0.0),
        (False, 0.0),
        (True, 9.0),
    ]
    rules = [each.rules for each in (stdin, journal, files) if isinstance(each.rules, LineRules)]
    assert [each.encoding for each in rules] == ["latin-1", None, "latin-1"]
    assert all(each.exclude for each in rules)


def test_the_form_of_files_is_not_that_of_an_input(tmp_path: Path) -> None:
    stdin, files = parsed(tmp_path, "--stdin", "--format", "cri", "/logs/*").files
    assert stdin.rules is None
    assert isinstance(files.rules, ContainerRules)


@pytest.mark.parametrize(
    ("options", "text", "said"),
    [
        ([], "", "GLOB is required"),
        (["--source", "x"], "", "--source"),
        (["--stdin", "--journald", "--source", "x"], "", "--source"),
        (["--once", "--journald"], "", "--once"),
        (["--journald", "--line-bytes", "2000"], "", "line_bytes"),
        (["--syslog", "x"], "", "--listen: 'x'"),
        (["--stdin"], '[[inputs]]\ntype = "stdin"', "--stdin"),
        ([], '[[inputs]]\ntype = "x"', "inputs[0].type: 'x'"),
        ([], '[[inputs]]\ntype = "stdin"\nnosuch = 1', "inputs[0].nosuch"),
        ([], '[[inputs]]\ntype = "stdin"\nlisten = "tcp://h:1"', "inputs[0].listen"),
        ([], '[[inputs]]\ntype = "journald"\ncut_lines = true', "inputs[0].cut_lines"),
        ([], '[[inputs]]\ntype = "journald"\nname = "../x"', "inputs[0].name"),
        ([], '[[inputs]]\ntype = "journald"\nsource = ""', "inputs[0].source"),
        ([], '[[inputs]]\ntype = "journald"\nstart = "middle"', "inputs[0].start"),
        ([], '[[inputs]]\ntype = "journald"\nspool_bytes = 1', "inputs[0].spool_bytes"),
        ([], '[[inputs]]\ntype = "syslog"', "inputs[0].listen"),
        ([], '[[inputs]]\ntype = "syslog"\nlisten = "tls://h:1"', "inputs[0].cert_file"),
        ([], '[[inputs]]\ntype = "syslog"\nlisten = "tls://h:1"\ncert_file = "/x"', "inputs[0].cert_file, key_file"),
        (
            [],
            '[[inputs]]\ntype = "syslog"\nlisten = "tls://h:1"\ncert_file = "/nosuch"\nkey_file = "/nosuch"',
            "inputs[0].cert_file, key_file, client_ca_file: No such file",
        ),
        ([], '[[inputs]]\ntype = "journald"\n[[inputs]]\ntype = "journald"', "same name"),
    ],
)
def test_a_wrong_setting_is_named(
    tmp_path: Path, options: list[str], text: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        parsed(tmp_path, *options, text=text)
    assert said in capsys.readouterr().err
