"""The TOML file of the push-client: what it says, what goes before it, and what is wrong with it."""

import re
from pathlib import Path
from typing import Any

import pytest
from logferry.client.agent.config import DataCentre, FileGroup, parse
from logferry.client.agent.main import main
from logferry.client.files.lines import LineRules

WHOLE = """
url = ["https://gw1:8443", "https://gw2:8443"]
state_dir = "/var/lib/logferry-push"
topic = "logs"
host = "web1"
attributes = { env = "prod", type = "plain" }
exclude = "*.debug.log"
line_bytes = 65536
heartbeat_s = 60.5
gzip = false

[[files]]
paths = ["/var/log/nginx/*.log", "/srv/nginx/*.log"]
topic = "nginx"
attributes = { type = "nginx" }

[[files]]
paths = "/var/log/app/**/*.log"
exclude = ["*/old/*"]
record_start = '^\\d{4}-'
cut_lines = true
"""


@pytest.fixture
def written(tmp_path: Path) -> Any:
    def write(text: str) -> list[str]:
        (tmp_path / "push.toml").write_text(text)
        return ["--config", str(tmp_path / "push.toml")]

    return write


def test_a_whole_file(written: Any) -> None:
    config = parse(written(WHOLE))
    assert config.data_centres[0].urls == ("https://gw1:8443", "https://gw2:8443")
    assert (config.state_dir, config.host, config.compression) == ("/var/lib/logferry-push", "web1", "none")
    assert (config.line_bytes, config.chunk_bytes, config.heartbeat_s) == (65536, 65536, 60.5)
    nginx, app = config.files
    assert nginx == FileGroup(
        ("/var/log/nginx/*.log", "/srv/nginx/*.log"), "nginx", ("*.debug.log",), {"env": "prod", "type": "nginx"}
    )
    assert (app.patterns, app.topic) == (("/var/log/app/**/*.log",), "logs")
    assert app.exclude == ("*.debug.log", "*/old/*")
    assert app.attributes == {"env": "prod", "type": "plain"}
    assert app.record_start is not None
    assert (app.record_start.pattern, app.cut_lines) == (rb"^(?:^\d{4}-)", True)


def test_the_command_line_goes_before_the_file(written: Any) -> None:
    given = written(WHOLE)
    config = parse([*given, "--url", "http://h:1", "--host", "other", "--heartbeat-s", "0", "--once", "--check"])
    assert (config.data_centres[0].urls, config.host, config.heartbeat_s) == (("http://h:1",), "other", 0.0)
    assert (config.once, config.check) == (True, True)
    assert config.files == parse(given).files


def test_patterns_may_come_from_the_command_line(written: Any) -> None:
    base = 'url = "http://h:1"\nstate_dir = "s"\ntopic = "t"\ncut_lines = true\n'
    (files,) = parse([*written(base), "/a/*.log"]).files
    assert files == FileGroup(("/a/*.log",), "t", cut_lines=True)


CENTRES = """
state_dir = "s"
topic = "t"
failover_s = 30
[[datacenters]]
name = "east"
urls = ["https://gw1.east:8443", "https://gw2.east:8443"]
[[datacenters]]
urls = "https://gw.west"
token_file = "/etc/west"
[[files]]
paths = "/a"
"""


def test_data_centres_of_the_file(written: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("logferry.client.agent.config.read_token", lambda path: f"of {path}")
    monkeypatch.setenv("LOGFERRY_TOKEN", "general")
    config = parse(written(CENTRES))
    assert (config.failover_s, config.failback_s) == (30.0, 120.0)
    assert config.data_centres == (
        DataCentre("east", ("https://gw1.east:8443", "https://gw2.east:8443"), "general"),
        DataCentre("gw.west:443", ("https://gw.west",), "of /etc/west", "/etc/west"),
    )


def test_data_centres_of_the_command_line() -> None:
    urls = [
        "--url",
        "http://a:1",
        "--url",
        "http://b:1",
        "--fallback-url",
        "http://c:1",
        "--fallback-url",
        "http://d:1",
    ]
    config = parse([*urls, "--state-dir", "s", "--topic", "t", "/a", "--once", "--timeout", "20"])
    assert config.data_centres == (
        DataCentre("a:1", ("http://a:1", "http://b:1")),
        DataCentre("c:1", ("http://c:1", "http://d:1")),
    )
    assert config.failover_s == 10.0  # or it would give up first


BASE = 'url = "http://h:1"\nstate_dir = "s"\ntopic = "t"\n'
FILES = '[[files]]\npaths = "/a"\n'


@pytest.mark.parametrize(
    ("text", "more", "said"),
    [
        ("url = ", [], "push.toml: "),
        (BASE + "topik = 1\n" + FILES, [], "push.toml: topik: unknown setting"),
        (BASE + FILES + "url = 'http://h'\n", [], "push.toml: files[0].url: unknown setting"),
        (BASE + "threads = '4'\n" + FILES, [], "push.toml: threads: must be a whole number"),
        (BASE + "threads = true\n" + FILES, [], "push.toml: threads: must be a whole number"),
        (BASE + "threads = 65\n" + FILES, [], "push.toml: threads 65 is not between 1 and 64"),
        (BASE + "gzip = 1\n" + FILES, [], "push.toml: gzip: must be true or false"),
        (BASE + "attributes = { a = 1 }\n" + FILES, [], "push.toml: attributes: must be a table of strings"),
        (BASE + "files = 1\n", [], "push.toml: files: must be tables, written as [[files]]"),
        (BASE + "[[files]]\ntopic = 'x'\n", [], "files[0].paths is required"),
        (BASE + FILES + "topic = 'a b'\n", [], "push.toml: files[0].topic: topic: 'a b'"),
        (BASE + FILES + "record_start = '('\n", [], "push.toml: files[0].record_start: '('"),
        (BASE + FILES + "attributes = { path = 'x' }\n", [], "push.toml: files[0].attributes path: the client sets"),
        (BASE, [], "GLOB is required"),
        (BASE + FILES, ["/b"], "has [[files]] already"),
        (FILES, [], "--url is required"),
        ("url = 'ftp://h'\n" + FILES, [], "push.toml: url 'ftp://h'"),
        ("url = 'http://h:1'\nstate_dir = 's'\n" + FILES, [], "--topic is required"),
        (BASE + "[[datacenters]]\nurls = 'http://x'\n" + FILES, [], "push.toml: url: "),
        ("[[datacenters]]\nname = 'x'\n" + FILES, [], "push.toml: datacenters[0].urls is required"),
        ("[[datacenters]]\nurls = 'x'\n" + FILES, [], "push.toml: datacenters[0].urls 'x' is not http"),
        ("[[datacenters]]\nurl = 'x'\n" + FILES, [], "push.toml: datacenters[0].url: unknown setting"),
        ("[[datacenters]]\nurls = 'http://x'\n" * 2 + FILES, [], "two data centres have the same name"),
        (BASE + "fallback_url = ['http://i', 'http://h:1']\n" + FILES, [], "two data centres have the same gateway"),
        (BASE + "failover_s = 0\n" + FILES, [], "push.toml: failover_s 0 is not between 1 and 86400"),
        (BASE + "pin = '00'\n" + FILES, [], "push.toml: pin: '00'"),
        (BASE + FILES + "topics = 'a'\n", [], "push.toml: files[0].topics: must be a list of names, or of tables"),
        (BASE + FILES + "topics = []\n", [], "push.toml: files[0].topics: must be 1 to 16 different topics"),
        (BASE + FILES + "topics = ['a', 'a']\n", [], "push.toml: files[0].topics: must be 1 to 16 different topics"),
        (BASE + FILES + "topics = ['a']\ntopic = 'b'\n", [], "topics: must be 1 to 16 different topics, in place of"),
        (BASE + FILES + f"topics = {[str(n) for n in range(17)]}\n", [], "must be 1 to 16 different topics"),
        (BASE + FILES + "topics = ['a', {cut_lines = true}]\n", [], "must be 1 to 16 different topics"),
        (BASE + FILES + "topics = ['a', {topic = 'b', paths = '/x'}]\n", [], "files[0].topics[1].paths: unknown"),
        (BASE + FILES + "topics = ['a', {topic = 'b', record_start = '('}]\n", [], "files[0].topics[1].record_start:"),
        (BASE + FILES + "topics = ['a', 'b c']\n", [], "files[0].topics[1].topic: topic: 'b c'"),
        (BASE + FILES + "topics = ['a', {topic = 'b'}]\nformat = 'x'\n", [], "push.toml: files[0].format: 'x'"),
        (BASE + "topics = ['a']\n" + FILES, [], "push.toml: topics: unknown setting"),
        (BASE + "[[inputs]]\ntype = 'stdin'\ntopics = ['a', {topic = 'b', start_at = 'end'}]\n", [], "topics[1].start"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(
    written: Any, text: Any, more: Any, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*written(text), *more]) == 2
    assert said in capsys.readouterr().err


def test_a_python_without_toml_says_what_would_help(
    written: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def nothing(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr("importlib.import_module", nothing)
    given = written(BASE + FILES)
    with monkeypatch.context():
        assert main(given) == 2
    assert "logferry-push.pyz" in capsys.readouterr().err


def test_the_files_of_the_guide(written: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("logferry.client.agent.config.read_token", lambda path: f"of {path}")
    guide = (Path(__file__).parents[4] / "ops/docs/guides/push-client.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```toml\n(# push\.toml\n.*?)^```$", guide, re.MULTILINE | re.DOTALL)
    configs = [parse(written(block)) for block in blocks]
    (whole,) = [config for config in configs if config.files[0].exclude]
    assert len(whole.data_centres[0].urls) == 2
    assert [files.topic for files in whole.files] == ["nginx", "app"]
    assert any(len(config.data_centres) == 2 for config in configs)


def test_each_topic_has_the_settings_of_its_files_and_of_its_own(written: Any) -> None:
    text = """
url = "http://h:1"
state_dir = "s"
attributes = { env = "p" }
[[files]]
paths = "/a"
attributes = { type = "java" }
cut_lines = true
topics = ["app", { topic = "audit", include_lines = "login", attributes = { type = "security" }, start_at = "end" }]
[[inputs]]
type = "syslog"
listen = "udp://127.0.0.1:514"
topics = ["app", { topic = "audit", attributes = { type = "security" } }]
"""
    spool, files = parse(written(text)).files
    assert list(files.topics) == list(spool.topics) == ["app", "audit"]
    (app, audit), (one, other) = files.topics.values(), spool.topics.values()
    assert app.patterns == audit.patterns == ("/a",)
    assert (dict(app.attributes), app.cut_lines, app.rules, app.starts_at_end) == (
        *({"env": "p", "type": "java"}, True, None, False),
    )
    assert (dict(audit.attributes), audit.cut_lines, audit.starts_at_end) == (
        *({"env": "p", "type": "security"}, True, True),
    )
    assert isinstance(audit.rules, LineRules)
    assert other.source == one.source
    assert dict(other.attributes) == {"env": "p", "type": "security", "path": "syslog"}
