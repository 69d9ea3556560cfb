"""What the documentation shows works: configuration, command lines, programs and links; generated pages are current."""

from __future__ import annotations

import argparse
import ast
import inspect
import itertools
import logging
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator
from functools import partialmethod
from pathlib import Path
from typing import Any, NamedTuple

import logferry.client
import logferry.client.testing
import pytest
from logferry.client import events as push_events
from logferry.client.agent import config as push_config
from logferry.client.hbase.metrics import Figures, render
from logferry.client.inputs.listeners import Certificates
from logferry.client.testing.gateway import CALLS
from logferry.client.transport.source_request import GatewayAnswer, NextStep, next_step
from logferry.gateway import log as service_log
from logferry.gateway.config import Config as GatewayConfig
from logferry.gateway.delivery.config import DeliverConfig
from logferry.gateway.errors import PROBLEMS, Problem
from logferry.loaders.config import Config as LoaderConfig
from logferry.mirror.config import MirrorConfig
from logferry.ops.audit.config import AuditConfig
from logferry.ops.cli import main
from logferry.ops.keeper.config import KeeperConfig

from tests.support.reference.__main__ import FOLDER, pages

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "ops" / "docs"
PAGES = [*sorted(DOCS.rglob("*.md")), *sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("*/README.md"))]
_FENCE = re.compile(r"^( *)```(\w+)[^\n]*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A fenced block of a page: its language, its text, and where it begins."""

    where: str
    language: str
    text: str


def blocks(*languages: str) -> Iterator[Block]:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for found in _FENCE.finditer(text):
            indent, language, body = found.groups()
            line = text.count("\n", 0, found.start()) + 1
            if language in languages:
                body = "".join(row.removeprefix(indent) for row in body.splitlines(keepends=True))
                yield Block(f"{page.relative_to(ROOT)}:{line}", language, body)


def named(found: list[Block]) -> Any:
    return pytest.mark.parametrize("block", found, ids=[block.where for block in found])


# What a fragment ("(part)") is completed with, so that the real model can judge it.
_BASE: dict[str, dict[str, Any]] = {
    "gateway": {"dc": "dc1", "listen": "127.0.0.1:8080", "kafka": {"bootstrap_servers": "k:9092"}},
    "mirror": {
        "dc": "dc2",
        "listen": "127.0.0.1:8180",
        "kafka": {"bootstrap_servers": "k:9092"},
        "remote": [{"dc": "dc1", "kafka": {"bootstrap_servers": "k:9092"}}],
    },
    "deliver": {"dc": "dc1", "kafka": {"bootstrap_servers": "k:9092"}},
    "keeper": {"dc": "dc1", "kafka": {"bootstrap_servers": "k:9092"}},
    "load": {"kafka": {"bootstrap_servers": "k:9092"}, "tables": [{"path": "/warehouse/t", "topics": ["*.t"]}]},
    "audit": {"kafka": {"bootstrap_servers": "k:9092"}},
    "push": {"url": "http://127.0.0.1:8080", "state_dir": "/tmp/s", "topic": "t"},
}
_MODELS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "gateway": GatewayConfig.model_validate,
    "mirror": MirrorConfig.model_validate,
    "deliver": DeliverConfig.model_validate,
    "keeper": KeeperConfig.model_validate,
    "load": LoaderConfig.model_validate,
    "audit": AuditConfig.model_validate,
}


def merged(base: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
    """The base with what the fragment says; tables are merged, everything else is replaced."""
    tables: dict[str, Any] = {
        key: merged(base[key], value)
        for key, value in part.items()
        if isinstance(value, dict) and isinstance(base.get(key), dict)
    }
    if isinstance(part.get("tables"), dict):
        tables["tables"] = [merged(base["tables"][0], part["tables"])]
    return {**base, **part, **tables}


def test_each_block_of_toml_says_which_file_it_is() -> None:
    names = "|".join([*_BASE, "pyproject"])
    unnamed = [b.where for b in blocks("toml") if not re.match(rf"# \S*({names})\S*\.toml( \(part\))?\s*\n", b.text)]
    assert unnamed == []


@named(list(blocks("toml")))
def test_the_configuration_is_accepted_as_it_is_shown(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = re.match(rf"# \S*({'|'.join(_BASE)})\S*\.toml( \(part\))?", block.text)
    if head is None:
        return
    kind, is_part = head.groups()
    digests = itertools.count()  # two tokens with the same one are refused
    given = tomllib.loads(re.sub('"…"', lambda _: f'"{next(digests):064x}"', block.text))
    if is_part:
        given = merged(_BASE[kind], given)
    if kind == "push":
        monkeypatch.setattr(push_config, "read_token", lambda path: "token")
        monkeypatch.setattr(Certificates, "context", lambda _: None)  # their files are not here
        file = tmp_path / "push.toml"
        file.write_text(_toml(given), encoding="utf-8")
        assert push_config.parse(["--config", str(file)]).files
    else:
        _MODELS[kind](given)


def _toml(values: dict[str, Any]) -> str:
    """Enough of TOML to write down what was read."""
    import json

    def value(item: Any) -> str:
        if isinstance(item, dict):
            return "{" + ", ".join(f"{json.dumps(k)} = {value(v)}" for k, v in item.items()) + "}"
        if isinstance(item, list):
            return "[" + ", ".join(map(value, item)) + "]"
        return json.dumps(item)

    return "".join(f"{json.dumps(key)} = {value(item)}\n" for key, item in values.items())


class Parsed(Exception):
    """The arguments were accepted."""


def command_lines() -> Iterator[tuple[str, list[str]]]:
    """Each call of ``logferry`` in the blocks for a shell."""
    for block in blocks("console", "bash", "sh", "shell"):
        text = block.text.replace("\\\n", " ")
        for number, row in enumerate(text.splitlines()):
            row = re.sub(r"^\s*(\$ |# )?", "", row)
            row = re.split(r"\s+#\s", row)[0]
            for part in re.split(r"\s*(?:&&|;|\|)\s*", row):
                found = re.match(r"(?:sudo )?(?:-u \S+ )?(?:\S*/)?(logferry|logferry-push\.pyz)\s+(.+)$", part.strip())
                if found is None or "…" in part:
                    continue
                rest = re.split(r"\s+(?:>>?|2>|<)", found[2])[0]
                try:
                    arguments = shlex.split(rest)
                except ValueError:
                    continue
                yield f"{block.where}+{number}", ["push" if found[1].endswith("pyz") else "", *arguments]


_LINES = [(where, [a for a in line if a]) for where, line in command_lines()]


@pytest.mark.parametrize("line", [line for _, line in _LINES], ids=[where for where, _ in _LINES])
def test_a_command_line_is_one_that_the_command_takes(line: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def parsed(parser: argparse.ArgumentParser, *given: Any, parse: Callable[..., Any], **more: Any) -> Any:
        parse(parser, *given, **more)
        raise Parsed

    for name in ("parse_args", "parse_intermixed_args"):
        parse = getattr(argparse.ArgumentParser, name)
        monkeypatch.setattr(argparse.ArgumentParser, name, partialmethod(parsed, parse=parse))
    if line in (["--version"], ["--help"]) or line[0].startswith("<"):
        return
    if "--help" in line:
        with pytest.raises(SystemExit) as ended:
            main.main(line)
        assert ended.value.code == 0
        return
    with pytest.raises(Parsed):
        main.main(line)


@named([block for block in blocks("python") if "logferry" in block.text])
def test_a_program_names_what_there_is(block: Block) -> None:
    """It is Python, and its names and keyword arguments are known."""
    program = ast.parse(block.text, filename=block.where)
    names = [
        alias.name
        for node in ast.walk(program)
        if isinstance(node, ast.ImportFrom) and node.module == "logferry.client"
        for alias in node.names
    ]
    for name in names:
        assert hasattr(logferry.client, name)
    for call in ast.walk(program):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in names:
            known = inspect.signature(getattr(logferry.client, call.func.id)).parameters
            assert {keyword.arg for keyword in call.keywords} <= known.keys()


def sections(page: Path) -> Iterator[tuple[str, str]]:
    """The second-level headings of a page, and the text below each."""
    _, *parts = re.split(r"^## (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return zip(parts[::2], parts[1::2], strict=True)


_API = DOCS / "reference" / "python-api.md"
_ARGUMENT = re.compile(r"^\| `(\w+)` \| [^|]+ \| ([^|]+) \| [^|]+ \|$", re.MULTILINE)


def test_the_python_reference_has_every_name_that_the_library_exports() -> None:
    text = _API.read_text(encoding="utf-8")
    assert [name for name in dir(logferry.client) if not re.search(rf"\b{name}\b", text)] == []


def public(name: str) -> Any:
    return getattr(logferry.client.testing if name == "FakeGateway" else logferry.client, name)


@pytest.mark.parametrize("name", ["Writer", "AsyncWriter", "Reader", "AsyncReader", "LogferryHandler", "FakeGateway"])
def test_the_python_reference_has_every_constructor_argument_with_its_default(name: str) -> None:
    section = next(text for heading, text in sections(_API) if name in heading.split())
    defaults = {
        argument: inspect.Parameter.empty if shown == "required" else eval(shown.strip("`"), {"logging": logging})
        for argument, shown in _ARGUMENT.findall(section)
    }
    parameters = inspect.signature(public(name)).parameters.values()
    assert defaults == {parameter.name: parameter.default for parameter in parameters}


@pytest.mark.parametrize(
    "name", ["Writer", "AsyncWriter", "Reader", "AsyncReader", "LogferryHandler", "Chunk", "Line", "FakeGateway"]
)
def test_the_python_reference_has_every_method_and_field(name: str) -> None:
    section = next(text for heading, text in sections(_API) if name in heading.split())
    own = [member for member in vars(public(name)) if not member.startswith("_")]
    assert [member for member in own if f"`{member}" not in section] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_link_leads_to_a_file(page: Path) -> None:
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    links = re.findall(r"\]\(([^)\s#]+)(?:#[^)]*)?\)", text)
    missing = [link for link in links if "://" not in link and not link.startswith("mailto:")
               and not (page.parent / link).exists()]  # fmt: skip
    assert missing == []


def test_each_page_is_in_the_navigation_once() -> None:
    config = (ROOT / "ops" / "mkdocs.yml").read_text(encoding="utf-8")
    listed = sorted(re.findall(r"^\s+- (?:[^:\n]+: )?(\S+\.md)$", config, re.MULTILINE))
    assert listed == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


def test_the_readme_is_one_page() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 150
    assert [line for line in lines if len(line) > 120] == []


def test_the_generated_pages_say_what_the_code_says() -> None:
    written = {name: (FOLDER / name).read_text(encoding="utf-8") for name in pages()}
    assert written == pages(), "run: make reference"


def test_the_usage_of_a_command_is_one_line() -> None:
    lines = pages()["cli.md"].splitlines()
    usages = [at for at, line in enumerate(lines) if line.startswith("usage: ")]
    assert [lines[at] for at in usages if lines[at + 1].startswith(" ")] == []


def hbase_figures() -> Figures:
    figures = Figures()
    figures.recorded(1, 1, 1)
    return figures


def test_the_page_of_metrics_has_every_metric() -> None:
    """Names as the code has them: first arguments of the metric classes, and what the push-client renders."""
    made: set[str] = set()
    for path in (
        file for folder in ("gateway", "mirror", "loaders", "ops/keeper") for file in (ROOT / folder).rglob("*.py")
    ):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
                kind = node.func.id.removesuffix("MetricFamily").strip("_").title()
                name = node.args[0]
                if kind in ("Counter", "Gauge", "Histogram") and isinstance(name, ast.Constant):
                    made.add(str(name.value))
                elif kind in ("Counter", "Gauge", "Histogram") and isinstance(name, ast.JoinedStr):
                    # One of the metrics that both services have of their lanes.
                    ends = [str(part.value) for part in name.values if isinstance(part, ast.Constant)]
                    made |= {service + ends[0] for service in ("logferry", "logferry_mirror", "logferry_delivery")}
    for path in (ROOT / "client" / "agent").glob("*.py"):
        text = path.read_text(encoding="utf-8")
        made |= {f"logferry_push_{name}" for name in re.findall(r'"(\w+)": \(\s*"(?:counter|gauge)"', text)}
        made |= {f"logferry_push_{name}" for name in re.findall(r'_head\("(\w+)"', text)}
    from logferry.client.agent.status import _SUMS

    made |= {f"logferry_push_{name}" for name in _SUMS}
    made |= set(re.findall(r"^# TYPE (\w+)", render("", hbase_figures(), 0, 0, True), re.MULTILINE))
    page = (DOCS / "reference" / "metrics.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(logferry_\w+)`", page, re.MULTILINE)) == made


def table_rows(page: str) -> dict[str, list[str]]:
    """The rows of a page's tables whose first cell is code: its text → the other cells."""
    text = (DOCS / "reference" / page).read_text(encoding="utf-8")
    rows = [re.split(r"\s*(?<!\\)\|\s*", line.strip())[1:-1] for line in text.splitlines() if line.startswith("| `")]
    return {cells[0].strip("`"): cells[1:] for cells in rows}


def test_the_page_of_events_has_every_event_with_its_level() -> None:
    push = {name: push_events.LEVELS[level] for name, level in push_events.EVENTS.items()}
    listed = table_rows("log-events.md")
    assert {name: cells[0] for name, cells in listed.items()} == {**service_log.EVENTS, **push}
    assert [name for name, (_, meaning, action) in listed.items() if not (meaning and action)] == []


# What the table "Outcome of a write" says of an attempt → what a sender of ours may make of it.
_ATTEMPTS = {
    "recorded, or duplicates": {NextStep.ADVANCE},
    "not recorded": {NextStep.WAIT},
    "rejected, not recorded": {NextStep.REFUSED, NextStep.SMALLER, NextStep.RECUT, NextStep.REOPEN},
    "unknown": {NextStep.AGAIN},
}


def test_the_interface_has_every_kind_with_its_status_and_the_outcome_of_every_status() -> None:
    text = (DOCS / "reference" / "http-api.md").read_text(encoding="utf-8")
    outcomes, kinds = text.partition("### Outcome of a write")[2].partition("### Kinds")[::2]
    listed = re.findall(r"^\| `([a-z-]+)` \| ([0-9]{3}) \| \S.* \| \S.* \|$", kinds.partition("Further keys")[0], re.M)
    assert {kind: int(status) for kind, status in listed} == {kind: status for kind, (status, _) in PROBLEMS.items()}
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in outcomes.splitlines() if line.startswith("|")]
    by_status = {status: row for row in rows[2:] for status in re.findall(r"\b[0-9]xx|\b[0-9]{3}", row[0])}
    for kind, status in [*((kind, status) for kind, (status, _) in PROBLEMS.items()), ("", 200), ("", 502), ("", 418)]:
        _, attempt, retry_after, _ = by_status.get(str(status)) or by_status[f"{status // 100}xx"]
        assert next_step(GatewayAnswer(status, kind)) in _ATTEMPTS[attempt], (status, kind)
        if kind and status != PROBLEMS["quota"][0]:  # its wait depends on the rate
            assert (Problem(kind, "why").retry_after_s is not None) == (retry_after == "yes"), (status, kind)


def test_the_page_of_problems_has_every_kind_with_its_status() -> None:
    listed = {kind: (int(cells[0]), cells[1]) for kind, cells in table_rows("problems.md").items()}
    assert listed == PROBLEMS
    assert all(all(cells) for cells in table_rows("problems.md").values())


def test_the_python_reference_has_every_call_of_the_fake_gateway() -> None:
    section = next(text for heading, text in sections(_API) if heading == "FakeGateway")
    rows = section.partition("| `call` | request |")[2].splitlines()
    named = [name for row in rows if row.startswith("| `") for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert sorted(named) == sorted(CALLS)
